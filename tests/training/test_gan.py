# SPDX-License-Identifier: Apache-2.0
"""Two models that train each other: two optimizers, each with a window and a loss scale of its own, or sharing one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from steps import begin_batch
from torch import nn
from torch.nn.functional import softplus

import accel

TOLERANCE = {"rtol": 0, "atol": 1e-10}
UPDATES = 3


def _models() -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        generator = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return generator, critic


def _draws(update: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is real, and the noise; a number of samples that depends on all three."""
    generator = torch.Generator().manual_seed(100 * update + 10 * micro + rank)
    samples = 1 + (update + micro + rank) % 3
    return (
        torch.randn(samples, 3, dtype=torch.float64, generator=generator),
        torch.randn(samples, 2, dtype=torch.float64, generator=generator),
    )


def _critic_loss(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    return (softplus(-critic(real)) + softplus(critic(fake))).mean()


def _flat(*models: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for model in models for each in model.parameters()])


def _train(ctx: accel.DistContext, micros: int, overflow: int | None = None) -> tuple[torch.Tensor, list[Any]]:
    generator, critic = (accel.prepare_model(ctx, model) for model in _models())
    plain = accel.unwrap_model(critic)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (generator, critic)]
    accum_g = accum_c = accel.Accumulation(steps=micros)
    scale_g = scale_c = accel.LossScale(scale=64.0, dynamic=True)
    for update in range(UPDATES):
        for micro in range(micros):
            real, noise = _draws(update, micro, ctx.rank)
            accum_c = accum_c.next()
            with accel.training.parts.accumulate(ctx, accum_c, critic):
                loss = _critic_loss(critic, real, generator(noise).detach())
                loss = loss * (math.inf if update == overflow and ctx.rank == 0 else 1.0)
                accum_c = accel.training.parts.backward(ctx, loss, scale_c, accum_c, weight=len(real))
        step = accel.training.parts.optimizer_step(ctx, optimizers[1], scale_c, accum_c, max_norm=0.5)
        accum_c, scale_c = step.accum, step.scaler
        plain.requires_grad_(False)  # the generator's turn: the critic only hands gradients on
        for micro in range(micros):
            _, noise = _draws(update, micro, ctx.rank)
            accum_g = accum_g.next()
            with accel.training.parts.accumulate(ctx, accum_g, generator):
                loss = softplus(-plain(generator(noise))).mean()
                accum_g = accel.training.parts.backward(ctx, loss, scale_g, accum_g, weight=torch.tensor(len(noise)))
        plain.requires_grad_(True)
        step = accel.training.parts.optimizer_step(ctx, optimizers[0], scale_g, accum_g)
        accum_g, scale_g = step.accum, step.scaler
    counts = [accum_g.updates, accum_c.updates, accum_g.skipped, accum_c.skipped, scale_g.scale, scale_c.scale]
    return _flat(generator, critic), counts


def _train_by_hand(world: int, micros: int, overflow: int | None = None) -> torch.Tensor:
    generator, critic = _models()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (generator, critic)]
    for update in range(UPDATES):
        draws = [_draws(update, micro, rank) for micro in range(micros) for rank in range(world)]
        real, noise = (torch.cat(part) for part in zip(*draws, strict=True))
        if update != overflow:
            critic.zero_grad()
            _critic_loss(critic, real, generator(noise).detach()).backward()
            nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
            optimizers[1].step()
        generator.zero_grad()
        softplus(-critic(generator(noise))).mean().backward()
        optimizers[0].step()
    return _flat(generator, critic)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("overflow", [None, 1])
def test_each_has_its_own_window_and_scale(ranks, world_size, micros, overflow):
    """An overflow of the critic skips the critic's step and halves its scale; the generator knows nothing of it."""
    expected = _train_by_hand(world_size, micros, overflow)
    skipped = overflow is not None
    for parameters, counts in ranks.run(lambda ctx: _train(ctx, micros, overflow), world_size):
        torch.testing.assert_close(parameters, expected, **TOLERANCE)
        assert counts == [UPDATES, UPDATES - skipped, 0, skipped, 64.0, 32.0 if skipped else 64.0]


@pytest.mark.parametrize("spoilt", [None, 0, 1])
def test_a_shared_step_is_one_decision(ranks, spoilt):
    """One window, one scale, two optimizers: inf in either model's gradient leaves both where they are."""

    def rank(ctx):
        models = [accel.prepare_model(ctx, model) for model in _models()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        before = _flat(*models)
        state = begin_batch(ctx, accel.train_state(ctx, scaler=accel.LossScale(scale=8.0, dynamic=True)))
        real, noise = _draws(0, 0, ctx.rank)
        with accel.accumulate(ctx, state, *models):
            losses = [models[0](noise).square().mean(), models[1](real).square().mean()]
            if spoilt is not None and ctx.rank == 1:
                losses[spoilt] = losses[spoilt] * math.inf
            for loss in losses:
                state = accel.backward(ctx, loss, state, weight=len(real), same_units=loss is losses[1])
        state = accel.optimizer_step(ctx, optimizers, state, max_norm=[0.1, 0.2])
        moves = [(_flat(model) - old).norm() for model, old in zip(models, before.split([27, 21]), strict=True)]
        return state.stepped, state.scaler.scale, state.grad_norm, moves

    def by_hand():
        draws = [_draws(0, 0, rank) for rank in range(2)]
        parts = (torch.cat(part) for part in zip(*draws, strict=True))
        norms = []
        for model, inputs in zip(_models(), reversed(list(parts)), strict=True):
            model(inputs).square().mean().backward()
            norms.append(nn.utils.get_total_norm([each.grad for each in model.parameters()]))
        return torch.stack(norms)

    for stepped, scale, norms, moves in ranks.run(rank, 2):
        assert (stepped, scale) == ((True, 8.0) if spoilt is None else (False, 4.0))
        if spoilt is None:
            torch.testing.assert_close(norms, by_hand(), **TOLERANCE)
            assert [move.item() for move in moves] == pytest.approx([0.1, 0.2], rel=1e-4)
        else:
            assert norms is None
            assert [move.item() for move in moves] == [0.0, 0.0]
