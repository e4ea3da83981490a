# SPDX-License-Identifier: Apache-2.0
"""Local SGD against averages by hand, and how much it says to the other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from steps import begin_batch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.comm import _torch as calls
from accel.errors import CollectiveMismatch, ConfigError, PrepareError
from accel.testing import InjectedFault, Simulator


def make(dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(dtype)


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    inputs = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    return inputs, torch.randn(5, 2, dtype=torch.float64, generator=generator)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers()]]


def train(ctx: accel.DistContext, steps: int, every: int) -> list[torch.Tensor]:
    torch.manual_seed(ctx.rank)
    model = make()
    if ctx.rank:
        nn.init.normal_(model[0].weight)  # rank 0's is the start for all
    model = accel.parallel.prepare_local_model(ctx, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    local = accel.parallel.LocalSgd(every)
    state = accel.train_state(ctx)
    for step in range(steps):
        inputs, targets = data(ctx.rank, step)
        state = begin_batch(ctx, state)
        with accel.accumulate(ctx, state):
            state = accel.backward(ctx, mse_loss(model(inputs), targets), state)
        state = accel.optimizer_step(ctx, optimizer, state)
        local = accel.parallel.local_sgd_step(ctx, model, local, last=step == steps - 1)
    assert local == accel.parallel.LocalSgd(every, averages=-(-steps // every))
    return values(model)


def by_hand(world_size: int, steps: int, every: int) -> list[torch.Tensor]:
    models = [make() for _ in range(world_size)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inputs, targets = data(rank, step)
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
        if (step + 1) % every == 0 or step == steps - 1:
            with torch.no_grad():
                for same in zip(*([*model.parameters(), *model.buffers()] for model in models), strict=True):
                    if same[0].is_floating_point():
                        mean = torch.stack(list(same)).mean(0)
                        for each in same:
                            each.copy_(mean)
    return values(models[0])


@settings(max_examples=share(0.5), deadline=None)
@given(world_size=st.integers(1, 4), steps=st.integers(1, 7), every=st.integers(1, 4))
def test_ranks_hold_the_average_of_what_each_would_have_become(world_size: int, steps: int, every: int) -> None:
    expected = by_hand(world_size, steps, every)
    with Simulator() as simulator:
        for got in simulator.run(lambda ctx: train(ctx, steps, every), world_size):
            for mine, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


@settings(max_examples=share(0.3), deadline=None)
@given(samples=st.integers(1, 20), world_size=st.integers(1, 3), steps=st.integers(1, 2))
def test_averaging_after_every_step_of_plain_sgd_is_data_parallel(samples: int, world_size: int, steps: int) -> None:
    """With `weight=batch.valid` every sample counts the same, ragged ends included."""

    def rank(ctx: accel.DistContext, local: accel.parallel.LocalSgd | None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(samples)
        dataset = TensorDataset(torch.randn(samples, 4, dtype=torch.float64, generator=generator))
        model: nn.Module = nn.Linear(4, 2, dtype=torch.float64)
        with torch.no_grad():
            model.weight.fill_(0.5)  # type: ignore[operator, union-attr]
        loader = accel.prepare_loader(ctx, DataLoader(dataset, batch_size=2))
        prepare = accel.prepare_model if local is None else accel.parallel.prepare_local_model
        model = prepare(ctx, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = accel.train_state(ctx, accumulation=steps)
        for batch in accel.batches(ctx, loader, accel.Cursor()):
            state = state.next(batch)
            with accel.accumulate(ctx, state, *([model] if local is None else [])):
                loss = model(batch.data[0]).square().mean()
                state = accel.backward(ctx, loss, state)
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state, nonfinite="ignore")
                local = local and accel.parallel.local_sgd_step(ctx, model, local)
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    with Simulator() as simulator:
        together = simulator.run(lambda ctx: rank(ctx, None), world_size)
        apart = simulator.run(lambda ctx: rank(ctx, accel.parallel.LocalSgd(every=1)), world_size)
    for got, expected in zip(apart, together, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtypes", [1, 2])
def test_an_average_is_one_message_for_each_dtype(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, dtypes: int
) -> None:
    said: list[str] = []
    originals = {name: getattr(calls, name) for name in ("start_all_reduce", "start_transfer")}

    def counting(name: str) -> Any:
        def count(*args: Any) -> Any:
            said.append(name)
            return originals[name](*args)

        return count

    def rank(ctx: accel.DistContext) -> None:
        layers = [nn.Linear(40, 40) for _ in range(20)]
        if dtypes == 2:
            layers[3].double()
        model = accel.parallel.prepare_local_model(ctx, nn.Sequential(*layers))
        if ctx.rank == 0:
            for name in originals:
                monkeypatch.setattr(calls, name, counting(name))
        accel.wait_for_everyone(ctx)
        local = accel.parallel.LocalSgd(every=3)
        for _ in range(6):
            local = accel.parallel.local_sgd_step(ctx, model, local)

    ranks.run(rank, 2)
    # Two ranks; two averages, each of a small checked message and what is too large for it; and the barrier.
    assert said.count("start_all_reduce") == 2 * 2 * dtypes
    assert said.count("start_transfer") <= 2 * (1 + 2 * (1 + dtypes))


def test_a_rank_that_fails_says_nothing_to_the_others(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model, local = accel.parallel.prepare_local_model(ctx, make()), accel.parallel.LocalSgd(every=2)
        for step in range(4):
            if ctx.rank == 1 and step == 3:
                raise InjectedFault("between two averages")
            local = accel.parallel.local_sgd_step(ctx, model, local)

    with pytest.raises(InjectedFault) as caught:
        ranks.run(rank, 2)
    assert "rank 0: waiting in" in "".join(caught.value.__notes__)


def test_ranks_that_average_at_other_steps_are_told(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model = accel.parallel.prepare_local_model(ctx, make())
        local = accel.parallel.local_sgd_step(ctx, model, accel.parallel.LocalSgd(every=2), last=ctx.rank == 0)
        with assert_raises(CollectiveMismatch, got="wait_for_everyone"):
            accel.wait_for_everyone(ctx)
        assert local.taken == 1

    with assert_raises(CollectiveMismatch, expected="rank 0: reduce at test_local_sgd"):
        ranks.run(rank, 2)


def test_sixteen_bits_are_averaged_in_thirty_two(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> torch.Tensor:
        model = accel.parallel.prepare_local_model(ctx, nn.Linear(64, 64, dtype=torch.bfloat16))
        with torch.no_grad():
            model.weight.fill_(1.0 + ctx.rank / 128)
        _ = accel.parallel.local_sgd_step(ctx, model, accel.parallel.LocalSgd(every=1))
        return model.weight.detach()

    for got in ranks.run(rank, 3):  # in bfloat16 the sum of 1, 1 + 1/128 and 1 + 2/128 has no bit for these
        assert got.dtype == torch.bfloat16
        assert bool((got == 1 + 1 / 128).all())


def test_with_its_optimizer_averaged_a_run_resumes_exactly(tmp_path: Path) -> None:
    def rank(ctx: accel.DistContext, steps: int) -> list[torch.Tensor]:
        model = accel.parallel.prepare_local_model(ctx, make())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        local = accel.parallel.LocalSgd(every=2)
        state = accel.train_state(ctx)

        def items() -> dict[str, object]:
            return {"model": model, "optimizer": optimizer, "state": state, "local": local}

        if found := accel.latest_checkpoint(tmp_path / str(steps % 2)):
            loaded = accel.load_state(ctx, found, items())
            state, local = loaded["state"], loaded["local"]  # type: ignore[assignment]
        while state.updates < steps:
            inputs, targets = data(ctx.rank, state.updates)
            state = begin_batch(ctx, state)
            state = accel.backward(ctx, mse_loss(model(inputs), targets), state)
            state = accel.optimizer_step(ctx, optimizer, state)
            local = accel.parallel.local_sgd_step(ctx, model, local, optimizer=optimizer)
            if local.taken:
                with assert_raises(ConfigError, problem="ranks hold different models between two averages"):
                    accel.save_state(ctx, tmp_path / "between", items(), step=0)
        accel.save_state(ctx, tmp_path / str(steps % 2), items(), step=steps)
        return values(model)

    with Simulator() as simulator:
        simulator.run(lambda ctx: rank(ctx, 4), 2)
        resumed = simulator.run(lambda ctx: rank(ctx, 8), 2)
        (tmp_path / "0").rename(tmp_path / "done")
        straight = simulator.run(lambda ctx: rank(ctx, 8), 2)
    for mine, theirs in zip(resumed, straight, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("every", [0, -1, 2.0, True])
def test_numbers_of_steps_that_are_none(every: Any) -> None:
    with assert_raises(ConfigError, expected="an integer from 1"):
        accel.parallel.LocalSgd(every)


def test_a_model_that_ddp_keeps_equal_is_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(ctx, make())
        for call in (
            lambda: accel.parallel.prepare_local_model(ctx, model),
            lambda: accel.parallel.local_sgd_step(ctx, model, accel.parallel.LocalSgd(1)),
        ):
            with assert_raises(PrepareError, got="one that DDP wraps", fix=r"accel.unwrap_model\(model\)"):
                call()
        plain = accel.unwrap_model(model)  # warm-up by DDP is over
        assert (
            accel.parallel.local_sgd_step(
                ctx, accel.parallel.prepare_local_model(ctx, plain), accel.parallel.LocalSgd(1)
            ).averages
            == 1
        )

    ranks.run(rank, 2)


def test_ranks_that_share_experts_and_empty_models_are_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        with assert_raises(PrepareError, fix="ep out of the mesh"):
            accel.parallel.prepare_local_model(accel.replace(ctx, mesh="dp=2,ep=2"), nn.Linear(2, 2))
        with assert_raises(accel.errors.DeviceError, problem="no values"):
            accel.parallel.prepare_local_model(ctx, nn.Linear(2, 2, device="meta"))

    ranks.run(rank, 2, default_group=True)
