# SPDX-License-Identifier: Apache-2.0
"""Skeletons and device maps: sizes in memory, refusals with the way out, encoding."""

from __future__ import annotations

from typing import Any

import pytest
from catching import assert_raises

import accel
from accel.bigmodel.plan import DeviceMap, Segment, Skeleton, Weight


def block(name: str, *shape: int, dtype: str = "F32", **options: Any) -> Segment:
    return Segment(name=name, weights=(Weight(name=f"{name}.weight", shape=shape, dtype=dtype),), **options)


def test_sizes_count_elements_and_memory_in_whole_units() -> None:
    weights = (
        Weight(name="a", shape=(3, 5), dtype="F32"),
        Weight(name="b", shape=(257,), dtype="BF16"),
        Weight(name="c", shape=(3,), dtype="F4"),
        Weight(name="d", shape=(), dtype="C128", stored=False, moves=False),
        Weight(name="e", shape=(0, 9), dtype="I64"),
    )
    assert [weight.nbytes for weight in weights] == [60, 514, 2, 16, 0]
    assert [weight.memory for weight in weights] == [512, 1024, 512, 512, 0]
    segment = Segment(name="s", weights=weights)
    assert (segment.moving, segment.fixed, segment.nbytes) == (2048, 512, 592)
    assert segment.offsets() == {"a": 0, "b": 512, "c": 1536, "e": 2048}
    still = Segment(name="s", weights=weights, movable=False)
    assert (still.moving, still.fixed, still.offsets()) == (0, 2560, {})
    half = Skeleton(segments=(segment,)).cast("F16")
    assert [weight.dtype for weight in half.weights()] == ["F16", "F16", "F4", "C128", "I64"]


def test_paths_belong_to_their_longest_segment_and_ties_make_groups() -> None:
    table = Weight(name="wte.weight", shape=(8, 4), dtype="F32", tied=("head.weight",), moves=False)
    segments = (
        Segment(name="", weights=(), movable=False),
        Segment(name="wte", weights=(table,), rows=True),
        block("h.1", 4),
        block("h.10", 4),
        Segment(name="head", weights=()),
    )
    skeleton = Skeleton(segments=segments)
    paths = ("h.1.attn.weight", "h.10.attn", "h.1", "h.2.attn", "other")
    assert [skeleton.segment_of(path) for path in paths] == ["h.1", "h.10", "h.1", "", ""]
    assert skeleton.tied_segments() == (("wte", "head"),)


@pytest.mark.parametrize(
    ("wrong", "fields"),
    [
        (
            lambda: Weight(name="a", shape=(2,), dtype="BF61"),
            {"problem": "unknown dtype", "fix": "Did you mean `BF16`"},
        ),
        (lambda: Weight(name="a", shape=(-2,), dtype="F32"), {"problem": "the shape is not valid"}),
        (lambda: Weight(name="a", shape=(2,), dtype="F32", stored=False), {"problem": "must be stored"}),
        (lambda: Segment(name="a", weights=(), rows=True, movable=False), {"problem": "may not move"}),
        (
            lambda: Skeleton(segments=(block("a", 1), block("a", 1))),
            {"problem": "two segments with one name", "got": "'a'"},
        ),
        (
            lambda: Skeleton(
                segments=(
                    Segment(name="a", weights=(Weight(name="a.w", shape=(2,), dtype="F32", tied=("b.w",)),)),
                    block("b", 1),
                )
            ),
            {"problem": "moves with one segment while another uses it", "got": "'a' and 'b'", "fix": "moves=False"},
        ),
    ],
)
def test_contradictions_are_refused(wrong: Any, fields: dict[str, str]) -> None:
    with assert_raises(accel.errors.ConfigError, **fields):
        wrong()


SKELETON = Skeleton(
    segments=(
        Segment(name="", weights=(Weight(name="scale", shape=(4,), dtype="F32"),), movable=False),
        block("embed", 1000, 8, rows=True),
        Segment(
            name="a",
            weights=(
                Weight(name="a.weight", shape=(128,), dtype="F32"),
                Weight(name="a.mask", shape=(128,), dtype="F32", stored=False, moves=False),
            ),
        ),
        block("b", 256),
        block("c", 128),
    )
)


def placed(home: dict[str, str] | None = None, runs: dict[str, str] | None = None, **options: Any) -> DeviceMap:
    device = dict.fromkeys(("", "embed", "a", "b", "c"), "cuda:0")
    return DeviceMap(skeleton=SKELETON, home={**device, **(home or {})}, runs={**device, **(runs or {})}, **options)


def test_a_map_counts_what_stays_and_what_passes_through_slots() -> None:
    found = placed({"embed": "cpu", "a": "disk", "c": "cpu"}, slots=3, limits={"cuda:0": 3584, "cpu": 34304})
    assert found.order == ("a", "c")
    assert [found.streams(name) for name in ("", "embed", "a", "b", "c")] == [False, False, True, False, True]
    assert found.devices == ("cuda:0",)
    assert (found.slot_bytes("cuda:0"), found.window("cuda:0"), found.resident("cuda:0")) == (512, 1536, 2048)
    assert (found.used("cuda:0"), found.used("cpu"), found.used("disk")) == (3584, 32256 + 512 + 1536, 512)
    assert DeviceMap.decode(found.encode()) == found
    with assert_raises(
        accel.errors.PlacementError, problem="'cuda:0' is too small", expected="at most 3583 bytes", got="3584: 2048"
    ):
        placed({"embed": "cpu", "a": "disk", "c": "cpu"}, slots=3, limits={"cuda:0": 3583})


def test_mapped_files_compute_on_the_host_without_slots() -> None:
    host = dict.fromkeys(("", "embed", "a", "b", "c"), "cpu")
    found = DeviceMap(skeleton=SKELETON, home={**host, "b": "mmap", "c": "disk"}, runs=host, limits={"cpu": 34816})
    assert found.order == ("c",)
    assert found.used_everywhere() == {"cpu": 512 + 32256 + 512 + 512 + 2 * 512, "mmap": 1024, "disk": 512}


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"slots": 0}, {"problem": "the number of slots is not valid"}),
        ({"home": {"d": "cpu"}}, {"problem": "a map of other segments", "got": "with 'd'", "where": "DeviceMap.home"}),
        ({"runs": {"a": "disk"}}, {"problem": "'disk' computes nothing"}),
        ({"home": {"a": "cuda:1"}}, {"problem": "streams from another device"}),
        ({"home": {"": "cpu"}}, {"problem": "a segment that cannot move", "expected": "'cuda:0'"}),
    ],
)
def test_impossible_maps_are_refused(options: dict[str, Any], fields: dict[str, str]) -> None:
    with assert_raises(accel.errors.ConfigError, **fields):
        placed(**options)
    with assert_raises(accel.errors.ConfigError, problem="the device map is not valid", got="skeleton"):
        DeviceMap.decode("{}")


def test_tied_segments_compute_on_one_device() -> None:
    table = Weight(name="a.weight", shape=(8,), dtype="F32", tied=("b.weight",), moves=False)
    skeleton = Skeleton(segments=(Segment(name="a", weights=(table,)), Segment(name="b", weights=())))
    places = {"a": "cuda:0", "b": "cuda:1"}
    with assert_raises(
        accel.errors.ConfigError, problem="tied weights on two devices", got="'a' on cuda:0, 'b' on cuda:1"
    ):
        DeviceMap(skeleton=skeleton, home=places, runs=places)
