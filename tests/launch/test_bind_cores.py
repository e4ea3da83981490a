# SPDX-License-Identifier: Apache-2.0
"""The cores of each process: near its GPU, of its own, or none at all where the system does not tell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from launches import Gpu, Machine, plan

from accel.cli._launch import describe_plan
from accel.config import LaunchConfig
from accel.launching.local._machine import (
    bind_processes,
    bound,
    describe_cores,
    list_cores,
    read_memory_node,
    read_memory_nodes,
    share_cores,
)

TWO_NODES = {0: ((0, 8), (1, 9), (2, 10), (3, 11)), 1: ((4, 12), (5, 13), (6, 14), (7, 15))}


@st.composite
def machines(draw: st.DrawFn) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Nodes of some cores, each of one or two hardware threads, that the process may use."""
    numbers = iter(range(1000))
    sizes = draw(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=9), min_size=1, max_size=4))
    return {
        node: tuple(tuple(next(numbers) for _ in range(threads)) for threads in cores)
        for node, cores in enumerate(sizes)
    }


@given(st.integers(1, 40), machines())
def test_cores_are_shared_without_rest_or_overlap(count: int, nodes: dict[int, tuple[tuple[int, ...], ...]]) -> None:
    cores = [core for each in nodes.values() for core in each]
    shares = bind_processes(count, nodes).cores
    threads = [thread for share in shares for thread in share]
    assert all(shares)
    assert {*threads} == {thread for core in cores for thread in core}, "every core is used"
    if count <= len({*threads}):
        assert len(threads) == len({*threads}), "no thread is used twice"
    if count <= len(cores):
        for core in cores:
            assert sum(not {*core}.isdisjoint(share) for share in shares) == 1, "threads of a core stay together"
        sizes = [sum(not {*core}.isdisjoint(share) for core in cores) for share in shares]
        assert max(sizes) - min(sizes) <= 1


@given(machines(), st.data())
def test_processes_are_bound_near_their_gpus(
    nodes: dict[int, tuple[tuple[int, ...], ...]], data: st.DataObject
) -> None:
    near = data.draw(st.lists(st.sampled_from(sorted(nodes)), min_size=1, max_size=8))
    binding = bind_processes(len(near), nodes, near)
    assert not binding.unbound
    for node, share in zip(near, binding.cores, strict=True):
        assert share
        assert {*share} <= {thread for core in nodes[node] for thread in core} or len(nodes) == 1
    for node in {*near}:
        shares = [share for its_node, share in zip(near, binding.cores, strict=True) if its_node == node]
        assert shares == [share_cores(nodes[node], part, len(shares)) for part in range(len(shares))]


@pytest.mark.parametrize(
    ("nodes", "near", "told"),
    [
        ({}, (), "does not list its cores"),
        (TWO_NODES, (0, None), "does not report the memory node of local rank 1's GPU"),
        (TWO_NODES, (0, 3), "no core of memory node 3, where local rank 1's GPU is"),
        ({0: TWO_NODES[0]}, (None, None), ""),  # with one node there is nothing to tell
    ],
)
def test_processes_are_all_bound_or_none_with_the_reason(
    nodes: dict[int, tuple[tuple[int, ...], ...]], near: tuple[int | None, ...], told: str
) -> None:
    binding = bind_processes(2, nodes, near)
    assert told in binding.unbound
    assert any(binding.cores) == (not told)


def sysfs(root: Path) -> Path:
    """Write what Linux tells of two nodes of four cores with two threads each, and of GPUs at both."""
    for node, cores in {0: "0-3,8-11\n", 1: "4-7,12-15\n"}.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    (root / "devices/system/node/online").write_text("0-1\n")
    for thread in range(16):
        folder = root / f"devices/system/cpu/cpu{thread}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{thread % 8},{thread % 8 + 8}\n")
    for slot, node in {"0000:3b:00.0": "0", "0000:af:00.0": "1", "10000:01:00.0": "-1"}.items():
        folder = root / f"bus/pci/devices/{slot}"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return root


def test_memory_nodes_are_read(tmp_path: Path) -> None:
    root = sysfs(tmp_path)
    assert read_memory_nodes(range(16), root) == TWO_NODES
    assert read_memory_nodes({1, 5, 9, 99}, root) == {0: ((1, 9),), 1: ((5,),), -1: ((99,),)}, "those allowed"
    assert read_memory_nodes({0, 8}, tmp_path / "none") == {-1: ((0,), (8,))}
    assert [read_memory_node(bus_id, root) for bus_id in ("00000000:3B:00.0", "00000000:AF:00.0")] == [0, 1]
    assert [read_memory_node(bus_id, root) for bus_id in ("00010000:01:00.0", "00000000:01:00.0", "")] == [None] * 3


@given(st.sets(st.integers(0, 200)))
def test_core_numbers_are_written_as_linux_lists_them(cores: set[int]) -> None:
    assert list_cores(describe_cores(cores)) == sorted(cores)


def gpus(*nodes: int | None, names: tuple[str, ...] = ("H100",)) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(name=names[at % len(names)], generation=9, uuid=f"GPU-{at}f", memory_node=node)
        for at, node in enumerate(nodes)
    )


FOUR = Machine(cores=16, gpus=gpus(1, 0, 1, 1), memory_nodes=TWO_NODES)
MIXED = Machine(cores=16, gpus=gpus(1, 0, names=("H100", "T4")), memory_nodes=TWO_NODES)


@pytest.mark.parametrize(
    ("machine", "environ", "settings", "cores"),
    [
        (FOUR, {}, {}, ["4-5,12-13", "0-3,8-11", "6,14", "7,15"]),
        (FOUR, {}, {"gpu_ids": (1, 3)}, ["0-3,8-11", "4-7,12-15"]),
        (FOUR, {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-1"}, {}, ["4-7,12-15", "0-3,8-11"]),
        (FOUR, {"CUDA_VISIBLE_DEVICES": "3,1"}, {"device": "cuda:1", "nproc_per_node": 2}, ["0-1,8-9", "2-3,10-11"]),
        (FOUR, {}, {"device": "cpu", "nproc_per_node": 2}, ["0-3,8-11", "4-7,12-15"]),
        (FOUR, {"CUDA_VISIBLE_DEVICES": ""}, {"nproc_per_node": 2}, ["0-3,8-11", "4-7,12-15"]),
        (FOUR, {"CUDA_VISIBLE_DEVICES": "MIG-0,MIG-1"}, {}, None),
        (MIXED, {}, {}, None),  # CUDA counts the fastest first, and the driver's library does not tell which it is
        (MIXED, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {}, ["4-7,12-15", "0-3,8-11"]),
        (Machine(cores=16, gpus=None, memory_nodes=TWO_NODES), {}, {"nproc_per_node": 2}, None),
    ],
)
def test_cores_follow_the_gpus_that_processes_use(
    machine: Machine, environ: dict[str, str], settings: dict[str, object], cores: list[str] | None
) -> None:
    config = LaunchConfig(bind_cores=True, **{"nproc_per_node": "auto", **settings})
    made = plan(config, machine, environ)
    assert [describe_cores(process.cores) for process in made.processes] == (cores or [""] * len(made.processes))
    shown = describe_plan(made, {})
    if cores is None:
        assert "does not report the memory node of local rank 0's GPU" in made.unbound
        assert shown.startswith(f"# not bound to cores: {made.unbound}\n")
    else:
        assert made.unbound == ""
        assert all(f"# rank {rank}, on cores {each}\n" in shown for rank, each in enumerate(cores))
    threads = [process.environ["OMP_NUM_THREADS"] for process in made.processes]
    assert threads == [str(len(process.cores) or 16 // len(made.processes)) for process in made.processes]


def test_processes_are_bound_only_if_asked() -> None:
    made = plan(LaunchConfig(nproc_per_node=2), Machine(cores=16, memory_nodes=TWO_NODES))
    assert [(process.cores, made.unbound) for process in made.processes] == [((), "")] * 2


def test_the_launcher_itself_stays_where_it_was() -> None:
    before = os.sched_getaffinity(0)
    with bound({min(before)}):
        assert os.sched_getaffinity(0) == {min(before)}
    with bound({100_000}), bound(()):  # taken away meanwhile
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before
