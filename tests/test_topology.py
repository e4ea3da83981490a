# SPDX-License-Identifier: Apache-2.0
"""Positions on meshes: which ranks have samples of their own, and what is refused rather than guessed."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import msgspec
import pytest
from catching import assert_raises
from hypothesis import given, strategies as st
from tables import rows

from accel.errors import ConfigError
from accel.topology import AXIS_NAMES, DATA_DIMS, SHARED_DIMS, Axis, Plan, TensorStyle, axis_of, mesh_position

known = st.lists(st.sampled_from(DATA_DIMS + SHARED_DIMS), min_size=1, max_size=4, unique=True)
meshes = known.flatmap(lambda names: st.tuples(st.just(names), st.tuples(*[st.integers(1, 4)] * len(names))))


def _coordinates(shape):
    return itertools.product(*map(range, shape))


def test_no_name_means_both():
    assert not set(DATA_DIMS) & set(SHARED_DIMS)


@given(mesh=meshes)
def test_ranks_share_a_place_just_if_they_differ_in_no_data_dimension(mesh):
    names, shape = mesh
    holders = {}
    for coordinate in _coordinates(shape):
        own = tuple(here for name, here in zip(names, coordinate, strict=True) if name in DATA_DIMS)
        index, count = mesh_position(names, shape, coordinate).data
        assert count == math.prod(size for name, size in zip(names, shape, strict=True) if name in DATA_DIMS)
        holders.setdefault(index, []).append(own)
    assert sorted(holders) == list(range(count))
    assert all(len(set(owns)) == 1 and len(owns) == math.prod(shape) // count for owns in holders.values())
    assert [holders[index][0] for index in sorted(holders)] == sorted(own for own, *_ in holders.values())


@given(mesh=meshes)
def test_stating_what_the_names_mean_changes_nothing(mesh):
    names, shape = mesh
    stated = [name for name in reversed(names) if name in DATA_DIMS]
    for coordinate in _coordinates(shape):
        assert mesh_position(names, shape, coordinate, stated) == mesh_position(names, shape, coordinate)


@given(mesh=meshes, at=st.integers(0, 3))
def test_a_dimension_of_one_changes_nothing(mesh, at):
    names, shape = mesh
    for coordinate in _coordinates(shape):
        longer = [[*each[:at], extra, *each[at:]] for each, extra in ((names, "dp"), (shape, 1), (coordinate, 0))]
        assert mesh_position(*longer).data == mesh_position(names, shape, coordinate).data


@given(size=st.integers(1, 9))
def test_one_dimension_without_a_name_is_data_parallel(size):
    assert [mesh_position(None, (size,), (at,)).data for at in range(size)] == [(at, size) for at in range(size)]
    assert mesh_position(None, (size, 2), (0, 1), ()).data == (0, 1)


@pytest.mark.parametrize(
    ("names", "place"),
    [
        (("dp", "tp"), (1, 2)),
        (("pp", "dp"), (2, 3)),
        (("dp_replicate", "dp_shard"), (5, 6)),
        (("cp", "tp"), (0, 1)),
        (("ep", "tensor"), (1, 2)),
    ],
)
def test_the_usual_meshes(names, place):
    assert mesh_position(names, (2, 3), (1, 2)).data == place


@given(mesh=meshes)
def test_every_axis_has_an_index_and_a_size(mesh):
    names, shape = mesh
    for coordinate in _coordinates(shape):
        position = mesh_position(names, shape, coordinate)
        assert [axis_of(position.axes, name, "") for name in names] == list(map(Axis, coordinate, shape))
        dimensions = {dimension for dimension, known in AXIS_NAMES.items() if not set(known) & set(names)}
        if set(names) & set(AXIS_NAMES["replicate"] + AXIS_NAMES["shard"]):
            dimensions.discard("data")  # the place along both
        for dimension in dimensions:
            assert {axis_of(position.axes, name, "") for name in AXIS_NAMES[dimension]} == {(0, 1)}


def test_an_axis_is_found_by_another_name_of_its_dimension_and_an_unknown_one_is_refused():
    position = mesh_position(("stage", "tensor"), (2, 3), (1, 2), ())
    assert (
        axis_of(position.axes, "tp", ""),
        axis_of(position.axes, "stage", ""),
        axis_of(position.axes, "pp", ""),
    ) == ((2, 3), (1, 2), (0, 1))
    with assert_raises(ConfigError, problem="unknown axis of a mesh", got="'tensors'", fix=r"Did you mean `tensor`\?"):
        axis_of(position.axes, "tensors", "")


def test_other_names_are_for_the_user_to_state():
    assert mesh_position(("stage", "x", "y"), (2, 2, 2), (1, 0, 1), ("x", "y")).data == (1, 4)


@pytest.mark.parametrize(
    ("names", "data_dims", "fields"),
    [
        (
            ("dp", "model"),
            None,
            {"problem": "of unknown meaning", "expected": "dp, data", "got": "'model'", "fix": r"data_dims=\(\.\.\.\)"},
        ),
        (("DP", "tp"), None, {"got": "'DP'"}),
        (None, None, {"got": "2 dimensions without names", "fix": "mesh_dim_names"}),
        (
            ("dp", "tp"),
            ("dp", "cp"),
            {"expected": "some of 'dp', 'tp'", "got": r"\('dp', 'cp'\)", "where": "data_dims="},
        ),
        (("dp", "tp"), ("dp", "dp"), {"got": r"\('dp', 'dp'\)"}),
        (("d", "p"), "dp", {"expected": "a tuple of some of 'd', 'p'", "got": "'dp'"}),
        (None, ("dp",), {"expected": "a mesh with named dimensions"}),
    ],
)
def test_what_is_not_known_is_refused(names, data_dims, fields):
    with assert_raises(ConfigError, **fields):
        mesh_position(names, (2, 2), (0, 0), data_dims)


UNKNOWN = [
    ("tensor", {"a": "colwis", "b": "rowwise", "c": "x"}, "one of .*colwise", "a: 'colwis', c: 'x'"),
    ("tensor", "auto", 'styles by pattern, or "model"', "'auto'"),
    ("experts", {"a": "dispach"}, "one of dispatch, local, sorted", "a: 'dispach'"),
    ("context", "rings", "one of gather, ring, heads", "'rings'"),
    ("schedule", "1f1b", "one of GPipe, 1F1B", "'1f1b'"),
    ("gather_dtype", "float16", "bf16", "'float16'"),
    ("overlap", "yes", "True or False", "'yes'"),
    ("sequence", 1, "True or False", "1"),
    ("stages_per_rank", True, "an integer from 1", "True"),
    ("prefetch", 0, "an integer from 1, or None", "0"),
    ("ignored", "layers.*", "a tuple of patterns", r"'layers\.\*'"),
    ("stages", ("a", "b"), "tuples of paths, one for each stage, or None", r"\('a', 'b'\)"),
]


@rows("field, value, expected, got", UNKNOWN)
def test_a_plan_knows_its_names_when_it_is_made(field, value, expected, got):
    for make in (lambda: Plan(**{field: value}), lambda: msgspec.structs.replace(Plan(), **{field: value})):
        with assert_raises(ConfigError, expected=expected, got=f"^{got}$", where=rf"^plan\.{field}$"):
            make()


def test_every_name_of_a_plan_is_taken_and_survives_a_file():
    styles = {str(at): style for at, style in enumerate(get_args(TensorStyle))}
    plans = [Plan(), Plan(tensor=styles, experts={"a": "dispatch", "b": "local"}), Plan(tensor={}, experts={})]
    hints = {field.name: field.type for field in msgspec.structs.fields(Plan)}
    for name in ("context", "schedule", "gather_dtype", "reduce_dtype"):
        plans += [Plan(**{name: value}) for value in get_args(hints[name])]
    plans += [Plan(units=each) for each in ("auto", 2, ("Block",))]
    plans += [Plan(reshard_after_forward=each) for each in (None, False, True, 2)]
    plans += [Plan(stages=(("a", "b"), ("c",)), ignored=("x",), overlap=True, prefetch=1)]
    for plan in plans:
        assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
