# SPDX-License-Identifier: Apache-2.0
import collections
import json
import math
import struct
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
from catching import assert_raises
from hypothesis import given, strategies as st
from tables import rows

import accel
from accel.checkpoint._encoding import decode, encode
from accel.errors import CheckpointError

ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(width=64),
    st.complex_numbers(),
    st.text(st.characters()),  # surrogates too
    st.binary(max_size=20),
    st.integers(-(2**80), 2**80),
)
KEYS = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.binary())
KEYS = st.one_of(KEYS, st.sampled_from(["$tuple", "$", "a.b"]), st.tuples(st.integers(), st.text(max_size=3)))
TENSORS = st.builds(lambda n, d: torch.arange(n).to(d), st.integers(0, 4), st.sampled_from([torch.float32, torch.int8]))
VALUES = st.recursive(
    st.one_of(ATOMS, TENSORS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.builds(deque, st.lists(inner, max_size=4), st.sampled_from([None, 4, 9])),
        st.sets(KEYS, max_size=4),
        st.frozensets(KEYS, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


def identical(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return identical(one.real, other.real) and identical(one.imag, other.imag)
    if isinstance(one, deque):
        return one.maxlen == other.maxlen and identical(list(one), list(other))
    if isinstance(one, set | frozenset):
        return one == other and Counter(map(type, one)) == Counter(map(type, other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, dict):
        return identical(list(one.keys()), list(other.keys())) and identical(list(one.values()), list(other.values()))
    return bool(one == other)


def round_trip(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = msgspec.json.encode(encode(value, "item", tensors))
    return decode(msgspec.json.decode(text), "item", tensors)


@given(VALUES)
def test_values_come_back_exactly_and_by_type(value: Any) -> None:
    try:
        found = round_trip(value)
    except CheckpointError as error:  # two keys of different types may be spelled alike; then it says so
        assert "same path" in str(error)  # noqa: PT017
        return
    assert identical(found, value)


def test_what_json_would_change_does_not_change() -> None:
    value = {
        "tuple": ((1, 2), ()),
        1: {True: None, 2.5: b"\0\xff"},
        "float": [math.inf, -math.inf, math.nan, -0.0, 5e-324, 1.0],
        "int": [2**63, -(2**63), 2**63 - 1, 10**5000],
        "milestones": Counter({30: 1, 80: 2}),
        "$tensor": "not a tensor",
        "text": "\ud800",
        "dollar": {"$tuple": 3},
    }
    assert identical(round_trip(value), value)


def test_tensors_are_named_by_their_path() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": [torch.ones(1)], "b.c": torch.ones(1), "b": {"c": torch.ones(1)}, 0: (torch.ones(1),)}
    encode(value, "item", tensors)
    assert sorted(tensors) == ["item.a[0]", "item.b.c", 'item["b.c"]', "item[0][0]"]


class Opaque:
    pass


@rows(
    "value, fields",
    [
        (lambda: 0, {"fix": "Leave functions out"}),
        (Opaque(), {"fix": "state_dict"}),
        (numpy.zeros(2, dtype=object), {"fix": "numbers, texts"}),
        (numpy.zeros(2, dtype="i4,f8"), {"fix": "numbers, texts"}),
        (torch.optim.SGD([torch.zeros(1)], lr=0.1), {"fix": "a separate item"}),
        (collections.defaultdict(int), {"problem": "dict"}),
        (type("Queue", (deque,), {})([1]), {"expected": "list, tuple, deque"}),
        (bytearray(b"x"), {"expected": "bytes"}),
        (torch.finfo(torch.float32), {"fix": "plain values"}),
        (torch.eye(2).to_sparse(), {"fix": "dense"}),
        (torch.empty(2, device="meta"), {"fix": "to_empty"}),
        (torch.nn.UninitializedParameter(), {"fix": "forward"}),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_path_with_a_fix(value: object, fields: dict[str, str]) -> None:
    with assert_raises(CheckpointError, **fields) as caught:
        encode({"list": [0, (value,)]}, "state", {})
    assert caught.value.where == "state.list[1][0]"


def test_keys_that_cannot_be_stored_are_refused() -> None:
    with assert_raises(CheckpointError, where=r"a key of state\.x"):
        encode({"x": {range(2): 1}}, "state", {})


@pytest.mark.parametrize("element", [torch.zeros(1), range(2)])
def test_elements_that_cannot_be_stored_are_refused(element: object) -> None:
    with assert_raises(CheckpointError, where=r"an element of state\.x"):
        encode({"x": {element}}, "state", {})


def test_a_set_is_stored_in_one_order_whatever_hashes_say() -> None:
    stored = encode(set("accelerate") | {1, None, (2, "b")}, "state", {})
    assert stored == {"$set": sorted(stored["$set"], key=json.dumps)}


def test_sets_queues_and_generators_are_items_that_come_back_as_they_were(tmp_path: Path) -> None:
    ctx = accel.single()
    generator = torch.Generator().manual_seed(7)
    _ = torch.rand(5, generator=generator)
    items = {"seen": {3, "a"}, "recent": deque([1.0, torch.ones(2)], maxlen=3), "noise": generator}
    accel.save_state(ctx, tmp_path, items, step=1)
    expected = torch.rand(4, generator=generator)
    found = accel.load_state(ctx, tmp_path, {"seen": set(), "recent": deque(), "noise": torch.Generator()})
    assert found["seen"] == {3, "a"}
    assert identical(found["recent"], items["recent"])
    assert torch.equal(torch.rand(4, generator=found["noise"]), expected)


TAGS = ["$set", "$frozenset", "$deque", "$generator", "$tuple", "$dict", "$ordered", "$counter", "$int", "$float"]
TAGS += ["$text", "$bytes", "$complex", "$tensor", "$x", "a", "$record", "$enum", "$path", "$scalar", "$array"]
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(TAGS), inner, max_size=2)),
    max_leaves=8,
)


@given(JSON)
def test_foreign_json_is_decoded_or_refused(value: Any) -> None:
    try:
        decode(value, "item x", {})
    except CheckpointError as error:
        assert error.where == "item x"  # noqa: PT017
