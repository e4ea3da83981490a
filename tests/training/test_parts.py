# SPDX-License-Identifier: Apache-2.0
"""The verbs of the step take a `TrainState`; calls by the parts of one are shown `accel.training.parts`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import one_sample_each
from tables import rows
from torch import nn

import accel
from accel.errors import ConfigError, StepError

VERBS: Any = accel  # calls that type checkers refuse
X = torch.linspace(-1, 1, 8).view(2, 4)
MORE = {"loss_fn": lambda output: output.square().sum(), "weight": 2.0}


def _scope(*, ended: bool) -> dict[str, Any]:
    """The names that lines to write use, within a micro-batch or after its backward."""
    ctx = accel.single()
    model = accel.prepare_model(ctx, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, accum = accel.loss_scale(ctx), accel.Accumulation().next()
    loss = model(X).square().mean()
    if ended:
        accum = accel.training.parts.backward(ctx, loss, scaler, accum)
    scope = {"accel": accel, "ctx": ctx, "model": model, "optimizer": optimizer, "scaler": scaler, "accum": accum}
    return scope | {"loss": loss, "parameters": model.parameters(), "max_norm": 0.5, "clip_value": 0.5, "inputs": X}


OLD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "accumulate": (lambda s: VERBS.accumulate(s["ctx"], s["accum"], s["model"]), "with accel.training.parts."),
    "backward": (lambda s: VERBS.backward(s["ctx"], s["loss"], s["scaler"], s["accum"], weight=2.0), "accum = "),
    "backward, keywords": (lambda s: VERBS.backward(s["ctx"], s["loss"], scaler=s["scaler"], accum=s["accum"]), ""),
    "backward, a scale": (lambda s: VERBS.backward(s["ctx"], s["loss"], s["scaler"]), "accum = "),
    "backward, a state too": (
        lambda s: VERBS.backward(s["ctx"], s["loss"], accel.train_state(s["ctx"]), s["accum"]),
        "accum = ",
    ),
    "forward_backward": (
        lambda s: VERBS.forward_backward(s["ctx"], s["model"], s["scaler"], s["accum"], X, **MORE),
        "loss, accum = ",
    ),
    "optimizer_step": (lambda s: VERBS.optimizer_step(s["ctx"], s["optimizer"], s["scaler"], s["accum"]), "step = "),
    "optimizer_step, a scale": (lambda s: VERBS.optimizer_step(s["ctx"], s["optimizer"], s["scaler"]), "step = "),
    "clip_grad_norm_": (
        lambda s: VERBS.clip_grad_norm_(s["ctx"], s["parameters"], 0.5, s["scaler"], s["accum"]),
        "norm = ",
    ),
    "clip_grad_value_": (
        lambda s: VERBS.clip_grad_value_(s["ctx"], s["parameters"], 0.5, s["scaler"], s["accum"]),
        "accel.training.parts.",
    ),
    "unscale_gradients": (
        lambda s: VERBS.unscale_gradients(s["ctx"], s["optimizer"], s["scaler"], s["accum"]),
        "accum = ",
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_a_call_by_the_parts_shows_the_line_to_write_and_changes_nothing(name: str) -> None:
    call, begins = OLD[name]
    verb = name.partition(",")[0]
    scope = _scope(ended=verb not in ("accumulate", "backward", "forward_backward"))
    before = {key: value.clone() for key, value in scope["model"].state_dict().items()}
    with assert_raises(ConfigError, problem="a step needs the full state", expected="a TrainState") as caught:
        call(scope)
    assert all(torch.equal(value, before[key]) for key, value in scope["model"].state_dict().items())
    line = caught.value.fix.partition(": ")[2]
    assert line.startswith(begins)
    line = line.replace("inputs)", "inputs, loss_fn=lambda output: output.square().sum(), weight=2.0)")
    exec(line + (" pass" if line.endswith(":") else ""), scope)
    if verb in ("backward", "forward_backward"):
        assert scope["accum"].backwards == 1
    if verb == "optimizer_step":
        assert scope["step"].stepped
        assert not torch.equal(scope["model"].weight, before["weight"])


@pytest.mark.parametrize(
    "wrong", [None, 1.0, (accel.LossScale(), accel.Accumulation())], ids=["none", "float", "tuple"]
)
def test_what_is_no_record_at_all_is_refused_too(wrong: Any) -> None:
    scope = _scope(ended=True)
    with assert_raises(ConfigError, expected="a TrainState, from"):
        VERBS.optimizer_step(scope["ctx"], scope["optimizer"], wrong)


def test_the_parts_have_the_verbs_options_and_no_parameter_named_after_another_record() -> None:
    for name in accel.training.parts.__all__:
        if name == "StepResult":
            continue
        ours = inspect.signature(getattr(accel, name)).parameters
        theirs = inspect.signature(getattr(accel.training.parts, name)).parameters
        assert [*ours]  # of a function
        kinds = {"state": "TrainState", "scaler": "LossScale", "accum": "Accumulation"}
        for parameters in (ours, theirs):
            for each in kinds.keys() & parameters.keys():
                assert str(parameters[each].annotation).removesuffix(" | None") == kinds[each], (name, each)
        options = [each for each in ours if each not in ("state", "closure")]
        assert sorted(options) == sorted(each for each in theirs if each not in ("scaler", "accum")), name


def _parts(verb: str, *records: object, **options: Any) -> None:
    ctx = accel.single()
    model = accel.prepare_model(ctx, nn.Linear(4, 1))
    call: Any = getattr(accel.training.parts, verb)
    if verb == "backward":
        call(ctx, model(X).square().mean(), *records, **options)
    elif verb == "accumulate":
        call(ctx, *records, model)
    else:
        call(ctx, torch.optim.SGD(model.parameters(), lr=0.1), *records, **options)


SCALE, WINDOW = accel.LossScale(), accel.Accumulation  # a window of each call: guards know records by identity
MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "step, an accumulation": (
        lambda: _parts("optimizer_step", WINDOW()),
        ConfigError,
        {"got": "Accumulation, NoneType"},
    ),
    "backward, an accumulation": (lambda: _parts("backward", WINDOW()), ConfigError, {"got": "Accumulation, NoneType"}),
    "the other order": (
        lambda: _parts("backward", WINDOW().next(), SCALE),
        ConfigError,
        {"expected": "a LossScale, then an Accumulation or None", "got": "Accumulation, LossScale"},
    ),
    "a weight that nothing remembers": (
        lambda: _parts("backward", SCALE, weight=3),
        ConfigError,
        {"problem": "weight= and retain_graph= need an accumulation"},
    ),
    "backward before next": (
        lambda: _parts("backward", SCALE, WINDOW()),
        StepError,
        {"expected": r"accum = accum\.next"},
    ),
    "accumulate before next": (
        lambda: _parts("accumulate", WINDOW()),
        StepError,
        {"problem": "no micro-batch has begun"},
    ),
    "next after a window": (lambda: WINDOW().next().next(), StepError, {"expected": r"step\.accum"}),
    "step within a window": (
        lambda: _parts("optimizer_step", SCALE, WINDOW(2).next()),
        StepError,
        {"got": "micro-batch 1 of 2"},
    ),
    "step with a window that backward was given": (
        lambda: _parts("optimizer_step", SCALE, WINDOW().next()),
        StepError,
        {"fix": "Keep what backward returns"},
    ),
    "step without one of the backwards": (
        lambda: _parts("optimizer_step", SCALE, accel.Accumulation(micro=2, backwards=1, latest=2, sync=True)),
        StepError,
        {"expected": "2 backward passes", "got": "^1$"},
    ),
}


@rows("name", MISTAKES)
def test_a_mistake_with_the_parts_is_refused(name: str) -> None:
    mistake, error, fields = MISTAKES[name]
    with assert_raises(error, **fields):
        mistake()


# Tests whose subject is the parts, and those that need a device which this machine may lack.
BY_PARTS = {
    "benchmarks/engine_overhead.py",
    "benchmarks/fsdp.py",
    "benchmarks/step_overhead.py",
    "gpu/test_cuda.py",
    "gpu/test_cuda_launching.py",
    "gpu/test_cuda_precision.py",
    "gpu/test_cuda_steps.py",
    "helpers/steps.py",
    "parallel/test_pipelines.py",
    "training/test_closures.py",
    "training/test_dropped_records.py",
    "training/test_fix_lines.py",
    "training/test_gan.py",
    "training/test_naming.py",
    "training/test_parts.py",
    "training/test_passes.py",
    "training/test_refused_steps.py",
    "training/test_repeated_runs.py",
    "training/test_train_state.py",
    "typing/reveal_functions.py",
    "xla/trains.py",
}


def test_other_tests_call_what_users_call() -> None:
    root = Path(__file__).parent.parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if "training.parts." in path.read_text()}
    assert found == BY_PARTS


def test_both_ways_train_to_the_same_bits() -> None:
    """The parts are thin functions over the same core."""

    def weights(*, parts: bool) -> torch.Tensor:
        ctx = accel.single()
        torch.manual_seed(0)
        model = accel.prepare_model(ctx, nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = accel.train_state(ctx, accumulation=2)
        scaler, accum = state.scaler, state.accum
        for _ in range(6):
            state, accum = state.next(one_sample_each(ctx, state.cursor)), accum.next()
            loss = model(X).square().mean()
            if parts:
                accum = accel.training.parts.backward(ctx, loss, scaler, accum, weight=1.0)
                if accum.sync:
                    step = accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum, max_norm=0.5)
                    scaler, accum = step.scaler, step.accum
                state = accel.train_state(ctx)
            else:
                state = accel.backward(ctx, loss, state, weight=1.0)
                if state.sync:
                    state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
                accum = accel.Accumulation()
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    assert torch.equal(weights(parts=True), weights(parts=False))
