# SPDX-License-Identifier: Apache-2.0
"""Launches as a job of Slurm: the ranks of a node, the checks before a submission, and the batch script."""

from __future__ import annotations

import math
import re
import shlex
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from accel.config import LaunchConfig
from accel.config._schema import to_text
from accel.config._settings import FIELDS
from accel.errors import ConfigError, LaunchError
from accel.launching._target import LaunchTarget
from accel.launching.local._launch_plan import HostPosition, check_mesh, idle_gpus, plan_launch
from accel.launching.local._machine import Gpu, Machine
from accel.system import run_helper
from accel.terminal import show_limit

_SHORT = {"-N": "nodes", "-G": "gpus"}
_GPU_ITEM = re.compile(r"(?:gres[/:])?gpu(?:[:=](.*))?")


class NodeRequest(NamedTuple):
    """The request of a job to Slurm, as far as it decides about ranks."""

    gpus: int | None = None  # GPUs of each node; None if the options do not name a number
    nodes: tuple[int, int] | None = None  # fewest and most nodes; None if the options do not name a number


def read_request(text: str, hosts: tuple[int, int]) -> NodeRequest:
    """Read the options of sbatch, such as "--partition=gpu --gres=gpu:a100:8", for a job of so many hosts."""
    try:
        options = _options(shlex.split(text))
    except ValueError as error:
        raise ConfigError(
            "the options of sbatch cannot be read", got=f"{text}: {error}", where="--slurm-options"
        ) from None
    if (tasks := options.get("ntasks-per-node", "1")) != "1":
        raise LaunchError(
            "one task of Slurm starts all ranks of its node",
            expected="--ntasks-per-node=1, or none",
            got=f"--ntasks-per-node={tasks}",
            where="--slurm-options",
            fix=f"Leave it out, and write `--nproc-per-node {tasks}`.",
        )
    fewest, _, most = options.get("nodes", "").partition("-")
    is_known = fewest.isdecimal() and (most or fewest).isdecimal()
    nodes = (int(fewest), int(most or fewest)) if is_known else None
    gpus = None
    for name in ("gpus-per-node", "gres", "tres-per-node", "gpus-per-task"):
        if gpus is None and name in options:
            gpus = _count_gpus(options[name], is_listed=name in ("gres", "tres-per-node"))
    if gpus is None and "gpus" in options:  # of the whole job
        total, (least, greatest) = _count_gpus(options["gpus"], is_listed=False) or 0, nodes or hosts
        gpus = total // least if least == greatest and total % least == 0 else None
    return NodeRequest(gpus, nodes)


def _options(words: list[str]) -> dict[str, str]:
    """Return the last value of each option by its long name; empty for an option without one."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            found[name] = value
        elif word[:2] in _SHORT:
            name = _SHORT[word[:2]]
            found[name] = word[2:].removeprefix("=")
        elif word.startswith("-"):
            name = ""
        elif name and not found[name]:
            found[name] = word
    return found


def _count_gpus(text: str, *, is_listed: bool) -> int | None:
    """Count the GPUs of "8", "a100:8" or "a100:4,v100:4", or those among other resources; None for no GPUs there."""
    counts: list[int] = []
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        found = _GPU_ITEM.fullmatch(item) if is_listed else None
        if is_listed and found is None:
            continue
        last = (item if found is None else found[1] or "").rpartition(":")[2]
        counts.append(int(last) if last.isdecimal() else 1)  # a kind alone is one of it
    return sum(counts) if counts else None


def plan_job(
    target: LaunchTarget, config: LaunchConfig, given: Collection[str], environ: Mapping[str, str]
) -> tuple[LaunchConfig, str]:
    """Refuse what the launchers of a job would refuse on its nodes, as a launch here does.

    Returns the settings with the ranks of a node as a number, and a line about GPUs that stay idle, or nothing."""
    request = read_request(config.slurm_options, config.hosts)
    if "nproc_per_node" not in given or config.nproc_per_node == "auto":
        config = msgspec.structs.replace(config, nproc_per_node=_count_ranks(config, request))
    # GPUs as the job asks for them: this host may have none, or others.
    gpus = None if request.gpus is None else (Gpu(name="", generation=0),) * request.gpus
    fewest, most = request.nodes or config.hosts
    plan = plan_launch(
        target,
        msgspec.structs.replace(config, bind_cores=False),
        environ={name: value for name, value in environ.items() if name != "CUDA_VISIBLE_DEVICES"},
        machine=Machine(cores=1, gpus=gpus),
        interpreter=(),
        parent_pid=0,
        port=1,
        record_dir="",
        position=HostPosition(num_nodes=fewest),
    )
    for nodes in range(fewest + 1, most + 1):
        check_mesh(config, nodes * len(plan.processes))
    used = len(plan.processes) if _has_gpu_each(config) else int(config.device.startswith("cuda"))
    return config, idle_gpus(request.gpus or 0, used)


def _has_gpu_each(config: LaunchConfig) -> bool:
    """Return whether each process has a separate GPU, if there are GPUs."""
    return config.device in ("auto", "cuda")


def _count_ranks(config: LaunchConfig, request: NodeRequest) -> int:
    """Return the ranks of a node from the GPUs that a job asks for, which the host that submits it does not see."""
    if not _has_gpu_each(config) and not config.device.startswith("xla"):
        return 1
    if config.gpu_ids != "all":
        return len(config.gpu_ids)
    if not request.gpus:
        raise LaunchError(
            "it is unknown how many ranks each node starts",
            expected="--nproc-per-node, or --gpus-per-node or --gres in --slurm-options",
            got="none of them, and the host that submits a job does not see its GPUs",
            fix="Write `--nproc-per-node 8` for nodes of 8 GPUs.",
        )
    return request.gpus


_SUBMIT_S = 120.0  # a busy controller makes `sbatch` try again
_MOST_ANSWER = 1_000_000
_SETTLED_THERE = {"nnodes", "node_rank", "rdzv_endpoint", "slurm_options"}
# A port that two jobs on a node are unlikely to share.
_ENDPOINT = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000))'


def batch_script(
    target: LaunchTarget, config: LaunchConfig, given: Collection[str], *, python: str, has_file: bool = False
) -> str:
    """Return a script for `sbatch` that launches on the job's nodes; fields in `given` become the launchers' flags.

    With `has_file`, some come from a file of settings, which the launchers then need not read again."""
    fewest, most = config.hosts
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={shlex.quote(Path(target.name).stem)}",
        f"#SBATCH --nodes={fewest if fewest == most else f'{fewest}-{most}'}",
        # A task is a launcher, which starts the ranks of its node.
        "#SBATCH --ntasks-per-node=1",
    ]
    lines += ["#SBATCH --no-kill"] if fewest != most else []  # the job outlives a node that dies
    lines += [f"#SBATCH {config.slurm_options}"] if config.slurm_options else []
    options = ["--config=/dev/null"] if has_file else []
    options += [
        f"{field.flag}={to_text(getattr(config, field.name))}"
        for field in FIELDS
        if field.name in given and field.name not in _SETTLED_THERE
    ]
    kind = {"script": [], "module": ["--module"], "program": ["--no-python"]}[target.kind]
    nodes = "$SLURM_NNODES" if fewest == most else f"{fewest}:$SLURM_NNODES"
    endpoint = shlex.quote(config.rdzv_endpoint) if config.rdzv_endpoint else _ENDPOINT
    lines += [
        "",
        f"endpoint={endpoint}",
        "exec srun --kill-on-bad-exit=0 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \\",
        f'    {shlex.join([python, "-m", "accel.cli", "launch"])} --nnodes="{nodes}" --rdzv-endpoint="$endpoint" \\',
        f"    {shlex.join([*options, *kind, '--', target.name, *target.args])}",
    ]
    return "\n".join(lines) + "\n"


def submit(script: str, environ: Mapping[str, str]) -> str:
    """Submit a script by `sbatch`; return its output."""
    sbatch = shutil.which("sbatch", path=environ.get("PATH"))
    if sbatch is None:
        raise LaunchError(
            "there is no Slurm here",
            expected="`sbatch` in PATH",
            fix="Submit from a node of the cluster, or see the script with --dry-run.",
        )
    waits = "SBATCH_WAIT" in environ or re.search(r"(?m)^#SBATCH\b.*\s(--wait|-W)\b", script)  # for the job's end
    ended = run_helper(
        [sbatch],
        limit_s=math.inf if waits else _SUBMIT_S,
        stdin=script.encode(errors="surrogateescape"),
        most_out=_MOST_ANSWER,
        environ=environ,
    )
    if ended.status is None:
        raise LaunchError(
            "Slurm does not answer",
            expected=f"an answer of `sbatch` within {show_limit(_SUBMIT_S)}",
            got=ended.last_line(),
            fix="See with `squeue --me` whether the job was submitted.",
        )
    if ended.status or ended.is_cut:
        answer = " ".join(ended.err.decode(errors="replace").split()).replace("sbatch: error: ", "")
        raise LaunchError("Slurm refuses the job", got=answer, fix="Change the request in --slurm-options.")
    return ended.out.decode(errors="replace")
