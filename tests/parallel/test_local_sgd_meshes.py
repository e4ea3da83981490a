# SPDX-License-Identifier: Apache-2.0
"""Local SGD of replicas that several ranks share: each steps as one rank would, and data ranks alone are averaged."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import forward_backward, make_objects, plan_of, rows
from steps import begin_batch

import accel
from accel.parallel import Axes, LocalSgd
from accel.tensors import full_tensor
from accel.testing import Simulator, simulate

STEPS = 5
MESHES = [
    (Axes(pp=2, dp=2), "fsdp"),
    (Axes(dp=2, cp=2), "fsdp"),
    pytest.param(Axes(dp=2, tp=2), "ddp", marks=pytest.mark.slow),
    pytest.param(Axes(dp=2, cp=2), "ddp", marks=pytest.mark.slow),
    pytest.param(Axes(pp=2, dp=2, cp=2, tp=2), "fsdp", marks=pytest.mark.slow),
]


def _train(ctx: accel.DistContext, axes: Axes, strategy: Any, out: Path | None = None, *, upto: int = STEPS) -> Any:
    """Steps of two replicas, averaged every second step; a run that finds a checkpoint goes on from it."""
    ctx = accel.replace(ctx, mesh=str(axes), strategy=strategy)
    model, _ = make_objects(ctx, tied=True)
    model = accel.parallel.prepare_local_model(ctx, model, plan=plan_of())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    local = LocalSgd(every=2)
    state = accel.train_state(ctx)

    def items() -> dict[str, object]:
        return {"model": model, "optimizer": optimizer, "state": state, "local": local}

    if out is not None and (found := accel.latest_checkpoint(out)):
        loaded: Any = accel.load_state(ctx, found, items())
        state, local = loaded["state"], loaded["local"]
    share, shares = ctx.data_parallel
    figures: list[float] = []
    while state.updates < upto:
        batch = rows(40)[8 * state.updates :][:8][share::shares]
        state = begin_batch(ctx, state)
        _, state = forward_backward(ctx, model, state, ids=batch, labels=batch)
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
        figures.append(float(state.grad_norm))
        local = accel.parallel.local_sgd_step(ctx, model, local, optimizer=optimizer, last=state.updates == upto)
        if out is not None and not local.taken:
            accel.save_state(ctx, out, items(), step=state.updates)
    held = model.named_parameters(remove_duplicate=False)
    return share, {name: full_tensor(each).clone() for name, each in held}, figures


@functools.cache
def _two_ranks() -> Any:
    found = simulate(lambda ctx: _train(ctx, Axes(dp=2), "ddp"), 2, default_group=True)
    assert found[0][2] != pytest.approx(found[1][2])  # replicas step on gradients of their own
    return found


@pytest.mark.parametrize(("axes", "strategy"), MESHES, ids=str)
def test_replicas_step_as_ranks_of_their_own(ranks: Simulator, axes: Axes, strategy: Any) -> None:
    expected = _two_ranks()
    runs = ranks.run(lambda ctx: _train(ctx, axes, strategy), axes.world_size, default_group=True, timeout_s=300)
    for share, parameters, figures in runs:
        _, whole, norms = expected[share]
        assert figures == pytest.approx(norms, rel=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-10, msg=name)
    assert {name for _, parameters, _ in runs for name in parameters} == expected[0][1].keys()


@pytest.mark.slow
def test_a_run_goes_on_from_an_average(ranks: Simulator, tmp_path: Path) -> None:
    def run(upto: int) -> Any:
        return ranks.run(lambda ctx: _train(ctx, Axes(dp=2, tp=2), "ddp", tmp_path, upto=upto), 4, default_group=True)

    run(2)
    expected = _two_ranks()
    for share, parameters, figures in run(STEPS):
        assert figures == pytest.approx(expected[share][2][2:], rel=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[share][1][name], rtol=0, atol=1e-10, msg=name)
