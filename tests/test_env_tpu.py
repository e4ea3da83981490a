# SPDX-License-Identifier: Apache-2.0
"""Variables of TPU hosts, written after torch_xla's source and Google Kubernetes Engine's documentation."""

from __future__ import annotations

import pytest
from catching import assert_raises
from hypothesis import given, strategies as st

from accel import read_env
from accel.env import read_pod
from accel.errors import EnvError

# the second of two hosts of a v5e slice on Kubernetes
POD = {
    "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "tpu-0.tpu,tpu-1.tpu",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_SKIP_MDS_QUERY": "true",
}
# the last of four processes that torch_xla.launch has started on each of two hosts
PROCESS = {
    "CLOUD_TPU_TASK_ID": "7",
    "TPU_PROCESS_ADDRESSES": ",".join(f"10.0.0.{host}:{port}" for host in (4, 2) for port in range(8476, 8480)),
    "TPU_PROCESS_PORT": "8479",
    "TPU_VISIBLE_CHIPS": "3",
}


def test_a_host_knows_its_place_in_the_pod() -> None:
    assert read_pod(POD) == (1, ("tpu-0.tpu", "tpu-1.tpu"))
    env = read_env(POD)
    assert (env.tpu_hosts, env.world_size, env.launcher) == (2, 1, "none")


@pytest.mark.parametrize("names", ["", "localhost", "localhost,", " "])
def test_a_host_alone_is_no_pod(names: str) -> None:
    assert read_pod({"TPU_WORKER_HOSTNAMES": names, "TPU_WORKER_ID": "0"}) is None
    assert read_env({"TPU_WORKER_HOSTNAMES": names}).tpu_hosts == 1


@pytest.mark.parametrize("worker", ["", "-1", "one"])
def test_a_host_without_a_usable_number_is_refused(worker: str) -> None:
    with assert_raises(EnvError, where="TPU_WORKER_ID"):
        read_pod({**POD, "TPU_WORKER_ID": worker})


def test_a_host_without_a_number_among_the_hosts_is_refused() -> None:
    with assert_raises(EnvError, expected="TPU_WORKER_ID"):
        read_pod({name: value for name, value in POD.items() if name != "TPU_WORKER_ID"})
    with assert_raises(EnvError, expected="TPU_WORKER_ID"):
        read_pod({**POD, "TPU_WORKER_ID": "2"})


def test_a_process_of_torch_xlas_own_launch_knows_its_place() -> None:
    env = read_env(PROCESS)
    assert (env.launcher, env.rank, env.world_size, env.local_rank, env.local_world_size) == ("torch_xla", 7, 8, 3, 4)
    assert (env.node_rank, env.num_nodes, env.master_addr) == (1, 2, "10.0.0.4")
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert read_env(PROCESS | launched).launcher == "torchrun"


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_every_process_has_a_place_of_its_own(hosts: int, each: int, data: st.DataObject) -> None:
    style = data.draw(st.sampled_from(["h{}", "10.0.0.{}", "[fe80::{}]"]))
    addresses = ",".join(f"{style.format(host)}:{8476 + at}" for host in range(hosts) for at in range(each))
    places = [
        read_env({"CLOUD_TPU_TASK_ID": str(task), "TPU_PROCESS_ADDRESSES": addresses}) for task in range(hosts * each)
    ]
    assert [(env.node_rank, env.local_rank) for env in places] == [(h, at) for h in range(hosts) for at in range(each)]
    assert {(env.num_nodes, env.local_world_size, env.world_size) for env in places} == {(hosts, each, hosts * each)}


@pytest.mark.parametrize(
    ("changed", "fields"),
    [
        ({"CLOUD_TPU_TASK_ID": "8"}, {"got": "CLOUD_TPU_TASK_ID=8"}),
        (
            {"TPU_PROCESS_ADDRESSES": "a:1,b:1,a:2,b:2", "CLOUD_TPU_TASK_ID": "0"},
            {"problem": "fill one host after another"},
        ),
        (
            {"TPU_PROCESS_ADDRESSES": "a:1,a:2,b:1", "CLOUD_TPU_TASK_ID": "0"},
            {"problem": "fill one host after another"},
        ),
    ],
)
def test_processes_that_do_not_fit_together_are_refused(changed: dict[str, str], fields: dict[str, str]) -> None:
    with assert_raises(EnvError, **fields):
        read_env(PROCESS | changed)


def test_addresses_without_a_number_among_them_are_somebody_elses() -> None:
    assert read_env({"TPU_PROCESS_ADDRESSES": PROCESS["TPU_PROCESS_ADDRESSES"]}).launcher == "none"
