# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, each declared once, and the configuration of a launch around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta

from accel.alerts import Alerts
from accel.config._schema import Field, fields_of, from_plain, to_text
from accel.errors import ConfigError
from accel.formats import Compile, CompileName, Precision, PrecisionName, StrategyName
from accel.topology import MESH_TEXT, Plan, mesh_sizes

if TYPE_CHECKING:
    import torch


SOURCES_VARIABLE = "ACCEL_SOURCES"  # from a launcher to its ranks: the flag or file behind each setting
COLUMNS_VARIABLE = "ACCEL_COLUMNS"  # from a launcher to its ranks: columns of its terminal behind the rank's name
Auto = Literal["auto"]
LogLevel = Literal["auto", "debug", "info", "warning", "error", "critical"]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]

_PRECISIONS = {
    "auto": "the script's choice, else fp32",
    "fp32": "full precision: exact, slow on GPUs",
    "tf32": "fp32 with faster, rounded matmuls; NVIDIA GPUs since Ampere",
    "bf16": "half the memory traffic, much faster; needs no loss scale",
    "fp16": "for GPUs without bf16; needs the loss scale",
    "pure-bf16": "parameters in bf16 too: least memory, less exact updates",
    "fp8": "bf16 with linear layers in fp8; Hopper or newer, extra `torchao`",
}
_STRATEGIES = {
    "auto": "the script's choice, else ddp",
    "ddp": "every rank holds the full model, and gradients are averaged",
    "fsdp": "ranks shard parameters, gradients and optimizer state: less memory, more messages",
    "deepspeed": "ZeRO by DeepSpeed, extra `deepspeed`, with the options of the setting deepspeed",
}
_COMPILATIONS = {
    "auto": "the script's choice, else off",
    "off": "models run as they are written",
    "whole": "each model as one, by inductor",
    "repeated": "the repeated blocks of each model, by inductor; starts faster",
}
_DEVICES = {
    "auto": "the machine's accelerator of any vendor, else the CPU",
    "cpu": "the CPU, even if there are GPUs",
    "cuda": "GPUs; an error if there are none",
    "xla": "TPUs, through torch_xla",
}
_LOG_LEVELS = {
    "auto": "the script's choice, else the level of Python's logging",
    "debug": "everything",
    "info": "what a run does",
    "warning": "what may be wrong",
    "error": "what failed",
    "critical": "what ends the run",
}


def about(meaning: str, *, pattern: str | None = None, examples: Sequence[str] = (), **extra: Any) -> Meta:
    """Return the annotation of a setting: its meaning, the pattern and examples of its text, and facts for `Field`."""
    return Meta(description=meaning, pattern=pattern, examples=list(examples) or None, extra=extra or None)


class GroupKeywords(TypedDict, total=False):
    """Settings as keywords of every maker of contexts; None is for the environment."""

    device: torch.device | str | None
    precision: Precision | PrecisionName | Literal["no"] | None
    accumulation: int | None
    strategy: StrategyName | None
    deepspeed: str | msgspec.Struct | None
    plan: Plan | str | None
    compile: Compile | CompileName | str | None
    timeout_s: float | None
    log_level: LogLevel | None
    alerts: Alerts | str | None
    system: bool | None


class SettingKeywords(GroupKeywords, total=False):
    """All settings as keywords, for makers that open a process group."""

    mesh: str | None
    backend: str | None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run; `auto`, or an empty text, leaves the choice open.

    If every source leaves it open, the extra `fallback` of the field holds.
    """

    device: Annotated[
        str,
        about(
            "Device to compute on; auto: the accelerator of each process, else the CPU.",
            pattern=r"^[a-z]+(:[0-9]+)?$",
            examples=["auto", "cpu", "cuda", "cuda:1", "xla"],
            shorthand=("--cpu", "cpu"),
            choices=_DEVICES,
        ),
    ] = "auto"
    precision: Annotated[
        Precision | PrecisionName | Auto,
        about(
            "Dtype to compute in, or the fields of a Precision; auto: the script's choice.",
            examples=["compute=bf16,fp8.scaling=rowwise"],
            choices=_PRECISIONS,
            fallback="fp32",
        ),
    ] = "auto"
    accumulation: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | Auto,
        about("Micro-batches of one optimizer step; auto: the script's choice.", fallback=1),
    ] = "auto"
    strategy: Annotated[
        StrategyName | Auto,
        about(
            "Strategy that distributes a model over the ranks; auto: the script's choice.",
            choices=_STRATEGIES,
            fallback="ddp",
        ),
    ] = "auto"
    plan: Annotated[
        Plan | Auto,
        about(
            "Fields of the Plan that prepare follows to split models; auto: the script's choice.",
            examples=["units=Block,offload=true"],
        ),
    ] = "auto"
    compile: Annotated[
        Compile | CompileName | Auto,
        about(
            "Parts of the models that prepare compiles with torch.compile; auto: the script's choice.",
            examples=["regions=repeated,mode=max-autotune"],
            choices=_COMPILATIONS,
            fallback="off",
        ),
    ] = "auto"
    mesh: Annotated[
        str,
        about(
            "Sizes of the mesh by axis: pp, dp or dp_replicate and dp_shard, cp, tp, ep; one may be -1.",
            pattern=MESH_TEXT,
            examples=["dp=2,tp=2", "dp=-1,tp=8"],
        ),
    ] = ""
    backend: Annotated[
        str,
        about(
            "Backend of the process group; auto: nccl between GPUs, gloo between CPUs.",
            pattern=r"^[A-Za-z][A-Za-z0-9_]*$",
            examples=["auto", "gloo", "nccl"],
        ),
    ] = "auto"
    timeout_s: Annotated[
        Seconds | Auto,
        about(
            "Seconds until a collective with a missing rank fails; auto: the script's choice, else 300.", fallback=300.0
        ),
    ] = "auto"
    deepspeed: Annotated[
        str,
        about(
            "Options of the strategy deepspeed: a DeepSpeed JSON file, or [deepspeed] of accel.toml.",
            pattern=r"^[^\x00]*$",
            examples=["ds_config.json"],
            section=True,
        ),
    ] = ""
    log_level: Annotated[
        LogLevel,
        about("Lowest level that the loggers of accel.get_logger log; auto: the script's choice.", choices=_LOG_LEVELS),
    ] = "auto"
    alerts: Annotated[
        Alerts | Literal["none"],
        about(
            "Rules of alerts, and their command or webhook: the section [alerts] of accel.toml.",
            examples=["disk_full=0.9"],
            section=True,
        ),
    ] = "none"
    system: Annotated[bool, about("Record CPU, memory, disk, network and GPUs of each host in the run's folder.")] = (
        False
    )


SETTINGS: tuple[Field, ...] = fields_of(Settings)


Count = Annotated[int, Meta(ge=1, le=4096)]
Span = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,3}:[1-9][0-9]{0,3}$")]


class LaunchConfig(Settings, frozen=True, kw_only=True):
    """The configuration of a launch. Each field's meaning is in its annotation.

    Raises:
        ConfigError: a value is none of those its field takes, or contradicts another field.
    """

    nproc_per_node: Annotated[
        Count | Auto, about("Processes to start on this machine; auto: one per visible GPU or TPU chip, else one.")
    ] = 1
    nnodes: Annotated[
        Count | Span, about("Number of hosts, each with one launcher; 1:4 means from 1 to 4 hosts.", examples=["1:4"])
    ] = 1
    node_rank: Annotated[
        Annotated[int, Meta(ge=0, le=4095)] | Auto,
        about("Number of this host, from 0; auto: in the order in which hosts arrive."),
    ] = "auto"
    rdzv_endpoint: Annotated[
        str,
        about(
            "HOST:PORT at which several hosts meet, the same on all; HOST is the first host.",
            pattern=r"^((\[[0-9a-fA-F:.]+\]|[^\[\]:/\s]+):[1-9][0-9]{0,4})?$",
            examples=["node0:29400"],
        ),
    ] = ""
    rdzv_timeout_s: Annotated[
        Seconds, about("Seconds that a host waits for the first host, and then for the others.")
    ] = 300.0
    rdzv_last_call_s: Annotated[
        Seconds, about("Seconds to wait for more hosts after the smallest number has arrived.")
    ] = 30.0
    rdzv_id: Annotated[
        str,
        about(
            "Name of the job, the same on all hosts; hosts with another name are refused.",
            pattern=r"^[^\s\x00]*$",
            examples=["job-17"],
        ),
    ] = ""
    role: Annotated[
        str,
        about(
            "Role of this host's processes, for ROLE_NAME; ROLE_RANK counts the ranks of a role.",
            pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$",
            examples=["default", "trainer"],
        ),
    ] = "default"
    gpu_ids: Annotated[
        Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)] | Literal["all"],
        about("Visible GPUs to use, counted from 0."),
    ] = "all"
    threads_per_process: Annotated[
        Count | Auto, about("CPU threads of each process; auto: OMP_NUM_THREADS if set, else a share of the cores.")
    ] = "auto"
    bind_cores: Annotated[bool, about("Bind each process to separate cores near its GPU.")] = False
    log_dir: Annotated[
        str,
        about(
            "Folder for one log file per process, such as rank-0.log; empty: no log files.",
            pattern=r"^[^\x00]*$",
            examples=["logs"],
        ),
    ] = ""
    prefix: Annotated[bool, about("Begin each line of output with its rank if there are several processes.")] = True
    quiet: Annotated[bool, about("Show the output of rank 0 only.")] = False
    stop_grace_s: Annotated[Seconds, about("Seconds that processes have to save and exit after a stop request.")] = 10.0
    max_restarts: Annotated[
        Annotated[int, Meta(ge=0, le=100_000)],
        about("Number of times that all processes restart after one has failed."),
    ] = 0
    hang_timeout_s: Annotated[
        Seconds | Literal["never"],
        about("Seconds without output until each process's Python stack is printed; the processes continue."),
    ] = "never"
    slurm_options: Annotated[
        str,
        about(
            "Options of sbatch for `accel launch --slurm`, in addition to the nodes; empty: none.",
            pattern=r"^[^\n\r\x00]*$",
            examples=["'--partition=gpu --time=2:00:00'"],
        ),
    ] = ""

    @property
    def hosts(self) -> tuple[int, int]:
        """The fewest and the most hosts of the job."""
        return _span(self.nnodes)

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in FIELDS}
        for field in FIELDS:
            value = from_plain(field, values[field.name], where=f"LaunchConfig.{field.name}")
            msgspec.structs.force_setattr(self, field.name, value)  # a list of GPUs becomes a tuple
        refuse_clash(values, {field.name: f"LaunchConfig.{field.name}" for field in FIELDS})


FIELDS: tuple[Field, ...] = fields_of(LaunchConfig)


def refuse_clash(values: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """Raise `ConfigError` for values that contradict each other; `places` has the source of each field, for the
    message."""
    count, device, ids = values["nproc_per_node"], values["device"], values["gpu_ids"]
    chosen = ids != "all"
    (fewest, most), host = _span(values["nnodes"]), values["node_rank"]
    sizes = mesh_sizes(values["mesh"], where=places["mesh"])
    clashes = (
        (
            chosen and device != "auto" and not device.startswith("cuda"),
            ("gpu_ids", "device"),
            f"GPUs have no effect on {device}",
            "Leave one of them out; gpu_ids is `all` where nothing sets it.",
        ),
        (
            chosen and count != "auto" and count > len(ids),
            ("nproc_per_node", "gpu_ids"),
            "there are more processes than GPUs",
            f"Start at most {len(ids)}, or name more GPUs.",
        ),
        (
            device == "cpu" and values["backend"] == "nccl",
            ("backend", "device"),
            "nccl carries messages between GPUs only",
            "Use gloo, or leave the backend out.",
        ),
        (fewest > most, ("nnodes",), "more hosts at least than at most", "Write the smaller number first."),
        (
            host != "auto" and host >= most,
            ("node_rank", "nnodes"),
            "there is no such host",
            f"Hosts count from 0 to {most - 1}; set nnodes to how many there are.",
        ),
        (
            host != "auto" and fewest != most,
            ("node_rank", "nnodes"),
            "hosts that come and go have no fixed places",
            "Leave node_rank out, or fix the number of hosts.",
        ),
        (
            bool(values["deepspeed"]) and values["strategy"] not in ("auto", "deepspeed"),
            ("deepspeed", "strategy"),
            "options of an engine that is not used",
            "Leave them out, or take the strategy deepspeed.",
        ),
        (
            fewest != most and bool(sizes) and -1 not in sizes.values(),
            ("mesh", "nnodes"),
            "the mesh fits one number of hosts only",
            "Let one of its sizes be -1, or fix the number of hosts.",
        ),
    )
    for clash, names, problem, fix in clashes:
        if clash:
            got = ", ".join(f"{name}={to_text(values[name])}" for name in names)
            raise ConfigError(problem, got=got, where=" and ".join(places[name] for name in names), fix=fix)
    if chosen and len(set(ids)) < len(ids):
        raise ConfigError("a GPU is named twice", got=to_text(ids), where=places["gpu_ids"], fix="Name each once.")


def _span(nnodes: int | str) -> tuple[int, int]:
    fewest, _, most = str(nnodes).partition(":")
    return int(fewest), int(most or fewest)
