# SPDX-License-Identifier: Apache-2.0
"""What the environment says is read exactly, or refused by name."""

from __future__ import annotations

import os
from types import MappingProxyType

import pytest
from catching import assert_raises
from configs import SETTINGS
from hypothesis import given, settings, strategies as st
from profiles import share

from accel import LaunchEnv, read_env
from accel.errors import ConfigError, EnvError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def _without(*names: str, **changes: str) -> dict[str, str]:
    return {name: value for name, value in (TORCHRUN | changes).items() if name not in names}


def test_torchruns_variables():
    assert read_env(TORCHRUN) == LaunchEnv(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        num_nodes=2,
        master_addr="node0",
        master_port=29500,
        launcher="torchrun",
    )


def test_nothing_set_is_one_process():
    assert read_env({}) == LaunchEnv(rank=0, world_size=1, local_world_size=1, num_nodes=1, launcher="none")


def test_a_launched_world_of_one_needs_no_address():
    env = read_env({"RANK": "0", "WORLD_SIZE": "1"})
    assert (env.world_size, env.master_addr, env.launcher) == (1, None, "torchrun")


@settings(deadline=None, max_examples=share(2))
@given(nodes=st.integers(1, 1000), per_node=st.integers(1, 64), data=st.data())
def test_every_consistent_assignment_reads_back(nodes, per_node, data):
    node, local = data.draw(st.integers(0, nodes - 1)), data.draw(st.integers(0, per_node - 1))
    variables = {
        "RANK": node * per_node + local,
        "WORLD_SIZE": nodes * per_node,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": node,
        "MASTER_ADDR": "host",
        "MASTER_PORT": 1,
    }
    for name in data.draw(st.sets(st.sampled_from(["LOCAL_RANK", "GROUP_RANK"]))):  # they follow from the others
        del variables[name]
    env = read_env({name: str(value) for name, value in variables.items()})
    assert (env.rank, env.world_size) == (node * per_node + local, nodes * per_node)
    assert (env.local_rank, env.local_world_size) == (local, per_node)
    assert (env.node_rank, env.num_nodes) == (node, nodes)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (_without("WORLD_SIZE"), ("WORLD_SIZE", "without it")),
        (_without("RANK"), ("expected RANK", "WORLD_SIZE")),
        ({"LOCAL_RANK": "0"}, ("LOCAL_RANK without them", "accel launch")),
        ({"LOCAL_WORLD_SIZE": "2"}, ("LOCAL_WORLD_SIZE without them",)),
        (_without(RANK="8"), ("RANK below WORLD_SIZE=8", "RANK=8")),
        (_without(RANK="-1"), ("RANK", "'-1'")),
        (_without(LOCAL_RANK="4"), ("LOCAL_RANK below LOCAL_WORLD_SIZE=4", "LOCAL_RANK=4")),
        (_without(GROUP_RANK="2"), ("GROUP_RANK below", "GROUP_RANK=2")),
        (_without(LOCAL_WORLD_SIZE="3", LOCAL_RANK="0"), ("divides WORLD_SIZE=8", "LOCAL_WORLD_SIZE=3")),
        (_without(WORLD_SIZE="0"), ("WORLD_SIZE", "at least 1")),
        (_without(RANK="five"), ("RANK", "'five'")),
        (_without(WORLD_SIZE="8.0"), ("WORLD_SIZE", "'8.0'")),
        (_without(LOCAL_WORLD_SIZE=""), ("LOCAL_WORLD_SIZE", "''")),
        (_without("MASTER_ADDR"), ("MASTER_ADDR", "8 processes")),
        (_without(MASTER_ADDR=""), ("MASTER_ADDR",)),
        (_without("MASTER_PORT"), ("MASTER_PORT",)),
        (_without(MASTER_PORT="http"), ("MASTER_PORT", "'http'")),
        (_without(MASTER_PORT="0"), ("MASTER_PORT", "'0'")),
        (_without(MASTER_PORT="65536"), ("MASTER_PORT", "at most 65535", "'65536'")),
        (_without(RANK="1" * 5000), ("RANK",)),
    ],
)
def test_contradictions_are_refused_by_name(environ, said):
    with pytest.raises(EnvError) as caught:
        read_env(environ)
    for words in said:
        assert words in str(caught.value)


def test_settings_are_read_beside_a_launcher_and_without():
    settings_ = {"ACCEL_DEVICE": "cpu", "ACCEL_BACKEND": "gloo", "ACCEL_PRECISION": "bf16", "ACCEL_TIMEOUT_S": "1.5"}
    settings_ |= {"ACCEL_ACCUMULATION": "4", "ACCEL_STRATEGY": "fsdp", "ACCEL_MESH": "dp=-1,tp=1"}
    for environ in (settings_, TORCHRUN | settings_):
        env = read_env(environ)
        assert (env.device, env.backend, env.precision, env.timeout_s) == ("cpu", "gloo", "bf16", 1.5)
        assert (env.accumulation, env.strategy, env.mesh) == (4, "fsdp", "dp=-1,tp=1")


def test_a_setting_that_is_empty_or_auto_says_nothing():
    assert read_env({field.variable: "auto" for field in SETTINGS if field.default == "auto"}) == LaunchEnv()
    assert read_env({field.variable: "" for field in SETTINGS}) == LaunchEnv()


@pytest.mark.parametrize("name", ["ACCEL_PRECISON", "ACCEL_TIMEOUT", "ACCEL_DEVICES", "ACCEL_BACKENDS"])
def test_a_near_miss_is_a_typo(name):
    with assert_raises(EnvError, got=f"{name}='x'", fix="Did you mean `ACCEL_"):
        read_env({name: "x"})


def test_names_of_other_software_are_left_alone():
    assert (
        read_env({"ACCEL_XYZ_7": "1", "ACCEL_DEBUG": "1", "ACCELERATE_USE_CPU": "1", "PRECISION": "no"}) == LaunchEnv()
    )


@pytest.mark.parametrize(
    ("precision", "hint"), [("fp61", "Did you mean `fp16`"), ("BF16", "Did you mean `bf16`"), ("float32", 'Use "fp32"')]
)
def test_an_unknown_precision_lists_the_choices(precision, hint):
    with assert_raises(EnvError, expected="one of bf16, fp16, fp32", got=precision, where="ACCEL_PRECISION", fix=hint):
        read_env({"ACCEL_PRECISION": precision})


@pytest.mark.parametrize(
    ("name", "value", "fields"),
    [
        (
            "ACCEL_ACCUMULATION",
            "0",
            {"expected": "an integer from 1 to 1000000 or auto", "got": "'0'", "where": "ACCEL_ACCUMULATION"},
        ),
        ("ACCEL_ACCUMULATION", "auto 4", {"got": "'auto 4'", "where": "ACCEL_ACCUMULATION"}),
        ("ACCEL_STRATEGY", "fdsp", {"expected": "one of ddp, deepspeed, fsdp or auto", "fix": "Did you mean `fsdp`?"}),
        (
            "ACCEL_MESH",
            "dp=3,tp=2",
            {
                "expected": "6 ranks for dp=3,tp=2",
                "got": "8",
                "where": "ACCEL_MESH",
                "fix": "Start 6 processes, or let",
            },
        ),
        (
            "ACCEL_MESH",
            "dp=-1,tp=3",
            {"expected": "a multiple of 3 ranks for dp=-1,tp=3", "got": "^8$", "where": "ACCEL_MESH"},
        ),
        ("ACCEL_MESH", "dp=8=1", {"problem": "invalid mesh", "where": "ACCEL_MESH"}),
        (
            "ACCEL_MESH",
            "stage=8",
            {"problem": "unknown axis of a mesh", "got": "'stage' in 'stage=8'", "where": "ACCEL_MESH"},
        ),
    ],
)
def test_a_setting_that_means_nothing_is_refused_by_name(name, value, fields):
    with assert_raises(EnvError, **fields):
        read_env(TORCHRUN | {name: value})


@pytest.mark.parametrize("seconds", ["0", "-3", "nan", "inf", "soon"])
def test_a_time_out_is_a_time(seconds):
    with assert_raises(EnvError, got=f"'{seconds}'", where="^ACCEL_TIMEOUT_S"):
        read_env({"ACCEL_TIMEOUT_S": seconds})


def test_reading_changes_neither_the_mapping_nor_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "77")  # must not be seen: another mapping was given
    before = dict(os.environ)
    read_only = MappingProxyType(dict(TORCHRUN))
    assert read_env(read_only) == read_env(read_only)
    assert read_env(read_only).rank == 5
    assert read_only == TORCHRUN
    assert dict(os.environ) == before


def test_the_script_may_say_where_ranks_meet():
    def place(init_method, environ=TORCHRUN):
        env = read_env(environ, init_method=init_method)
        return env.rank, env.world_size, env.master_addr, env.master_port

    assert place(None) == place("env://") == place("") == (5, 8, "node0", 29500)
    assert place("tcp://10.0.0.1:4000") == place("tcp://10.0.0.1:4000/") == (5, 8, "10.0.0.1", 4000)
    assert place("tcp://[::1]:4000") == (5, 8, "::1", 4000)
    unaddressed = {name: value for name, value in TORCHRUN.items() if not name.startswith("MASTER")}
    assert place("tcp://10.0.0.1:4000", unaddressed) == (5, 8, "10.0.0.1", 4000)
    assert place("file:///shared/a%20store", unaddressed)[:2] == (5, 8)
    assert place("tcp://10.0.0.1:4000", {}) == place("file:///shared/store", {}) == (0, 1, None, None)


@pytest.mark.parametrize(
    "init_method",
    [
        "tcp://node0",
        "tcp://:4000",
        "tcp://node0:99999",
        "tcp://node0:1?rank=0",
        "file://store",
        "file:///",
        "mpi://",
        3,
    ],
)
def test_what_is_no_place_to_meet_is_refused(init_method):
    with assert_raises(ConfigError, expected='"env://", "tcp://HOST:PORT" or', where="init_method="):
        read_env(TORCHRUN, init_method=init_method)
