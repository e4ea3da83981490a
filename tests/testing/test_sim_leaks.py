# SPDX-License-Identifier: Apache-2.0
"""Simulations leave no threads and no memory behind, whatever becomes of them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard

from accel.testing import Deadlock, Simulator, simulate_groups

MEBIBYTE = 2**20


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed in a thread's arena is no leak
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _well(group):
    total = torch.ones(32 * 1024)
    dist.all_reduce(total, group=group)
    return total


def _deadlocks(group):
    kept = torch.ones(32 * 1024)
    if group.rank():
        dist.all_reduce(kept, group=group)


def _raises(group):
    kept = torch.ones(32 * 1024)
    if group.rank() == 1:
        raise ValueError("asked for")
    dist.all_reduce(kept, group=group)


def _leaves_open(group):
    dist.all_reduce(torch.ones(32 * 1024), group=group, async_op=True)


def _run_all(run: Callable[..., object], times: int, fns: list[Callable[..., object]]) -> None:
    for number in range(times):
        fn = fns[number % len(fns)]
        with contextlib.suppress(Deadlock, ValueError):
            run(fn, 2 + number % 3, seed=number)


@pytest.mark.nightly
def test_thousands_of_runs():
    fns = [_well, _deadlocks, _raises, _leaves_open]
    threads = set(threading.enumerate())
    with Simulator() as simulator:
        for run in (simulate_groups, simulator.run_groups):
            _run_all(run, 500, fns)
            before = _resident()
            _run_all(run, 2000, fns)
            assert _resident() - before < 16 * MEBIBYTE  # one tensor of each run would be 240
            assert len(set(threading.enumerate()) - threads) <= 4
    assert set(threading.enumerate()) <= threads


def _mesh(group):
    mesh = dist.init_device_mesh("cpu", (group.size(),))
    model = fully_shard(torch.nn.Linear(512, 512), mesh=mesh)
    model(torch.ones(2, 512)).sum().backward()
    return model


def _mesh_deadlocks(group):
    model = _mesh(group)
    if group.rank():
        model(torch.ones(2, 512))


def _functional_deadlocks(group):
    pending = functional.all_reduce(torch.ones(MEBIBYTE // 4), "sum", group)
    other = dist.new_group(list(range(group.size())))
    if group.rank():
        functional.wait_tensor(functional.all_reduce(torch.ones(MEBIBYTE // 4), "sum", other))
    return pending


def _functional_raises(group):
    functional.all_reduce(torch.ones(MEBIBYTE // 4), "sum", group)
    raise ValueError("asked for")


@pytest.mark.nightly
def test_runs_with_default_groups():
    fns = [_mesh, _mesh_deadlocks, _functional_deadlocks, _functional_raises]
    threads = set(threading.enumerate())

    def run(fn, size, *, seed):
        simulate_groups(fn, size, seed=seed, default_group=True)

    _run_all(run, 40, fns)
    before = _resident()
    _run_all(run, 120, fns)
    assert _resident() - before < 90 * MEBIBYTE  # one tensor of each rank would be 360
    assert set(threading.enumerate()) <= threads
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
