# SPDX-License-Identifier: Apache-2.0
"""Trees are taken apart and put together without loss; what cannot be is refused by its path."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel.errors import TreeError
from accel.tree import map_tensors
from accel.tree._walk import leaves, map_leaves, replace_tensors, structure, tensors


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any

    def __post_init__(self) -> None:
        if self.a == "never":
            raise AssertionError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slotted:
    a: Any


class Record(msgspec.Struct, frozen=True):
    a: Any
    b: Any = ()

    def __post_init__(self) -> None:
        if self.a == "never":
            raise AssertionError


class Named(dict):
    """A subclass with a setting of its own."""

    def __init__(self, *args: Any, title: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.title = title


def _default(items: dict[Any, Any]) -> collections.defaultdict[Any, Any]:
    return collections.defaultdict(list, items)


atoms = (
    st.integers()
    | st.text(max_size=4)
    | st.none()
    | st.booleans()
    | st.binary(max_size=3)
    | st.builds(lambda n: torch.arange(n), st.integers(0, 3))
)
keys = st.text(max_size=3) | st.integers(-3, 3) | st.tuples(st.integers(0, 2))


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        items,
        items.map(collections.OrderedDict),
        items.map(_default),
        items.map(lambda d: Named(d, title="kept")),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(Plain, inner, inner),
        st.builds(Frozen, inner, inner),
        st.builds(lambda a: Slotted(a=a), inner),
        st.builds(Record, inner, inner),
    )


trees = st.recursive(atoms, _containers, max_leaves=12)
relaxed = settings(deadline=None, max_examples=share(2))


def assert_same(a: Any, b: Any) -> None:
    """Equal in types, keys, their order, and leaves; written without the functions under test."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert vars(a) == vars(b) if isinstance(a, Named) else True
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, Plain | Frozen | Record):
        assert_same(a.a, b.a)
        assert_same(a.b, b.b)
    elif isinstance(a, Slotted):
        assert_same(a.a, b.a)
    else:
        assert a == b


@relaxed
@given(tree=trees)
def test_mapping_nothing_gives_an_equal_tree(tree):
    assert_same(map_leaves(lambda leaf: leaf, tree), tree)
    assert_same(replace_tensors(tree, [leaf for _, leaf in tensors(tree)]), tree)
    assert structure(map_leaves(lambda leaf: leaf, tree)) == structure(tree)


@relaxed
@given(tree=trees)
def test_containers_are_new_and_the_old_are_left_as_they_were(tree):
    before = leaves(tree)
    marked = map_leaves(lambda _: "mark", tree)
    assert [leaf for _, leaf in leaves(marked)] == ["mark"] * len(before)
    assert [path for path, _ in leaves(marked)] == [path for path, _ in before]
    after = leaves(tree)
    assert [path for path, _ in after] == [path for path, _ in before]
    assert all(one is other for (_, one), (_, other) in zip(before, after, strict=True))


@relaxed
@given(tree=trees, offset=st.integers(-5, 5))
def test_maps_compose_and_touch_tensors_only(tree, offset):
    once = map_tensors(lambda x: x + offset, tree)
    assert_same(map_tensors(lambda x: x - offset, once), tree)
    assert [x.tolist() for _, x in tensors(once)] == [(x + offset).tolist() for _, x in tensors(tree)]
    others = [leaf for _, leaf in leaves(tree) if not isinstance(leaf, torch.Tensor)]
    assert [leaf for _, leaf in leaves(once) if not isinstance(leaf, torch.Tensor)] == others


@relaxed
@given(tree=trees)
def test_tensors_are_the_leaves_that_are_tensors_in_order(tree):
    expected = [(path, leaf) for path, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
    assert [(path, id(leaf)) for path, leaf in tensors(tree)] == [(path, id(leaf)) for path, leaf in expected]


def test_paths_read_as_python():
    tree = {"inputs": [1, (2,)], 3: Pair(4, Plain(5, Record(6, 7)))}
    assert leaves(tree) == [
        ("$.inputs[0]", 1),
        ("$.inputs[1][0]", 2),
        ("$[3].first", 4),
        ("$[3].second.a", 5),
        ("$[3].second.b.a", 6),
        ("$[3].second.b.b", 7),
    ]


@pytest.mark.parametrize("kind", [Frozen, Record])
def test_frozen_records_are_rebuilt_without_running_their_checks_again(kind):
    rebuilt = map_leaves(lambda _: "never", kind(1, 2))
    assert (rebuilt.a, rebuilt.b) == ("never", "never")


def test_structures_tell_containers_keys_and_kinds_apart():
    x = torch.zeros(2)
    different = [x, [x], (x,), {"a": x}, {"b": x}, {0: x}, Pair(x, x), [x, x], Plain(x, x), Record(x, x), [1], [""], []]
    assert len({structure(each) for each in different}) == len(different)
    assert structure({"a": x}) == structure({"a": torch.ones(5, dtype=torch.int64)})


class Window(collections.abc.Sequence):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1)


class Sealed(collections.abc.Mapping):
    """A mapping with more than its values, which a dict of them does not give back."""

    def __init__(self, values: dict, layout: str = "columns") -> None:
        self.values_ = values
        self.layout = layout

    def __len__(self) -> int:
        return len(self.values_)

    def __iter__(self):
        return iter(self.values_)

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.values_[key]


class Encoding(collections.UserDict):
    """What a tokenizer returns: a mapping with attributes of its own."""

    def __init__(self, data: dict | None = None, rows: int = 0) -> None:
        super().__init__(data)
        self.rows = rows


@pytest.mark.parametrize(
    "mapping",
    [
        Encoding({"x": torch.ones(2), "more": [torch.ones(1), "text"]}, rows=2),
        collections.UserDict(x=torch.ones(2), more=[torch.ones(1), "text"]),
        types.MappingProxyType({"x": torch.ones(2), "more": [torch.ones(1), "text"]}),
        Sealed({"x": torch.ones(2), "more": [torch.ones(1), "text"]}),
    ],
    ids=lambda mapping: type(mapping).__name__,
)
def test_mappings_that_a_dict_gives_back_are_taken_apart_and_keep_class_and_attributes(mapping):
    tree = {"batch": (mapping,)}
    assert [path for path, _ in tensors(tree)] == ["$.batch[0].x", "$.batch[0].more[0]"]
    (new,) = map_leaves(lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf, tree)["batch"]
    assert type(new) is type(mapping)
    assert new["x"].tolist() == [2.0, 2.0]
    assert new["more"][1] == "text"
    assert mapping["x"].tolist() == [1.0, 1.0]
    attributes = {name: value for name, value in getattr(mapping, "__dict__", {}).items() if name in ("rows", "layout")}
    assert attributes == {name: getattr(new, name) for name in attributes}
    assert structure(new) == structure(mapping)


@pytest.mark.parametrize(
    "container",
    [
        Sealed({"a": torch.zeros(1)}, "rows"),
        collections.UserList([torch.zeros(1)]),
        {1, 2},
        frozenset({1}),
        collections.deque([torch.zeros(1)]),
        Window(),
        {"a": 1}.keys(),
        torch.ones(2, 2).max(0),
        torch.Size([2, 3]),
        type("Rows", (list,), {})([1]),
    ],
    ids=lambda container: type(container).__name__,
)
def test_unknown_containers_are_refused_with_their_path(container):
    for function in (leaves, tensors, structure, lambda tree: map_leaves(lambda leaf: leaf, tree)):
        with pytest.raises(TreeError) as caught:
            function({"batch": [0, Pair(1, container)]})
        assert caught.value.where == "$.batch[1].second"
        assert caught.value.got == type(container).__name__
        assert "dict" in caught.value.expected


@pytest.mark.parametrize("leaf", [torch.zeros(2), "text", b"bytes", 1.5, None, range(3), Plain, object()])
def test_leaves_are_leaves(leaf):
    assert leaves(leaf) == [("$", leaf)]
    assert map_leaves(lambda each: [each], leaf) == [leaf]


def test_what_is_said_to_be_a_leaf_is_one_though_it_be_a_container():
    odd = collections.UserList([3])
    tree = {"list": [1, [2]], "odd": odd}
    got = map_leaves(lambda leaf: ("leaf", leaf), tree, is_leaf=lambda node: isinstance(node, list) or node is odd)
    assert got == {"list": ("leaf", [1, [2]]), "odd": ("leaf", odd)}
    with assert_raises(TreeError, got="UserList", where=r"\$\.odd"):
        map_leaves(lambda leaf: leaf, tree)


BATCHES = st.integers(1, 5).flatmap(
    lambda rows: st.recursive(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64]).map(
            lambda dtype: torch.arange(rows * 2).reshape(rows, 2).to(dtype)
        ),
        lambda inner: (
            st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3) | st.builds(Pair, inner, inner)
        ),
        max_leaves=5,
    )
)


@settings(deadline=None, max_examples=share(0.8))
@given(batch=BATCHES, cut=st.integers(0, 5))
def test_a_batch_cut_in_two_and_joined_is_the_batch(batch, cut):
    rows = accel.tree.find_batch_size(batch)
    assert rows == tensors(batch)[0][1].shape[0]
    parts = [accel.tree.slice_tensors(batch, slice(cut)), accel.tree.slice_tensors(batch, slice(cut, None))]
    assert accel.tree.find_batch_size(parts[0]) == min(cut, rows)
    joined = accel.tree.concatenate(parts)
    assert_same(joined, batch)
    assert accel.tree.tensors_equal(joined, batch)
    halves = accel.tree.convert_to_fp32(batch)
    assert all(tensor.dtype != torch.bfloat16 for _, tensor in tensors(halves))
    assert accel.tree.tensors_equal(halves, batch) == all(
        tensor.dtype != torch.bfloat16 for _, tensor in tensors(batch)
    )


def test_values_of_skipped_keys_stay_whatever_they_are():
    foreign = collections.deque([torch.ones(1)])  # not a known container
    kept = torch.ones(2)
    moved = accel.tree.send_to_device(
        {"x": torch.ones(2), "aux": {"raw": foreign}, "y": [kept]}, "meta", skip_keys=["raw", "y"]
    )
    assert moved["x"].is_meta
    assert moved["aux"]["raw"] is foreign
    assert moved["y"][0] is kept
    with assert_raises(TreeError, got="deque", where=r"\$\.raw"):
        accel.tree.send_to_device({"raw": foreign}, "meta")


def test_batches_that_do_not_agree_are_refused():
    with assert_raises(TreeError, expected=r"2 rows as at \$\.a", got="3", where=r"\$\.b"):
        accel.tree.find_batch_size({"a": torch.ones(2), "scalar": torch.tensor(1), "b": torch.ones(3)})
    assert accel.tree.find_batch_size({"scalar": torch.tensor(1), "text": "x"}) is None
    with assert_raises(TreeError, problem="differ in structure", where=r"trees\[1\]"):
        accel.tree.concatenate([{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    with assert_raises(TreeError, expected="one or more"):
        accel.tree.concatenate([])
    assert not accel.tree.tensors_equal([torch.ones(1), 2], [torch.ones(1), 3])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_rows_and_compare_by_their_parts_and_are_not_sliced(layout):
    def nested(*rows: int) -> dict[str, torch.Tensor]:
        return {"x": torch.nested.nested_tensor([torch.ones(count, 3) for count in rows], layout=layout)}

    assert accel.tree.find_batch_size(nested(2, 3)) == 2
    assert accel.tree.tensors_equal(nested(2, 3), nested(2, 3))
    for other in (nested(3, 2), nested(2, 3, 3), {"x": torch.ones(2, 3)}, {"x": nested(2, 3)["x"].double()}):
        assert not accel.tree.tensors_equal(nested(2, 3), other)
        assert not accel.tree.tensors_equal(other, nested(2, 3))
    with assert_raises(TreeError, problem="nested tensor cannot be sliced", where=r"\$\.x", fix="unbind"):
        accel.tree.slice_tensors(nested(2, 3), slice(0, 1))
