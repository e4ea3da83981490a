# SPDX-License-Identifier: Apache-2.0
"""Variables of schedulers and MPIs.

Those of Slurm, Open MPI, MPICH and Intel MPI are what real runs printed; the others are written after their
documentation.
"""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from accel import LaunchEnv, read_env
from accel.env._launchers import first_host, tasks_per_node
from accel.errors import EnvError

# srun of Slurm 22.05, the last of 4 tasks on 2 nodes
SLURM = {
    "SLURMD_NODENAME": "n2",
    "SLURM_GTIDS": "2,3",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
# mpirun of Open MPI 4.1, rank 1 of 2 on one host
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_HOSTNAME": "vm",
    "PMIX_ID": "1473642497.1",
    "PMIX_NAMESPACE": "1473642497",
    "PMIX_RANK": "1",
}
# mpiexec.hydra of MPICH 4.0, rank 3 of 4, two on each host, called with -genv MASTER_ADDR node0
MPICH = {
    "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
    "MASTER_ADDR": "node0",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "h1",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "13",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
# mpiexec.hydra of Intel MPI 2021.19, rank 1 of 2 on one host
INTEL_MPI = {
    "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
    "HYDRA_IP_VERSION": "2",
    "HYDRA_LAUNCH_TYPE": "2",
    "I_MPI_HYDRA_TOPOLIB": "ipl2",
    "I_MPI_HYDRA_UUID": "d4460000-0fd4-45fa-cf60-06000851be16",
    "I_MPI_PIN_INFO": "1",
    "I_MPI_PIN_MAPPING": "2:0 0,1 1",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
# mpirun_rsh of MVAPICH2
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "2",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29511",
}
# the second pod of a PyTorchJob, training operator 1.8
KUBERNETES = {
    "PYTHONUNBUFFERED": "1",
    "MASTER_PORT": "23456",
    "PET_MASTER_PORT": "23456",
    "MASTER_ADDR": "train-master-0",
    "PET_MASTER_ADDR": "train-master-0",
    "WORLD_SIZE": "2",
    "RANK": "1",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "SM_NUM_GPUS": "1",
    "SM_NUM_CPUS": "4",
}


def place(env: LaunchEnv) -> tuple[int, ...]:
    return env.rank, env.world_size, env.local_rank, env.local_world_size, env.node_rank, env.num_nodes


@pytest.mark.parametrize(
    ("environ", "launcher", "where", "address", "port"),
    [
        (SLURM, "slurm", (3, 4, 1, 2, 1, 2), "n1", range(20000, 30000)),
        (OPEN_MPI, "openmpi", (1, 2, 1, 2, 0, 1), "127.0.0.1", range(20000, 30000)),
        (MPICH, "mpich", (3, 4, 1, 2, 1, 2), "node0", [29500]),
        (INTEL_MPI, "mpich", (1, 2, 1, 2, 0, 1), "127.0.0.1", range(20000, 30000)),
        (MVAPICH, "mvapich", (2, 4, 0, 2, 1, 2), "node0", [29511]),
        (KUBERNETES, "kubernetes", (1, 2, 0, 1, 1, 2), "train-master-0", [23456]),
        (SAGEMAKER, "sagemaker", (1, 2, 0, 1, 1, 2), "algo-1", [29500]),
    ],
)
def test_each_launcher_is_known_by_what_it_sets(
    environ: dict[str, str], launcher: str, where: tuple[int, ...], address: str, port: range
) -> None:
    env = read_env(environ)
    assert (env.launcher, place(env), env.master_addr) == (launcher, where, address)
    assert env.master_port in port
    chosen = read_env({**environ, "MASTER_ADDR": "elsewhere", "MASTER_PORT": "4711"})
    assert (chosen.master_addr, chosen.master_port) == ("elsewhere", 4711)
    assert place(chosen) == where


@pytest.mark.parametrize("inner", [SLURM, OPEN_MPI, MPICH, MVAPICH, KUBERNETES, SAGEMAKER])
def test_ranks_that_a_launcher_started_inside_of_another_are_the_inner_ones(inner: dict[str, str]) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env = read_env(inner | launched)
    assert (env.launcher, place(env)) == ("torchrun", (0, 1, 0, 1, 0, 1))


@pytest.mark.parametrize("mpi", [OPEN_MPI, MPICH, INTEL_MPI, MVAPICH])
def test_an_mpi_inside_of_slurm_counts_and_not_the_step_of_its_daemons(mpi: dict[str, str]) -> None:
    assert place(read_env(SLURM | mpi)) == place(read_env(mpi))


def test_slurm_with_pmi_is_slurm() -> None:
    assert read_env(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}).launcher == "slurm"


def test_a_batch_script_of_slurm_is_one_process() -> None:
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
    assert read_env(batch) == LaunchEnv()


def test_jobs_on_one_host_have_ports_of_their_own_and_ranks_of_a_job_the_same() -> None:
    first, other = read_env(SLURM), read_env(SLURM | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"})
    assert first.master_port == other.master_port
    assert first.master_port != read_env(SLURM | {"SLURM_JOB_ID": "78"}).master_port
    assert first.master_port != read_env(SLURM | {"SLURM_STEP_ID": "1"}).master_port
    assert read_env(OPEN_MPI).master_port != read_env(OPEN_MPI | {"PMIX_NAMESPACE": "5"}).master_port
    assert read_env(INTEL_MPI).master_port != read_env(INTEL_MPI | {"I_MPI_HYDRA_UUID": "5"}).master_port


@pytest.mark.parametrize(
    ("environ", "restarts"),
    [
        (SLURM | {"SLURM_RESTART_COUNT": "2"}, 2),
        (OPEN_MPI | {"SLURM_RESTART_COUNT": "2"}, 0),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "3"}, 3),
        ({}, 0),
    ],
)
def test_restarts_are_counted(environ: dict[str, str], restarts: int) -> None:
    assert read_env(environ).restarts == restarts


@given(st.integers(1, 20), st.integers(1, 8), st.data())
def test_every_place_that_slurm_gives_reads_back(nodes: int, per_node: int, data: st.DataObject) -> None:
    node, local = data.draw(st.integers(0, nodes - 1)), data.draw(st.integers(0, per_node - 1))
    counts = data.draw(st.sampled_from([f"{per_node}(x{nodes})", ",".join([str(per_node)] * nodes)]))
    environ = SLURM | {
        "SLURM_PROCID": str(node * per_node + local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
        "SLURM_STEP_TASKS_PER_NODE": counts,
    }
    assert place(read_env(environ)) == (node * per_node + local, nodes * per_node, local, per_node, node, nodes)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (SLURM | {"SLURM_PROCID": "4"}, "SLURM_PROCID below SLURM_STEP_NUM_TASKS=4"),
        (SLURM | {"SLURM_PROCID": "x"}, "got 'x' - at SLURM_PROCID"),
        (SLURM | {"SLURM_NODEID": "2"}, "SLURM_NODEID below SLURM_STEP_NUM_NODES=2"),
        (SLURM | {"SLURM_LOCALID": "2"}, "SLURM_LOCALID below"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "got SLURM_STEP_TASKS_PER_NODE=3,1"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "such as 2(x3),1, got '2(x'"),
        (SLURM | {"SLURM_STEP_NODELIST": "n[1-"}, "got 'n[1-' - at SLURM_STEP_NODELIST"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK below OMPI_COMM_WORLD_SIZE=2"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "`--map-by slot`"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "3"}, "OMPI_COMM_WORLD_LOCAL_SIZE that divides OMPI_COMM_WORLD_SIZE=3"),
        ({**MPICH, "MASTER_ADDR": ""}, "mpirun -x MASTER_ADDR=node0"),
        (
            {name: value for name, value in MPICH.items() if name != "PMI_SIZE"},
            "expected PMI_SIZE, got MPI_LOCALRANKID",
        ),
        (KUBERNETES | {"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8"),
        (KUBERNETES | {"RANK": "2"}, "RANK below WORLD_SIZE=2"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, "got algo-3 and"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, "the JSON list SM_HOSTS"),
    ],
)
def test_contradictions_are_refused_by_name(environ: dict[str, str], said: str) -> None:
    with pytest.raises(EnvError) as caught:
        read_env(environ)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-3,7]", "n1"),
        ("n[08-10,12],login", "n08"),
        ("login,n[1-2]", "login"),
        ("rack[2-3]n[4-5],x", "rack2n4"),
        ("gpu-a[3]-x.site", "gpu-a3-x.site"),
    ],
)
def test_the_first_of_slurms_hosts(text: str, host: str) -> None:
    assert first_host(text) == host


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=5))
def test_slurms_counts_are_spelled_out(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert tasks_per_node(text) == [count for count, times in runs for _ in range(times)]
