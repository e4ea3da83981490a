# SPDX-License-Identifier: Apache-2.0
"""The strategy fsdp trains as ddp does, to the last digits but a few: same script, same numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from steps import begin_batch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import accel
from accel.errors import PrepareError
from accel.testing import Simulator

TOLERANCE = {"rtol": 0, "atol": 1e-10}
WIDTH = 5


class Block(nn.Module):
    """Two layers, the second of which may stay out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor, *, aside: bool = True) -> torch.Tensor:
        hidden = inputs + self.outer(torch.tanh(self.inner(inputs)))
        return hidden + self.side(inputs) if aside else hidden


class Model(nn.Module):
    """Blocks between two ends that share a weight, with statistics and a frozen layer."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor, *, aside: bool = True) -> torch.Tensor:
        hidden = self.norm(self.first(inputs))
        for block in self.blocks:
            hidden = block(hidden, aside=aside)
        return self.last(torch.tanh(self.frozen(hidden)))


def _same_block() -> nn.Module:
    block = Block()
    return nn.Sequential(block, nn.Linear(WIDTH, WIDTH), block, block)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 1, 4, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(0, (1, -1)), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


MODELS = {
    "blocks": Model,
    "one block thrice": _same_block,
    "encoder": _encoder,
    "no blocks": lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1)),
}
OPTIMIZERS = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
    "adam, not foreach": lambda parameters: Adam(parameters, lr=0.01, foreach=False),
}


def _make(name: str = "blocks", seed: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[name]().double()


def _inputs(rank: int, micro: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + micro)
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)


def _whole(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach().clone() for each in tensors]


def _train(
    ctx: accel.DistContext, model: nn.Module, optimizer: Optimizer, updates: int = 2, **window: Any
) -> list[Any]:
    """Clipped steps on ragged micro-batches: the norms before clipping."""
    norms = []
    state = accel.train_state(ctx, **window)
    for micro in range(updates * state.accum.steps):
        state = begin_batch(ctx, state)
        inputs = _inputs(ctx.rank, micro, 2 + (ctx.rank + micro) % 3)
        with accel.accumulate(ctx, state, model):
            state = accel.backward(ctx, model(inputs).square().mean(), state, weight=len(inputs))
        if state.sync:
            state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.05)
            norms.append(state.grad_norm)
    return norms


def _under(ranks: Simulator, strategy: Any, fn: Any, world_size: int = 2, mesh: str = "") -> list[Any]:
    def rank(ctx: accel.DistContext) -> Any:
        return fn(accel.replace(ctx, strategy=strategy, mesh=mesh))

    return ranks.run(rank, world_size, default_group=True)


def _sharded(ctx: accel.DistContext, name: str = "blocks") -> tuple[nn.Module, Optimizer]:
    model = _make(name)
    return accel.prepare(ctx, model, SGD(model.parameters(), lr=0.1))


WORLDS = st.sampled_from([(1, ""), (2, ""), (3, ""), (4, "dp_replicate=2,dp_shard=2"), (4, "dp=4,tp=1")])


@settings(max_examples=share(0.1), deadline=None)
@given(
    world=WORLDS,
    name=st.sampled_from(list(MODELS)),
    made=st.sampled_from(list(OPTIMIZERS)),
    steps=st.integers(1, 3),
    each=st.booleans(),
)
def test_a_run_is_that_of_ddp(ranks: Simulator, world: Any, name: str, made: str, steps: int, each: bool):
    def rank(ctx: accel.DistContext) -> Any:
        model = _make(name, seed=ctx.rank)  # all begin with rank 0's
        optimizer = OPTIMIZERS[made](model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)
        norms = _train(ctx, model, optimizer, accumulation=steps, sync_each_batch=each)
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert sharded == (ctx.world_size > 1 and (ctx.strategy == "fsdp" or ctx.axis("tp").size > 1))
        return norms, _whole(model.parameters()), [each.clone() for each in model.buffers() if ctx.is_main_process]

    size, mesh = world
    expected, got = (_under(ranks, strategy, rank, size, mesh) for strategy in ("ddp", "fsdp"))
    torch.testing.assert_close(got, expected, **TOLERANCE)


HANDED = {
    "together": lambda ctx, model, optimizer: accel.prepare(ctx, model, optimizer),
    "the optimizer first": lambda ctx, model, optimizer: accel.prepare(ctx, optimizer, model)[::-1],
    "one by one": lambda ctx, model, optimizer: (accel.prepare(ctx, model), accel.prepare(ctx, optimizer)),
    "again with the model": lambda ctx, model, optimizer: accel.prepare(ctx, accel.prepare(ctx, model), optimizer),
    "by its own call": lambda ctx, model, optimizer: (
        accel.prepare_model(ctx, model),
        accel.prepare_optimizer(ctx, optimizer),
    ),
}


@pytest.mark.parametrize("how", HANDED)
def test_an_optimizer_built_before_goes_on_with_the_shards(ranks, how):
    def rank(ctx):
        model = _make()
        named = list(model.named_parameters())
        groups = [{"params": named[:2], "lr": 0.3}, {"params": named[2:]}]
        optimizer = AdamW(groups, lr=0.01)
        held = optimizer.param_groups[1]["params"]
        prepared, same = HANDED[how](ctx, model, optimizer)
        assert same is optimizer
        assert optimizer.param_groups[1]["params"] is held
        listed = [each for group in optimizer.param_groups for each in group["params"]]
        assert all(one is other for one, other in zip(listed, model.parameters(), strict=True))
        assert [name for group in optimizer.param_groups for name in group["param_names"]] == [n for n, _ in named]
        return _train(ctx, prepared, optimizer), accel.get_state_dict(ctx, prepared, dst=None)

    expected, got = (_under(ranks, strategy, rank) for strategy in ("ddp", "fsdp"))
    torch.testing.assert_close(got, expected, **TOLERANCE)


def test_an_optimizer_of_before_that_nobody_prepared_is_refused_at_its_first_step(ranks):
    def rank(ctx):
        model, other = _make(), _make("no blocks")
        stale = SGD(model.parameters(), lr=0.1)
        model, other = accel.prepare(ctx, model, other)
        good = SGD(other.parameters(), lr=0.1)
        state = accel.train_state(ctx)
        loss = model(_inputs(0, 0, 2)).square().mean() + other(_inputs(0, 0, 2)).square().mean()
        state = accel.backward(ctx, loss, begin_batch(ctx, state))
        for optimizers in (stale, [good, stale]):
            with assert_raises(
                PrepareError, problem="no longer", got=r"such as first\.weight", fix=r"accel.prepare\(ctx, model, opt"
            ):
                state = accel.optimizer_step(ctx, optimizers, state)
        assert accel.optimizer_step(ctx, [good, accel.prepare(ctx, stale)], state).stepped
        return True

    assert _under(ranks, "fsdp", rank) == [True, True]


def _stepped(parameters: Any) -> Optimizer:
    optimizer = SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_an_optimizer_with_state_is_refused_and_nothing_has_changed(ranks):
    def rank(ctx):
        model = _make("no blocks")
        optimizer = _stepped(list(model.parameters()))
        before = list(model.parameters())
        with assert_raises(PrepareError, got=f"{type(optimizer).__name__} with state of 4 of them", fix="model first"):
            accel.prepare(ctx, model, optimizer)
        assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
        accel.prepare(ctx, model)
        with assert_raises(PrepareError, got="with state of 4"):
            accel.prepare(ctx, optimizer)
        return _train(ctx, model, Adagrad(model.parameters()))

    first, second = _under(ranks, "fsdp", rank)
    assert first == second


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of the import in torch
def test_an_optimizer_that_divides_parameters_itself_is_refused(ranks):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def rank(ctx):
        model = _make("no blocks")
        zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=SGD, lr=0.1)
        with assert_raises(PrepareError, got="a ZeroRedundancyOptimizer"):
            accel.prepare(ctx, model, zero)

    _under(ranks, "fsdp", rank)


def test_shards_keep_what_users_noted_on_parameters_and_the_whole_ones_are_freed(ranks):
    def rank(ctx):
        model = _make()
        model.first.weight.no_decay = True
        held = list(model.parameters())
        model = accel.prepare(ctx, model)
        assert model.last.weight is model.first.weight
        assert model.first.weight.no_decay
        assert all(parameter.untyped_storage().nbytes() == 0 for parameter in held)
        assert sum(each.to_local().numel() for each in model.parameters()) < sum(
            each.numel() for each in model.parameters()
        )

    _under(ranks, "fsdp", rank)


@pytest.mark.parametrize("saved", ["ddp", "fsdp"])
def test_a_checkpoint_is_loaded_under_the_other_strategy_on_other_ranks(ranks, tmp_path: Path, saved):
    loaded = {"ddp": "fsdp", "fsdp": "ddp"}[saved]

    def items(ctx):
        model = _make("encoder")
        model, optimizer = accel.prepare(ctx, model, AdamW(model.parameters(), lr=0.01))
        return {"model": model, "optimizer": optimizer, "average": accel.training.Ema(model)}

    def save(ctx):
        held = items(ctx)
        _train(ctx, held["model"], held["optimizer"])
        held["average"].update_(held["model"])
        accel.save_state(ctx, tmp_path, held, step=1)
        return _tensors(ctx, held)

    def load(ctx):
        held = items(ctx)
        accel.load_state(ctx, accel.latest_checkpoint(tmp_path), held)
        return _tensors(ctx, held)

    expected = _under(ranks, saved, save, 3)[0]
    for got in _under(ranks, loaded, load, 2):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def _tensors(ctx: accel.DistContext, held: Any) -> Any:
    states = [held["optimizer"].state[each] for group in held["optimizer"].param_groups for each in group["params"]]
    moments = [_whole([state["exp_avg"], state["exp_avg_sq"]]) for state in states]
    return [accel.get_state_dict(ctx, held[name], dst=None) for name in ("model", "average")], moments
