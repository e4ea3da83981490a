# SPDX-License-Identifier: Apache-2.0
"""torchrun's variables: what Kubeflow's jobs set in a pod needs no flag, and everything that is ours beats it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configs import FIELDS, Source, some_values, to_text
from hypothesis import given, strategies as st

from accel.cli import main
from accel.config import ConfigFile, LaunchConfig, resolve
from accel.errors import ConfigError

# As pkg/controller.v1/pytorch/envvar.go of kubeflow/training-operator 1.7 sets them in the second of two pods,
JOB = {
    "PYTHONUNBUFFERED": "1",
    "MASTER_PORT": "23456",
    "PET_MASTER_PORT": "23456",
    "MASTER_ADDR": "train-master-0",
    "PET_MASTER_ADDR": "train-master-0",
    "WORLD_SIZE": "16",
    "RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
}
# elastic.go beside it with an elasticPolicy,
ELASTIC = {
    "PET_RDZV_ENDPOINT": "train-worker-0:29400",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "1:4",
    "PET_MAX_RESTARTS": "100",
    "PET_NPROC_PER_NODE": "gpu",
    "PET_RDZV_ID": "job",
    "PET_RDZV_CONF": "join_timeout=600",
}
# and pkg/runtime/framework/plugins/torch/torch.go of kubeflow/trainer 2.
TRAINER = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "0",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environ", "config"),
    [
        (JOB, LaunchConfig(nproc_per_node=8, nnodes=2, node_rank=1, rdzv_endpoint="train-master-0:23456")),
        (
            ELASTIC,
            LaunchConfig(
                nproc_per_node="auto",
                nnodes="1:4",
                rdzv_endpoint="train-worker-0:29400",
                rdzv_id="job",
                rdzv_timeout_s=600,
                max_restarts=100,
            ),
        ),
        # hosts that come and go take any place, and the master's address is that of rank 0, not of the meeting
        (
            JOB | ELASTIC | {"PET_RDZV_CONF": "last_call_timeout=5,close_timeout=1", "PET_ROLE": "trainer"},
            LaunchConfig(
                nproc_per_node="auto",
                nnodes="1:4",
                rdzv_endpoint="train-worker-0:29400",
                rdzv_id="job",
                rdzv_last_call_s=5,
                role="trainer",
                max_restarts=100,
            ),
        ),
        (
            TRAINER,
            LaunchConfig(nproc_per_node="auto", nnodes=2, node_rank=0, rdzv_endpoint="job-node-0-0.job:29500"),
        ),
        ({"PET_MASTER_ADDR": "fe80::1"}, LaunchConfig(rdzv_endpoint="[fe80::1]:29500")),
        ({"PET_RDZV_ENDPOINT": "fe80::1"}, LaunchConfig(rdzv_endpoint="[fe80::1]:29400")),
        ({"PET_RDZV_ENDPOINT": "[fe80::1]:7"}, LaunchConfig(rdzv_endpoint="[fe80::1]:7")),
        ({"PET_RDZV_ENDPOINT": "node0"}, LaunchConfig(rdzv_endpoint="node0:29400")),
        (dict.fromkeys(JOB | ELASTIC, ""), LaunchConfig()),
        ({"PET_TEE": "3", "PET_START_METHOD": "fork", "PETS": "2"}, LaunchConfig()),
    ],
)
def test_what_torchrun_would_follow_is_followed(environ: dict[str, str], config: LaunchConfig) -> None:
    assert resolve({}, environ).config == config


@given(flags=some_values(), environ=some_values(), file=some_values(), count=st.integers(1, 99))
def test_ours_beats_torchruns_and_that_beats_the_file(
    flags: dict[str, Any], environ: dict[str, Any], file: dict[str, Any], count: int
) -> None:
    taken = ("max_restarts", "quiet")
    told = [{name: values[name] for name in taken if name in values} for values in (flags, environ, file)]
    variables = {field.variable: to_text(told[1][field.name]) for field in FIELDS if field.name in told[1]}
    resolved = resolve(
        {name: to_text(value) for name, value in told[0].items()},
        variables | {"PET_MAX_RESTARTS": str(count), "PET_QUIET": "true"},
        ConfigFile(path="a.toml", values=told[2]),
    )
    without = resolve(
        {name: to_text(value) for name, value in told[0].items()}, variables, ConfigFile(path="a.toml", values=told[2])
    )
    if "max_restarts" in told[0] or "max_restarts" in told[1]:
        assert resolved == without
    else:
        assert (resolved.config.max_restarts, resolved.config.quiet) == (count, without.config.quiet)
        assert resolved.sources["max_restarts"] == Source("environment", "PET_MAX_RESTARTS")


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"PET_RDZV_BACKEND": "etcd-v2"}, "expected c10d or static, got 'etcd-v2' - at PET_RDZV_BACKEND"),
        ({"PET_NPROC_PER_NODE": "cpu"}, "an integer from 1 to 4096 or auto, got 'cpu' - at PET_NPROC_PER_NODE"),
        ({"PET_NNODES": "two"}, "got 'two' - at PET_NNODES"),
        ({"PET_NODE_RANK": "2", "PET_NNODES": "2"}, "got node_rank=2, nnodes=2 - at PET_NODE_RANK and PET_NNODES"),
        ({"PET_NODE_RANK": "1", "ACCEL_NNODES": "1:2"}, "at PET_NODE_RANK and ACCEL_NNODES"),
        ({"PET_MASTER_ADDR": "node0", "PET_MASTER_PORT": "http"}, "got 'node0:http' - at PET_MASTER_ADDR"),
        ({"PET_MAX_RESTARTS": "-1"}, "got '-1' - at PET_MAX_RESTARTS"),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_variables_name(environ: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({}, environ)
    assert told in str(caught.value)


def test_config_show_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert main(["config", "show", "--nproc-per-node", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["nproc_per_node", "2", "flag", "--nproc-per-node"] in lines
    assert ["nnodes", "2", "environment", "PET_NNODES"] in lines
    assert ["rdzv_endpoint", "train-master-0:23456", "environment", "PET_MASTER_ADDR"] in lines
