# SPDX-License-Identifier: Apache-2.0
"""The planner, by its laws."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import launches
import msgspec
import pytest
from catching import assert_raises
from configs import FIELDS, SETTINGS
from hypothesis import given, strategies as st
from launches import Gpu, HostPosition, LaunchPlan, LaunchTarget, Machine

from accel import launching
from accel.config import LaunchConfig
from accel.config._resolve import TORCHRUN_VARIABLES
from accel.env import read_env
from accel.errors import ConfigError, EnvError, LaunchError
from accel.launching.local._machine import read_gpus, visible_gpus
from accel.topology import fit_axes


def plan(
    n: int | Literal["auto"] = 2,
    *,
    environ: dict[str, str] | None = None,
    args: tuple[str, ...] = (),
    machine: Machine | None = None,
    config: LaunchConfig | None = None,
    target: LaunchTarget | None = None,
    position: HostPosition | None = None,
    columns: int = 0,
) -> LaunchPlan:
    return launches.plan(
        config or LaunchConfig(nproc_per_node=n),
        machine or Machine(cores=8),
        environ,
        target=target or LaunchTarget(name="train.py", args=args),
        position=position or HostPosition(),
        columns=columns,
    )


def with_gpus(count: int) -> Machine:
    return Machine(cores=8, gpus=(Gpu(name="H100", generation=9),) * count)


def variables(plan: LaunchPlan, name: str) -> set[str | None]:
    return {process.environ.get(name) for process in plan.processes}


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
        assert process.command == ("python", "worker", process.record, "42", "script", "train.py", *args)
        assert process.program == (sys.executable, "train.py", *args)


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
    assert {process.environ["OMP_NUM_THREADS"] for process in plan(n, machine=Machine(cores=cores)).processes} == {
        threads
    }


def test_a_chosen_number_of_threads_is_kept() -> None:
    assert plan(environ={"OMP_NUM_THREADS": "3"}).processes[0].environ["OMP_NUM_THREADS"] == "3"


def test_the_records_settings_reach_every_rank_and_beat_the_environment() -> None:
    config = LaunchConfig(nproc_per_node=2, device="cpu", precision="bf16", timeout_s=5, backend="gloo")
    config = msgspec.structs.replace(config, accumulation=4, strategy="fsdp", mesh="dp=-1,tp=1")
    for process in plan(config=config, environ={"ACCEL_PRECISION": "fp16"}).processes:
        env = read_env(process.environ)
        assert (env.device, env.precision, env.timeout_s, env.backend) == ("cpu", "bf16", 5.0, "gloo")
        assert (env.accumulation, env.strategy, env.mesh) == (4, "fsdp", "dp=-1,tp=1")


def test_what_is_left_to_the_script_does_not_reach_it() -> None:
    environ = {field.variable: "1" for field in FIELDS} | dict.fromkeys(TORCHRUN_VARIABLES, "1")
    process = plan(environ=environ).processes[0]
    assert not environ.keys() & process.environ.keys()


def test_every_setting_of_a_rank_is_a_field_of_the_record() -> None:
    assert all(field in FIELDS for field in SETTINGS)


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from(["dp=2,tp=2", "dp=-1,tp=2", "dp_shard=3", "dp_shard=-1"]))
def test_a_mesh_fits_the_processes_of_all_hosts_or_nothing_starts(hosts: int, n: int, mesh: str) -> None:
    config, position = LaunchConfig(nproc_per_node=n, mesh=mesh), HostPosition(num_nodes=hosts)
    try:
        fit_axes(mesh, hosts * n, where="")
    except ConfigError:
        with assert_raises(LaunchError, got=f"^{hosts * n}$", where="^--mesh$"):
            plan(config=config, position=position)
    else:
        processes = plan(config=config, position=position).processes
        assert {read_env(process.environ).mesh for process in processes} == {mesh}


def test_a_misspelt_setting_is_refused_before_anything_starts() -> None:
    with assert_raises(EnvError, fix="ACCEL_PRECISION"):
        plan(environ={"ACCEL_PRECISON": "bf16"})


@pytest.mark.parametrize(("gpus", "processes"), [(0, 1), (1, 1), (4, 4)])
def test_auto_is_one_process_a_gpu(gpus: int, processes: int) -> None:
    assert len(plan("auto", machine=with_gpus(gpus)).processes) == processes


@pytest.mark.parametrize(
    ("config", "idle"),
    [
        (LaunchConfig(), "3 of 4 GPUs of a host stay idle"),
        (LaunchConfig(nproc_per_node=3), "1 of 4 GPUs of a host stay idle"),
        (LaunchConfig(nproc_per_node="auto"), ""),
        (LaunchConfig(nproc_per_node="auto", gpu_ids=(0, 2)), ""),  # chosen
        (LaunchConfig(gpu_ids=(0, 2)), "1 of 2 GPUs of a host stay idle"),
        (LaunchConfig(device="cpu"), ""),
        (LaunchConfig(device="cuda:1", nproc_per_node=2), ""),
    ],
)
def test_gpus_that_stay_idle_are_counted(config: LaunchConfig, idle: str) -> None:
    assert plan(config=config, machine=with_gpus(4)).idle == idle
    assert plan(config=config, machine=Machine(cores=8, gpus=None)).idle in ("", idle)


def test_auto_counts_what_is_visible_and_chosen() -> None:
    machine, hidden = with_gpus(4), {"CUDA_VISIBLE_DEVICES": "3,1,GPU-7"}
    assert len(plan("auto", machine=machine, environ=hidden).processes) == 3
    chosen = plan(config=LaunchConfig(nproc_per_node="auto", gpu_ids=(0, 2)), machine=machine, environ=hidden)
    assert len(chosen.processes) == 2
    assert variables(chosen, "CUDA_VISIBLE_DEVICES") == {"3,GPU-7"}
    on_cpu = plan(config=LaunchConfig(nproc_per_node="auto", device="cpu"), machine=machine)
    assert len(on_cpu.processes) == 1


def test_gpus_that_nobody_can_count_are_left_to_the_ranks() -> None:
    machine = Machine(cores=8, gpus=None)
    assert len(plan(config=LaunchConfig(nproc_per_node=4, device="cuda"), machine=machine).processes) == 4
    assert len(plan("auto", machine=machine).processes) == 1
    chosen = LaunchConfig(nproc_per_node="auto", gpu_ids=(1, 0))
    assert variables(plan(config=chosen, machine=machine), "CUDA_VISIBLE_DEVICES") == {"1,0"}
    hidden = plan(config=chosen, machine=machine, environ={"CUDA_VISIBLE_DEVICES": "4,5"})
    assert variables(hidden, "CUDA_VISIBLE_DEVICES") == {"5,4"}


def test_several_processes_may_share_the_gpu_that_is_named() -> None:
    assert len(plan(config=LaunchConfig(nproc_per_node=3, device="cuda:0"), machine=with_gpus(1)).processes) == 3


def test_the_cpu_takes_any_number_of_processes() -> None:
    assert len(plan(config=LaunchConfig(nproc_per_node=5, device="cpu"), machine=with_gpus(2)).processes) == 5


@pytest.mark.parametrize(
    ("config", "gpus", "fields"),
    [
        (LaunchConfig(nproc_per_node=3), 2, {"expected": "at most 2", "got": "nproc_per_node=3"}),
        (LaunchConfig(device="cuda"), 0, {"problem": "no GPU is visible"}),
        (LaunchConfig(device="cuda:0"), 0, {"problem": "no GPU is visible"}),
        (LaunchConfig(gpu_ids=(0, 2)), 2, {"expected": "ids from 0 to 1", "got": "gpu_ids=0,2"}),
        (LaunchConfig(gpu_ids=(0,)), 0, {"expected": "a machine with a visible GPU"}),
    ],
)
def test_gpus_that_are_not_there_are_refused(config: LaunchConfig, gpus: int, fields: dict[str, str]) -> None:
    with assert_raises(LaunchError, **fields):
        plan(config=config, machine=with_gpus(gpus))


@given(st.integers(0, 5), st.lists(st.integers(-1, 6), max_size=5))
def test_visible_gpus_end_at_the_first_that_is_none(count: int, ids: list[int]) -> None:
    shown = visible_gpus(",".join(map(str, ids)), count)
    assert visible_gpus(None, count) == tuple(map(str, range(count)))
    assert shown == tuple(map(str, ids[: len(shown)]))
    assert len(shown) == len(ids) or not 0 <= ids[len(shown)] < count


def test_chosen_threads_beat_the_environment() -> None:
    chosen = plan(config=LaunchConfig(threads_per_process=5), environ={"OMP_NUM_THREADS": "3"})
    assert variables(chosen, "OMP_NUM_THREADS") == {"5"}


@pytest.mark.parametrize(("name", "count", "off"), [("RTX 4090", 2, "1"), ("RTX 4090", 1, None), ("H100", 2, None)])
def test_cards_without_peer_to_peer_copies_are_told_to_nccl(name: str, count: int, off: str | None) -> None:
    machine = Machine(cores=4, gpus=(Gpu(name=f"NVIDIA {name}", generation=8),) * count)
    config = LaunchConfig(nproc_per_node=count)
    for process in plan(config=config, machine=machine).processes:
        assert [process.environ.get(each) for each in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")] == [off, off]
    users = plan(config=config, machine=machine, environ={"NCCL_P2P_DISABLE": "0"}).processes[0].environ
    assert users["NCCL_P2P_DISABLE"] == "0"


def test_modules_and_programs() -> None:
    module = plan(target=LaunchTarget(kind="module", name="pkg.train", args=("-x",))).processes[0]
    assert module.program == (sys.executable, "-m", "pkg.train", "-x")
    assert module.command[-3:] == ("module", "pkg.train", "-x")
    assert plan(target=LaunchTarget(kind="program", name="nvidia-smi")).processes[0].program == ("nvidia-smi",)


class FakeNvml:
    """NVIDIA's management library with two GPUs, of which the second does not answer."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.open = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += self.status == 0
        return self.status

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: Any) -> int:  # noqa: N802
        if handle.value == 1:
            name.value = b"NVIDIA H100"
        return 0 if handle.value == 1 else 15

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:  # noqa: N802
        if handle.value == 1:
            major._obj.value = 9
        return 0 if handle.value == 1 else 15

    def nvmlDeviceGetUUID(self, handle: Any, uuid: Any, size: Any) -> int:  # noqa: N802
        if handle.value == 1:
            uuid.value = b"GPU-1a2b"
        return 0 if handle.value == 1 else 15

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, pci: Any) -> int:  # noqa: N802
        if handle.value == 1:
            pci._obj.bus_id = b"00000000:3B:00.0"
        return 0 if handle.value == 1 else 15


def test_gpus_are_read_from_the_driver_and_it_is_closed_again(tmp_path: Path) -> None:
    nvml = FakeNvml()
    slot = tmp_path / "bus/pci/devices/0000:3b:00.0"
    slot.mkdir(parents=True)
    (slot / "numa_node").write_text("1\n")
    first = Gpu(name="NVIDIA H100", generation=9, uuid="GPU-1a2b", memory_node=1)
    assert read_gpus(nvml, tmp_path) == (first, Gpu(name="GPU", generation=0))
    assert nvml.open == 0
    assert read_gpus(FakeNvml(status=9)) == ()


def test_no_module_beside_the_worker_could_be_taken_for_the_standard_librarys() -> None:
    # The worker is run by path, so its folder comes first on `sys.path` while its imports are resolved.
    folder = Path(launching.__file__).parent
    assert not {path.stem for path in folder.glob("*.py")} & sys.stdlib_module_names


def test_ranks_get_the_width_of_the_launchers_terminal_beside_their_name() -> None:
    def widths(columns: int, n: int, **options: Any) -> set[str | None]:
        made = plan(n, columns=columns, environ={"ACCEL_COLUMNS": "7"}, **options)  # of an outer launch
        return {process.environ.get("ACCEL_COLUMNS") for process in made.processes}

    assert widths(0, 2) == {None}
    assert widths(80, 2) == {"71"}  # "[rank 1] "
    assert widths(80, 1) == widths(80, 2, config=LaunchConfig(nproc_per_node=2, prefix=False)) == {"80"}
    assert widths(5, 2) == {None}
    assert read_env(plan(2, columns=80).processes[0].environ).columns == 71
