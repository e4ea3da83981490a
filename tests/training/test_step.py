# SPDX-License-Identifier: Apache-2.0
"""The training step against a single-process loop in float64, over splits into ranks and micro-batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from processes import job, script_ranks
from profiles import share
from steps import WAYS, ByState, begin_batch, both_ways
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.errors import ConfigError, NonFiniteError, PrepareError, StepError
from accel.testing import Simulator

TOLERANCE = 1e-10


class Outcome(NamedTuple):
    parameters: torch.Tensor
    norms: list[float]
    rates: list[float]
    ids: list[int]


def make_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 5, dtype=torch.float64, generator=generator)
    targets = torch.randn(samples, 2, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, targets, torch.arange(samples))


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(
    ctx: accel.DistContext,
    samples: int,
    window: int,
    steps: int,
    max_norm: float | None,
    *,
    tail: str = "ragged",
    way: type[ByState] = ByState,
) -> Outcome:
    """Two epochs with `window` samples to a step, cut into `steps` micro-batches."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LinearLR(optimizer, total_iters=10)
    loader = DataLoader(make_data(samples), batch_size=1, shuffle=True)
    sharded = accel.prepare_loader(ctx, loader, global_batch=window // steps, tail=tail)  # type: ignore[arg-type]
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)
    run = way(ctx, steps, seed=3)
    norms, rates, ids = [], [], []
    while run.cursor.epoch < 2:
        for batch in run.batches(sharded):
            inputs, targets, positions = batch.data
            rows = batch.valid if tail == "pad" and batch.valid else batch.rows
            with run.accumulate(model):
                run.backward(mse_loss(model(inputs)[:rows], targets[:rows]))
            ids += accel.gather_for_metrics(ctx, positions, batch).tolist()
            if run.sync:
                rates.append(optimizer.param_groups[0]["lr"])
                run.step(optimizer, scheduler=scheduler, max_norm=max_norm)
                assert run.grad_norm is not None
                norms.append(run.grad_norm.item())
    return Outcome(flat(model), norms, rates, ids)


def train_by_hand(samples: int, window: int, max_norm: float | None) -> Outcome:
    """The same with torch alone: one process, one batch a step."""
    model, data = make_model(), make_data(samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LinearLR(optimizer, total_iters=10)
    norms, rates, ids = [], [], []
    for epoch in range(2):
        order = accel.data.order(3, epoch, samples).at(torch.arange(samples))
        for start in range(0, samples, window):
            chosen = order[start : start + window]
            inputs, targets, _ = data[chosen]
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            limit = math.inf if max_norm is None else max_norm
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            ids += chosen
    return Outcome(flat(model), norms, rates, ids)


@settings(max_examples=share(0.2), deadline=None)
@given(
    samples=st.integers(1, 50),
    micro=st.integers(1, 9),
    steps=st.sampled_from([1, 2, 3, 4]),
    world_size=st.sampled_from([1, 2, 3, 4]),
    max_norm=st.sampled_from([None, 0.05, 1.0]),
    tail=st.sampled_from(["ragged", "pad"]),
    way=st.sampled_from(WAYS),
)
def test_any_split_trains_the_same_model(
    samples: int, micro: int, steps: int, world_size: int, max_norm: float | None, tail: str, way: type[ByState]
) -> None:
    window = micro * steps
    expected = train_by_hand(samples, window, max_norm)
    with Simulator() as simulator:
        ranks = simulator.run(
            lambda ctx: train(ctx, samples, window, steps, max_norm, tail=tail, way=way), world_size, seed=samples
        )
    for rank in ranks:
        assert torch.allclose(rank.parameters, expected.parameters, rtol=0, atol=TOLERANCE)
        assert rank.norms == pytest.approx(expected.norms, abs=TOLERANCE)
        assert rank.rates == expected.rates
    for epoch in range(2):
        part = slice(epoch * samples, (epoch + 1) * samples)
        assert sorted(ranks[0].ids[part]) == list(range(samples))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_worlds_and_accumulations_of_the_same_global_batch(world_size: int, steps: int) -> None:
    expected = train_by_hand(107, 16, 0.3)
    with Simulator() as simulator:
        ranks = simulator.run(lambda ctx: train(ctx, 107, 16, steps, 0.3), world_size)
    assert all(torch.allclose(rank.parameters, expected.parameters, rtol=0, atol=TOLERANCE) for rank in ranks)


REAL = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, accel
from test_step import TOLERANCE, train, train_by_hand
torch.set_num_threads(1)
expected = train_by_hand(107, 16, 0.3)
with accel.session(device="cpu") as ctx:
    assert ctx.world_size == int(sys.argv[2])
    for steps in (1, 2, 4):
        got = train(ctx, 107, 16, steps, 0.3)
        assert torch.allclose(got.parameters, expected.parameters, rtol=0, atol=TOLERANCE), steps
        assert sorted(got.ids[:107]) == sorted(got.ids[107:]) == list(range(107)), steps
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_real_processes_train_the_same_model(tmp_path: Path, world_size: int) -> None:
    script = tmp_path / "real.py"
    script.write_text(REAL)
    words = (Path(__file__).parent, world_size)
    with script_ranks(script, job(world_size), *words, folder=tmp_path) as ranks:
        assert not any(rank.wait(120) for rank in ranks), [rank.said() for rank in ranks]


@settings(max_examples=share(0.5), deadline=None)
@given(
    tokens=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=4),
    as_tensor=st.booleans(),
    way=st.sampled_from(WAYS),
)
def test_token_weights_give_the_gradient_of_all_tokens(
    tokens: list[list[int]], as_tensor: bool, way: type[ByState]
) -> None:
    """Ranks with other numbers of valid tokens, none included: every valid token counts the same."""
    micro_batches = max(map(len, tokens))
    tokens = [counts + [0] * (micro_batches - len(counts)) for counts in tokens]
    total = sum(map(sum, tokens))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(len(tokens), micro_batches, 4, 5, dtype=torch.float64, generator=generator)
    labels = torch.randint(2, (len(tokens), micro_batches, 4), generator=generator)
    for rank, counts in enumerate(tokens):
        for at, count in enumerate(counts):
            labels[rank, at, count:] = -100

    def rank_gradient(ctx: accel.DistContext) -> tuple[bool, torch.Tensor]:
        model = accel.prepare_model(ctx, make_model())
        before = flat(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run = way(ctx, micro_batches)
        for at in range(micro_batches):
            run.begin()
            count = tokens[ctx.rank][at]
            with run.accumulate(model):
                loss = cross_entropy(model(inputs[ctx.rank, at]), labels[ctx.rank, at])
                weight = torch.tensor(count) if as_tensor else count
                run.backward(loss, weight=weight)
        return run.step(optimizer), before - flat(model)

    with Simulator() as simulator:
        ranks = simulator.run(rank_gradient, len(tokens))
    model = make_model()
    if total:
        cross_entropy(model(inputs.flatten(0, 2)), labels.flatten()).backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    expected = torch.cat([grad.flatten() for grad in grads])
    for stepped, gradient in ranks:
        assert stepped == (total > 0)
        assert torch.allclose(gradient, expected, rtol=0, atol=TOLERANCE)


def one_weight(ctx: accel.DistContext) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    model = accel.prepare_model(ctx, model)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


@both_ways
def test_a_last_window_that_is_not_full_weighs_what_it_holds(way: type[ByState]) -> None:
    """Three micro-batches with two to a window: the last step's gradient is 1, not one half."""
    ctx = accel.single()
    model, optimizer = one_weight(ctx)
    run = way(ctx, 2)
    moves = []
    for i in range(3):
        run.begin(last=i == 2)
        with run.accumulate(model):
            run.backward(model(torch.ones(1, 1, dtype=torch.float64)).mean())
        if run.sync:
            before = flat(model)
            run.step(optimizer)
            moves.append((before - flat(model)).item())
    assert moves == [1.0, 1.0]


@both_ways
def test_micro_batches_of_one_and_three_tokens_weigh_one_to_three(way: type[ByState]) -> None:
    """Gradients 2 over one token and 8 over three: 6.5, where the mean of means would be 5."""
    ctx = accel.single()
    model, optimizer = one_weight(ctx)
    run = way(ctx, 2)
    for gradient, tokens in ((2.0, 1), (8.0, 3)):
        run.begin()
        loss = model(torch.full((1, 1), gradient, dtype=torch.float64)).mean()
        run.backward(loss, weight=tokens)
    before = flat(model)
    run.step(optimizer)
    assert (before - flat(model)).item() == 6.5


def test_a_step_averages_ranks() -> None:
    def rank(ctx: accel.DistContext) -> float:
        model, optimizer = one_weight(ctx)
        loss = model(torch.full((1, 1), float(ctx.rank), dtype=torch.float64)).mean()
        state = accel.backward(ctx, loss, begin_batch(ctx))
        assert accel.optimizer_step(ctx, optimizer, state).stepped
        return -flat(model).item()

    with Simulator() as simulator:
        assert simulator.run(rank, 4) == [1.5] * 4


@pytest.mark.parametrize("world_size", [1, 3])
@both_ways
def test_an_overflow_on_one_rank_skips_the_step_on_all(world_size: int, way: type[ByState]) -> None:
    def rank(ctx: accel.DistContext) -> tuple[list[bool], list[float], torch.Tensor, int, float]:
        ctx = accel.replace(ctx, precision="fp16")
        model, optimizer = one_weight(ctx)
        scheduler = LinearLR(optimizer, start_factor=0.5, total_iters=100)
        run = way(ctx, scaler=accel.loss_scale(ctx, initial=8.0, growth_interval=2))
        stepped, scales = [], [run.scaler.scale]
        for i in range(4):
            run.begin()
            inputs = torch.ones(1, 1, dtype=torch.float64)
            if i == 1 and ctx.rank == 0:
                inputs[:] = math.inf
            run.backward(model(inputs).mean(), weight=1)
            rate = optimizer.param_groups[0]["lr"]
            before = flat(model)
            run.step(optimizer, scheduler=scheduler, max_norm=0.5)
            stepped.append(run.stepped)
            scales.append(run.scaler.scale)
            if not run.stepped:
                assert torch.equal(before, flat(model))
                assert optimizer.param_groups[0]["lr"] == rate
        return stepped, scales, flat(model), run.skipped, optimizer.param_groups[0]["lr"]

    with Simulator() as simulator:
        ranks = simulator.run(rank, world_size)
    for stepped, scales, parameters, skipped, rate in ranks:
        assert stepped == [True, False, True, True]
        assert scales == [8.0, 8.0, 4.0, 4.0, 8.0]
        assert skipped == 1
        assert torch.equal(parameters, ranks[0][2])
        assert rate == pytest.approx(0.5 + 3 * 0.005)


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@both_ways
def test_nonfinite_gradients_follow_the_policy_on_every_rank(policy: str, value: float, way: type[ByState]) -> None:
    def rank(ctx: accel.DistContext) -> tuple[str, torch.Tensor]:
        model, optimizer = one_weight(ctx)
        inputs = torch.full((1, 1), value if ctx.rank == 1 else 1.0, dtype=torch.float64)
        run = way(ctx)
        run.begin()
        run.backward(model(inputs).mean())
        try:
            run.step(optimizer, nonfinite=policy)  # type: ignore[arg-type]
        except NonFiniteError as error:
            return str(error), flat(model)
        assert run.skipped == (policy == "skip")
        return str(run.stepped), flat(model)

    with Simulator() as simulator:
        for told, parameters in simulator.run(rank, 2):
            if policy == "raise":
                assert "step 0" in told
                assert "at weight, shape [1, 1]" in told
                assert parameters.item() == 0.0
            elif policy == "skip":
                assert (told, parameters.item()) == ("False", 0.0)
            else:
                assert told == "True"
                assert not math.isfinite(parameters.item())


def test_an_overflow_that_never_ends_is_an_error() -> None:
    ctx = accel.replace(accel.single(), precision="fp16")
    model, optimizer = one_weight(ctx)
    run, steps = ByState(ctx), 0
    with assert_raises(NonFiniteError, problem="not finite"):
        for steps in range(200):  # noqa: B007
            run.begin()
            run.backward(model(torch.full((1, 1), math.nan, dtype=torch.float64)).mean())
            run.step(optimizer)
    assert steps == 64


@both_ways
def test_two_optimizers_share_one_norm_and_one_decision(way: type[ByState]) -> None:
    ctx = accel.replace(accel.single(), precision="fp16")
    (first, one), (second, two) = one_weight(ctx), one_weight(ctx)
    run = way(ctx, scaler=accel.loss_scale(ctx, initial=4.0))
    run.begin()
    loss = (
        3 * first(torch.ones(1, 1, dtype=torch.float64)).mean()
        + 4 * second(torch.ones(1, 1, dtype=torch.float64)).mean()
    )
    run.backward(loss)
    run.step([one, two], max_norm=1.0)
    assert run.grad_norm is not None
    assert run.grad_norm.item() == pytest.approx(5.0)
    assert [flat(first).item(), flat(second).item()] == pytest.approx([-0.6, -0.8], abs=1e-6)


@settings(max_examples=share(0.5), deadline=None)
@given(
    weights=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    max_norm=st.sampled_from([0.01, 0.5, 100.0]),
    way=st.sampled_from(WAYS),
)
def test_clipping_apart_is_clipping_in_the_step(weights: list[int], max_norm: float, way: type[ByState]) -> None:
    def rank(ctx: accel.DistContext, apart: bool) -> tuple[torch.Tensor, float]:
        model = accel.prepare_model(ctx, make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run = way(ctx, len(weights), scaler=accel.LossScale(scale=16.0))
        generator = torch.Generator().manual_seed(ctx.rank)
        for weight in weights:
            run.begin()
            inputs = torch.randn(3, 5, dtype=torch.float64, generator=generator)
            with run.accumulate(model):
                run.backward(model(inputs).square().mean(), weight=weight + ctx.rank)
        if not apart:
            run.step(optimizer, max_norm=max_norm)
            assert run.grad_norm is not None
            return flat(model), run.grad_norm.item()
        norm = run.clip_norm(model.parameters(), max_norm)
        run.step(optimizer)
        return flat(model), norm.item()

    with Simulator() as simulator:
        for one, other in zip(
            *(simulator.run(lambda ctx, a=apart: rank(ctx, a), 2) for apart in (True, False)), strict=True
        ):
            assert torch.allclose(one[0], other[0], rtol=0, atol=TOLERANCE)
            assert one[1] == pytest.approx(other[1], abs=TOLERANCE)


def test_schedulers_step_once_whatever_the_world_size() -> None:
    with Simulator() as simulator:
        rates = {world: simulator.run(lambda ctx: train(ctx, 30, 10, 1, None).rates, world)[0] for world in (1, 2, 4)}
    assert rates[1] == rates[2] == rates[4]


def test_bfloat16_losses_are_weighted_in_full_precision() -> None:
    ctx = accel.single(precision="bf16")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = ByState(ctx)
    run.begin()
    with accel.autocast(ctx):
        loss = model(torch.ones(2, 4)).mean()
    assert loss.dtype == torch.bfloat16
    run.backward(loss, weight=257)  # bf16 knows 256 and 258
    run.step(optimizer)
    assert run.grad_norm is not None
    assert run.grad_norm.item() == pytest.approx(math.sqrt(4 * 4 / 16 + 4 / 16), rel=1e-2)


class TestCallsOutOfOrder:
    ctx = accel.single()

    def test_backward_before_next(self) -> None:
        model, _ = one_weight(self.ctx)
        with assert_raises(StepError, expected=r"state = state\.next\(batch\)"):
            _ = accel.backward(self.ctx, flat_loss(model), accel.train_state(self.ctx))

    def test_accumulate_before_next(self) -> None:
        with (
            assert_raises(StepError, problem="no batch has begun"),
            accel.accumulate(self.ctx, accel.train_state(self.ctx)),
        ):
            pass

    def test_step_within_a_window(self) -> None:
        model, optimizer = one_weight(self.ctx)
        begun = begin_batch(self.ctx, accel.train_state(self.ctx, accumulation=2))
        state = accel.backward(self.ctx, flat_loss(model), begun)
        with assert_raises(StepError, got="micro-batch 1 of 2"):
            _ = accel.optimizer_step(self.ctx, optimizer, state)
        assert flat(model).item() == 0.0

    def test_step_with_the_state_that_backward_was_given(self) -> None:
        model, optimizer = one_weight(self.ctx)
        stale = begin_batch(self.ctx)
        _ = accel.backward(self.ctx, flat_loss(model), stale)
        with assert_raises(StepError, fix=r"Keep the result: state = accel\.backward"):
            _ = accel.optimizer_step(self.ctx, optimizer, stale)

    def test_a_loss_without_a_gradient(self) -> None:
        with assert_raises(StepError, got="requires_grad=False"):
            accel.backward(self.ctx, torch.ones(()), begin_batch(self.ctx))
        with assert_raises(StepError, got="float", fix=r"without \.item\(\)"):
            accel.backward(self.ctx, 1.0, begin_batch(self.ctx))  # type: ignore[arg-type]

    def test_optimizers_that_need_more_than_a_step(self) -> None:
        model, _ = one_weight(self.ctx)
        state = accel.backward(self.ctx, flat_loss(model), begin_batch(self.ctx))
        with assert_raises(ConfigError, expected="closure"):
            _ = accel.optimizer_step(self.ctx, torch.optim.LBFGS(model.parameters()), state)

    def test_step_with_another_scale_than_the_gradients(self) -> None:
        model, optimizer = one_weight(self.ctx)
        begun = begin_batch(self.ctx, accel.train_state(self.ctx, scaler=accel.LossScale(scale=4.0)))
        state = accel.backward(self.ctx, flat_loss(model), begun)
        other = msgspec.structs.replace(state, scaler=accel.LossScale(scale=2.0))
        with assert_raises(StepError, fix="in one call"):
            _ = accel.optimizer_step(self.ctx, optimizer, other)

    def test_step_without_backward(self) -> None:
        _, optimizer = one_weight(self.ctx)
        with assert_raises(StepError, problem="no gradients"):
            _ = accel.optimizer_step(self.ctx, optimizer, counted(self.ctx))

    def test_a_loss_that_is_no_scalar(self) -> None:
        model, _ = one_weight(self.ctx)
        with assert_raises(StepError, got=r"shape \[3, 1\]"):
            accel.backward(self.ctx, model(torch.ones(3, 1, dtype=torch.float64)), begin_batch(self.ctx))

    @pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
    def test_a_weight_that_is_none(self, weight: float) -> None:
        model, _ = one_weight(self.ctx)
        with assert_raises(ConfigError, problem="the weight is not valid"):
            _ = accel.backward(self.ctx, flat_loss(model), begin_batch(self.ctx), weight=weight)

    @pytest.mark.parametrize("steps", [0, -3, 2.5, True, "4"])
    def test_an_accumulation_that_is_no_number_of_micro_batches(self, steps: int) -> None:
        with assert_raises(
            ConfigError, problem="the number of micro-batches is not valid", expected="an integer from 1"
        ):
            _ = accel.train_state(self.ctx, accumulation=steps)

    def test_a_scheduler_that_needs_a_metric(self) -> None:
        _, optimizer = one_weight(self.ctx)
        with assert_raises(ConfigError, problem="metric"):
            _ = accel.optimizer_step(self.ctx, optimizer, counted(self.ctx), scheduler=ReduceLROnPlateau(optimizer))

    def test_options_outside_their_range(self) -> None:
        _, optimizer = one_weight(self.ctx)
        with assert_raises(ConfigError, expected="above 0"):
            _ = accel.optimizer_step(self.ctx, optimizer, counted(self.ctx), max_norm=0.0)
        with assert_raises(ConfigError, fix="Did you mean `skip`"):
            _ = accel.optimizer_step(self.ctx, optimizer, counted(self.ctx), nonfinite="skipp")  # type: ignore[arg-type]


def counted(ctx: accel.DistContext) -> accel.TrainState:
    """A state that waits for its step, though no parameter has a gradient: its loss was of other leaves."""
    return accel.backward(ctx, torch.ones((), requires_grad=True) * 1.0, begin_batch(ctx))


def flat_loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(1, 1, dtype=torch.float64)).mean()


@pytest.mark.parametrize("max_norm", [None, 9.0, [9.0, 9.0]])
def test_a_parameter_of_two_optimizers_is_scaled_once(max_norm: float | list[float] | None) -> None:
    ctx = accel.single()
    model, one = one_weight(ctx)
    other, _ = one_weight(ctx)
    two = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.0)
    run = ByState(ctx, 2)
    for _ in range(2):
        loss = 3 * flat_loss(model) + flat_loss(other)
        run.begin()
        run.backward(loss, weight=4)
    run.step([one, two], max_norm=max_norm)
    assert flat(model).item() == -3.0


def test_an_optimizer_that_clears_gradients_in_its_own_way_does() -> None:
    class Keeping(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = False) -> None:
            super().zero_grad(set_to_none=False)

    ctx, model = accel.single(), make_model()
    for kind in (torch.optim.SGD, Keeping):
        state = accel.backward(ctx, model(torch.ones(1, 5, dtype=torch.float64)).sum(), begin_batch(ctx))
        accel.optimizer_step(ctx, kind(model.parameters(), lr=0.1), state)
        left = [each.grad for each in model.parameters() if each.grad is not None]
        assert len(left) == (4 if kind is Keeping else 0)
        assert not any(grad.any() for grad in left)


def test_gradients_are_cleared_by_a_method_set_on_the_optimizer() -> None:
    ctx, model = accel.single(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain, calls = optimizer.zero_grad, list[str]()

    def zero_grad(set_to_none: bool = True) -> None:
        calls.append("zero_grad")
        plain(set_to_none)

    optimizer.zero_grad = zero_grad
    state = accel.backward(ctx, model(torch.ones(1, 5, dtype=torch.float64)).sum(), begin_batch(ctx))
    accel.optimizer_step(ctx, optimizer, state)
    assert calls == ["zero_grad"]
    assert all(each.grad is None for each in model.parameters())


def test_an_unprepared_model_is_refused_where_ranks_would_drift_apart() -> None:
    def rank(ctx: accel.DistContext) -> None:
        with accel.accumulate(ctx, begin_batch(ctx), nn.Linear(1, 1)):
            pass

    with Simulator() as simulator, assert_raises(PrepareError, expected="prepare_model"):
        simulator.run(rank, 2)


def test_list_operations_of_torch_do_what_plain_loops_do() -> None:
    """Fails when torch changes the private names in accel.optim._gradients."""
    from accel.optim import scale_, total_norm

    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((3, 4), (5,), ())]
    expected = math.sqrt(sum(grad.square().sum().item() for grad in grads))
    assert total_norm(grads) == pytest.approx(expected, abs=1e-12)
    assert total_norm([*grads, torch.full((2,), math.inf)]) == math.inf
    assert not math.isfinite(total_norm([*grads, torch.full((2,), math.nan)]))
    assert total_norm([*grads, torch.ones(2, dtype=torch.float32)]) == pytest.approx(math.hypot(expected, 2**0.5))
    doubled = [2 * grad for grad in grads]
    scale_(grads, 2.0)
    assert all(torch.equal(a, b) for a, b in zip(grads, doubled, strict=True))
    scale_(grads, torch.tensor(0.5, dtype=torch.float64))
    assert all(torch.equal(2 * a, b) for a, b in zip(grads, doubled, strict=True))
