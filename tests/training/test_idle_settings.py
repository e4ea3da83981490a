# SPDX-License-Identifier: Apache-2.0
"""What the launcher was asked for has an effect, or the first step says that it has none."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD

import accel
from accel.config import ConfigFile, resolve
from accel.errors import ConfigError, PrepareError
from accel.testing import Simulator

FOUR = {"ACCEL_ACCUMULATION": "4"}
HALF = {"ACCEL_PRECISION": "bf16"}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))


def _step(ctx: accel.DistContext, steps: int, model: nn.Module | None = None) -> Any:
    """A step after one backward, in a window of `steps` micro-batches that ends with its first."""
    model = accel.prepare_model(ctx, _model()) if model is None else model
    state = begin_batch(ctx, accel.train_state(ctx, accumulation=steps), last=True)
    state = accel.backward(ctx, model(torch.ones(3, 2)).square().mean(), state)
    return accel.optimizer_step(ctx, SGD(model.parameters(), lr=0.1), state)


def _sessions(environ: dict[str, str], **arguments: Any) -> Iterator[accel.DistContext]:
    with accel.session(environ, device="cpu", **arguments) as ctx:
        yield ctx


@pytest.mark.parametrize("steps", [1, 3])
def test_another_accumulation_than_the_one_asked_for_is_refused_with_both_numbers(steps):
    for ctx in _sessions(FOUR):
        with pytest.raises(ConfigError) as caught:
            _step(ctx, steps)
        assert caught.value.expected == "accumulation=4 (ACCEL_ACCUMULATION)"
        assert str(steps) in caught.value.got
        assert _step(ctx, 4).stepped


@pytest.mark.parametrize(
    ("flags", "file", "source"),
    [({"accumulation": "4"}, {}, "--accumulation"), ({}, {"accumulation": 4}, "accel.toml, key accumulation")],
)
def test_an_error_names_the_flag_or_the_file_that_the_user_wrote(flags, file, source):
    resolved = resolve(flags, {}, ConfigFile(path="accel.toml", values=file))
    for ctx in _sessions(FOUR | resolved.sources_variable()):
        with assert_raises(ConfigError, expected=re.escape(f"accumulation=4 ({source})"), got="^a step of 3"):
            _step(ctx, 3)


def test_the_state_takes_the_accumulation_asked_for():
    for ctx in _sessions(FOUR):
        assert accel.train_state(ctx).accum.steps == 4
        assert accel.train_state(ctx, accumulation=2).accum.steps == 2  # which its first step refuses, as any other


def test_a_second_loop_may_have_a_number_of_its_own():
    for ctx in _sessions(FOUR):
        own = accel.replace(ctx, accumulation=1)
        assert _step(own, 1).stepped
        assert _step(own, 3).stepped
        with pytest.raises(ConfigError):
            _step(accel.replace(ctx, precision="fp32"), 3)


@pytest.mark.parametrize("environ", [{}, FOUR])
def test_an_argument_of_the_script_is_no_order_to_itself(environ):
    for ctx in _sessions(environ, accumulation=2):
        assert _step(ctx, 3).stepped


def _half(ctx: accel.DistContext, model: nn.Module, *, autocast: bool) -> Any:
    with accel.autocast(ctx) if autocast else torch.autocast("cpu", enabled=False):
        loss = model(torch.ones(3, 2)).float().square().mean()
    state = accel.backward(ctx, loss, begin_batch(ctx))
    return accel.optimizer_step(ctx, SGD(model.parameters(), lr=0.1), state)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_precision_that_no_forward_computes_in_is_refused(compiles):
    torch.compiler.reset()  # code that an earlier test let run uncompiled stays so
    for ctx in _sessions(HALF):
        model = accel.prepare_model(ctx, _model())
        if compiles:
            accel.compile_model(model, backend="aot_eager", fullgraph=True)
        before = copy.deepcopy(model.state_dict())
        with assert_raises(
            ConfigError, expected="ACCEL_PRECISION", fix=r"with accel.autocast\(ctx\).*accel.replace\(ctx, precision="
        ):
            _half(ctx, model, autocast=False)
        assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
        accel.training.clear_gradients(model)
        assert _half(ctx, model, autocast=True).stepped
        assert _half(ctx, model, autocast=False).stepped  # one forward has shown that the script knows of it


def test_hooks_are_gone_after_the_first_forward_with_autocast():
    for ctx in _sessions(HALF):
        model = accel.prepare_model(ctx, _model())
        assert any(each._forward_pre_hooks for each in model.modules())
        _half(ctx, model, autocast=True)
        assert not any(each._forward_pre_hooks for each in model.modules())


class Inner(nn.Module):
    """A model whose own forward turns autocast on."""

    def __init__(self, ctx: accel.DistContext) -> None:
        super().__init__()
        self.layers, self.ctx = _model(), ctx

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with accel.autocast(self.ctx):
            return self.layers(inputs)


def test_autocast_within_a_model_counts():
    for ctx in _sessions(HALF):
        assert _half(ctx, accel.prepare_model(ctx, Inner(ctx)), autocast=False).stepped


@pytest.mark.parametrize("precision", ["fp32", "tf32", "pure-bf16"])
def test_a_precision_that_needs_no_autocast_is_not_asked_for_one(precision):
    for ctx in _sessions({"ACCEL_PRECISION": precision}):
        if precision != "tf32":  # which CPUs may lack
            assert not any(each._forward_pre_hooks for each in accel.prepare_model(ctx, _model()).modules())


def test_a_model_of_that_precision_needs_no_autocast():
    for ctx in _sessions(HALF):
        model = accel.prepare_model(ctx, _model().bfloat16())
        state = begin_batch(ctx)
        loss = model(torch.ones(3, 2, dtype=torch.bfloat16)).square().mean()
        state = accel.backward(ctx, loss, state)
        assert accel.optimizer_step(ctx, SGD(model.parameters(), lr=0.1), state).stepped


def test_a_precision_of_the_script_is_not_asked_for():
    for ctx in _sessions({}, precision="bf16"):
        assert _half(ctx, accel.prepare_model(ctx, _model()), autocast=False).stepped


@pytest.mark.parametrize(
    ("strategy", "error", "problem"),
    [
        ("ddp", ConfigError, "the precision of this run"),
        ("fsdp", PrepareError, "a module computes without autocast"),
    ],
)
def test_autocast_is_seen_whatever_the_strategy(ranks, strategy, error, problem):
    def rank(ctx):
        ctx = dataclasses.replace(
            accel.replace(ctx, strategy=strategy, precision="bf16"), launched={"precision": "ACCEL_PRECISION"}
        )
        model = accel.prepare_model(ctx, _model())
        with assert_raises(error, problem=problem):
            _half(ctx, model, autocast=False)
        accel.training.clear_gradients(model)
        return _half(ctx, model, autocast=True).stepped

    assert ranks.run(rank, 2, default_group=True) == [True, True]


def _on_mesh(ctx: accel.DistContext, mesh: str, *, launched: bool = True) -> accel.DistContext:
    """What a session makes of ACCEL_MESH, or of its argument."""
    places = {"mesh": "ACCEL_MESH"} if launched else {}
    return dataclasses.replace(accel.replace(ctx, mesh=mesh), launched=places)


def test_a_mesh_that_no_model_uses_is_refused(ranks):
    def rank(ctx):
        meshed = _on_mesh(ctx, "dp=1,tp=2")
        model = accel.prepare_model(meshed, _model(), plan=accel.parallel.Plan(tensor={}))
        with assert_raises(ConfigError, got="none along tp=2"):
            _step(meshed, None, model)
        return [
            _step(accel.replace(meshed, mesh=meshed.mesh), None, model).stepped,  # the script says that it uses it
            _step(_on_mesh(ctx, "dp=1,tp=2", launched=False), None, model).stepped,
            _step(_on_mesh(ctx, "dp=2"), None, accel.prepare_model(ctx, _model())).stepped,
            _step(_on_mesh(ctx, "dp=2,tp=1"), None, accel.prepare_model(ctx, _model())).stepped,
        ]

    assert ranks.run(rank, 2, default_group=True) == [[True] * 4] * 2


def test_a_mesh_along_which_a_model_is_spread_has_its_effect(ranks):
    def rank(ctx):
        ctx = _on_mesh(ctx, "dp=1,tp=2")
        model = _model()
        parallelize_module(model, ctx.mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return _step(ctx, None, accel.prepare_model(ctx, model)).stepped

    assert ranks.run(rank, 2, default_group=True) == [True, True]


class _Stages(nn.Module):
    """Two blocks; ranks along tp divide layers of the first block alone."""

    def __init__(self) -> None:
        super().__init__()
        pair = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.blocks = nn.ModuleList([pair, nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            x = each(x)
        return x


_DIVIDED = {"blocks.0.0": "colwise", "blocks.0.2": "rowwise"}


def _step_of_stages(ctx: accel.DistContext, tensor: Any) -> bool | None:
    net = _Stages()
    plan = accel.parallel.Plan(tensor=tensor, micro_batches=2)
    model, optimizer = accel.prepare(ctx, net, SGD(net.parameters(), lr=0.1), plan=plan)
    _, state = accel.forward_backward(
        ctx, model, begin_batch(ctx), torch.ones(4, 4), loss_fn=lambda output: output.square().sum(), weight=4
    )
    return accel.optimizer_step(ctx, optimizer, state).stepped


@pytest.mark.parametrize("first", ["divided", pytest.param("whole", marks=pytest.mark.slow)])
def test_a_mesh_that_one_stage_uses_has_its_effect(ranks: Simulator, first: str) -> None:
    """And one that no stage uses is refused on all ranks, whatever other models use."""

    def rank(ctx: accel.DistContext) -> bool:
        ctx = _on_mesh(ctx, "pp=2,tp=2")
        for kind in [first, *({"divided", "whole"} - {first})]:
            if kind == "divided":
                assert _step_of_stages(ctx, _DIVIDED)
            else:
                with assert_raises(ConfigError, got="none along tp=2"):
                    _ = _step_of_stages(ctx, {})
        return True

    assert ranks.run(rank, 4, default_group=True) == [True] * 4


@pytest.mark.parametrize(
    ("environ", "arguments", "launched"),
    [
        ({}, {}, set()),
        ({**FOUR, **HALF}, {}, {"accumulation", "precision"}),
        ({**FOUR, **HALF}, {"precision": "fp32"}, {"accumulation"}),
        ({"ACCEL_MESH": "dp=1"}, {}, {"mesh"}),
        ({"ACCEL_MESH": "dp=1"}, {"mesh": ""}, set()),
    ],
)
def test_a_context_knows_what_a_variable_has_set(environ, arguments, launched):
    for ctx in _sessions(environ, **arguments):
        assert ctx.launched == {name: f"ACCEL_{name.upper()}" for name in launched}
        assert accel.replace(ctx, strategy="fsdp").launched == ctx.launched
    assert not accel.single().launched
