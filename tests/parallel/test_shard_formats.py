# SPDX-License-Identifier: Apache-2.0
"""Formats in which sharded parameters and gradients travel: the context's, at half the bytes, with sums in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from steps import begin_batch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import SGD

import accel
from accel.errors import ConfigError, PrepareError
from accel.formats import Precision, precision
from accel.parallel import Plan
from accel.parallel.axes.shard._options import WireFormat, wire_format
from accel.testing import Simulator

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Net(nn.Module):
    """An embedding, blocks with norms, and a head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


def _net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Net()


def _under(ranks: Simulator, fn: Any, *, strategy: Any = "fsdp", precision: Any = "bf16") -> list[Any]:
    return ranks.run(lambda ctx: fn(accel.replace(ctx, strategy=strategy, precision=precision)), 2, default_group=True)


def _whole(model: nn.Module) -> list[torch.Tensor]:
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach().clone() for each in model.parameters()]


def _ids(ctx: accel.DistContext, step: int) -> torch.Tensor:
    return torch.randint(16, (12,), generator=torch.Generator().manual_seed(2 * step + ctx.rank))


class _Gathered:
    """Torch's own way to gather, with a count of the bytes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self.sizes.append(output_tensor.nbytes)
        return ALL_GATHER_SINGLE(output_tensor, input_tensor, group=group, async_op=async_op)


class _Reduced:
    """Torch's own way to sum, with a count of the bytes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, **_: Any
    ) -> Any:
        self.sizes.append(input_tensor.nbytes)
        return REDUCE_SCATTER_SINGLE(output_tensor, input_tensor, op=op, group=group)


def _count(model: nn.Module) -> tuple[list[int], list[int]]:
    gathered: list[int] = []
    reduced: list[int] = []
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_custom_all_gather(_Gathered(gathered))
            each.set_custom_reduce_scatter(_Reduced(reduced))
    return gathered, reduced


PLANS = {
    "fp32": ("fp32", Plan(), 4, 4),
    "bf16": ("bf16", Plan(), 2, 4),
    "bf16, gathered as stored": ("bf16", Plan(gather_dtype="fp32"), 4, 4),
    "bf16, summed in bf16": ("bf16", Plan(gather_dtype="bf16", reduce_dtype="bf16"), 2, 2),
    "fp16": ("fp16", Plan(), 2, 4),
    "pure-bf16": ("pure-bf16", Plan(), 2, 4),
}


@pytest.mark.parametrize("name", PLANS)
def test_bytes_on_the_way_are_those_of_the_formats(ranks: Simulator, name: str) -> None:
    formats, plan, gather_bytes, reduce_bytes = PLANS[name]

    def rank(ctx: accel.DistContext) -> Any:
        model = accel.prepare(ctx, _net(), plan=plan)
        gathered, reduced = _count(model)
        with accel.autocast(ctx):
            loss = model(_ids(ctx, 0)).float().square().mean()
        loss.backward()
        assert {each.grad.dtype for each in model.parameters()} == {each.dtype for each in model.parameters()}
        return sum(gathered), sum(reduced)

    count = sum(each.numel() for each in _net().parameters())
    blocks = sum(each.numel() for each in _net().blocks.parameters())
    expected = ((count + blocks) * gather_bytes, count * reduce_bytes)  # blocks are gathered again for the backward
    assert _under(ranks, rank, precision=formats) == [expected] * 2


@pytest.mark.parametrize("formats", ["bf16", "fp16"])
def test_a_run_is_that_of_ddp_to_the_digits_of_the_format(ranks: Simulator, formats: str) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        model = _net()
        model, optimizer = accel.prepare(ctx, model, SGD(model.parameters(), lr=0.1, momentum=0.9))
        losses = []
        state = accel.train_state(ctx)
        for step in range(8):
            ids, state = _ids(ctx, step), begin_batch(ctx, state)
            with accel.accumulate(ctx, state, model):
                with accel.autocast(ctx):
                    loss = nn.functional.cross_entropy(model(ids), ids)
                state = accel.backward(ctx, loss, state)
            state = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0)
            losses.append(float(loss.detach()))
            assert state.stepped
        return torch.tensor(losses), _whole(model)

    expected, got = (_under(ranks, rank, strategy=strategy, precision=formats)[0] for strategy in ("ddp", "fsdp"))
    assert expected[0][-1] < 0.9 * expected[0][0]
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=2e-2)
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=2e-2)


def test_gradients_of_a_window_are_summed_in_fp32(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        model = accel.prepare(ctx, nn.Linear(4, 2, bias=False))
        state = accel.train_state(ctx, accumulation=9)
        for micro in range(9):
            state = begin_batch(ctx, state)
            with accel.accumulate(ctx, state, model), accel.autocast(ctx):
                # 256 and then eight times 1, which a sum in bf16 would lose
                loss = model(torch.full((1, 4), 1.0 if micro else 256.0)).float().sum()
                state = accel.backward(ctx, loss, state, weight=1)
        return model.weight.grad.full_tensor()

    for grad in _under(ranks, rank):
        assert grad.eq(264.0).all()


def test_a_forward_needs_no_autocast_of_its_own_and_none_may_turn_it_off(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        model = accel.prepare(ctx, _net())
        ids = _ids(ctx, 0)
        with torch.no_grad():
            bare = model(ids)
            with accel.autocast(ctx):
                within = model(ids)
        with (
            torch.no_grad(),
            accel.autocast(ctx, "fp32"),
            assert_raises(PrepareError, got="turns it off", fix="fp32_modules.*gather_dtype"),
        ):
            model(ids)
        return bare, within

    for bare, within in _under(ranks, rank):
        assert bare.dtype == BF16
        assert torch.equal(bare, within)


def test_modules_in_fp32_are_gathered_as_they_are_stored(ranks: Simulator) -> None:
    formats = Precision(compute="bf16", fp32_modules=("head",))

    def rank(ctx: accel.DistContext) -> Any:
        model = nn.Sequential()
        model.add_module("body", nn.Linear(4, 4))
        model.add_module("head", nn.Linear(4, 1))
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(1 + 2**-12)
        model = accel.prepare(ctx, model)
        seen: dict[str, torch.dtype] = {}
        for name, module in model.named_children():
            module.register_forward_hook(lambda module, *_, name=name: seen.update({name: module.weight.dtype}))
        out = model(torch.ones(2, 4))
        assert [name for name, each in model.named_modules() if isinstance(each, FSDPModule)] == ["", "head"]
        return seen, out.dtype

    for seen, dtype in _under(ranks, rank, precision=formats):
        assert (seen, dtype) == ({"body": BF16, "head": FP32}, FP32)


FORMATS = {
    "fp32": ([FP32], "fp32", "auto", "auto", WireFormat(None, None)),
    "bf16": ([FP32], "bf16", "auto", "auto", WireFormat(BF16, FP32)),
    "fp16": ([FP32], "fp16", "auto", "auto", WireFormat(FP16, FP32)),
    "tf32": ([FP32], "tf32", "auto", "auto", WireFormat(None, None)),
    "stored in bf16": ([BF16], "pure-bf16", "auto", "auto", WireFormat(None, FP32)),
    "fp64, which autocast leaves": ([FP64], "bf16", "auto", "auto", WireFormat(None, None)),
    "frozen ones of another": ([FP32, BF16], "bf16", "auto", "auto", WireFormat(BF16, FP32)),
    "none that floats": ([torch.int64], "bf16", "auto", "auto", WireFormat(None, None)),
    "gathered as stored": ([FP32], "bf16", "fp32", "auto", WireFormat(None, None)),
    "sums in bf16": ([FP32], "bf16", "bf16", "bf16", WireFormat(BF16, BF16)),
    "sums in fp16 of fp32": ([FP32], "fp32", "auto", "fp16", WireFormat(None, FP16)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_follow_the_context(name: str) -> None:
    dtypes, context, gather, reduce, expected = FORMATS[name]
    parameters = [nn.Parameter(torch.ones(1, dtype=dtype), requires_grad=dtype.is_floating_point) for dtype in dtypes]
    assert wire_format(parameters, frozenset(), precision(context), gather, reduce) == expected
    wide = frozenset(map(id, parameters[:1]))
    assert wire_format(parameters, wide, precision(context), gather, reduce).gather is None


NORMS = {
    "layer norm": lambda: nn.LayerNorm(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in NORMS),
        ("layer norm", True),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in NORMS if name != "layer norm"),
    ],
)
def test_norms_compute_with_fp32_parameters_whatever_their_inputs(ranks: Simulator, name: str, compiled: bool) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(NORMS[name](), nn.Linear(4, 4), NORMS[name](), nn.Tanh())
        if compiled:
            accel.compile_model(model, backend="eager")
        model = accel.prepare(ctx, model)
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(ctx.rank))
        with accel.autocast(ctx):
            outputs = model(inputs)
        outputs.float().square().mean().backward()
        grads = [each.grad for each in accel.unwrap_model(model).parameters()]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in grads]
        return outputs.dtype, outputs.detach().float(), whole

    expected, got = (_under(ranks, rank, strategy=strategy)[0] for strategy in ("ddp", "fsdp"))
    assert got[0] == expected[0]
    torch.testing.assert_close(got[1:], expected[1:], rtol=0, atol=2e-2)


REFUSED = [("fp32", "bf16"), ("tf32", "fp16"), ("bf16", "fp16"), ("fp16", "bf16")]


@pytest.mark.parametrize(("context", "gather"), REFUSED)
def test_a_format_that_the_context_does_not_compute_in_is_refused(ranks: Simulator, context: str, gather: Any) -> None:
    def rank(ctx: accel.DistContext) -> str:
        model = _net()
        with assert_raises(ConfigError, problem="gathered in a format") as caught:
            accel.prepare_model(ctx, model, plan=Plan(gather_dtype=gather))
        assert not any(isinstance(each, DTensor) for each in model.parameters())
        return caught.value.got

    said = f"gather_dtype={gather!r} and a context that computes in {context}"
    assert _under(ranks, rank, precision=Precision(compute=context)) == [said] * 2
