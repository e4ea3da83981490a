# SPDX-License-Identifier: Apache-2.0
"""Launches on TPU hosts, as far as they go before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from catching import assert_raises
from launches import Machine, plan

from accel.cli import main
from accel.config import LaunchConfig, resolve
from accel.errors import EnvError, LaunchError
from accel.launching.local._machine import count_chips, on_pod

POD = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "tpu-0.tpu,tpu-1.tpu"}


def processes(config: LaunchConfig, chips: int) -> int:
    found = plan(config, Machine(cores=8, tpu_chips=chips)).processes
    assert {process.environ.get("ACCEL_DEVICE") for process in found} == {config.device}
    return len(found)


@pytest.mark.parametrize("device", ["xla", "xla:0"])
def test_a_host_of_a_slice_knows_the_others(device: str) -> None:
    config = on_pod(resolve({"device": device}, {}), POD)
    assert (config.nnodes, config.node_rank, config.rdzv_endpoint) == (2, 1, "tpu-0.tpu:29400")
    numbered = on_pod(resolve({"device": device}, {}), POD | {"TPU_WORKER_HOSTNAMES": "fe80::1,fe80::2"})
    assert numbered.rdzv_endpoint == "[fe80::1]:29400"


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        ({"device": "cpu"}, POD),
        ({}, POD),
        ({"device": "xla", "nnodes": "1"}, POD),
        ({"device": "xla", "rdzv_endpoint": "elsewhere:1"}, POD),
        ({"device": "xla"}, {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}),
    ],
)
def test_hosts_are_taken_from_a_slice_only_where_nobody_says_otherwise(
    flags: dict[str, str], environ: dict[str, str]
) -> None:
    resolved = resolve(flags, {})
    assert on_pod(resolved, environ) == resolved.config


def test_a_host_without_a_number_is_refused() -> None:
    with assert_raises(EnvError, expected="TPU_WORKER_ID"):
        on_pod(resolve({"device": "xla"}, {}), {"TPU_WORKER_HOSTNAMES": "a,b"})


def test_a_process_for_each_chip_or_one_alone() -> None:
    assert processes(LaunchConfig(device="xla", nproc_per_node="auto"), 4) == 4
    assert processes(LaunchConfig(device="xla", nproc_per_node=4), 4) == 4
    assert processes(LaunchConfig(device="xla", nproc_per_node=1), 4) == 1
    assert processes(LaunchConfig(device="xla", nproc_per_node="auto"), 0) == 1
    assert processes(LaunchConfig(device="cpu", nproc_per_node=3), 4) == 3
    several = LaunchConfig(device="xla", nproc_per_node=1, nnodes=2, rdzv_endpoint="node0:29400")
    for config in (LaunchConfig(device="xla", nproc_per_node=3), several):
        with assert_raises(LaunchError, expected="nproc_per_node=4 for 4 chips"):
            processes(config, 4)


def test_chips_are_counted_on_the_pci_bus(tmp_path: Path) -> None:
    assert count_chips(tmp_path / "nothing") == 0
    for name, vendor, device in (
        ("0000:00:01.0", "0x1ae0", "0x0063"),
        ("0000:00:02.0", "0x1ae0", "0x006f"),
        ("0000:00:03.0", "0x1ae0", "0x0042"),  # Google's network card
        ("0000:00:04.0", "0x10de", "0x0063"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "device").write_text(device + "\n")
    (tmp_path / "0000:00:05.0").mkdir()
    assert count_chips(tmp_path) == 2


def test_a_dry_run_tells_the_place_in_the_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    for name, value in POD.items():
        monkeypatch.setenv(name, value.replace("tpu-0.tpu", "127.0.0.1"))
    assert main(["launch", "--device", "xla", "--dry-run", "train.py"]) == 0
    said = capsys.readouterr().out
    assert "# host 1 of 2" in said
    assert "ACCEL_DEVICE=xla" in said
    assert "WORLD_SIZE=2" in said
