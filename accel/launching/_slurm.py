# SPDX-License-Identifier: Apache-2.0
"""A launch as a job of Slurm: a batch script that starts one launcher a node, and its submission."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

from accel.config import FIELDS, LaunchConfig, to_text
from accel.errors import LaunchError
from accel.launching._target import Target

_SETTLED_THERE = {"nnodes", "node_rank", "rdzv_endpoint", "slurm_options"}
# A port that two jobs on a node are unlikely to share.
_ENDPOINT = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000))'


def batch_script(target: Target, config: LaunchConfig, given: Collection[str], *, python: str) -> str:
    """Return a script for `sbatch` that launches on the nodes of the job. No communication.

    Args:
        target: target of every process.
        config: settings of the launch; `nnodes` is the number of nodes to ask for.
        given: names of the fields that are set somewhere; these become flags of the job's launchers.
        python: interpreter of the launchers.
    """
    fewest, most = config.hosts
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={shlex.quote(Path(target.name).stem)}",
        f"#SBATCH --nodes={fewest if fewest == most else f'{fewest}-{most}'}",
        "#SBATCH --ntasks-per-node=1",
    ]
    lines += ["#SBATCH --no-kill"] if fewest != most else []  # the job outlives a node that dies
    lines += [f"#SBATCH {config.slurm_options}"] if config.slurm_options else []
    told = [
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
        f"    {shlex.join([*told, *kind, '--', target.name, *target.args])}",
    ]
    return "\n".join(lines) + "\n"


def submit(script: str, environ: Mapping[str, str]) -> str:
    """Submit a script by `sbatch`; return its output.

    Raises:
        LaunchError: there is no Slurm here, or it refuses the job.
    """
    sbatch = shutil.which("sbatch", path=environ.get("PATH"))
    if sbatch is None:
        raise LaunchError(
            "there is no Slurm here",
            expected="`sbatch` in PATH",
            fix="Submit from a node of the cluster, or see the script with --dry-run.",
        )
    done = subprocess.run([sbatch], input=script, env=dict(environ), capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()).replace("sbatch: error: ", "")
        raise LaunchError("Slurm refuses the job", got=said, fix="--slurm-options says what to ask Slurm for.")
    return done.stdout
