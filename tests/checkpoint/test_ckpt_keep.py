# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints stay: laws of the planner."""

from typing import Any

import pytest
from catching import assert_raises
from ckpt_helpers import plan_keep
from hypothesis import given, strategies as st

from accel.checkpoint import Keep
from accel.checkpoint._retention import check_keep, check_metrics
from accel.errors import ConfigError

METRICS = st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.sampled_from([0.0, 0.5, 1.0, -2.0, 3.25]))
SAVED = st.dictionaries(st.integers(0, 60), METRICS, min_size=1, max_size=12)


@st.composite
def keeps(draw: st.DrawFn) -> Keep:
    best = draw(st.integers(0, 4))
    return Keep(
        newest=draw(st.integers(1, 5)),
        every=draw(st.none() | st.integers(1, 7)),
        best=best,
        by=draw(st.sampled_from(["loss", "accuracy"])) if best else "",
        mode=draw(st.sampled_from(["min", "max"])),
    )


@given(saved=SAVED, keep=keeps(), data=st.data())
def test_what_was_asked_for_stays_and_nothing_else(saved: Any, keep: Keep, data: st.DataObject) -> None:
    current = data.draw(st.sampled_from(sorted(saved)))
    stay = plan_keep(saved, current, keep)
    assert current in stay
    assert stay <= saved.keys()
    newest = sorted(saved.keys() - {current})[::-1][: keep.newest - 1]
    every = {step for step in saved if keep.every and step % keep.every == 0}
    assert {*newest, *every} <= stay
    rest = stay - {current, *newest, *every}
    assert len(rest) <= keep.best
    for step in rest:  # kept for its metric alone, so fewer than `best` others are better
        sign = 1 if keep.mode == "min" else -1
        mine = sign * saved[step][keep.by]
        better = [other for other in saved if keep.by in saved[other] and sign * saved[other][keep.by] < mine]
        assert len(better) < keep.best
    rated = [step for step in saved if keep.by in saved[step]]
    assert len(stay & set(rated)) >= min(keep.best, len(rated))


@given(saved=SAVED, keep=keeps(), data=st.data())
def test_planning_again_changes_nothing(saved: Any, keep: Keep, data: st.DataObject) -> None:
    current = data.draw(st.sampled_from(sorted(saved)))
    stay = plan_keep(saved, current, keep)
    assert plan_keep({step: saved[step] for step in stay}, current, keep) == stay


@given(saved=SAVED, keep=keeps(), more=st.integers(1, 3))
def test_asking_for_more_deletes_no_more(saved: Any, keep: Keep, more: int) -> None:
    current = max(saved)
    larger = Keep(newest=keep.newest + more, every=keep.every, best=keep.best, by=keep.by, mode=keep.mode)
    assert plan_keep(saved, current, keep) <= plan_keep(saved, current, larger)


@given(saved=SAVED, count=st.integers(1, 15))
def test_a_number_keeps_so_many_of_the_newest(saved: Any, count: int) -> None:
    keep = check_keep(count)
    assert keep is not None
    assert plan_keep(saved, max(saved), keep) == set(sorted(saved)[-count:])


@given(others=st.lists(st.integers(1, 3), max_size=6), best=st.integers(1, 3), more=st.integers(1, 3), data=st.data())
def test_of_equal_metrics_the_newer_stay(others: list[int], best: int, more: int, data: st.DataObject) -> None:
    metrics = data.draw(st.permutations([0] * (best + more) + others))  # more of the lowest than are to stay
    saved = {step: {"loss": float(value)} for step, value in enumerate(metrics)}
    stay = plan_keep(saved, max(saved), Keep(best=best, by="loss"))
    lowest = [step for step, value in enumerate(metrics) if value == min(metrics)]
    assert stay - {max(saved)} <= set(lowest)
    assert max(lowest) in stay


@pytest.mark.parametrize(
    ("keep", "fields"),
    [
        (0, {"expected": "1 or above"}),
        (True, {"expected": "1 or above"}),
        (1.5, {"expected": "1 or above"}),
        (Keep(newest=0), {"expected": "1 or above"}),
        (Keep(every=0), {"problem": "distance"}),
        (Keep(best=-1), {"expected": "best from 0"}),
        (Keep(best=1), {"problem": "need each other"}),
        (Keep(by="loss"), {"problem": "need each other"}),
        (Keep(best=1, by="loss", mode="lowest"), {"expected": "one of min, max"}),  # type: ignore[arg-type]
    ],
)
def test_wishes_that_make_no_sense_are_refused(keep: Any, fields: dict[str, str]) -> None:
    with assert_raises(ConfigError, **fields):
        check_keep(keep)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.5", True, 10**400])
def test_metrics_that_cannot_be_compared_are_refused_by_name(value: Any) -> None:
    with assert_raises(ConfigError, problem="'loss'"):
        check_metrics({"accuracy": 1.0, "loss": value}, None)


def test_metrics_without_the_one_to_keep_by_are_refused_and_none_at_all_are_not() -> None:
    keep = Keep(best=1, by="loss")
    with assert_raises(ConfigError, expected="loss", got="los"):
        check_metrics({"los": 1.0}, keep)
    assert check_metrics(None, keep) == {}
    assert check_metrics({"loss": 2, "other": 0.5}, keep) == {"loss": 2.0, "other": 0.5}
