# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a mesh have samples of their own: laws of the place, and what is refused rather than guessed."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel import ConfigError
from accel.topology import DATA_DIMS, SHARED_DIMS, data_place

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
        index, count = data_place(names, shape, coordinate)
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
        assert data_place(names, shape, coordinate, stated) == data_place(names, shape, coordinate)


@given(mesh=meshes, at=st.integers(0, 3))
def test_a_dimension_of_one_changes_nothing(mesh, at):
    names, shape = mesh
    for coordinate in _coordinates(shape):
        longer = [[*each[:at], extra, *each[at:]] for each, extra in ((names, "dp"), (shape, 1), (coordinate, 0))]
        assert data_place(*longer) == data_place(names, shape, coordinate)


@given(size=st.integers(1, 9))
def test_one_dimension_without_a_name_is_data_parallel(size):
    assert [data_place(None, (size,), (at,)) for at in range(size)] == [(at, size) for at in range(size)]
    assert data_place(None, (size, 2), (0, 1), ()) == (0, 1)


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
    assert data_place(names, (2, 3), (1, 2)) == place


def test_other_names_are_for_the_user_to_state():
    assert data_place(("stage", "x", "y"), (2, 2, 2), (1, 0, 1), ("x", "y")) == (1, 4)


@pytest.mark.parametrize(
    ("names", "data_dims", "said"),
    [
        (("dp", "model"), None, r"not known whether.*dp, ddp.* got 'model' .*data_dims=\(\.\.\.\)"),
        (("DP", "tp"), None, "got 'DP'"),
        (None, None, r"2 dimensions without names.*mesh_dim_names"),
        (("dp", "tp"), ("dp", "cp"), r"some of 'dp', 'tp', got \('dp', 'cp'\) - at data_dims="),
        (("dp", "tp"), ("dp", "dp"), r"got \('dp', 'dp'\)"),
        (("d", "p"), "dp", "a tuple of some of 'd', 'p', got 'dp'"),
        (None, ("dp",), "expected a mesh with named dimensions"),
    ],
)
def test_what_is_not_known_is_refused(names, data_dims, said):
    with pytest.raises(ConfigError, match=said):
        data_place(names, (2, 2), (0, 0), data_dims)
