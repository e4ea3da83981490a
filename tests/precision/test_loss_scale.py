# SPDX-License-Identifier: Apache-2.0
"""The loss scale is a value whose future follows from what happened."""

from __future__ import annotations

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel import LossScale
from accel.errors import ConfigError

relaxed = settings(deadline=None, max_examples=share(2))
histories = st.lists(st.booleans(), max_size=60)


def _after(scale: LossScale, history: list[bool]) -> LossScale:
    for finite in history:
        scale = scale.update(finite=finite)
    return scale


@relaxed
@given(history=histories, interval=st.integers(1, 10), factors=st.tuples(st.floats(1, 8), st.floats(0.1, 0.9)))
def test_it_grows_after_an_interval_of_good_steps_and_falls_at_each_overflow(history, interval, factors):
    growth, backoff = factors
    start = LossScale(1024.0, True, growth, backoff, interval)
    scale, good, bad = start.scale, 0, 0  # the rule, counted by hand
    for finite in history:
        good, bad = (good + 1, 0) if finite else (0, bad + 1)
        if not finite:
            scale = max(scale * backoff, 2.0**-126)
        elif good == interval:
            scale, good = min(scale * growth, 2.0**127), 0
    after = _after(start, history)
    assert (after.scale, after.good_steps, after.overflows) == (scale, good, bad)
    assert (after.growth_factor, after.backoff_factor, after.growth_interval) == (growth, backoff, interval)


@relaxed
@given(history=histories, cut=st.integers(0, 60))
def test_it_follows_torchs_grad_scaler_and_goes_on_from_json(history, cut):
    ours = LossScale(2.0**16, True, growth_interval=3)
    ours = msgspec.json.decode(msgspec.json.encode(_after(ours, history[:cut])), type=LossScale)
    ours = _after(ours, history[cut:])
    theirs, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for finite in history:
        torch._amp_update_scale_(theirs, tracker, torch.tensor(0.0 if finite else 1.0), 2.0, 0.5, 3)
    assert ours.scale == theirs.item()
    assert ours.good_steps == tracker.item()


@relaxed
@given(history=histories, scale=st.floats(1e-3, 1e30))
def test_a_fixed_scale_stays(history, scale):
    assert _after(LossScale(scale), history) == LossScale(scale)


@relaxed
@given(finite=st.booleans())
def test_an_update_leaves_the_record_as_it_was(finite):
    scale = LossScale(8.0, True)
    assert scale.update(finite=finite) == scale.update(finite=finite) != scale
    assert scale == LossScale(8.0, True)
    with pytest.raises(AttributeError):
        scale.scale = 2.0


def test_it_never_leaves_the_range_of_float32():
    scale = _after(LossScale(2.0**100, True, growth_interval=1), [True] * 100)
    assert scale.scale == 2.0**127
    assert torch.isfinite(torch.tensor(scale.scale))
    scale = _after(scale, [False] * 2000)
    assert scale.scale == 2.0**-126
    assert torch.isfinite(1 / torch.tensor(scale.scale))


def test_only_fp16_needs_one():
    for precision in ("fp32", "bf16"):
        assert accel.loss_scale(accel.single(precision=precision), initial=8.0) == LossScale()
        assert not accel.loss_scale(accel.single(precision=precision)).dynamic
    scale = accel.loss_scale(accel.single(precision="fp16"), initial=8.0, growth_interval=7)
    assert scale == LossScale(scale=8.0, dynamic=True, growth_interval=7)
    assert accel.loss_scale(accel.single(precision="fp16")).scale == 2.0**16


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"scale": 0.0}, r"scale from 2\*\*-126"),
        ({"scale": -1.0}, r"scale from 2\*\*-126"),
        ({"scale": float("inf")}, r"scale from 2\*\*-126"),
        ({"scale": float("nan")}, r"scale from 2\*\*-126"),
        ({"growth_factor": 0.9}, "growth_factor"),
        ({"growth_factor": float("nan")}, "growth_factor"),
        ({"backoff_factor": 1.0}, "backoff_factor"),
        ({"backoff_factor": 0.0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval"),
    ],
)
def test_what_is_no_scale_is_refused(fields, said):
    with assert_raises(ConfigError, expected=f"^{said}"):
        LossScale(**fields)


def test_arguments_are_checked_where_they_are_used():
    ctx = accel.single(precision="fp16")
    with pytest.raises(ConfigError):
        accel.loss_scale(ctx, initial=0.0)
    with pytest.raises(ConfigError):
        accel.loss_scale(ctx, growth_interval=0)
