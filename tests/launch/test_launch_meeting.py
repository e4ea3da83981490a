# SPDX-License-Identifier: Apache-2.0
"""What hosts make of each other's notes, and what is refused before they meet."""

from __future__ import annotations

import pytest
from catching import assert_raises
from hypothesis import given, strategies as st
from launches import HostPosition, died, failure_report

from accel.config import LaunchConfig
from accel.endpoints import split_endpoint
from accel.errors import LaunchError
from accel.launching._target import HostTerms, assign_node_ranks, describe_hosts, terms_of
from accel.launching.hosts._hosts import check_endpoint, is_here


def note(host: str, node_rank: int | None = None, **settings: str) -> HostTerms:
    return HostTerms(host=host, node_rank=node_rank, settings=settings)


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_every_host_gets_a_place_of_its_own_and_the_one_it_asks_for(order: list[int], free: set[int]) -> None:
    asked = [None if place in free else place for place in order]
    given_ = assign_node_ranks([note(f"h{at}", place) for at, place in enumerate(asked)])
    assert sorted(given_) == list(range(6))
    assert all(place is None or place == got for place, got in zip(asked, given_, strict=True))
    unasked = [got for place, got in zip(asked, given_, strict=True) if place is None]
    assert unasked == sorted(unasked)


@given(st.permutations([note("h0", 1), note("h1", 1), note("h2", 0)]))
def test_two_hosts_that_want_one_place_are_named_whatever_the_order(notes: list[HostTerms]) -> None:
    with assert_raises(LaunchError, got="node_rank=1 on h[01] and h[01]"):
        assign_node_ranks(notes)


def test_what_hosts_were_told_differently_is_named_with_the_hosts() -> None:
    notes = [note("h0", precision="bf16", torch="2.13"), note("h1", precision="auto", torch="2.13")]
    with assert_raises(LaunchError, problem="agree on precision", got="bf16 on h0; auto on h1"):
        assign_node_ranks(notes)
    many = [note(f"h{at}", torch="2.6" if at else "2.7") for at in range(9)]
    with assert_raises(LaunchError, got=r"2\.7 on h0; 2\.6 on h1, h2, h3, h4 and 4 more"):
        assign_node_ranks(many)


def test_a_note_holds_what_all_hosts_must_share_and_not_what_is_their_own() -> None:
    def of(**fields: object) -> HostTerms:
        return terms_of("h0", LaunchConfig(**fields), processes=2, contents={"torch": "2.13"})  # type: ignore[arg-type]

    assert of() == of(log_dir="logs", quiet=True, nnodes=1)
    assert of() != of(max_restarts=1)
    assert of(nnodes=2, node_rank=1, rdzv_endpoint="h0:1").node_rank == 1
    assert of().node_rank is None


@pytest.mark.parametrize(
    ("hosts", "processes", "told"),
    [
        (["a", "b"], 2, "ranks 0-1 on a, 2-3 on b"),
        (["a", "b"], 1, "ranks 0 on a, 1 on b"),
        (["a"], 1, "rank 0 on a"),
    ],
)
def test_who_runs_what_is_told_in_a_line(hosts: list[str], processes: int, told: str) -> None:
    assert describe_hosts(hosts, processes) == told


def test_of_many_hosts_the_first_are_named() -> None:
    text = describe_hosts([f"h{at}" for at in range(10)], 1)
    assert text.endswith("7 on h7, and 2 more hosts")


def test_a_report_over_hosts_names_them() -> None:
    first, other = (died(rank, float(rank), 3) for rank in (0, 1))
    text = failure_report(first, [other], "logs/rank-0.log on a", hosts={0: "a", 1: "b"}, where="ranks 0 on a, 1 on b")
    assert text.splitlines() == [
        "accel: rank 0 on a exited with status 3 and left no traceback",
        "accel: its output is in logs/rank-0.log on a",
        "accel: ranks 0 on a, 1 on b",
        "accel: after it, rank 1 on b exited with status 3 and left no traceback",
    ]


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (
            "",
            {
                "problem": "the hosts have no endpoint to meet at",
                "expected": "--rdzv-endpoint HOST:PORT",
                "got": "nnodes=2 without it",
            },
        ),
        ("127.0.0.1:70000", {"problem": "there is no such port", "expected": "1 to 65535", "got": "^70000$"}),
        ("no-such-host.invalid:29400", {"problem": "does not resolve here", "got": r"'no-such-host\.invalid'"}),
        (f"{'x' * 70}.invalid:29400", {"problem": "does not resolve here"}),
    ],
)
def test_a_place_where_nobody_can_meet_is_refused(endpoint: str, fields: dict[str, str]) -> None:
    with assert_raises(LaunchError, **fields):
        check_endpoint(LaunchConfig(nnodes=2, rdzv_endpoint=endpoint))


def test_endpoints_are_names_and_addresses() -> None:
    assert split_endpoint("node0:29400") == ("node0", 29400)
    assert split_endpoint("[::1]:1") == ("::1", 1)
    assert is_here("127.0.0.1", 1)
    assert not is_here("192.0.2.77", 1)  # an address that nobody has


def test_places_of_other_hosts_follow_from_their_number() -> None:
    from test_launch_plan import plan

    from accel.env import read_env

    places = [HostPosition(node_rank=at, num_nodes=3, master_addr="h0", restarts=2) for at in range(3)]
    envs = [read_env(process.environ) for place in places for process in plan(2, position=place).processes]
    assert [env.rank for env in envs] == list(range(6))
    assert [(env.node_rank, env.local_rank) for env in envs] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert {(env.world_size, env.num_nodes, env.master_addr, env.restarts) for env in envs} == {(6, 3, "h0", 2)}


def test_ranks_of_one_role_are_counted_over_the_hosts() -> None:
    from test_launch_plan import plan

    roles = ("reader", "trainer", "reader")
    found: list[tuple[str, ...]] = []
    for at, role in enumerate(roles):
        place = HostPosition(node_rank=at, num_nodes=3, roles=roles)
        for process in plan(config=LaunchConfig(role=role, nproc_per_node=2), position=place).processes:
            names = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE")
            found.append(tuple(process.environ[name] for name in names))
            assert "TORCHELASTIC_RUN_ID" not in process.environ
    assert found == [
        ("reader", "0", "4", "3"),
        ("reader", "1", "4", "3"),
        ("trainer", "0", "2", "3"),
        ("trainer", "1", "2", "3"),
        ("reader", "2", "4", "3"),
        ("reader", "3", "4", "3"),
    ]
    alone = plan(config=LaunchConfig(rdzv_id="job-7", max_restarts=3)).processes[0].environ
    assert (alone["ROLE_NAME"], alone["ROLE_WORLD_SIZE"]) == ("default", "1")
    assert (alone["TORCHELASTIC_RUN_ID"], alone["TORCHELASTIC_MAX_RESTARTS"]) == ("job-7", "3")


def test_a_rendezvous_belongs_to_the_job_that_came_first() -> None:
    from torch.distributed import HashStore

    from accel.launching.hosts._agent import claim

    store = HashStore()
    config = LaunchConfig(rdzv_id="job-7", rdzv_endpoint="h0:29400")
    for _ in range(2):
        claim(store, config)
    with assert_raises(
        LaunchError, problem="another job uses this rendezvous", expected="rdzv_id=job-8", got="rdzv_id=job-7"
    ):
        claim(store, LaunchConfig(rdzv_id="job-8", rdzv_endpoint="h0:29400"))
    with assert_raises(LaunchError, expected="rdzv_id=", got="rdzv_id=job-7"):
        claim(store, LaunchConfig(rdzv_endpoint="h0:29400"))
