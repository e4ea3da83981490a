# SPDX-License-Identifier: Apache-2.0
"""Device maps that are inferred: laws of random models, refusals with the smallest limit that works, and speed."""

from __future__ import annotations

import itertools
import random
import re
import time
from itertools import pairwise
from typing import Any, get_args

import pytest
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from tables import rows

import accel
from accel.bigmodel.plan import DeviceMap, Fill, Segment, Skeleton, Weight, infer_device_map, pass_seconds

UNIT = 512
Case = tuple[Skeleton, dict[str, int | None], dict[str, Any]]


def weight(name: str, units: int, **options: Any) -> Weight:
    return Weight(name=name, shape=(units * UNIT // 4,), dtype="F32", **options)


def layers(count: int, units: int = 4) -> Skeleton:
    """A model of equal blocks."""
    return Skeleton(
        segments=tuple(Segment(name=f"layers.{at}", weights=(weight(f"layers.{at}.w", units),)) for at in range(count))
    )


@st.composite
def skeletons(draw: st.DrawFn) -> Skeleton:
    """Models of blocks, embeddings, parts that cannot move, buffers that stay, casts and a tie."""
    kinds = draw(st.sampled_from([(4,), (1, 7, 50), (1, 2, 3, 4, 5, 6, 7), (4, 4, 4, 12)]))
    storages = draw(st.sampled_from([(None,), ("BF16",), (None, "F8_E4M3", "F64")]))
    segments: list[Segment] = []
    for at in range(draw(st.integers(1, 12))):
        movable = draw(st.integers(0, 9)) > 0
        storage = draw(st.sampled_from(storages)) if movable else None
        weights = [weight(f"s{at}.w", draw(st.sampled_from(kinds)), storage_dtype=storage)]
        if draw(st.integers(0, 3)) == 0:
            weights.append(weight(f"s{at}.b", draw(st.sampled_from(kinds)), stored=False, moves=False))
        rows = movable and draw(st.integers(0, 9)) == 0
        segments.append(Segment(name=f"s{at}", weights=tuple(weights), movable=movable, rows=rows))
    if len(segments) > 2 and draw(st.booleans()):
        first, last = sorted(draw(st.permutations(range(len(segments))))[:2])
        tied = weight(f"s{first}.t", 2, tied=(f"s{last}.t",), moves=False)
        old = segments[first]
        segments[first] = Segment(name=old.name, weights=(*old.weights, tied), movable=old.movable, rows=old.rows)
    return Skeleton(segments=tuple(segments))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Models, limits around their size, and options."""
    skeleton = draw(skeletons())
    share = draw(st.sampled_from([0.6, 1.0, 1.5]))
    limits: dict[str, int | None] = {
        f"cuda:{at}": draw(st.integers(0, int(skeleton.memory * share))) for at in range(draw(st.integers(0, 3)))
    }
    if not limits or draw(st.integers(0, 4)):
        limits["cpu"] = draw(st.integers(0, skeleton.memory))
    for place, odds in (("disk", 2), ("mmap", 4)):
        if draw(st.integers(0, odds)) == 0:
            limits[place] = draw(st.sampled_from([None, skeleton.memory // 2]))
    options = {
        "slots": draw(st.integers(1, 3) | st.none()),
        "placement": draw(st.sampled_from(["spread", "last"])),
        "fill": draw(st.sampled_from(["balanced", "sequential", "low_first", None])),
    }
    return skeleton, limits, options


def used_bytes(found: DeviceMap, place: str) -> int:
    """The law's left side, counted anew from the weights."""
    itemsize = {None: 4, "BF16": 2, "F8_E4M3": 1, "F64": 8}
    resident = casting = 0
    largest: dict[str, int] = {}
    for segment in found.skeleton.segments:
        memory = [(-(-each.nbytes // UNIT) * UNIT, each.moves and segment.movable) for each in segment.weights]
        moving = sum(size for size, moves in memory if moves)
        home, runs = found.home[segment.name], found.runs[segment.name]
        stored = [each.nbytes // 4 * itemsize[each.storage_dtype] for each in segment.weights if each.moves]
        at_home = sum(-(-size // UNIT) * UNIT for size in stored) if segment.movable else 0
        narrow = {"BF16", "F8_E4M3"} & {each.storage_dtype for each in segment.weights}
        is_cast = bool(narrow) and segment.movable and not segment.rows
        resident += (moving if home == runs and not is_cast else at_home) * (home == place)
        casting = max(casting, moving if home == runs == place and is_cast else 0)
        resident += (sum(size for size, _ in memory) - moving) * (runs == place)
        cast = any(each.storage_dtype for each in segment.weights)
        if home != runs and not segment.rows and ((home, runs) != ("mmap", "cpu") or cast):
            largest[runs] = max(largest.get(runs, 0), moving)
    through = sum(largest.values()) if place == "cpu" else largest.get(place, 0)  # pinned memory mirrors GPUs' slots
    return resident + found.slots * through + casting


def infer(case: Case, **limits: int | None) -> DeviceMap | accel.errors.PlacementError:
    skeleton, given_limits, options = case
    try:
        return infer_device_map(skeleton, {**given_limits, **limits}, **options)
    except accel.errors.PlacementError as error:
        return error


def assert_refusal(case: Case, error: accel.errors.PlacementError) -> None:
    """The limit that the error names works, and one byte less does not."""
    least = re.search(r"at least (\d+) bytes", error.expected)
    place = re.search(r"\['(.*)'\]", error.where)
    if least is None or place is None:
        assert error.fix.startswith("Add 'disk': None")
        assert isinstance(infer(case, disk=None), DeviceMap)
        host = int(error.fix.rpartition("'cpu': ")[2].rstrip("."))
        assert isinstance(infer(case, cpu=host), DeviceMap)
        assert isinstance(infer(case, cpu=host - 1), accel.errors.PlacementError)
        return
    if "only place" in error.problem:
        assert isinstance(infer(case, **{place[1]: int(least[1]) - 1}), accel.errors.PlacementError)
    if "does not fit" in error.problem:  # then homes may be too small as well
        case[1]["disk"] = None
        if place[1] != "cpu":
            case[1]["cpu"] = 16 * case[0].memory
        assert isinstance(infer(case, **{place[1]: int(least[1]) - 1}), accel.errors.PlacementError)
    assert isinstance(infer(case, **{place[1]: int(least[1])}), DeviceMap)


def assert_laws(case: Case) -> None:
    """A map keeps every limit, and a refusal names the smallest that works."""
    skeleton, limits, _ = case
    found = infer(case)
    if isinstance(found, accel.errors.PlacementError):
        assert_refusal(case, found)
        return
    for place in {*found.home.values(), *found.runs.values(), "cpu"}:
        limit = limits.get(place)
        used = used_bytes(found, place)
        assert found.used(place) == used
        assert limit is None or used <= limit
    for group in skeleton.tied_segments():
        assert len({found.runs[name] for name in group}) == 1
    if not skeleton.tied_segments():
        devices = [found.runs[segment.name] for segment in skeleton.segments]
        assert sum(one != other for one, other in pairwise(devices)) == len(set(devices)) - 1
    assert DeviceMap.decode(found.encode()) == found


@settings(max_examples=share(1.2))
@given(cases())
def test_maps_keep_every_limit_and_refusals_name_the_smallest_that_works(case: Case) -> None:
    assert_laws(case)


@pytest.mark.nightly
@settings(max_examples=share(16))
@given(cases())
def test_the_laws_hold_of_many_models(case: Case) -> None:
    assert_laws(case)


@settings(max_examples=share(0.6))
@given(st.integers(2, 20), st.integers(1, 3), st.sampled_from(["spread", "last"]), st.floats(0.1, 4))
def test_more_memory_never_makes_a_pass_of_equal_blocks_longer(
    count: int, slots: int, placement: Any, transfer: float
) -> None:
    skeleton = layers(count)
    compute = {segment.name: 1.0 for segment in skeleton.segments}
    bandwidth = 4 * UNIT / transfer
    before = float("inf")
    for room in range(slots, count + 1):
        found = infer_device_map(skeleton, {0: room * 4 * UNIT, "disk": None}, slots=slots, placement=placement)
        seconds = pass_seconds(found, compute, bandwidth)
        assert seconds <= before + 1e-9
        before = seconds


@pytest.mark.parametrize("transfer", [0.01, 0.02, 0.04, 0.08])
@pytest.mark.parametrize("share", [0.5, 0.75, 0.9])
def test_spread_segments_reach_the_limit_and_the_last_ones_do_not(transfer: float, share: float) -> None:
    skeleton = layers(32)
    compute = dict.fromkeys((segment.name for segment in skeleton.segments), 0.01)
    found, last, slow = (
        pass_seconds(each, compute, 4 * UNIT / transfer, overlap=overlap)
        for each, overlap in (
            (infer_device_map(skeleton, {0: int(skeleton.memory * share), "cpu": skeleton.memory}), True),
            (
                infer_device_map(skeleton, {0: int(skeleton.memory * share), "cpu": skeleton.memory}, placement="last"),
                True,
            ),
            (infer_device_map(skeleton, {0: int(skeleton.memory * share), "cpu": skeleton.memory}), False),
        )
    )
    streamed = 32 - (int(32 * share) - 2)
    limit = max(32 * 0.01, streamed * transfer)
    assert limit * (1 - 1e-9) <= found <= limit * 1.01
    assert found <= last <= slow * (1 + 1e-9)
    assert slow == pytest.approx(32 * 0.01 + streamed * transfer)


def test_devices_are_filled_in_equal_shares_or_in_order_or_with_little_on_the_first() -> None:
    skeleton = layers(12, 4)
    limits = {0: 8 * 4 * UNIT, 1: 8 * 4 * UNIT, 2: 8 * 4 * UNIT}

    def counts(**options: Any) -> list[int]:
        runs = list(infer_device_map(skeleton, limits, **options).runs.values())
        return [runs.count(f"cuda:{at}") for at in range(3)]

    assert counts() == [4, 4, 4]
    assert counts(fill="sequential") == [8, 4, 0]
    assert counts(fill="low_first") == [0, 6, 6]
    small = dict.fromkeys(range(3), 3 * 4 * UNIT) | {"cpu": skeleton.memory}
    found = infer_device_map(skeleton, small, slots=1)
    assert [list(found.runs.values()).count(f"cuda:{at}") for at in range(3)] == [4, 4, 4]
    assert [found.window(f"cuda:{at}") for at in range(3)] == [4 * UNIT] * 3
    assert len(found.order) == 6


WAYS = list(itertools.product(get_args(Fill), (1, 2, 3)))


def assert_choice(case: Case) -> None:
    """No way that can be named has fewer bytes in files, and a way that was named is the one that is taken."""
    skeleton, limits, options = case
    placement = options["placement"]
    try:
        found = infer_device_map(skeleton, limits, placement=placement)
    except accel.errors.PlacementError:
        found = None
    costs: dict[tuple[str, int], tuple[int, int]] = {}
    for fill, slots in WAYS:
        try:
            named = infer_device_map(skeleton, limits, placement=placement, fill=fill, slots=slots)
        except accel.errors.PlacementError:
            continue
        assert named.slots == slots
        costs[fill, slots] = named.resident("disk"), named.resident("mmap")
    if found is None:
        assert not costs
        return
    mine = found.resident("disk"), found.resident("mmap")
    assert mine <= min(costs.values(), default=mine)
    assert found.slots == 2 or all(mine < cost for (_, slots), cost in costs.items() if slots == 2)


@settings(max_examples=share(1.2))
@given(cases())
def test_no_way_that_can_be_named_has_fewer_bytes_in_files(case: Case) -> None:
    assert_choice(case)


@pytest.mark.nightly
@settings(max_examples=share(24))
@given(cases())
def test_no_way_has_fewer_bytes_in_files_of_many_models(case: Case) -> None:
    assert_choice(case)


def mixtral() -> Skeleton:
    """Mixtral 8x7B in bfloat16."""
    shapes = {"attention": (10_240, 4096), "experts.up": (8, 28_672, 4096), "experts.down": (8, 4096, 14_336)}
    blocks = tuple(
        Segment(
            name=f"layers.{at}",
            weights=tuple(
                Weight(name=f"layers.{at}.{name}", shape=shape, dtype="BF16") for name, shape in shapes.items()
            ),
        )
        for at in range(32)
    )
    table = {"shape": (32_000, 4096), "dtype": "BF16"}
    first = Segment(name="embed", weights=(Weight(name="embed.w", **table),), rows=True)
    return Skeleton(segments=(first, *blocks, Segment(name="head", weights=(Weight(name="head.w", **table),))))


def test_many_small_gpus_and_a_host_hold_a_model_without_a_disk() -> None:
    skeleton, limits = mixtral(), {**dict.fromkeys(range(8), "8.2GB"), "cpu": "56GB", "disk": None}
    found = infer_device_map(skeleton, limits)
    assert found.resident("disk") == 0
    assert all(found.resident(f"cuda:{at}") > 2.9e9 for at in range(8))
    text = accel.bigmodel.explain(found)
    assert "Chosen: fill='sequential', slots=1: 0 B on disk" in text
    assert "fill='balanced', slots=2: 84.2 GB on disk" in text
    assert len([line for line in text.splitlines() if line.startswith("fill=")]) == 5
    assert infer_device_map(skeleton, limits, fill="balanced", slots=2).chosen == ""
    whole = infer_device_map(skeleton, dict.fromkeys(range(2), "60GB"))
    assert whole.order == ()
    assert accel.bigmodel.explain(whole).endswith("All segments fit on their devices: fill='balanced'.")
    assert DeviceMap.decode(found.encode()) == found


def test_two_slots_stay_where_one_leaves_no_less_in_files() -> None:
    skeleton = layers(16)
    found = infer_device_map(skeleton, {0: 24 * UNIT, "cpu": skeleton.memory * 2})
    assert (found.slots, len(found.order)) == (2, 12)
    assert infer_device_map(skeleton, {0: 4 * UNIT, "cpu": skeleton.memory * 2}).slots == 1  # there is room for one


def test_a_choice_is_quick() -> None:
    draw = random.Random(0)
    segments = (Segment(name=f"s{at}", weights=(weight(f"s{at}.w", draw.randint(1, 10_000)),)) for at in range(200))
    skeleton = Skeleton(segments=tuple(segments))
    limits: dict[int | str, int | None] = dict.fromkeys(range(8), skeleton.memory // 20)
    began = time.process_time()
    infer_device_map(skeleton, {**limits, "cpu": skeleton.memory // 4, "disk": None})
    assert time.process_time() - began < 1


def test_embeddings_leave_first_and_a_large_block_does_not_set_the_slots() -> None:
    segments = (
        Segment(name="embed", weights=(weight("embed.w", 20),), rows=True),
        *layers(8).segments,
        Segment(name="head", weights=(weight("head.w", 20),)),
    )
    skeleton = Skeleton(segments=segments)
    found = infer_device_map(skeleton, {0: 52 * UNIT, "cpu": skeleton.memory})
    assert found.home["embed"] == "cpu"
    assert found.order == ()
    found = infer_device_map(skeleton, {0: 40 * UNIT, "cpu": 38 * UNIT, "disk": None}, slots=2)
    assert (found.home["head"], found.slot_bytes("cuda:0"), len(found.order)) == ("cuda:0", 4 * UNIT, 5)
    assert found.home["embed"] == "cpu"
    assert sorted(found.home.values()).count("disk") == 3
    assert found.used("cuda:0") == 40 * UNIT


def test_the_host_computes_from_mapped_files_or_through_slots() -> None:
    skeleton = layers(8)
    mapped = infer_device_map(skeleton, {"cpu": 16 * UNIT, "mmap": None})
    assert (mapped.order, mapped.used("cpu"), mapped.used("mmap")) == ((), 16 * UNIT, 16 * UNIT)
    read = infer_device_map(skeleton, {"cpu": 16 * UNIT, "disk": None}, slots=2)
    assert (len(read.order), read.window("cpu"), read.used("cpu")) == (6, 8 * UNIT, 16 * UNIT)


def test_a_dtype_changes_sizes_and_texts_are_limits() -> None:
    skeleton = layers(8)
    for dtype in ("bfloat16", "torch.bfloat16", "BF16"):
        found = infer_device_map(skeleton, {"xpu:1": "1MB"}, dtype=dtype)
        assert found.skeleton.nbytes == skeleton.nbytes // 2
        assert found.limits == {"xpu:1": 10**6}


@rows(
    "limits, options, fields",
    [
        (
            "auto",
            {},
            {"problem": "limits are given by place", "got": "'auto'", "fix": "accel.bigmodel.available_memory"},
        ),
        (
            {"cpu": 5},
            {},
            {"problem": "no room for the model in 'cpu', its only place", "expected": "at least 16384 bytes"},
        ),
        ({}, {}, {"problem": "no device that computes", "fix": "accel.bigmodel.available_memory"}),
        ({"disk": None}, {}, {"problem": "no device that computes"}),
        ({"cuda": 5}, {}, {"problem": "the place is not valid", "got": "'cuda'", "fix": "'cuda:0'"}),
        ({-1: 5}, {}, {"problem": "the place is not valid"}),
        ({0: 5, "cuda:0": 5}, {}, {"problem": "a place with two limits", "got": "'cuda:0'"}),
        ({0: None}, {}, {"problem": "a limit is missing", "where": r"max_memory\['cuda:0'\]"}),
        ({0: "many"}, {}, {"problem": "the size is not valid"}),
        ({0: 5}, {"slots": 0}, {"problem": "the number of slots is not valid"}),
        ({0: 5}, {"placement": "first"}, {"problem": "unknown placement"}),
        ({0: 5}, {"fill": "low"}, {"problem": "unknown way to fill devices"}),
        (
            {0: 5},
            {"dtype": "bf16"},
            {"problem": "the dtype of the weights is unknown", "fix": "Did you mean `bfloat16`"},
        ),
        (
            {0: 5},
            {},
            {
                "problem": "does not fit on 'cuda:0'",
                "expected": r"at least 2048 bytes \(2.0 kB\)",
                "got": "5; its largest block is",
            },
        ),
        (
            {0: 5},
            {"slots": 2},
            {"problem": "does not fit on 'cuda:0'", "expected": "at least 4096 bytes", "fix": "fewer slots"},
        ),
        (
            {0: 4096},
            {"slots": 2},
            {"problem": "no home for the segments that stream", "fix": "Add 'disk': None, or 'cpu': 20480"},
        ),
        (
            {0: 4096},
            {},
            {"problem": "no home for the segments that stream", "fix": "Add 'disk': None, or 'cpu': 16384"},
        ),
        (
            {0: 4096, "cpu": 5},
            {"slots": 2},
            {"problem": "no room for", "expected": "at least 20480 bytes", "where": r"max_memory\['cpu'\]"},
        ),
    ],
)
def test_limits_that_mean_nothing_or_fit_nothing_are_refused(limits: Any, options: Any, fields: dict[str, str]) -> None:
    with assert_raises(accel.errors.ConfigError, **fields):
        infer_device_map(layers(8), limits, **options)


def test_a_model_is_described_first() -> None:
    with assert_raises(
        accel.errors.ConfigError, problem="the value is not a skeleton", fix=r"accel.bigmodel.describe\(model\)"
    ):
        infer_device_map(object(), {0: 1})  # type: ignore[arg-type]


def test_bandwidths_and_segments_of_a_pass_are_checked() -> None:
    found = infer_device_map(layers(8), {0: 16 * UNIT, "disk": None})
    with assert_raises(accel.errors.ConfigError, problem="no such segment", got="'layer'"):
        pass_seconds(found, {"layer": 1.0}, 1.0)
    for bandwidth in (0.0, {"cpu": 1.0}):
        with assert_raises(accel.errors.ConfigError, problem="no bandwidth"):
            pass_seconds(found, {}, bandwidth)
