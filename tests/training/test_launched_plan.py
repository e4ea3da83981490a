# SPDX-License-Identifier: Apache-2.0
"""Plan and compilation of the launcher: `prepare` takes them up, an argument beats them, and idle ones are refused."""

from __future__ import annotations

import pytest
import torch
from catching import assert_raises
from planned_parts import is_compiled
from steps import begin_batch
from torch import nn

import accel
from accel import Compile
from accel.errors import ConfigError
from accel.parallel import Plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _model() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(4, 1))


def _units(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module).__name__.startswith("FSDP")}


def test_prepare_takes_the_launched_plan_and_an_argument_beats_it(ranks):
    def rank(ctx: accel.DistContext) -> list[set[str]]:
        ctx = accel.replace(ctx, strategy="fsdp", plan=Plan(units=("2",)))
        models = [accel.prepare(ctx, _model()), accel.prepare_model(ctx, _model())]
        models.append(accel.prepare(ctx, _model(), plan=Plan(units=("0", "1"))))
        return [_units(model) for model in models]

    assert ranks.run(rank, 2, default_group=True) == [[{"", "2"}, {"", "2"}, {"", "0", "1"}]] * 2


def test_prepare_compiles_as_the_launcher_says_and_leaves_what_the_script_compiled(ranks):
    def rank(ctx: accel.DistContext) -> list[list[str]]:
        found: list[list[str]] = []
        own = accel.compile_model(_model(), backend="eager")
        blocks, whole = (Compile(regions=each, backend="eager") for each in ("repeated", "whole"))
        for asked, model in ((blocks, _model()), (whole, _model()), ("off", _model()), (blocks, own)):
            prepared = accel.prepare(accel.replace(ctx, compile=asked), model)
            inner = accel.unwrap_model(prepared)
            found.append([name for name, module in inner.named_modules() if is_compiled(module)])
        return found

    assert ranks.run(rank, 2) == [[["0", "1"], [""], [], [""]]] * 2


@pytest.mark.parametrize(("name", "text"), [("plan", "offload=true"), ("compile", "whole")])
def test_a_setting_that_prepare_never_saw_is_refused_at_the_first_step(name, text):
    variables = {f"ACCEL_{name.upper()}": text}
    with accel.session(variables, device="cpu") as ctx:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = accel.backward(ctx, model(torch.ones(1, 2)).mean(), begin_batch(ctx))
        with assert_raises(ConfigError, problem=f"{name} of this run has no effect", expected=f"ACCEL_{name.upper()}"):
            accel.optimizer_step(ctx, optimizer, state)
        ctx = accel.replace(ctx, **{name: Plan() if name == "plan" else "off"})  # the script's own word
        accel.optimizer_step(ctx, optimizer, state)
