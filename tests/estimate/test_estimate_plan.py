# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `accel estimate`: laws for any shapes, and the bytes of real models, gradients and optimizers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from estimates import OPTIMIZERS, PARTS, STRATEGIES, kept_by_forward, memory_by_moment
from hypothesis import given, strategies as st
from steps import begin_batch
from torch import nn

import accel
from accel.estimate import EstimatedStep, Input, measure, strategy_memory
from accel.estimate._memory import Moment, RankMemory, fewest_ranks
from accel.estimate._model import Activations, Model, Parameter, units_of
from accel.estimate._step import shard_count
from accel.formats import PrecisionName
from accel.topology import Axes

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
names = st.sampled_from(["embed.weight", "layers.0.weight", "layers.0.bias", "layers.1.up.weight", "head.bias"])
parameters = st.builds(Parameter, name=names, shape=shapes, trained=st.booleans())
activations = st.builds(Activations, saved=st.integers(0, 10**6), copies=st.integers(0, 10**6))
buffers = st.builds(Parameter, name=st.just("steps"), shape=shapes, trained=st.just(False))
models = st.builds(
    Model,
    source=st.just("a model"),
    parameters=st.lists(parameters, min_size=1, max_size=8).map(tuple),
    buffers=st.lists(buffers, max_size=2).map(tuple),
    activations=st.dictionaries(st.sampled_from(["fp32", "bf16", "pure-bf16"]), activations),
)
precisions = st.sampled_from(["fp32", "tf32", "bf16", "fp16", "pure-bf16", "fp8"])
strategies = st.sampled_from(list(STRATEGIES))
optimizers = st.sampled_from(list(OPTIMIZERS))


def moments(model: Model, strategy: str, step: EstimatedStep, nproc: int = 1) -> dict[Moment, RankMemory]:
    """The memory of a rank by moment."""
    how = STRATEGIES[strategy]
    return {each.moment: each for each in memory_by_moment(model, Axes(dp=nproc), how.of(step), how.plan, 0)}


@given(models, precisions, strategies, optimizers, st.integers(2, 64))
def test_the_total_is_the_sum_and_more_ranks_never_take_more(
    model: Model, precision: PrecisionName, strategy: str, optimizer: str, nproc: int
) -> None:
    step = EstimatedStep(precision=precision, optimizer=optimizer)
    memory = strategy_memory(model, strategy, step, nproc)
    assert memory.total == sum(getattr(memory, part) or 0 for part in PARTS)
    found, more, whole = (moments(model, strategy, step, ranks) for ranks in (nproc, 2 * nproc, 1))
    assert memory.total == max(each.total for each in found.values())
    dealt = "optimizer" if strategy == "ddp-zero" else ""  # whole parameters may be dealt worse to more ranks
    parts = [part for part in PARTS if part not in ("gathered", "buffers", dealt)]
    for moment, each in found.items():
        assert all((getattr(more[moment], part) or 0) <= (getattr(each, part) or 0) for part in parts)
    stored = found["optimizer"].parameters - model.buffer_bytes
    assert nproc * stored >= whole["optimizer"].parameters - model.buffer_bytes
    assert nproc * found["optimizer"].gradients >= whole["optimizer"].gradients


@given(models, precisions, optimizers)
def test_one_rank_divides_nothing(model: Model, precision: PrecisionName, optimizer: str) -> None:
    step = EstimatedStep(precision=precision, optimizer=optimizer)
    plans = [moments(model, name, step) for name in STRATEGIES]
    assert all(plan["optimizer"] == plans[0]["optimizer"] for plan in plans)
    assert len({strategy_memory(model, name, step).total for name in STRATEGIES}) == 1
    trained = sum(each.count for each in model.parameters if each.trained)
    item_bytes = 2 if precision == "pure-bf16" else 4
    assert plans[0]["optimizer"].gradients == trained * item_bytes
    assert plans[0]["optimizer"].optimizer >= OPTIMIZERS[optimizer].values * trained * item_bytes


@given(shapes, st.integers(1, 50))
def test_the_largest_shard_is_torchs_first_chunk(shape: tuple[int, ...], nproc: int) -> None:
    chunk = torch.empty(shape, device="meta").chunk(nproc)[0]
    assert shard_count(shape, nproc) == chunk.numel()


@given(models, st.integers(1, 10**6), precisions, strategies)
def test_the_fewest_ranks_fit_and_half_of_them_do_not(
    model: Model, limit: int, precision: PrecisionName, strategy: str
) -> None:
    step = EstimatedStep(precision=precision)
    found = fewest_ranks(model, limit, strategy, step)

    def total(nproc: int) -> int:
        return strategy_memory(model, strategy, step, nproc).total

    if found:
        assert total(found) <= limit
        assert found == 1 or total(found // 2) > limit
    else:
        assert total(1) > limit < total(1 << 16)


@pytest.mark.parametrize("bad", [{"strategy": "fdsp"}, {"optimizer": "adan"}, {"nproc": 0}, {"precision": "int4"}])
def test_words_that_mean_nothing_are_refused(bad: dict[str, Any]) -> None:
    model = Model(source="", parameters=())

    def estimate(strategy: str = "ddp", nproc: int = 1, **names: Any) -> RankMemory:
        return strategy_memory(model, strategy, EstimatedStep(**names), nproc)

    with pytest.raises(accel.errors.ConfigError):
        _ = estimate(**bad)


class Block(nn.Module):
    """Attention and an MLP, as a language model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, 50)
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def size(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure-bf16"])
def test_real_bytes_are_the_planned_ones(precision: PrecisionName) -> None:
    model = Block()
    estimated = measure(Block, "Block", [Input((4, 7), "int64")])
    memory = moments(estimated, "ddp", EstimatedStep(precision=precision))
    ctx = accel.single(precision=precision)
    accel.precision.apply_precision(ctx, model)
    model, optimizer = accel.prepare(ctx, model, torch.optim.AdamW(model.parameters()))
    ids = torch.zeros(4, 7, dtype=torch.int64)
    with accel.autocast(ctx):
        kept = kept_by_forward(model, [ids])
        loss = model(ids).float().square().mean()
    state = accel.backward(ctx, loss, begin_batch(ctx))
    gradients = size([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    accel.optimizer_step(ctx, optimizer, state)
    moments_of = [value for values in optimizer.state.values() for value in values.values()]
    assert {each.parameters for each in memory.values()} == {size([*model.parameters(), *model.buffers()])}
    assert memory["optimizer"].gradients == gradients
    assert {each.optimizer for each in memory.values()} == {size(moments_of)}
    assert (memory["loss"].activations, memory["loss"].gathered) == (kept.saved, kept.copies)
    assert (kept.copies > 0) == (precision == "bf16")


def test_shards_of_fully_shard_are_the_planned_ones() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def shards(ctx: accel.DistContext) -> int:
        model = Block()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        local = [each.to_local() for each in model.parameters() if isinstance(each, DTensor)]
        return size(local)

    model = measure(Block, "Block")
    for nproc in (2, 3):
        sizes = accel.testing.simulate(shards, nproc, default_group=True)  # type: ignore[attr-defined]
        memory = strategy_memory(model, "fsdp", EstimatedStep(precision="fp32"), nproc)
        assert max(sizes) == memory.parameters - model.buffer_bytes


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of the import in torch
def test_state_of_zero_redundancy_optimizer_is_the_planned_one() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def state(ctx: accel.DistContext) -> int:
        model = Block()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return size([value for values in optimizer.optim.state.values() for value in values.values()])

    sizes = accel.testing.simulate(state, 3, default_group=True)  # type: ignore[attr-defined]
    memory = strategy_memory(measure(Block, "Block"), "ddp-zero", EstimatedStep(precision="fp32"), 3)
    assert max(sizes) == memory.optimizer


def test_blocks_are_those_that_fully_shard_would_take() -> None:
    model = measure(Block, "Block")
    units = units_of(model.parameters)
    assert set(units) == {"", "layers.0", "layers.1"}
    assert sum(math.prod(each.shape) for each in model.parameters) == model.count
    memory, keep = (moments(model, name, EstimatedStep(), 2)["block"] for name in ("fsdp", "fsdp-keep"))
    block = sum(each.count for each in units["layers.0"])
    root = sum(each.count for each in units[""])
    assert memory.gathered == 2 * (root + 2 * block)
    assert keep.gathered == 2 * model.count


def test_dropout_and_attention_keep_what_they_keep_on_gpus() -> None:
    def dropped() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))

    kept = measure(dropped, "dropped", [Input((32, 8), "float32")]).activations["fp32"]
    assert kept.saved == 32 * 8 * 4 + 32 * 16 * (1 + 4)  # the input, the mask, and what it leaves

    def attention() -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    short, long = (measure(attention, "", [Input((1, n, 16), "float32")]).activations["bf16"] for n in (256, 1024))
    assert long.saved == 4 * short.saved
    assert long.copies == short.copies
