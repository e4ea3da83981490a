# SPDX-License-Identifier: Apache-2.0
"""The planner, by its laws."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accel.launch
from accel.env import read_env
from accel.errors import EnvError, LaunchError
from accel.launch import LaunchPlan, plan_launch


def plan(
    n: int = 2, *, environ: dict[str, str] | None = None, args: tuple[str, ...] = (), cores: int = 8
) -> LaunchPlan:
    return plan_launch(
        "train.py",
        args,
        nproc_per_node=n,
        environ=environ or {},
        interpreter=("python", "worker"),
        parent_pid=42,
        port=29511,
        cores=cores,
        record_dir="records",
    )


@given(st.integers(1, 64))
def test_every_process_knows_its_place_and_no_two_share_one(n: int) -> None:
    envs = [read_env(process.environ) for process in plan(n).processes]
    assert [env.rank for env in envs] == list(range(n))
    assert [env.local_rank for env in envs] == list(range(n))
    assert {(env.world_size, env.local_world_size, env.num_nodes, env.node_rank) for env in envs} == {(n, n, 1, 0)}
    assert len({process.record for process in plan(n).processes}) == n


@given(st.lists(st.text(), max_size=6).map(tuple))
def test_the_words_after_the_script_come_through_verbatim(args: tuple[str, ...]) -> None:
    for process in plan(args=args).processes:
        assert process.command == ("python", "worker", process.record, "42", "train.py", *args)


@given(st.dictionaries(st.sampled_from(["HOME", "RANK", "WORLD_SIZE", "MASTER_ADDR", "NODE_RANK"]), st.text()))
def test_the_given_environment_is_left_alone_and_an_outer_launch_is_overridden(environ: dict[str, str]) -> None:
    before = dict(environ)
    process = plan(environ=environ).processes[1]
    assert environ == before
    ours = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
    ours |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "PYTHONUNBUFFERED": "1"}
    assert ours.items() <= process.environ.items()
    assert process.environ.get("HOME") == environ.get("HOME")


def test_notes_of_another_launcher_to_its_children_are_dropped() -> None:
    assert (
        "TORCHELASTIC_USE_AGENT_STORE"
        not in plan(environ={"TORCHELASTIC_USE_AGENT_STORE": "True"}).processes[0].environ
    )


@pytest.mark.parametrize(("n", "cores", "threads"), [(1, 8, "8"), (2, 8, "4"), (3, 8, "2"), (16, 8, "1")])
def test_cores_are_shared_out(n: int, cores: int, threads: str) -> None:
    assert {process.environ["OMP_NUM_THREADS"] for process in plan(n, cores=cores).processes} == {threads}


def test_a_chosen_number_of_threads_is_kept() -> None:
    assert plan(environ={"OMP_NUM_THREADS": "3"}).processes[0].environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("n", [0, -1])
def test_no_process_is_no_launch(n: int) -> None:
    with pytest.raises(LaunchError) as caught:
        plan(n)
    assert (caught.value.expected, caught.value.got) == ("an integer of at least 1", str(n))


def test_a_setting_that_all_ranks_would_refuse_is_refused_once() -> None:
    with pytest.raises(EnvError, match="ACCEL_PRECISION"):
        plan(environ={"ACCEL_PRECISION": "fp17"})


def test_no_module_beside_the_worker_could_be_taken_for_the_standard_librarys() -> None:
    # The worker is run by path, so its folder comes first on `sys.path` while its imports are resolved.
    folder = Path(accel.launch.__file__).parent
    assert not {path.stem for path in folder.glob("*.py")} & sys.stdlib_module_names
