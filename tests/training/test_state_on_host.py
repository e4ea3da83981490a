# SPDX-License-Identifier: Apache-2.0
"""Optimizer state on the host: equal steps in every order of streams, two buckets on the device, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import language_models as lm
import pytest
import torch
from catching import assert_raises
from simulated_reads import alive, read
from torch import Tensor, nn

import accel
from accel.errors import ConfigError, StepError
from accel.optim import _streamed_state
from accel.optim._streamed_state import StreamedState
from accel.parallel import Plan
from accel.tensors import full_tensor
from accel.testing import STREAM_ORDERS, SimulatedDevice, Simulator, StreamRace, simulate

ON_HOST = Plan(offload="optimizer")
LAYER = 32 * 33 * 4  # bytes of a layer's parameters
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.01),
    "Muon": lambda model: accel.optim.Muon(model, lr=0.02, adamw_lr=0.01),
    "Adafactor": lambda model: accel.optim.Adafactor(model.parameters(), lr=0.01),
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is a bucket."""
    monkeypatch.setattr(_streamed_state, "STATE_BUCKET", LAYER)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)])


def train(
    ctx: accel.DistContext,
    kind: str = "AdamW",
    *,
    plan: Plan | None = ON_HOST,
    steps: int = 3,
    out: Path | None = None,
    look: Callable[[Any, torch.optim.Optimizer], None] | None = None,
    fused_step: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Return the parameters after some steps, the last of which resume a checkpoint in `out`."""
    net = make()
    model, optimizer = accel.prepare(ctx, net, OPTIMIZERS[kind](net), plan=plan)
    items = {"model": model, "optimizer": optimizer}
    state = accel.train_state(ctx)
    if out is not None:
        state = accel.resume(ctx, out, items, state)
    streams: Any = ctx.streams
    if look is not None:
        look(streams, optimizer)
    while state.updates < steps:
        x = streams.to(torch.linspace(-1, 1 + state.updates, 128).view(4, 32))
        if fused_step:
            accel.training.fused_step(ctx, model(x).square().mean(), optimizer)
            steps -= 1
            continue
        state = accel.backward(ctx, model(x).square().mean(), state.next(), weight=4)
        state = accel.optimizer_step(ctx, optimizer, state, **options)
        del x
        if look is not None:
            look(streams, optimizer)
    if out is not None:
        accel.save_state(ctx, out, items | {"state": state}, step=state.updates)
    return [read(streams, each) for each in accel.unwrap_model(model).parameters()]


def on_device(device: SimulatedDevice, kind: str = "AdamW", **options: Any) -> list[Tensor]:
    return simulate(lambda ctx: train(ctx, kind, **options), 1, streams=device)[0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_bit_equal(kind: str) -> None:
    expected = train(accel.single("cpu"), kind, plan=None)
    assert all(map(torch.equal, on_device(SimulatedDevice(), kind), expected))


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_bit_equal_in_every_order(kind: str) -> None:
    expected = train(accel.single("cpu"), kind, plan=None)
    for order in (*STREAM_ORDERS, *range(4)):
        device = SimulatedDevice(order) if isinstance(order, int) else SimulatedDevice(order=order)
        assert all(map(torch.equal, on_device(device, kind), expected)), order


OPTIONS: tuple[dict[str, Any], ...] = (
    {"max_norm": 0.1},
    {"nonfinite": "skip"},
    {"kind": "fused", "nonfinite": "defer"},
    {"fused_step": True},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_steps_work(options: dict[str, Any]) -> None:
    expected = train(accel.single("cpu"), plan=None, **options)
    assert all(map(torch.equal, on_device(SimulatedDevice(), **options), expected))


class Without:
    """Streams of a device without some waits."""

    def __init__(self, streams: Any, left_out: Callable[[Any], bool]) -> None:
        self._streams = streams
        self._left_out = left_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams, name)

    def wait(self, stream: Any, event: Any) -> None:
        if not self._left_out(stream):
            self._streams.wait(stream, event)


@pytest.mark.parametrize("name", ["_into", "_out", "current"])
def test_each_missing_wait_is_a_race(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Waits of copies to the device and to the host for the computation, and of the computation for either."""

    def begin(self: StreamedState, optimizer: Any, streams: Any) -> None:
        began(self, optimizer, streams)
        sides = {"_into": self._into, "_out": self._out}
        missing = sides.get(name)
        self.streams = Without(
            streams, lambda each: each is missing if missing is not None else each not in sides.values()
        )

    began = StreamedState.__init__
    monkeypatch.setattr(StreamedState, "__init__", begin)
    with pytest.raises(StreamRace):
        _ = on_device(SimulatedDevice())


def test_two_buckets_of_state_are_on_the_device_during_a_step_and_none_between() -> None:
    between: dict[bool, list[int]] = {True: [], False: []}
    during: list[int] = []

    def look(streams: Any, optimizer: torch.optim.Optimizer, *, is_on_host: bool) -> None:
        between[is_on_host].append(alive(streams))
        if is_on_host and not during:
            for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
                _ = register(lambda *_: during.append(alive(streams)))

    for is_on_host in (True, False):
        plan = ON_HOST if is_on_host else None
        _ = on_device(SimulatedDevice(), plan=plan, look=partial(look, is_on_host=is_on_host))
    assert between[True] == [between[True][0]] * 4
    assert between[False][-1] == between[False][0] + 2 * 5 * LAYER
    gradients = 5 * LAYER
    assert max(during) <= between[True][0] + gradients + 2 * 2 * LAYER + 1024


def test_a_state_dict_waits_for_copies() -> None:
    """Also of one of the last order, in which nothing is copied before somebody waits."""
    expected = dict[str, Any]()

    def look(streams: Any, optimizer: torch.optim.Optimizer, *, found: dict[str, Any]) -> None:
        found |= {"state": [dict(each) for each in optimizer.state_dict()["state"].values()]}

    _ = train(accel.single("cpu"), plan=None, look=partial(look, found=expected))
    for order in STREAM_ORDERS:
        found = dict[str, Any]()

        def compare(streams: Any, optimizer: torch.optim.Optimizer, found: dict[str, Any] = found) -> None:
            held = optimizer.state_dict()["state"].values()
            found["state"] = [{name: each.clone() for name, each in state.items()} for state in held]

        _ = on_device(SimulatedDevice(order=order), look=compare)
        for got, want in zip(found["state"], expected["state"], strict=True):
            assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(("saved", "resumed"), [(ON_HOST, ON_HOST), (None, ON_HOST), (ON_HOST, None)])
def test_checkpoints_resume_with_and_without(tmp_path: Path, saved: Plan | None, resumed: Plan | None) -> None:
    expected = train(accel.single("cpu"), plan=None, steps=4)
    _ = on_device(SimulatedDevice(), plan=saved, steps=2, out=tmp_path)
    assert all(map(torch.equal, on_device(SimulatedDevice(), plan=resumed, steps=4, out=tmp_path), expected))


def test_an_optimizer_may_drop_and_replace_its_state() -> None:
    class Alternating(torch.optim.SGD):
        """Has momentum after odd steps alone, in a tensor of each step's own."""

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                for each in group["params"]:
                    state = self.state[each]
                    state["taken"] = state.get("taken", 0) + 1
                    if state["taken"] % 2:
                        state["own"] = each.grad.clone()
                    else:
                        del state["own"]

    def run(ctx: accel.DistContext, plan: Plan | None) -> list[set[str]]:
        net = make()
        model, optimizer = accel.prepare(ctx, net, Alternating(net.parameters(), lr=0.1), plan=plan)
        state = accel.train_state(ctx)
        names: list[set[str]] = []
        for _ in range(3):
            x = ctx.streams.to(torch.ones(4, 32))
            state = accel.backward(ctx, model(x).square().mean(), state.next(), weight=4)
            state = accel.optimizer_step(ctx, optimizer, state)
            names.append(set(optimizer.state[net[0].weight]) - {"momentum_buffer"})
        return names

    expected = [{"taken", "own"}, {"taken"}, {"taken", "own"}]
    assert run(accel.single("cpu"), None) == expected
    assert simulate(lambda ctx: run(ctx, ON_HOST), 1, streams=SimulatedDevice()) == [expected]


def test_what_cannot_stream_is_refused() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
            return super().step(closure)

    net = make()
    ctx = accel.single("cpu")
    with assert_raises(ConfigError, problem="LBFGS cannot be streamed"):
        _ = accel.prepare(ctx, net, torch.optim.LBFGS(net.parameters()), plan=ON_HOST)
    model, optimizer = accel.prepare(ctx, make(), plan=ON_HOST), None
    optimizer = accel.prepare_optimizer(ctx, Counting(model.parameters(), lr=0.1))
    state = accel.backward(ctx, model(torch.ones(4, 32)).mean(), accel.train_state(ctx).next(), weight=4)
    with assert_raises(StepError, problem="counts its steps per group"):
        _ = accel.optimizer_step(ctx, optimizer, state)
    state = accel.train_state(ctx).next()
    with assert_raises(ConfigError, got='offload="optimizer"'):
        _ = accel.optimizer_step(ctx, optimizer, state, closure=lambda: (model(torch.ones(4, 32)).mean(), 4))


MESHES = {
    "ddp": ("dp=2", "ddp", 2),
    "fsdp": ("dp=2", "fsdp", 2),
    "tp": ("tp=2", "ddp", 2),
    "pp": ("pp=2", "ddp", 2),
    "cp": ("cp=2", "ddp", 2),
    "fsdp and tp": ("dp=2,tp=2", "fsdp", 4),
    "ep": ("dp=2,ep=2", "fsdp", 2),
}
ON_MESHES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "Muon": lambda model: accel.optim.Muon(model, lr=0.02, adamw_lr=0.01, dtype=None),
    "Adafactor": lambda model: accel.optim.Adafactor(model.parameters(), lr=0.02, eps=(1e-4, 1e-3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW", "Muon", "Adafactor"])
@pytest.mark.parametrize("name", MESHES)
def test_meshes_train_as_one_process(ranks: Simulator, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    mesh, strategy, size = MESHES[name]
    monkeypatch.setattr(_streamed_state, "STATE_BUCKET", 16 * 16 * 8)
    options: dict[str, Any] = {"experts": 4} if name == "ep" else {}
    options |= {"of_model": ON_MESHES[kind], "epochs": 2}
    plan = lm.plan_of(options.get("experts", 0), offload="optimizer")
    (one,) = ranks.run(lambda ctx: lm.train(ctx, "dp=1", **options), 1, default_group=True)
    runs = ranks.run(lambda ctx: lm.train(ctx, mesh, strategy=strategy, plan=plan, **options), size, default_group=True)
    for run in runs:
        for parameter, each in run.parameters.items():
            assert (each - one.parameters[parameter]).abs().max() < 1e-10, parameter


def on_mesh(
    ctx: accel.DistContext, mesh: str, plan: Plan | None, out: Path | None, *, until: int, strategy: Any = "fsdp"
) -> list[Tensor]:
    """Return whole parameters after some steps, the last of which resume a checkpoint."""
    ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
    net = make().double()
    model, optimizer = accel.prepare(ctx, net, OPTIMIZERS["AdamW"](net), plan=plan)
    items = {"model": model, "optimizer": optimizer}
    state = accel.train_state(ctx)
    if out is not None:
        state = accel.resume(ctx, out, items, state)
    while state.updates < until:
        x = torch.linspace(-1, 1 + state.updates, 128, dtype=torch.float64).view(4, 32)
        own = x.chunk(ctx.data_parallel[1])[ctx.data_parallel[0]]
        state = accel.backward(ctx, model(own).square().mean(), state.next(), weight=len(own))
        state = accel.optimizer_step(ctx, optimizer, state)
    if out is not None:
        accel.save_state(ctx, out, items | {"state": state}, step=state.updates)
    return [full_tensor(each) for each in accel.unwrap_model(model).parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("second", [ON_HOST, None])
def test_checkpoints_resume_on_other_meshes(ranks: Simulator, tmp_path: Path, second: Plan | None) -> None:
    (expected,) = ranks.run(lambda ctx: on_mesh(ctx, "dp=1", None, None, until=4), 1, default_group=True)
    _ = ranks.run(lambda ctx: on_mesh(ctx, "dp=2", ON_HOST, tmp_path, until=2), 2, default_group=True)
    runs = ranks.run(lambda ctx: on_mesh(ctx, "dp=4", second, tmp_path, until=4, strategy="ddp"), 4, default_group=True)
    for run in runs:
        for got, want in zip(run, expected, strict=True):
            assert (got - want).abs().max() < 1e-10


MASTERS = accel.precision.Precision(params="bf16", master_weights="fp32")


@pytest.mark.parametrize("precision", [MASTERS, "bf16", "fp16"], ids=["master weights", "bf16", "fp16"])
def test_precisions_are_bit_equal(precision: Any) -> None:
    """Under fp16 the first loss scales overflow, and the steps are skipped."""

    def run(ctx: accel.DistContext, plan: Plan | None) -> list[Tensor]:
        ctx = accel.replace(ctx, precision=precision)
        net = make()
        model, optimizer = accel.prepare(ctx, net, OPTIMIZERS["AdamW"](net), plan=plan)
        state = accel.train_state(ctx)
        for at in range(4):
            x = torch.linspace(-1, 1 + at, 128).view(4, 32) * (1e4 if at == 1 else 1)
            with accel.autocast(ctx):
                loss = model(x.to(next(model.parameters()).dtype)).square().mean()
            state = accel.backward(ctx, loss, state.next(), weight=4)
            state = accel.optimizer_step(ctx, optimizer, state, nonfinite="skip")
        return [each.detach().clone() for each in model.parameters()]

    plain, moved = (run(accel.single("cpu"), plan) for plan in (None, ON_HOST))
    assert all(map(torch.equal, plain, moved))


@pytest.mark.parametrize("averaged", [False, True])
def test_local_sgd_averages_state_on_the_host(ranks: Simulator, averaged: bool) -> None:
    def run(ctx: accel.DistContext, plan: Plan) -> list[Tensor]:
        model = accel.parallel.prepare_local_model(ctx, make(), plan=plan)
        optimizer = accel.prepare_optimizer(ctx, OPTIMIZERS["AdamW"](model))
        local = accel.parallel.LocalSgd(every=2)
        state = accel.train_state(ctx)
        for at in range(4):
            x = torch.linspace(-1, 1 + at + ctx.rank, 128).view(4, 32)
            state = accel.backward(ctx, model(x).square().mean(), state.next(), weight=4)
            state = accel.optimizer_step(ctx, optimizer, state)
            local = accel.parallel.local_sgd_step(ctx, model, local, optimizer=optimizer if averaged else None)
        return [each.detach().clone() for each in model.parameters()]

    plain, moved = (ranks.run(lambda ctx, plan=plan: run(ctx, plan), 2) for plan in (Plan(), ON_HOST))
    for one, other in zip(plain, moved, strict=True):
        assert all(map(torch.equal, one, other))
