# SPDX-License-Identifier: Apache-2.0
"""`nonfinite="defer"`: the optimizer leaves a step out on the device, and the next call that looks raises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from steps import WAYS, ByState
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau

import accel
from accel.errors import ConfigError, NonFiniteError
from accel.tensors import local_part
from accel.testing import Simulator

STEPS = 4
PLAN = accel.parallel.Plan(tensor={"0.0": "colwise", "1.0": "rowwise"})
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (3, {}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "tp": (2, {"mesh": "tp=2"}),
    "pp": (2, {"mesh": "pp=2"}),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "Adam": lambda held: Adam(held, lr=0.1, amsgrad=True, fused=True),
    "AdamW": lambda held: AdamW(held, lr=0.1, fused=True),
    "SGD": lambda held: SGD(held, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "plain SGD": lambda held: SGD(held, lr=0.1, fused=True),
    "Adagrad": lambda held: Adagrad(held, lr=0.1, fused=True),
}
# torch has fused kernels for DTensors of these alone
SHARDED = ["Adam", "AdamW"]
KINDS = {"ddp": list(OPTIMIZERS), "pp": list(OPTIMIZERS), "fsdp": SHARDED, "tp": SHARDED}


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
        return nn.Sequential(*blocks).double()


def values(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """This rank's parameters and optimizer state; no state yet is one of zeros, as torch begins with."""
    found = [each.detach().clone() for each in model.parameters()]
    for each in model.parameters():
        state = {key: value for key, value in optimizer.state.get(each, {}).items() if isinstance(value, Tensor)}
        found += [state[key].detach().clone() for key in sorted(state) if state[key].any()]
    return [each.to_local() if hasattr(each, "to_local") else each for each in found]  # type: ignore[operator]


class Loop(ByState):
    """Steps of one model on any layout, of which one has a loss that is not finite on one rank."""

    def __init__(self, ctx: accel.DistContext, kind: str, accumulation: int, *, scale: float = 1.0) -> None:
        super().__init__(ctx, accumulation, scaler=accel.LossScale(scale=scale))
        self.model = accel.prepare_model(ctx, make_model(), plan=PLAN if ctx.axis("tp").size > 1 else None)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scheduler = LinearLR(self.optimizer, total_iters=10)

    def window(self, bad: float, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for _ in range(self.state.accum.steps):
            self.begin()
            inputs = torch.randn(2, 4, dtype=torch.float64, generator=generator)
            if self.ctx.axis("pp").size > 1:
                self.forward_backward(self.model, inputs, loss_fn=lambda out: out.square().sum() * bad, weight=8.0)
                continue
            with self.accumulate(self.model):
                self.backward(self.model(inputs).square().mean() * bad, weight=torch.tensor(2.0))

    def run(self, steps: int, at: tuple[int, int], bad: float, **options: Any) -> None:
        for step in range(steps):
            guilty = at == (step, self.ctx.rank) or (at[0] == step and self.ctx.axis("pp").size > 1)
            self.window(bad if guilty else 1.0, step)
            self.step(self.optimizer, scheduler=self.scheduler, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("clip", [{}, {"norm_type": math.inf}, {"max_norm": [1.0]}], ids=str)
def test_it_names_the_parameter_that_raise_names(ranks: Simulator, layout: str, clip: dict[str, Any]) -> None:
    size, options = LAYOUTS[layout]

    def rank(ctx: accel.DistContext) -> list[str]:
        ctx = accel.replace(ctx, **options)
        found = list[str]()
        for at in (0, 1):
            loop = Loop(ctx, "AdamW", 1)
            loop.window(1.0, 0)
            for name, parameter in loop.model.named_parameters():
                if name.removeprefix("module.").startswith(f"{at}.0") or name.endswith("1.0.bias"):
                    assert parameter.grad is not None
                    local_part(parameter.grad)[:] = math.nan
            with pytest.raises(NonFiniteError) as raised:
                loop.step(loop.optimizer, nonfinite="raise", **clip)
            loop.step(loop.optimizer, nonfinite="defer", **clip)
            with pytest.raises(NonFiniteError) as deferred:
                ctx.comm.settle()
            found += [raised.value.where, deferred.value.where]
        return found

    names = ["0.0.weight, shape [4, 4]"] * 2 + ["1.0.weight, shape [4, 4]"] * 2
    assert ranks.run(rank, size, default_group=True) == [names] * size


def test_it_names_one_of_gradients_of_several_dtypes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2).bfloat16(), nn.Linear(2, 2).double())
    optimizer, run = AdamW(model.parameters(), fused=True), ByState(accel.single())
    for name, parameter in model.named_parameters():
        run.begin()
        run.backward(sum((each.float().square().sum() for each in model.parameters()), torch.zeros(())))
        assert parameter.grad is not None
        parameter.grad[0] = math.inf
        run.step(optimizer, nonfinite="defer")
        at = list(dict(model.named_parameters())).index(name)
        with assert_raises(NonFiniteError, where=rf"params'\]\[{at}\], shape"):
            run.ctx.comm.settle()


LOADS: dict[str, Callable[..., object]] = {
    "load_state": lambda ctx, out, items, state: accel.load_state(ctx, out, items | {"state": state}),
    "resume": lambda ctx, out, items, state: accel.resume(ctx, out, items, state),
}


@pytest.mark.parametrize("load", LOADS)
def test_a_load_raises_first_changes_nothing_and_then_loads(ranks: Simulator, tmp_path: Path, load: str) -> None:
    def rank(ctx: accel.DistContext) -> bool | None:
        loop = Loop(ctx, "AdamW", 1)
        items: dict[str, Any] = {"model": loop.model, "optimizer": loop.optimizer}
        saved = values(loop.model, loop.optimizer)
        _ = accel.save_state(ctx, tmp_path, items | {"state": loop.state}, step=0)
        loop.run(2, (1, 0), math.nan, nonfinite="defer")
        state, before = loop.state, values(loop.model, loop.optimizer)
        with assert_raises(NonFiniteError, problem="a gradient of step 1 is not finite"):
            _ = LOADS[load](ctx, tmp_path, items, state)
        assert all(map(torch.equal, before, values(loop.model, loop.optimizer)))
        _ = LOADS[load](ctx, tmp_path, items, state)
        assert all(map(torch.equal, saved, values(loop.model, loop.optimizer)))
        return state.stepped

    assert ranks.run(rank, 2) == [False, False]


READERS: dict[str, Callable[[Loop, Path], object]] = {
    "step": lambda loop, _: loop.run(1, (-1, 0), 1.0, nonfinite="raise"),
    "deferred step": lambda loop, _: loop.run(1, (-1, 0), 1.0, nonfinite="defer"),
    "save": lambda loop, out: accel.save_state(loop.ctx, out, {"model": loop.model, "state": loop.state}, step=1),
    "metrics": lambda loop, _: accel.metrics.running_metrics(loss="mean").add(1, loss=0.5).read(loop.ctx),
    "statistics": lambda loop, _: accel.metrics.step_statistics().read(loop.ctx),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=share(0.08))
@given(draw=st.data())
def test_the_step_of_a_bad_gradient_changes_nothing_and_the_next_look_raises(
    ranks: Simulator, tmp_path_factory: pytest.TempPathFactory, layout: str, draw: st.DataObject
) -> None:
    size, options = LAYOUTS[layout]
    kind = draw.draw(st.sampled_from(KINDS[layout]), "optimizer")
    at = draw.draw(st.tuples(st.integers(0, STEPS - 1), st.integers(0, size - 1)), "step and rank")
    bad = draw.draw(st.sampled_from([math.nan, math.inf]))
    accumulation = draw.draw(st.sampled_from([1, 2]), "accumulation")
    clip = draw.draw(st.sampled_from([{}, {"max_norm": 0.5}, {"max_norm": [0.5]}, {"max_value": 0.1}]), "clip")
    scale = draw.draw(st.sampled_from([1.0, 1024.0]), "scale")
    reader = draw.draw(st.sampled_from(list(READERS)), "reader")
    out = tmp_path_factory.mktemp("run")

    def rank(ctx: accel.DistContext) -> tuple[list[Tensor], list[Tensor], str]:
        ctx = accel.replace(ctx, **options)
        skips = Loop(ctx, kind, accumulation, scale=scale)
        skips.run(at[0] + 1, at, bad, nonfinite="skip", **clip)
        loop = Loop(ctx, kind, accumulation, scale=scale)
        loop.run(at[0] + 1, at, bad, nonfinite="defer", **clip)
        state = loop.state
        assert state.stepped is None
        before = values(loop.model, loop.optimizer)
        with pytest.raises(NonFiniteError) as caught:
            READERS[reader](loop, out)
        assert state.stepped is False
        after = values(loop.model, loop.optimizer)
        assert all(map(torch.equal, before, after))
        ctx.comm.settle()  # told once
        return before, values(skips.model, skips.optimizer), str(caught.value)

    for found, expected, told in ranks.run(rank, size, default_group=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert told.startswith(f"a gradient of step {at[0]} is not finite: ")
        assert "inf or NaN; the loss of rank" in told
        assert "at 0.0.weight, shape [4, 4]" in told
    assert not list(out.iterdir())  # nothing was saved


@pytest.mark.parametrize(("layout", "kind"), [(layout, kind) for layout in LAYOUTS for kind in KINDS[layout]])
def test_finite_steps_are_those_of_skip(ranks: Simulator, layout: str, kind: str) -> None:
    size, options = LAYOUTS[layout]

    def rank(ctx: accel.DistContext) -> tuple[list[Tensor], list[Tensor]]:
        ctx = accel.replace(ctx, **options)
        found = list[list[Tensor]]()
        for policy in ("defer", "skip"):
            loop = Loop(ctx, kind, 2)
            loop.run(3, (-1, 0), 1.0, nonfinite=policy, max_norm=0.5)
            state = loop.state
            ctx.comm.settle()
            assert (state.stepped, state.updates) == (True, 3)
            found.append(values(loop.model, loop.optimizer))
        return found[0], found[1]

    for found, expected in ranks.run(rank, size, default_group=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_no_later_call_is_needed_to_end_well(way: type[ByState]) -> None:
    with accel.session({}) as ctx:
        run, model = way(ctx), nn.Linear(2, 2)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            run.begin()
            run.backward(model(torch.ones(1, 2)).sum())
            run.step(optimizer, nonfinite="defer")
            assert run.stepped is None


@contextmanager
def closing() -> Iterator[accel.DistContext]:
    ctx = accel.from_env({})
    try:
        yield ctx
    finally:
        accel.close(ctx)


@pytest.mark.parametrize("scope", [lambda: accel.session({}), closing], ids=["session", "close"])
def test_the_end_of_the_session_raises(scope: Callable[[], Any]) -> None:
    def train(spoils: bool) -> None:
        with scope() as ctx:
            run, model = ByState(ctx), nn.Linear(2, 2)
            run.begin()
            run.backward(model(torch.ones(1, 2)).sum() * math.nan)
            run.step(SGD(model.parameters(), lr=0.1, fused=True), nonfinite="defer")
            if spoils:
                raise KeyError("of the user's own")

    with assert_raises(NonFiniteError, problem="a gradient of step 0 is not finite"):
        train(spoils=False)
    with pytest.raises(KeyError):
        train(spoils=True)


def test_a_run_goes_on_after_the_error(ranks: Simulator) -> None:
    """The error comes once, and the window that waited for its step is still whole."""

    def rank(ctx: accel.DistContext) -> bool:
        loop = Loop(ctx, "AdamW", 1)
        loop.run(2, (1, 0), math.nan, nonfinite="defer")
        loop.window(1.0, 2)
        with assert_raises(NonFiniteError, problem="step 1"):
            loop.step(loop.optimizer, nonfinite="defer")
        loop.step(loop.optimizer, nonfinite="defer")
        _ = loop.ctx.comm.settle()
        return loop.state.stepped

    assert ranks.run(rank, 2) == [True, True]


def test_sixteen_bits_with_master_weights() -> None:
    ctx = accel.single(precision=accel.precision.Precision(params="bf16", compute="bf16", master_weights="fp32"))
    model = accel.prepare_model(ctx, nn.Linear(4, 4))
    for optimizer in (AdamW(model.parameters(), fused=True), SGD(model.parameters(), 0.1, momentum=0.9, fused=True)):
        run = ByState(ctx)
        for factor in (math.nan, 1.0, math.nan):
            before = [each.detach().clone() for each in model.parameters()]
            run.begin()
            with accel.autocast(ctx):
                run.backward(model(torch.ones(2, 4)).square().mean() * factor)
            if factor == 1.0:
                with pytest.raises(NonFiniteError):
                    run.step(optimizer, nonfinite="defer")
            run.step(optimizer, nonfinite="defer")
            kept = all(map(torch.equal, before, model.parameters()))
            assert kept == math.isnan(factor)
        with pytest.raises(NonFiniteError):
            ctx.comm.settle()


def refused(optimizer: Callable[[Any], Optimizer], ctx: accel.DistContext | None = None, **options: Any) -> str:
    run, model = ByState(ctx or accel.single(), scaler=options.pop("scaler", None)), nn.Linear(2, 2)
    run.begin()
    run.backward(model(torch.ones(1, 2)).sum())
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(ConfigError) as caught:
        run.step(optimizer(model.parameters()), nonfinite="defer", **options)
    assert all(map(torch.equal, before, model.parameters()))
    return str(caught.value)


def test_what_cannot_leave_a_step_out_is_refused() -> None:
    assert "torch.optim.AdamW(..., fused=True)" in refused(AdamW)
    assert "torch.optim.SGD(..., fused=True)" in refused(lambda held: SGD(held, lr=0.1))
    assert "Use one of those, with fused=True" in refused(torch.optim.RMSprop)
    assert "dampening=0" in refused(lambda held: SGD(held, 0.1, momentum=0.9, dampening=0.5, fused=True))
    mixed = [{"params": [], "fused": False}]
    assert "fused=True" in refused(lambda held: SGD([{"params": list(held)}, *mixed], lr=0.1, fused=True))
    told = refused(lambda held: SGD(held, 0.1, fused=True), scaler=accel.LossScale(scale=8.0, dynamic=True))
    assert "depends on the outcome of this step" in told
    plateau = refused(lambda held: SGD(held, 0.1, fused=True), scheduler=_plateau())
    assert "ReduceLROnPlateau needs a metric" in plateau


def test_sharded_parameters_need_a_kernel_that_takes_them(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> str:
        loop = Loop(accel.replace(ctx, strategy="fsdp"), "SGD", 1)
        with pytest.raises(ConfigError) as caught:
            loop.run(1, (-1, 0), 1.0, nonfinite="defer")
        return str(caught.value)

    for told in ranks.run(rank, 2, default_group=True):
        assert told.startswith("torch has no fused kernel of this optimizer for DTensors")


def _plateau() -> Any:
    return ReduceLROnPlateau(SGD([nn.Parameter(torch.ones(1))], lr=0.1))


@pytest.mark.parametrize("told", [True, False])
def test_no_average_follows_deferred_steps(told: bool) -> None:
    ctx, model, other = accel.single(), nn.Linear(2, 2), nn.Linear(2, 2)
    ema, another = accel.training.Ema(model), accel.training.Ema(other)
    optimizer, run = SGD(model.parameters(), lr=0.1, fused=True), ByState(ctx)
    for policy in ("raise", "defer", "skip"):
        run.begin()
        run.backward(model(torch.ones(1, 2)).sum())
        run.step(optimizer, nonfinite=policy)
        another.update_(other)
        step = (run.state,) if told else ()
        if policy != "defer":
            ema.update_(model, *step)
            continue
        with assert_raises(ConfigError, problem="the average cannot take a step with an unknown outcome"):
            ema.update_(model, *step)
    assert (int(ema.updates), int(another.updates)) == (2, 3)


def test_a_weight_that_is_none_takes_no_step_and_is_told_by_the_next_look() -> None:
    model = nn.Linear(2, 2)
    optimizer, run = SGD(model.parameters(), lr=0.1, fused=True), ByState(accel.single())
    before = model.weight.detach().clone()
    run.begin()
    run.backward(model(torch.ones(1, 2)).sum(), weight=torch.tensor(2.0))
    accum = msgspec.structs.replace(run.state.accum, world_weight=torch.tensor(-1.0))  # as a device alone knows it
    run.state = msgspec.structs.replace(run.state, accum=accum)
    run.step(optimizer, nonfinite="defer")
    assert model.weight.equal(before)
    with assert_raises(ConfigError, problem="a weight is not a finite number from 0"):
        run.ctx.comm.settle()
