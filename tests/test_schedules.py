# SPDX-License-Identifier: Apache-2.0
"""Schedules are exact at their ends, continuous where they join, and the same through torch and JSON."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from tables import rows
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, PolynomialLR

import accel
from accel.errors import ConfigError
from accel.schedules import Constant, Cosine, InverseSqrt, Joined, Linear, Polynomial, warmup, wsd

factors = st.floats(0, 8)
lengths = st.integers(1, 200)
powers = st.floats(0.25, 4)
lines = st.builds(Linear, lengths, start=factors, end=factors)
cosines = st.builds(Cosine, lengths, start=factors, end=factors)
parts = st.sampled_from(["remaining", "elapsed"])
powered = st.builds(Polynomial, lengths, start=factors, end=factors, power=powers, of=parts)
shapes = lines | cosines | powered
relaxed = settings(deadline=None, max_examples=share(2))


@relaxed
@given(piece=shapes, beyond=st.integers(0, 10**9))
def test_a_piece_goes_from_its_start_to_its_end_exactly_and_stays(piece, beyond):
    assert piece(0) == piece.start
    assert piece(piece.steps) == piece(piece.steps + beyond) == piece.end


@relaxed
@given(piece=shapes)
def test_a_piece_is_monotonous_and_within_its_ends(piece):
    values = [piece(step) for step in range(piece.steps + 1)]
    slack = 1e-12
    low, high = sorted((piece.start, piece.end))
    assert all(low - slack <= value <= high + slack for value in values)
    rising = 1 if piece.end >= piece.start else -1
    assert all(rising * (b - a) >= -slack for a, b in itertools.pairwise(values))


@relaxed
@given(steps=lengths, power=powers)
def test_curves_are_the_formulas_of_their_papers(steps, power):
    line, cosine = Linear(steps), Cosine(steps)
    poly, root = Polynomial(steps, power=power), Polynomial(steps, power=0.5, of="elapsed")
    for step in range(steps + 1):
        t = step / steps
        assert line(step) == pytest.approx(1 - t, abs=1e-12)
        assert cosine(step) == pytest.approx((1 + math.cos(math.pi * t)) / 2, abs=1e-12)
        assert poly(step) == pytest.approx((1 - t) ** power, abs=1e-12)
        assert root(step) == pytest.approx(1 - math.sqrt(t), abs=1e-12)


@relaxed
@given(ramp=lengths, step=st.integers(0, 10**6))
def test_warm_up_and_inverse_root_are_the_transformers_schedule(ramp, step):
    schedule = Joined((warmup(ramp), InverseSqrt(timescale=ramp)))
    expected = (step + 1) / (ramp + 1) if step < ramp else math.sqrt(ramp / step)
    assert schedule(step) == pytest.approx(expected, rel=1e-12)


@relaxed
@given(pieces=st.lists(shapes, min_size=1, max_size=4), step=st.integers(0, 900))
def test_joined_pieces_follow_each_other_without_a_gap(pieces, step):
    schedule = Joined(tuple(pieces), jumps=True)
    expected = [piece(local) for piece in pieces for local in range(piece.steps)]
    assert schedule(step) == (expected[step] if step < len(expected) else pieces[-1].end)


@relaxed
@given(pieces=st.lists(shapes, min_size=2, max_size=4))
def test_joined_pieces_meet_or_are_refused(pieces):
    meets = all(math.isclose(a.end, b.start, rel_tol=1e-9, abs_tol=1e-12) for a, b in itertools.pairwise(pieces))
    if meets:
        Joined(tuple(pieces))
    else:
        with assert_raises(ConfigError, problem="the factor jumps between two pieces"):
            Joined(tuple(pieces))


@relaxed
@given(ramp=lengths, stable=lengths, decay=lengths)
def test_wsd_rises_stays_and_falls(ramp, stable, decay):
    schedule = wsd(ramp, stable, Linear(decay))
    assert schedule(0) == 1 / (ramp + 1)
    assert {schedule(step) for step in range(ramp, ramp + stable + 1)} == {1.0}
    assert schedule(ramp + stable + decay) == 0.0
    assert all(0 < schedule(step) < 1 for step in range(ramp))


@relaxed
@given(piece=shapes, more=shapes)
def test_records_are_themselves_through_json(piece, more):
    for schedule in (piece, Joined((piece, more), jumps=True), Constant(3, value=0.5), InverseSqrt(timescale=7)):
        assert msgspec.json.decode(msgspec.json.encode(schedule), type=type(schedule)) == schedule


def _rates(make, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (Cosine(20), lambda o: CosineAnnealingLR(o, T_max=20)),
        (Cosine(20, end=0.1), lambda o: CosineAnnealingLR(o, T_max=20, eta_min=0.05)),
        (Linear(20, start=0.25, end=1.0), lambda o: LinearLR(o, start_factor=0.25, total_iters=20)),
        (Polynomial(20, power=3.0), lambda o: PolynomialLR(o, total_iters=20, power=3.0)),
    ],
)
def test_through_torch_they_are_torchs_own(ours, torchs):
    mine = _rates(lambda optimizer: LambdaLR(optimizer, ours), 21)
    assert mine == pytest.approx(_rates(torchs, 21), abs=1e-9)
    assert mine == [0.5 * ours(step) for step in range(21)]


@pytest.mark.parametrize("stop", [0, 3, 7])
def test_a_run_goes_on_from_a_checkpoint_at_the_same_rate(tmp_path, stop):
    ctx, schedule = accel.single(), Joined((warmup(4), Cosine(6)))

    def start():
        parameter = torch.nn.Parameter(torch.zeros(1))
        model = torch.nn.ParameterList([parameter])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return {"model": model, "optimizer": optimizer, "scheduler": LambdaLR(optimizer, schedule)}

    def go(items, steps):
        rates = []
        for _ in range(steps):
            rates.append(items["optimizer"].param_groups[0]["lr"])
            items["optimizer"].step()
            items["scheduler"].step()
        return rates

    straight, first, second = go(start(), 12), start(), start()
    rates = go(first, stop)
    accel.load_state(ctx, accel.save_state(ctx, tmp_path, first, step=stop), second)
    assert rates + go(second, 12 - stop) == straight == [schedule(step) for step in range(12)]


@rows(
    "make, fields",
    [
        (lambda: Linear(0), {"expected": "an integer from 1", "got": "^0$", "where": "Linear.steps"}),
        (lambda: Cosine(), {"got": "None", "where": "Cosine.steps"}),
        (lambda: Cosine(1.5), {"where": "Cosine.steps"}),
        (lambda: Constant(steps=True), {"where": "Constant.steps"}),
        (lambda: InverseSqrt(timescale=-1), {"where": "InverseSqrt.timescale"}),
        (lambda: warmup(0), {"where": r"warmup\(steps=\)"}),
        (lambda: Linear(3, start=-0.1), {"expected": "a number from 0", "got": "-0.1", "where": "Linear.start"}),
        (lambda: Cosine(3, end=float("nan")), {"where": "Cosine.end"}),
        (lambda: Constant(value=float("inf")), {"where": "Constant.value"}),
        (lambda: Polynomial(3, power=0), {"where": "Polynomial.power"}),
        (lambda: Polynomial(3, of="past"), {"expected": "one of remaining, elapsed"}),
        (lambda: Joined(()), {"problem": "nothing to join", "got": r"\(\)"}),
        (
            lambda: Joined(warmup(2), Cosine(3)),
            {"problem": "nothing to join", "fix": r"Write Joined\(\(first, second\)\)"},
        ),
        (lambda: Joined([warmup(2), Cosine(3)]), {"expected": "a tuple of Linear"}),
        (lambda: Joined((warmup(2), float)), {"expected": "a tuple of Linear"}),
        (lambda: Joined((Constant(), Linear(3))), {"problem": "without an end", "where": r"pieces\[0\]"}),
        (
            lambda: wsd(3, 3, Linear(3, start=0.5)),
            {"expected": "begins at 1", "got": "begins at 0.5", "where": r"Joined.pieces\[2\]"},
        ),
        (lambda: Linear(3)(-1), {"problem": "the step is not valid", "got": "^-1$", "where": "Linear"}),
        (lambda: Linear(3)(math.nan), {"problem": "the step is not valid", "got": "nan"}),
        (lambda: Joined((Linear(3),))(-1), {"problem": "the step is not valid", "where": "Joined"}),
    ],
)
def test_what_is_no_schedule_is_refused(make, fields):
    with assert_raises(ConfigError, **fields):
        make()


def test_the_docstrings_example_holds():
    import doctest

    from accel import schedules

    assert doctest.testmod(schedules) == (0, 3)
