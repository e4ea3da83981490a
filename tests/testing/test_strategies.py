# SPDX-License-Identifier: Apache-2.0
"""What strategies generate, what they shrink to, and what they refuse."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from catching import assert_raises
from hypothesis import Phase, find, given, settings, strategies as st
from leaves import form_of, tensors_of
from processes import patience
from profiles import share

import accel
from accel.errors import ConfigError
from accel.testing import Deadlock, Fault, Simulator, WriteFault, strategies as sim
from accel.testing.strategies import Pair, Point, Record, World

shrinking = settings(max_examples=share(50), deadline=None, database=None, phases=(Phase.generate, Phase.shrink))


def shapes(trees: list[object]) -> list[list[tuple[torch.dtype, tuple[int, ...]]]]:
    return [[(leaf.dtype, tuple(leaf.shape)) for leaf in tensors_of(tree)] for tree in trees]


@settings(deadline=None)
@given(trees=sim.rank_trees(min_size=2, max_size=5, max_rows=4, max_depth=1))
def test_trees_of_ranks_differ_in_rows_only(trees):
    assert 2 <= len(trees) <= 5
    assert len({form_of(tree) for tree in trees}) == 1
    for column in zip(*shapes(trees), strict=True):
        assert len({(dtype, shape[1:], len(shape)) for dtype, shape in column}) == 1
        assert all(shape[0] <= 4 for _, shape in column if shape)


@settings(deadline=None)
@given(trees=sim.rank_trees(ragged=False))
def test_trees_that_are_not_ragged_have_the_same_shapes(trees):
    assert all(each == shapes(trees)[0] for each in shapes(trees))


@settings(deadline=None)
@given(tensor=sim.tensors(dtypes=(torch.int16, torch.bfloat16), max_dims=2, max_side=5))
def test_tensors_keep_to_what_was_asked_for(tensor):
    assert tensor.dtype in (torch.int16, torch.bfloat16)
    assert tensor.ndim <= 2
    assert all(side <= 5 for side in tensor.shape)
    assert all(value in range(7) for value in tensor.flatten().tolist())


@pytest.mark.parametrize(
    "wanted",
    [
        *(lambda x, dtype=dtype: x.dtype == dtype and x.numel() > 1 for dtype in sim.DTYPES),
        lambda x: x.ndim == 0,
        lambda x: x.ndim > 1 and x.numel() == 0,
        lambda x: x.numel() > 1 and not x.is_contiguous(),
        lambda x: x.ndim > 0 and x.shape[0] > 1 and x.stride(0) == 0,
        lambda x: x.is_conj(),
    ],
)
def test_every_kind_of_tensor_comes(wanted):
    find(sim.tensors(), wanted, settings=shrinking)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda x: x.isnan().any(),
        lambda x: x.isinf().any() and x.dtype == torch.bfloat16,
        lambda x: x.dtype == torch.float32 and x.eq(0).any() and x.signbit()[x.eq(0)].any(),
        lambda x: x.dtype == torch.int8 and x.eq(-128).any(),
    ],
)
def test_special_elements_come_when_asked_for(wanted):
    find(sim.tensors(special=True), wanted, settings=shrinking)


@pytest.mark.parametrize("kind", [list, tuple, dict, Pair, Point, Record])
def test_every_container_comes_and_shrinks_to_one(kind):
    found = find(sim.trees(), lambda tree: type(tree) is kind and len(tensors_of(tree)) > 0, settings=shrinking)
    assert len(tensors_of(found)) == 1 or kind in (Pair, Point, Record)
    assert all(leaf.shape == () and leaf == 0 for leaf in tensors_of(found))


def test_other_leaves_can_be_asked_for():
    found = find(sim.trees(st.integers(0, 9)), lambda tree: isinstance(tree, dict) and tree, settings=shrinking)
    assert list(found.values()) == [0]


def test_what_everything_shrinks_to():
    found = [
        find(strategy, lambda _: True, settings=shrinking)
        for strategy in (sim.worlds(), sim.schedules(), sim.faults(3, 4), sim.write_faults(3, 4), sim.tensors())
    ]
    assert found == [World(1, None), None, Fault(0, 0), WriteFault(0, 0, byte=0), torch.tensor(0.0)]


def test_trees_of_ranks_shrink_to_the_ranks_that_matter():
    def one_has_rows_and_another_has_none(trees: list[object]) -> bool:
        counts = [sum(leaf.shape[0] for leaf in tensors_of(tree) if leaf.ndim) for tree in trees]
        return 0 in counts and max(counts) > 0

    found = find(sim.rank_trees(), one_has_rows_and_another_has_none, settings=shrinking)
    # one leaf for each rank; a container around it stays in some searches
    assert [[leaf.tolist() for leaf in tensors_of(tree)] for tree in found] == [[[]], [[0.0]]]


def gather_rows(ctx: accel.DistContext, mine: torch.Tensor) -> torch.Tensor:
    """Planted fault: a rank without rows skips the collective."""
    return accel.gather(ctx, mine) if len(mine) else mine


def test_a_skipped_collective_is_found_and_shrunk():
    with Simulator() as simulator:

        def hangs(case: tuple[list[int], int | None]) -> bool:
            rows, seed = case
            try:
                simulator.run(lambda ctx: gather_rows(ctx, torch.ones(rows[ctx.rank])), len(rows), seed=seed)
            except Deadlock:
                return True
            return False

        cases = st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=8), sim.schedules())
        assert find(cases, hangs, settings=shrinking) == ([0, 1], None)


@settings(deadline=None)
@given(
    world=sim.worlds(min_size=3, max_size=4),
    fault=sim.faults(2, 3, actions=["delay"]),
    write=sim.write_faults(2, 3, actions=["cut", "full"]),
)
def test_worlds_and_faults_keep_to_what_was_asked_for(world, fault, write):
    assert 3 <= world.size <= 4
    assert world.seed is None or 0 <= world.seed < 2**32
    assert (fault.rank in range(2), fault.call in range(3), fault.action) == (True, True, "delay")
    assert write.rank in range(2)
    assert write.write in range(3)
    assert write.action in ("cut", "full")


@pytest.mark.parametrize(
    ("ask", "fields"),
    [
        (lambda: sim.worlds(min_size=0), {"expected": "1 <= min_size <= max_size"}),
        (lambda: sim.rank_trees(min_size=3, max_size=2), {"expected": "1 <= min_size <= max_size"}),
        (lambda: sim.rank_trees(max_rows=-1), {"where": "max_rows="}),
        (lambda: sim.trees(max_depth=-1), {"where": "max_depth="}),
        (lambda: sim.tensors(max_dims=-1), {"where": "max_dims="}),
        (lambda: sim.tensors(dtypes=()), {"problem": "no dtype"}),
        (lambda: sim.faults(0, 1), {"expected": "world_size and calls from 1"}),
        (lambda: sim.write_faults(1, 0), {"expected": "world_size and writes from 1"}),
        (lambda: sim.faults(1, 1, actions=["vanihs"]), {"fix": "Did you mean `vanish`"}),
        (lambda: sim.faults(1, 1, actions=[]), {"problem": "no action"}),
    ],
)
def test_strategies_of_nothing_are_refused_at_once(ask, fields):
    with assert_raises(ConfigError, **fields):
        ask()


def test_without_hypothesis_the_error_names_the_extra():
    code = (
        "import sys\n"
        "sys.modules['hypothesis'] = None\n"
        "import accel, accel.testing\n"
        "try:\n"
        "    from accel.testing import strategies\n"
        "except accel.errors.MissingExtraError as error:\n"
        "    assert 'pip install \"accel-torch[testing]\"' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(120))
