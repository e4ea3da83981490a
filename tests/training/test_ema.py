# SPDX-License-Identifier: Apache-2.0
"""The average is the formula's, sharded or not; it moves with steps, is saved, and gives the weights back."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from planned_parts import note_module
from profiles import share
from steps import begin_batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import accel
from accel.errors import ConfigError, PrepareError
from accel.testing import simulate
from accel.training import Ema
from accel.training._evaluating import ema_decay

relaxed = settings(deadline=None, max_examples=share(0.6))
STEPPED, SKIPPED = SimpleNamespace(stepped=True), SimpleNamespace(stepped=False)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def _walk(model: nn.Module, seed: int) -> None:
    """A step in a random direction."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            each += torch.randn(each.shape, generator=generator).to(each.dtype)


@relaxed
@given(steps=st.lists(st.booleans(), max_size=12), decay=st.floats(0, 0.999), warmup=st.booleans())
def test_the_average_is_the_sum_of_its_formula_over_the_steps_that_were_taken(steps, decay, warmup):
    model = _model().double()
    ema = Ema(model, decay=decay, warmup=warmup)
    expected, taken = [each.detach().clone() for each in model.parameters()], 0
    for at, stepped in enumerate(steps):
        _walk(model, at)
        ema.update_(model, STEPPED if stepped else SKIPPED)
        if stepped:
            kept = min(decay, (1 + taken) / (10 + taken)) if warmup else decay
            expected = [kept * a + (1 - kept) * b for a, b in zip(expected, model.parameters(), strict=True)]
            taken += 1
    assert int(ema.updates) == taken
    for mine, theirs in zip(ema.weights.parameters(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@relaxed
@given(updates=st.integers(0, 10**6), decay=st.floats(0, 0.99999))
def test_the_decay_grows_up_to_its_most(updates, decay):
    assert ema_decay(0, decay) == min(decay, 0.1)
    assert ema_decay(updates, decay) <= ema_decay(updates + 1, decay) <= decay == ema_decay(10**7, decay)
    assert ema_decay(updates, decay, warmup=False) == decay


def test_weights_of_16_bits_have_an_average_that_moves():
    model = _model().bfloat16()
    ema = Ema(model, decay=0.999, warmup=False)
    with torch.no_grad():
        model[0].weight += 1
    before = ema.weights.get_parameter("0.weight").clone()
    assert before.dtype == torch.float32
    ema.update_(model)
    torch.testing.assert_close(
        ema.weights.get_parameter("0.weight") - before, torch.full((5, 3), 1e-3), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("buffers", ["model", "average"])
def test_buffers_are_the_models_or_averages(buffers):
    model = _model()
    ema = Ema(model, decay=0.5, warmup=False, buffers=buffers)
    model(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    mean, count = model[1].running_mean.clone(), model[1].num_batches_tracked.clone()
    ema.update_(model)
    with ema.applied_to(model):
        torch.testing.assert_close(model[1].running_mean, mean if buffers == "model" else mean / 2)
        assert model[1].num_batches_tracked == count == 1
    torch.testing.assert_close(model[1].running_mean, mean)


def test_buffers_have_averages_of_their_own_where_some_modules_have_no_parameters():
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3), nn.BatchNorm1d(3))
    ema = Ema(model, decay=0.0, warmup=False, buffers="average")
    model(5 + torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    ema.update_(model)
    for name, live in model.named_buffers():
        torch.testing.assert_close(ema.weights.get_buffer(name), live)


def test_an_autocast_around_sees_the_average_in_the_block_and_the_weights_after_it():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    ema = Ema(model)
    nn.init.constant_(model.weight, 3.0)
    with accel.autocast(accel.single(precision="bf16")):
        before = model(torch.ones(1, 1)).item()
        with ema.applied_to(model):
            within = model(torch.ones(1, 1)).item()
        assert (before, within, model(torch.ones(1, 1)).item()) == (3.0, 1.0, 3.0)


def test_a_model_whose_weights_are_empty_between_passes_has_no_average():
    early = Ema(model := nn.Linear(2, 2))
    note_module(model, emptied="stage 3")
    with assert_raises(
        PrepareError, problem="between passes, where these are empty", got="stage 3", fix="strategy='fsdp'"
    ):
        Ema(model)
    model.weight.data = torch.empty(0)
    with assert_raises(PrepareError, fix="stage below 3"):
        early.update_(model)


def test_updates_are_counted_where_reading_them_waits_for_no_device():
    with torch.device("meta"):
        assert Ema(nn.Linear(2, 2)).updates.device.type == "cpu"


@relaxed
@given(buffers=st.sampled_from(["model", "average"]), half=st.booleans(), fails=st.booleans())
def test_the_model_has_the_average_in_the_block_and_its_own_bits_after_it(buffers, half, fails):
    model = _model().bfloat16() if half else _model()
    ema = Ema(model, buffers=buffers)
    _walk(model, 1)
    ema.update_(model)
    own = copy.deepcopy(model.state_dict())

    def evaluate() -> None:
        with ema.applied_to(model):
            for name, each in ema.weights.named_parameters():
                assert torch.equal(model.get_parameter(name), each.to(model.get_parameter(name).dtype))
            with torch.no_grad():
                model[0].weight.zero_()
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            evaluate()
    else:
        evaluate()
    assert all(torch.equal(each, own[name]) for name, each in model.state_dict().items())
    assert all(each.requires_grad for each in model.parameters())


def test_tied_weights_have_one_average_and_stay_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    ema = Ema(model, decay=0.5, warmup=False)
    assert len(list(ema.weights.parameters())) == 3
    with ema.applied_to(model):
        assert model[1].weight is model[0].weight


def test_a_run_goes_on_from_a_checkpoint_with_the_same_average(tmp_path):
    ctx = accel.single()

    def go(model, ema, steps):
        for at in steps:
            _walk(model, at)
            ema.update_(model)

    model = _model()
    ema = Ema(model, decay=0.9)
    go(model, ema, range(3))
    saved = accel.save_state(ctx, tmp_path, {"model": model, "ema": ema}, step=3)
    go(model, ema, range(3, 6))
    other = _model()
    resumed = Ema(other, decay=0.9)
    accel.load_state(ctx, saved, {"model": other, "ema": resumed})
    go(other, resumed, range(3, 6))
    assert int(resumed.updates) == 6
    for mine, theirs in zip(resumed.weights.parameters(), ema.weights.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_step_that_overflowed_leaves_the_average_alone_on_all_ranks(ranks):
    def rank(ctx):
        ctx = accel.replace(ctx, precision="fp16")
        model = _model()[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accel.prepare(ctx, model, optimizer)
        ema, counts = Ema(model, decay=0.5), []
        state = accel.train_state(ctx, scaler=accel.loss_scale(ctx, initial=2.0))
        for at in range(4):
            scale = float("inf") if at == 1 and ctx.rank == 1 else 1.0
            state = accel.backward(ctx, model(torch.ones(2, 3)).mean() * scale, begin_batch(ctx, state))
            state = accel.optimizer_step(ctx, optimizer, state)
            ema.update_(model, state)
            counts.append(int(ema.updates))
        return counts, [each.clone() for each in ema.weights.parameters()]

    (counts, first), (others, second) = ranks.run(rank, 2)
    assert counts == others == [1, 1, 2, 3]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_sharded_weights_have_sharded_averages_equal_to_whole_ones():
    """Gathered weights are dropped around the block, or `fully_shard` would go on with those of the average."""
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))

    def train(model, ema, shard):
        outputs = []
        for at in range(3):
            loss = model(inputs * (at + 1)).square().mean()
            loss.backward()
            with torch.no_grad():
                for each in model.parameters():
                    each -= 0.1 * each.grad
                    each.grad = None
            ema.update_(model, STEPPED)
            with torch.no_grad(), ema.applied_to(model):
                outputs.append(model(inputs))
            with torch.no_grad():
                outputs.append(model(inputs))
        return outputs, [(each.full_tensor() if shard else each).clone() for each in ema.weights.parameters()]

    def plain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))

    def rank(ctx):
        mesh = init_device_mesh("cpu", (2,))
        model = plain()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        ema = Ema(model, decay=0.7)
        assert all(each.to_local().shape != each.shape for each in ema.weights.parameters())
        return train(model, ema, shard=True)

    model = plain()
    expected = train(model, Ema(model, decay=0.7), shard=False)
    for outputs, averages in simulate(rank, 2, default_group=True):
        for mine, theirs in zip([*outputs, *averages], [*expected[0], *expected[1]], strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_model_that_is_sharded_in_part_has_the_averages_of_a_whole_one():
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))

    def average(live: nn.Module) -> list[torch.Tensor]:
        ema = Ema(live, decay=0.7)
        for _ in range(3):
            with torch.no_grad():
                for each in live.parameters():
                    each += 1
            ema.update_(live, STEPPED)
        with torch.no_grad(), ema.applied_to(live):
            applied = [each.full_tensor() if isinstance(each, DTensor) else each for each in live.parameters()]
            return [each.clone() for each in applied]

    def rank(ctx):
        live = model()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(live, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(live[2], mesh=mesh["dp"])
        return average(live)

    expected = average(model())
    for averages in simulate(rank, 4, default_group=True):
        torch.testing.assert_close(averages, expected)


def test_wrappers_leave_no_trace_in_names(ranks):
    def rank(ctx):
        model = accel.prepare(ctx, _model())
        ema = Ema(model)
        ema.update_(accel.unwrap_model(model))
        return [name for name, _ in ema.named_parameters()]

    assert ranks.run(rank, 2)[0] == [f"weights.{name}" for name, _ in _model().named_parameters()]


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_what_is_no_decay_is_refused(decay):
    with assert_raises(ConfigError, expected="0 up to but without 1"):
        Ema(_model(), decay=decay)


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        (
            lambda: nn.Sequential(nn.Linear(3, 4)),
            {"expected": r"shape \[5, 3\] on cpu", "got": r"shape \[4, 3\]", "where": "Ema, 0.weight"},
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 5)),
            {"expected": r"shape \[5\] on cpu", "got": "no such tensor", "where": "Ema, 1.weight"},
        ),
        (
            lambda: nn.Sequential(*_model(), nn.Linear(2, 2)),
            {"expected": "no such tensor", "got": "shape", "where": "Ema, 3.weight"},
        ),
    ],
)
def test_another_model_is_refused_and_left_alone(other, fields):
    ema, model = Ema(_model()), other()
    before = copy.deepcopy(model.state_dict())
    with assert_raises(PrepareError, **fields):
        ema.update_(model)
    with assert_raises(PrepareError, **fields), ema.applied_to(model):
        pass
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    with assert_raises(ConfigError, expected="model, average"):
        Ema(model, buffers="copy")
