# SPDX-License-Identifier: Apache-2.0
"""What the simulator relies on in torch without torch promising it; a failure here asks to adapt `_group.py`."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist

from accel.testing import simulate_groups
from accel.testing._group import SimulatedGroup, SimulatedWork

CALLED_BY_TORCH = {
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "allgather", "allgather_coalesced", "gather",
    "scatter", "reduce_scatter", "alltoall", "send", "recv",
}  # fmt: skip
RENAMED = [
    ("_allgather_base", "all_gather_single"),
    ("_reduce_scatter_base", "reduce_scatter_single"),
    ("alltoall_base", "all_to_all_single"),
    ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
]


def test_the_group_overrides_methods_that_torch_has():
    for name in CALLED_BY_TORCH:
        assert hasattr(dist.ProcessGroup, name), f"torch no longer has ProcessGroup.{name}"
        assert name in vars(SimulatedGroup), f"{name} is not simulated"
    for old, new in RENAMED:
        assert hasattr(dist.ProcessGroup, old) or hasattr(dist.ProcessGroup, new), f"torch renamed {new} again"
        assert vars(SimulatedGroup)[old] is vars(SimulatedGroup)[new]


def test_torch_has_no_collective_that_is_not_simulated():
    """A call that reaches other ranks returns a Work."""
    calls = {
        name
        for name, value in inspect.getmembers(dist.ProcessGroup, inspect.isroutine)
        if not name.startswith("_") and "c10d::Work" in (value.__doc__ or "")
    }
    assert len(calls) > len(CALLED_BY_TORCH)
    others = {"recv_anysource", "reconfigure"}  # inherited; of groups that change while they run
    unknown = {name for name in calls - others if name not in vars(SimulatedGroup)}
    assert not unknown, f"torch has new collectives: {sorted(unknown)}"


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="of torch 2.14")
def test_gather_single_gives_the_root_the_rows_of_all_ranks():
    def rank(group):
        mine = torch.full((2, 3), float(group.rank()))
        rows = torch.zeros(6, 3) if group.rank() == 1 else None
        dist.gather_single(mine, rows, group=group, group_dst=1)
        return None if rows is None else rows[:, 0].tolist()

    assert simulate_groups(rank, 3) == [None, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0], None]


def test_work_overrides_what_torch_calls():
    for name in ("wait", "get_future", "is_completed", "is_success", "result", "synchronize"):
        assert hasattr(dist.Work, name)
        assert name in vars(SimulatedWork)


def test_calls_from_cpp_reach_python():
    def rank(group):
        tensors = [torch.full((2,), float(group.rank())), torch.full((3,), float(group.rank()))]
        dist._broadcast_coalesced(group, tensors, 1024, 1)
        logger = None
        dist._verify_params_across_processes(group, tensors, logger)
        return [tensor.tolist() for tensor in tensors]

    assert simulate_groups(rank, 2) == [[[1.0] * 2, [1.0] * 3]] * 2


@pytest.mark.parametrize("member", ["rank", "size", "name"])
def test_what_contexts_ask_of_a_group(member):
    answers = {"rank": [0, 1], "size": [2, 2], "name": ["simulated"] * 2}
    assert simulate_groups(lambda group: getattr(group, member)(), 2) == answers[member]
