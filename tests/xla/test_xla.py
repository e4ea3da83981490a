# SPDX-License-Identifier: Apache-2.0
"""Contexts on XLA devices, by what stands for torch_xla; see test_xla_real.py for the package itself."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import fake_xla
import pytest
import torch
from catching import assert_raises
from processes import job, script_ranks

import accel
from accel import xla
from accel.comm import connect
from accel.context._make import choose_device
from accel.env import LaunchEnv, read_env
from accel.errors import ConfigError, EnvError, MissingExtraError
from accel.random import Key, capture_rng, isolated_rng, restore_rng, seed_rng

HERE = Path(__file__).parent
DEVICE = torch.device("xla", 0)


@pytest.fixture
def torch_xla(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, module in fake_xla.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["torch_xla"]


def test_without_torch_xla_what_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    for device in ("xla", "xla:0", torch.device("xla")):
        with assert_raises(MissingExtraError, fix=r"torch_xla\[tpu\]==2\.9"):
            accel.single(device)
    with assert_raises(MissingExtraError, fix=r"torch_xla\[tpu\]==2\.9"):
        accel.from_env({"ACCEL_DEVICE": "xla"})


def test_the_rank_is_xlas(torch_xla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fake_xla.DEVICES, "8")
    monkeypatch.setenv(fake_xla.ORDINAL, "5")
    assert xla.join(1, 4, 8) == 5
    assert torch_xla.joined == [(1, 4)]


def test_other_backends_are_refused(torch_xla: Any) -> None:
    with assert_raises(ConfigError, problem="XLA tensors are sent by XLA only", expected="xla, or none", got="gloo"):
        connect(LaunchEnv(world_size=2), DEVICE, "gloo", 1.0)


def test_a_process_alone_leaves_the_others_devices(torch_xla: Any) -> None:
    assert xla.join(0, 1, 1) == 0
    assert torch_xla.joined == []


def test_processes_that_xla_does_not_connect_are_refused(torch_xla: Any) -> None:
    with assert_raises(ConfigError, expected="2 devices for 2 processes", got="1 of kind TPU"):
        xla.join(0, 2, 2)


def test_a_host_of_several_starts_no_process_without_a_place(torch_xla: Any) -> None:
    host = {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "tpu-0,tpu-1"}
    with assert_raises(EnvError, fix="accel launch --device xla"):
        accel.from_env({**host, "ACCEL_DEVICE": "xla"})
    assert accel.from_env({**host, "ACCEL_DEVICE": "cpu"}).world_size == 1
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "tpu-0", "MASTER_PORT": "1"}
    assert choose_device("xla", read_env(host | launched)) == DEVICE
    assert choose_device("xla:1", LaunchEnv(world_size=2)) == torch.device("xla", 1)


def test_random_streams_are_captured_and_put_back(torch_xla: Any) -> None:
    with isolated_rng(DEVICE):
        seed_rng(Key(3), DEVICE)
        state = capture_rng(DEVICE)
        assert [(kind, len(data)) for kind, data in state.devices] == [("xla", xla.STATE_BYTES)]
        drawn = random.random()
        xla.set_random_state("xla:0", (2**64 - 1).to_bytes(8, "little"))
        assert capture_rng(DEVICE).devices == (("xla", b"\xff" * 8),)
        restore_rng(state, DEVICE)
        assert capture_rng(DEVICE) == state
        assert random.random() == drawn
    assert xla.get_random_state("xla:0") == bytes(8)


def test_steps_end_where_they_are_told_to(torch_xla: Any) -> None:
    xla.end_step()
    assert len(torch_xla.steps) == 1


@pytest.mark.multiprocess
def test_two_ranks_in_xlas_order_talk_through_the_host(tmp_path: Path) -> None:
    told = job(2, **{fake_xla.DEVICES: "2"})
    environs = [environ | {fake_xla.ORDINAL: str(1 - rank)} for rank, environ in enumerate(told)]
    with script_ranks(HERE / "rank_on_xla.py", environs, folder=tmp_path) as ranks:
        assert [rank.wait(200) for rank in ranks] == [0, 0], [rank.said() for rank in ranks]
        said = [rank.said() for rank in ranks]
    assert [out.splitlines()[-1] for out in said] == [
        "launcher's local rank 0 is rank 1",
        "launcher's local rank 1 is rank 0",
    ]
