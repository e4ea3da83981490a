# SPDX-License-Identifier: Apache-2.0
"""A rank whose place on its host is unknown is refused, as an incomplete torchrun environment is."""

from __future__ import annotations

import itertools

import pytest
from catching import assert_raises

from accel import read_env
from accel.errors import EnvError

MPIS = {
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


@pytest.mark.parametrize("mpi", MPIS)
def test_any_part_of_a_place_names_what_is_missing(mpi: str) -> None:
    names, values = MPIS[mpi], ("1", "2", "1", "2")
    whole = dict(zip(names, values, strict=True))
    assert read_env(whole).rank == 1
    for count in (1, 2, 3):
        for kept in itertools.combinations(names, count):
            if not {names[0], names[1]} & set(kept):
                continue  # no rank, no world: nothing says that there are others
            with assert_raises(EnvError, problem="incomplete") as caught:
                read_env({name: whole[name] for name in kept})
            assert any(name not in kept and name in str(caught.value) for name in names)


def test_pmi_alone_is_no_single_process() -> None:
    with assert_raises(EnvError, problem="incomplete") as caught:
        read_env({"PMI_RANK": "3", "PMI_SIZE": "4"})
    assert caught.value.got == "PMI_RANK, PMI_SIZE without MPI_LOCALRANKID, MPI_LOCALNRANKS"
    assert "unset PMI_RANK, PMI_SIZE" in caught.value.fix


def test_a_place_from_elsewhere_is_enough() -> None:
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert read_env(pmi | SLURM).launcher == "slurm"
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    assert read_env(pmi | torchrun).rank == 1
    assert read_env({"PMI_RANK": "0", "PMI_SIZE": "1"}).world_size == 1
