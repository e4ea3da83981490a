# SPDX-License-Identifier: Apache-2.0
"""Complex parameters of which ranks hold uneven parts are stepped as in one process, by every optimizer of torch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.optim import step_of
from accel.testing import Simulator

Make = functools.partial[optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": functools.partial(optim.SGD, lr=0.01, momentum=0.9),
    "Adam": functools.partial(optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": functools.partial(optim.AdamW, lr=0.01),
    "NAdam": functools.partial(optim.NAdam, lr=0.01),
    "RAdam": functools.partial(optim.RAdam, lr=0.01),
    "Adamax": functools.partial(optim.Adamax, lr=0.01),
    "Adadelta": functools.partial(optim.Adadelta, lr=0.5),
    "Adagrad": functools.partial(optim.Adagrad, lr=0.01),
    "RMSprop": functools.partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Rprop": functools.partial(optim.Rprop, lr=0.01),
    "ASGD": functools.partial(optim.ASGD, lr=0.01),
}
WIDTHS = (4, 3, 1)
X = torch.randn(16, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
Trained = tuple[list[float], dict[str, torch.Tensor]]


class _Abs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().square()


def _net(width: int) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(4, width, dtype=torch.complex128)
    real = nn.Linear(2, 3).double()
    return nn.Sequential(first, nn.Linear(width, 2, dtype=torch.complex128), _Abs(), real)


def _train(
    ctx: accel.DistContext, make: Make, width: int, out: Path | None = None, *, resumes: bool = False
) -> Trained:
    """Take four clipped steps and a checkpoint before the last two; with `resumes`, take these from the checkpoint."""
    plan = accel.parallel.Plan(tensor={"0": "colwise", "1": "rowwise"})
    model = accel.prepare_model(ctx, _net(width), plan=plan)
    # torch's Rprop takes no DTensors of real numbers
    trained = [each for each in model.parameters() if each.is_complex() or make.func is not optim.Rprop]
    optimizer = accel.prepare_optimizer(ctx, make(trained))
    loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(X), batch_size=4), global_batch=4)
    items = {"model": model, "optimizer": optimizer}
    start = accel.train_state(ctx, seed=0)
    state = start
    if resumes and out is not None:
        state = accel.load_state(ctx, accel.latest_checkpoint(out), {**items, "state": start})["state"]
    norms: list[float] = []
    for batch in accel.batches(ctx, loader, state):
        (x,) = batch.data
        state = state.next(batch)
        state = accel.backward(ctx, (model(x) - x.sum(1, keepdim=True).abs()).square().mean(), state)
        norms.append(float(accel.clip_grad_norm_(ctx, model.parameters(), 1.0, state)))
        state = accel.optimizer_step(ctx, optimizer, state)
        if out is not None and state.updates == 2 and not resumes:
            accel.save_state(ctx, out, {**items, "state": state}, step=2)
    found = accel.get_state_dict(ctx, model, dst=None)
    return norms, {name: each.clone() for name, each in found.items()}


def assert_law(found: Iterable[Trained], want: Trained) -> None:
    for norms, weights in found:
        assert norms == pytest.approx(want[0][-len(norms) :], rel=1e-9)
        torch.testing.assert_close(weights, want[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_are_stepped_as_the_whole(ranks: Simulator, name: str) -> None:
    make = OPTIMIZERS[name]
    for width in WIDTHS:
        want = _train(accel.single(), make, width)

        def rank(ctx: accel.DistContext, width: int = width) -> Trained:
            return _train(accel.replace(ctx, strategy="fsdp"), make, width)

        assert_law(ranks.run(rank, 2, default_group=True), want)


MESHES = {"dp=2,tp=2": 4, "tp=2": 2, "dp_replicate=2,dp_shard=2": 4, "dp=3": 3}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_are_stepped_as_the_whole_on_any_mesh(ranks: Simulator, name: str, mesh: str) -> None:
    make = functools.partial(OPTIMIZERS[name], foreach=True)
    for width in (3,) if "tp" in mesh else (3, 1):
        want = _train(accel.single(), make, width)

        def rank(ctx: accel.DistContext, width: int = width) -> Trained:
            return _train(accel.replace(ctx, strategy="fsdp", mesh=mesh), make, width)

        assert_law(ranks.run(rank, MESHES[mesh], default_group=True), want)


@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_states_of_parts_are_saved_as_the_whole(ranks: Simulator, tmp_path: Path, name: str) -> None:
    make = OPTIMIZERS[name]
    want = _train(accel.single(), make, 3)

    def rank(ctx: accel.DistContext, *, resumes: bool = False) -> Trained:
        return _train(accel.replace(ctx, strategy="fsdp"), make, 3, tmp_path, resumes=resumes)

    assert_law(ranks.run(rank, 2, default_group=True), want)
    assert_law(ranks.run(functools.partial(rank, resumes=True), 3, default_group=True), want)
    assert_law([_train(accel.single(), make, 3, tmp_path, resumes=True)], want)


def test_a_step_that_fails_leaves_the_optimizer_as_it_was(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(accel.replace(ctx, strategy="fsdp"), _net(3))
        optimizer = accel.prepare_optimizer(ctx, optim.AdamW(model.parameters()))
        params = list(optimizer.param_groups[0]["params"])
        for each in params:
            each.grad = torch.ones_like(each)
        step_of(optimizer)()
        states: dict[Any, Any] = copy.deepcopy({at: optimizer.state[each] for at, each in enumerate(params)})
        optimizer.param_groups[0]["lr"] = "no number"
        with pytest.raises(TypeError):
            step_of(optimizer)()
        assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], params, strict=True))
        for at, each in enumerate(params):
            assert optimizer.state[each].keys() == states[at].keys()
            assert optimizer.state[each]["exp_avg"].placements == each.placements

    _ = ranks.run(rank, 2, default_group=True)


def test_other_optimizers_and_real_parameters_are_stepped_as_they_are(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, strategy="fsdp")
        model = accel.prepare_model(ctx, nn.Linear(4, 3))
        optimizer = accel.prepare_optimizer(ctx, optim.AdamW(model.parameters()))
        assert step_of(optimizer) == optimizer.step
        other = accel.prepare_optimizer(ctx, optim.SGD(accel.prepare_model(ctx, _net(3)).parameters()))
        assert step_of(other) == other.step

    _ = ranks.run(rank, 2, default_group=True)
    plain = accel.prepare_optimizer(accel.single(), optim.AdamW(_net(3).parameters()))
    assert step_of(plain) == plain.step
