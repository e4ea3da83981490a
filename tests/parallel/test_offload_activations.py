# SPDX-License-Identifier: Apache-2.0
"""Activations on the host: the same gradients in every order of streams, bounds on bytes, and no weights that move."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import language_models as lm
import pytest
import torch
from catching import assert_raises
from planned_parts import notes_of
from simulated_reads import alive, read
from torch import Tensor, nn

import accel
from accel.errors import ConfigError
from accel.parallel import _offload
from accel.testing import STREAM_ORDERS, SimulatedDevice, Simulator, StreamRace, simulate

ROWS = torch.linspace(-1, 1, 40 * 16, dtype=torch.float64).view(40, 16)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.sigmoid(self.up(x))
        out = self.down(inner)
        if self.in_place:
            inner.add_(1)
        return x + out


def make(blocks: int = 6, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), *[Block(**options) for _ in range(blocks)], nn.Linear(16, 1)).double()


def train(
    ctx: accel.DistContext,
    *,
    on: bool = True,
    recompute: str = "",
    held: list[int] | None = None,
    blocks: int = 6,
    **options: Any,
) -> list[Tensor]:
    """Return gradients of two micro-batches; `held`: bytes of the device between their forward and backward."""
    streams: Any = ctx.streams
    model = make(blocks)
    if recompute == "before":
        model = accel.checkpoint_activations(model, Block)
    if on:
        model = accel.offload_activations(model, Block, **{"min_bytes": 1, **options})
    if recompute == "after":
        model = accel.checkpoint_activations(model, Block)
    model = accel.prepare_model(ctx, model)
    for each in ROWS.split(20):
        x = streams.to(each)
        before = alive(streams) if held is not None else 0
        loss = model(x).square().mean()
        if held is not None:
            held.append(alive(streams) - before)
        loss.backward()
        del loss, x
    return [read(streams, each.grad) for each in model.parameters()]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return train(accel.single("cpu"), on=False)


def on_device(device: SimulatedDevice, **options: Any) -> list[Tensor]:
    return simulate(lambda ctx: train(ctx, **options), 1, streams=device)[0]


CASES = (
    {},
    {"recompute": "before"},
    {"recompute": "after"},
    {"max_pinned_bytes": 40_000},
    {"prefetch": 0},
    {"prefetch": 3},
)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_gradients_are_bit_equal_in_program_order(expected: list[Tensor], options: dict[str, Any]) -> None:
    assert all(map(torch.equal, on_device(SimulatedDevice(), **options), expected))


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES, ids=str)
def test_gradients_are_bit_equal_in_every_order(expected: list[Tensor], options: dict[str, Any]) -> None:
    for order in (*STREAM_ORDERS, *range(4)):
        device = SimulatedDevice(order) if isinstance(order, int) else SimulatedDevice(order=order)
        assert all(map(torch.equal, on_device(device, **options), expected)), order


SOURCE = Path(_offload.__file__)
WAITS = {at: line.strip() for at, line in enumerate(SOURCE.read_text().splitlines(), 1) if ".streams.wait(" in line}
COVERED = {  # waits that others contain in this loop
    "by.streams.wait(by.out, read)": "the computation has waited for what it read, and copies out wait for it",
    "by.streams.wait(by.back, self._copied)": "the computation has waited for copies out, and copies back wait for it",
}


class Without:
    """Streams of a device without the wait of one line of `_offload.py`."""

    def __init__(self, streams: Any, line: int) -> None:
        self._streams = streams
        self._line = line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams, name)

    def wait(self, stream: Any, event: Any) -> None:
        caller = sys._getframe(1)
        if (caller.f_code.co_filename, caller.f_lineno) != (str(SOURCE), self._line):
            self._streams.wait(stream, event)


@pytest.mark.parametrize("line", WAITS)
def test_each_missing_wait_is_a_race(expected: list[Tensor], line: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(self: Any, streams: Any) -> None:
        used(self, streams)
        self._streams = Without(streams, line)

    used = _offload._OffloadState.use
    monkeypatch.setattr(_offload._OffloadState, "use", use)
    if WAITS[line] in COVERED:
        assert all(map(torch.equal, on_device(SimulatedDevice()), expected))
        return
    with pytest.raises(StreamRace):
        _ = on_device(SimulatedDevice())


def test_each_wait_that_others_contain_is_in_the_source() -> None:
    assert COVERED.keys() <= set(WAITS.values())


def test_bytes_between_forward_and_backward_are_those_of_the_last_block_and_of_inputs() -> None:
    """24 blocks: of the others nothing stays on the device but what the blocks return."""
    plain, moved = list[int](), list[int]()
    _ = on_device(SimulatedDevice(), on=False, held=plain, blocks=24)
    _ = on_device(SimulatedDevice(), held=moved, blocks=24)
    row = 20 * 8
    block = row * (16 + 64 + 16)
    inputs = 24 * row * 16
    assert max(moved) <= 2 * block + inputs < min(plain) / 3


def test_a_change_in_place_of_what_the_backward_needs_raises() -> None:
    model = accel.offload_activations(make(in_place=True), Block, min_bytes=1)
    with assert_raises(ConfigError, fix=r"x = x \+ y"):
        _ = model(ROWS)


class Packed(nn.Module):
    """A layer that makes its weight anew in each forward, from numbers of 8 bits."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.codes = nn.Buffer(torch.randint(-8, 8, (out_features * in_features,), dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype).view(self.out_features, self.in_features) / 64)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the storages that forwards copy."""
    from accel.parallel import _offload

    found: list[int] = []
    copies = _offload._BlockRun._copy_out

    def count(self: Any, storage: Any) -> Any:
        found.append(storage.nbytes())
        return copies(self, storage)

    monkeypatch.setattr(_offload._BlockRun, "_copy_out", count)
    return found


WEIGHTS = {16 * 64 * size for size in (2, 4, 8)}  # activations have 20 rows


@pytest.mark.parametrize("kind", ["plain", "autocast", "quantized"])
def test_no_weights_move(kind: str, copied: list[int]) -> None:
    """Nor copies in autocast's dtype, nor weights that a layer makes."""
    model = make().float()
    for each in model:
        if isinstance(each, Block) and kind == "quantized":
            each.up = Packed(16, 64)
    model = accel.offload_activations(model, Block, min_bytes=1)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        model(ROWS[:20].float()).sum().backward()
    assert copied
    assert WEIGHTS.isdisjoint(copied)


@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_no_gathered_weights_move(dtype: Any, copied: list[int], ranks: Simulator) -> None:
    def step(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2", strategy="fsdp", precision="bf16")
        model = accel.offload_activations(make().float(), Block, min_bytes=1)
        model = accel.prepare_model(ctx, model, plan=accel.parallel.Plan(gather_dtype=dtype))
        with accel.autocast(ctx):
            model(ROWS[:20].float()).float().sum().backward()

    _ = ranks.run(step, 2, default_group=True)
    assert copied
    assert WEIGHTS.isdisjoint(copied)


def test_copies_of_a_model_have_their_own_memory() -> None:
    model = accel.offload_activations(make(), Block, min_bytes=1)
    model(ROWS).sum().backward()
    twin = copy.deepcopy(model)
    twin(ROWS).sum().backward()
    assert notes_of(twin[1])["offload"].by is notes_of(twin[2])["offload"].by
    assert notes_of(twin[1])["offload"].by is not notes_of(model[1])["offload"].by


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("mesh", "strategy", "experts", "sequence"),
    [
        ("dp=2", "ddp", 0, False),
        ("dp=2", "fsdp", 0, False),
        ("tp=2", "ddp", 0, False),
        ("tp=2", "ddp", 0, True),
        ("cp=2", "ddp", 0, False),
        ("tp=2,cp=2", "ddp", 0, True),
        ("pp=2", "ddp", 0, False),
        ("pp=2,cp=2", "ddp", 0, False),
        ("dp=2,tp=2", "fsdp", 0, False),
        ("dp=2,ep=2", "fsdp", 2, False),
    ],
)
def test_meshes_train_as_without(
    ranks: Simulator,
    mesh: str,
    strategy: Any,
    experts: int,
    sequence: bool,
    recompute: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 2 if "," not in mesh or "ep" in mesh else 4
    make_objects = lm.make_objects

    def with_offload(ctx: accel.DistContext, **options: Any) -> Any:
        model, optimizer = make_objects(ctx, **options)
        if recompute:
            model = accel.checkpoint_activations(model)
        return accel.offload_activations(model, min_bytes=1), optimizer

    one = ranks.run(lambda ctx: lm.train(ctx, "dp=1", accumulation=2, experts=experts), 1, default_group=True)[0]
    monkeypatch.setattr(lm, "make_objects", with_offload)
    plan = lm.plan_of(experts, sequence=sequence)
    for run in ranks.run(
        lambda ctx: lm.train(ctx, mesh, strategy=strategy, accumulation=2, plan=plan, experts=experts),
        size,
        default_group=True,
    ):
        for name, each in run.parameters.items():
            assert (each - one.parameters[name]).abs().max() < 1e-10, name


def pinned(model: nn.Module) -> int:
    """Bytes of pinned memory that the blocks of a model hold."""
    return next(notes_of(each)["offload"].by.pool.held for each in model.modules() if "offload" in notes_of(each))


@pytest.mark.nightly
def test_compiled_blocks_train_as_without_and_recomputation_saves(expected: list[Tensor]) -> None:
    """Recomputed blocks pin their inputs alone, compiled or not, whatever was called first."""
    held: dict[tuple[bool, bool], int] = {}
    for recompute in (False, True):
        for compiled in (False, True):
            model = accel.offload_activations(make(), Block, min_bytes=1)
            if recompute:
                model = accel.checkpoint_activations(model, Block)
            if compiled:
                model = accel.compile_model(model, Block, backend="aot_eager")
            for each in ROWS.split(20):
                model(each).square().mean().backward()
            for got, want in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(got.grad, want, rtol=1e-12, atol=1e-12)
            held[recompute, compiled] = pinned(model)
    assert held[True, True] <= held[True, False] < held[False, True] / 2


@pytest.mark.nightly
def test_recomputation_saves_in_compiled_blocks_under_fsdp(ranks: Simulator) -> None:
    def held(ctx: accel.DistContext, *, recompute: bool) -> int:
        ctx = accel.replace(ctx, mesh="dp=2", strategy="fsdp")
        model = accel.offload_activations(make(), Block, min_bytes=1)
        if recompute:
            model = accel.checkpoint_activations(model, Block)
        model = accel.compile_model(model, Block, backend="aot_eager")
        model = accel.prepare_model(ctx, model)
        model(ROWS[:20]).square().mean().backward()
        return pinned(model)

    plain = ranks.run(lambda ctx: held(ctx, recompute=False), 2, default_group=True)
    again = ranks.run(lambda ctx: held(ctx, recompute=True), 2, default_group=True)
    assert again[0] < plain[0] / 2
