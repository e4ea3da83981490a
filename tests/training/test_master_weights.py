# SPDX-License-Identifier: Apache-2.0
"""Master weights: 16-bit parameters train as float32 ones do, rounded after each step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from steps import ByState, begin_batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.errors import AccelError, CheckpointError, ConfigError, NonFiniteError, PrepareError
from accel.testing import simulate

MASTERS = accel.precision.Precision(params="bf16", master_weights="fp32")
MICRO = 2


class Linear(nn.Module):
    """A loss whose gradient is the input, exact in bf16 for eighths below 32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 12).bfloat16().float().view(3, 4))
        self.norm = nn.BatchNorm1d(1)  # stays in float32
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.weight.dtype)
        return (
            (self.weight * x).sum()
            + (self.bias * x[0]).sum()
            + ((self.norm.weight + self.norm.bias) * x[0, 0].float()).sum()
        )


class Run(NamedTuple):
    """What a run leaves behind."""

    weights: dict[str, torch.Tensor]
    copies: list[torch.Tensor]


def inputs(window: int, of: int) -> torch.Tensor:
    """Eighths for a micro-batch of a window; every size of the world has the same ones in another order."""
    drawn = torch.randint(-16, 17, (3, 4), generator=torch.Generator().manual_seed(10 * window + of))
    return drawn.float() / 8


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=2e-4),
    "momentum": partial(torch.optim.SGD, lr=1e-4, momentum=0.9, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
}


def train(
    ctx: accel.DistContext, kind: str, windows: range, *, max_norm: float | None = None, out: Path | None = None
) -> Run:
    """Train for some windows of two micro-batches on two ranks, or four on one; load and save in a folder."""
    model = Linear()
    optimizer = OPTIMIZERS[kind](model.parameters())
    model, optimizer = accel.prepare(ctx, model, optimizer)
    items: dict[str, Any] = {"model": model, "optimizer": optimizer}
    micro = 2 * MICRO // ctx.world_size
    run = ByState(ctx, micro)
    if out is not None and windows.start:
        accel.load_state(ctx, out, items)
    for window in windows:
        for at in range(micro):
            run.begin()
            with run.accumulate(model):
                loss = model(inputs(window, at * ctx.world_size + ctx.rank)).float()
                run.backward(loss)
        run.step(optimizer, max_norm=max_norm)
    if out is not None:
        accel.save_state(ctx, out, items, step=windows.stop)
    inner = accel.unwrap_model(model)
    held = [optimizer.state[each].get("accel_master") for each in inner.parameters()]
    copies = [each.clone() for each in held if each is not None]
    return Run({name: each.detach().clone() for name, each in inner.named_parameters()}, copies)


def assert_same(run: Run, other: Run) -> None:
    """Compare runs bit by bit."""
    torch.testing.assert_close(run, other, rtol=0, atol=0)


@settings(max_examples=share(0.12))
@given(
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    world=st.sampled_from([1, 2]),
    windows=st.integers(1, 4),
    max_norm=st.sampled_from([None, 0.25]),
)
def test_weights_are_those_of_float32_training_rounded(
    kind: str, world: int, windows: int, max_norm: float | None
) -> None:
    job = partial(train, kind=kind, windows=range(windows), max_norm=max_norm)
    wide = job(accel.single("cpu")).weights
    rounded = {name: each if "norm" in name else each.bfloat16() for name, each in wide.items()}
    for run in simulate(lambda ctx: job(accel.replace(ctx, precision=MASTERS)), world):
        torch.testing.assert_close(run.weights, rounded, rtol=0, atol=0)
        torch.testing.assert_close(run.copies, [wide["weight"], wide["bias"]], rtol=0, atol=0)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_a_run_resumes_to_the_bit(tmp_path: Path, before: int, after: int) -> None:
    def ranks(world: int, windows: range) -> list[Run]:
        return simulate(lambda ctx: train(accel.replace(ctx, precision=MASTERS), "adamw", windows, out=tmp_path), world)

    straight = train(accel.single("cpu", precision=MASTERS), "adamw", range(5))
    ranks(before, range(3))
    for run in ranks(after, range(3, 5)):
        assert_same(run, straight)


def test_a_checkpoint_without_copies_is_gone_on_from_its_weights(tmp_path: Path) -> None:
    pure = accel.single("cpu", precision=accel.precision.Precision(params="bf16"))
    stopped = train(pure, "adamw", range(3), out=tmp_path)
    run = train(accel.single("cpu", precision=MASTERS), "adamw", range(3, 4), out=tmp_path)
    for copy, name in zip(run.copies, ("weight", "bias"), strict=True):
        assert copy.dtype == torch.float32
        torch.testing.assert_close(copy, stopped.weights[name].float(), rtol=0, atol=2e-4)


def test_a_run_without_copies_refuses_those_of_a_checkpoint(tmp_path: Path) -> None:
    train(accel.single("cpu", precision=MASTERS), "adamw", range(2), out=tmp_path)
    for precision in (accel.precision.Precision(params="bf16"), accel.precision.Precision()):
        with assert_raises(CheckpointError, problem="master weights of model.weight:.*master_weights='fp32'"):
            train(accel.single("cpu", precision=precision), "adamw", range(2, 3), out=tmp_path)


def prepared(
    precision: accel.precision.Precision = MASTERS, lr: float = 1e-4, **options: Any
) -> tuple[accel.DistContext, nn.Module, torch.optim.Optimizer]:
    ctx = accel.single("cpu", precision=precision)
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **options)
    return ctx, *accel.prepare(ctx, model, optimizer)


def step(ctx: accel.DistContext, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    state = accel.train_state(ctx)
    state = accel.backward(ctx, model(options.pop("x", inputs(0, 0))).float(), begin_batch(ctx, state))
    return accel.optimizer_step(ctx, optimizer, state, **options)


def test_small_steps_add_up_where_bf16_alone_stands_still() -> None:
    start = Linear().weight.detach()
    for precision, moved in ((accel.precision.Precision(params="bf16"), 0.0), (MASTERS, 30 * 2e-4)):
        ctx, model, optimizer = prepared(precision, lr=2e-4)
        for _ in range(30):
            step(ctx, model, optimizer, x=torch.ones(3, 4))
        expected = (start - moved).bfloat16()
        torch.testing.assert_close(model.get_parameter("weight").detach(), expected, rtol=0, atol=0)


def test_a_skipped_step_changes_neither_copies_nor_weights() -> None:
    ctx, model, optimizer = prepared(momentum=0.9)
    step(ctx, model, optimizer)
    before = [each.clone() for state in optimizer.state.values() for each in state.values()]
    weights = [each.clone() for each in model.parameters()]
    assert not step(ctx, model, optimizer, x=inputs(0, 1).fill_(torch.inf), nonfinite="skip").stepped
    after = [each for state in optimizer.state.values() for each in state.values()]
    torch.testing.assert_close((after, list(model.parameters())), (before, weights), rtol=0, atol=0)


def test_an_error_is_raised_for_an_overflow_and_nothing_changes() -> None:
    ctx, model, optimizer = prepared()
    with assert_raises(NonFiniteError, where="weight"):
        step(ctx, model, optimizer, x=inputs(0, 1).fill_(torch.nan))
    assert not optimizer.state


def test_elements_changed_elsewhere_are_taken_over_and_others_keep_their_copy() -> None:
    ctx, model, optimizer = prepared()
    weight: Any = model.get_parameter("weight")
    for _ in range(3):
        step(ctx, model, optimizer)
    with torch.no_grad():
        weight[0] = 4.0
    master = optimizer.state[weight]["accel_master"]
    expected = master - 1e-4 * inputs(0, 0)
    expected[0] = 4.0 - 1e-4 * inputs(0, 0)[0]
    step(ctx, model, optimizer)
    torch.testing.assert_close(optimizer.state[weight]["accel_master"], expected, rtol=0, atol=1e-7)


def test_a_failing_step_leaves_the_optimizer_as_it_was() -> None:
    ctx, model, optimizer = prepared()
    step(ctx, model, optimizer)
    weights = [each.clone() for each in model.parameters()]
    listed = [id(each) for each in optimizer.param_groups[0]["params"]]

    class Failing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "add_" in str(func):
                raise MemoryError
            return func(*args, **(kwargs or {}))

    with pytest.raises(MemoryError), Failing():
        step(ctx, model, optimizer)
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == listed
    assert set(map(id, optimizer.state)) <= set(listed)
    torch.testing.assert_close(list(model.parameters()), weights, rtol=0, atol=0)


def test_a_step_that_fails_over_a_copy_loses_no_state() -> None:
    ctx, model, optimizer = prepared(momentum=0.9)
    step(ctx, model, optimizer)
    before = {id(each): dict(state) for each, state in optimizer.state.items()}
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.0)  # so that the next step compares each copy with its parameter

    class Failing(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += "aten.where" in str(func)
            if self.seen == 2:
                raise MemoryError
            return func(*args, **(kwargs or {}))

    state = accel.train_state(ctx)
    state = accel.backward(ctx, model(inputs(0, 0)).float(), begin_batch(ctx, state))
    with pytest.raises(MemoryError), Failing():
        state = accel.optimizer_step(ctx, optimizer, state)
    after = {id(each): dict(state) for each, state in optimizer.state.items()}
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def refusals() -> dict[str, tuple[Callable[[accel.DistContext], Any], type[AccelError], dict[str, str]]]:
    """Calls on two ranks, with the error and its fields."""

    def ddp_of_the_users(ctx: accel.DistContext) -> Any:
        return accel.prepare(ctx, DistributedDataParallel(Linear().bfloat16()))

    def unprepared(ctx: accel.DistContext) -> Any:
        return accel.prepare_optimizer(ctx, torch.optim.SGD(Linear().bfloat16().parameters()))

    def unused(ctx: accel.DistContext) -> Any:
        return accel.prepare_model(ctx, Linear(), find_unused_parameters=True)

    def sharded(ctx: accel.DistContext) -> Any:
        return accel.prepare(accel.replace(ctx, strategy="fsdp"), Linear())

    return {
        "fsdp": (sharded, ConfigError, {"fix": "bf16"}),
        "unused": (unused, ConfigError, {"expected": "find_unused_parameters"}),
        "foreign": (ddp_of_the_users, PrepareError, {"problem": "exchanges 16 bits"}),
        "unprepared": (unprepared, PrepareError, {"fix": "Prepare the model along"}),
    }


@pytest.mark.parametrize("case", list(refusals()))
def test_what_cannot_have_copies_is_refused_on_every_rank(case: str) -> None:
    call, error, fields = refusals()[case]

    def rank(ctx: accel.DistContext) -> None:
        with assert_raises(error, **fields):
            call(accel.replace(ctx, precision=MASTERS))

    simulate(rank, 2, default_group=True)


def test_without_parameters_in_16_bits_the_setting_has_no_effect_and_is_refused() -> None:
    with assert_raises(ConfigError, problem="no effect"):
        accel.precision.Precision(params="fp32", master_weights="fp32")
    ctx = accel.single("cpu", precision=accel.precision.Precision(master_weights="fp32"))
    with assert_raises(ConfigError, expected="parameters in 16 bits"):
        accel.prepare(ctx, Linear())
    with assert_raises(PrepareError, got="one in torch.float64", where="0.weight"):
        accel.prepare(ctx, nn.Sequential(nn.Linear(1, 1).double(), nn.Linear(1, 1).bfloat16()))


def test_a_model_without_values_gets_wide_gradients_too() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    prepared_model = accel.prepare(accel.single("cpu", precision=MASTERS), model)
    assert {each.grad_dtype for each in prepared_model.parameters()} == {torch.float32}


def test_a_fused_step_refuses_them() -> None:
    ctx, model, optimizer = prepared()
    with assert_raises(ConfigError, problem="all gradients of a step"):
        accel.training.fused_step(ctx, model(inputs(0, 0)).float(), optimizer)
