# SPDX-License-Identifier: Apache-2.0
"""Adafactor on meshes: torch's results on one process, the same on all meshes, two messages a step, any checkpoint."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import language_models as lm
import pytest
import torch
from catching import assert_raises
from optimizer_runs import MESHES, largest, messages_of_a_step, model_of, resumed, stepped
from torch import nn

import accel
from accel.errors import ConfigError, StepError
from accel.optim import Adafactor
from accel.testing import Simulator

# With eps below the noise of gradients that are 0 in exact numbers, their updates would be signs of the noise.
EXACT: Any = partial(Adafactor, lr=0.02, eps=(1e-4, 1e-3), weight_decay=0.1)


def of_model(model: nn.Module) -> Adafactor:
    return EXACT(model.parameters())


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "d": 1.5, "eps": (1e-6, 1e-2), "maximize": True}])
def test_one_process_steps_as_torchs_adafactor(options: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((12, 8), (8,), (3, 4, 5), (), (6, 1))
    theirs = nn.ParameterList(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    mine = copy.deepcopy(theirs)
    optimizers = (
        Adafactor(mine.parameters(), lr=0.1, **options),
        torch.optim.Adafactor(theirs.parameters(), lr=0.1, **options),
    )
    for _ in range(4):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator, dtype=torch.float64)
            other.grad = one.grad.clone()
        for each in optimizers:
            each.step()
    for one, other in zip(mine, theirs, strict=True):
        assert float((one - other).detach().abs().max()) < 1e-10


@pytest.mark.parametrize("name", MESHES)
def test_parameters_on_meshes_are_those_of_one_process(ranks: Simulator, name: str) -> None:
    mesh, strategy, size = MESHES[name]
    options: dict[str, Any] = {"experts": 4} if "ep" in mesh.split(",")[0] else {}
    (one,) = ranks.run(lambda ctx: lm.train(ctx, "dp=1", of_model=of_model, epochs=2, **options), 1, default_group=True)
    runs = ranks.run(
        lambda ctx: lm.train(ctx, mesh, strategy=strategy, of_model=of_model, epochs=2, **options),
        size,
        default_group=True,
    )
    for run in runs:
        assert largest(run.parameters, {name: one.parameters[name] for name in run.parameters}) < 1e-10


def test_a_step_sends_two_small_messages(ranks: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in messages_of_a_step(ranks, monkeypatch, "dp=2,tp=2", 4, of_model):
        assert len(found) == 2


def test_a_checkpoint_is_resumed_on_another_mesh(ranks: Simulator, tmp_path: Path) -> None:
    run = partial(resumed, of_model=of_model)
    (expected,) = ranks.run(lambda ctx: run(ctx, "dp=1", tmp_path / "one", 3), 1, default_group=True)
    ranks.run(lambda ctx: run(ctx, "dp=2,tp=2", tmp_path / "two", 1), 4, default_group=True)
    for found in ranks.run(lambda ctx: run(ctx, "dp=3", tmp_path / "two", 3), 3, default_group=True):
        assert largest(found, expected) < 1e-10


def test_slips_are_refused(ranks: Simulator) -> None:
    slips: Any = ({"lr": -1.0}, {"beta2_decay": 1.0}, {"eps": (-1.0, 0.0)}, {"d": 0.5}, {"weight_decay": -1.0})
    for slip in slips:
        with assert_raises(ConfigError, problem=next(iter(slip))):
            Adafactor([torch.ones(2, 2)], **slip)
    with assert_raises(ConfigError, problem="complex"):
        Adafactor([torch.ones(2, 2, dtype=torch.complex64)])


def test_the_refusal_of_torchs_under_shards_names_it(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2", strategy="fsdp")
        model, optimizer, state = model_of(ctx, lambda model: torch.optim.Adafactor(model.parameters()))
        with pytest.raises(StepError) as error:
            stepped(ctx, model, optimizer, state)
        line = error.value.fix.removeprefix("Use ").removesuffix(".")
        assert isinstance(eval(line, {"accel": accel, "model": model}), Adafactor)

    ranks.run(rank, 2, default_group=True)
