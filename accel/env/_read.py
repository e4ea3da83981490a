# SPDX-License-Identifier: Apache-2.0
"""From a mapping to the record: who this process is, by the launcher that left its variables, and the settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from accel.env._launchers import check_unplaced, find_place
from accel.env._record import LaunchEnv
from accel.env._tpu import pod_hosts
from accel.env._values import integer, seconds
from accel.errors import EnvError, check_choice, check_spelling
from accel.formats import PrecisionName, StrategyName, precision_fix
from accel.topology import fit_mesh

SETTINGS = (
    "ACCEL_DEVICE",
    "ACCEL_BACKEND",
    "ACCEL_PRECISION",
    "ACCEL_ACCUMULATION",
    "ACCEL_STRATEGY",
    "ACCEL_MESH",
    "ACCEL_TIMEOUT_S",
)


def read_env(environ: Mapping[str, str]) -> LaunchEnv:
    """Read a launcher's variables, or none, and the `ACCEL_*` settings out of a mapping.

    Known are those of `accel launch` and torchrun, Open MPI, MVAPICH, MPICH and Intel MPI, Slurm's `srun`, Kubeflow's
    PyTorchJob, SageMaker, and torch_xla; the first of these that is there counts.

    Args:
        environ: variable names to values, `os.environ` or any other mapping.

    Returns:
        The record; a process that no launcher started is rank 0 of 1.

    Raises:
        EnvError: variables contradict each other, are missing beside others, or hold what they cannot mean.
    """
    env = _with_place(environ, _settings(environ))
    if env.mesh is not None:
        _ = fit_mesh(env.mesh, env.world_size, where="ACCEL_MESH", error=EnvError)
    return env


def _with_place(environ: Mapping[str, str], settings: LaunchEnv) -> LaunchEnv:
    place = find_place(environ)
    if place is None:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            if name in environ:
                raise EnvError(
                    "the launcher's variables are incomplete",
                    expected=f"RANK and WORLD_SIZE beside {name}",
                    got=f"{name} without them",
                    where="the environment",
                    fix=f"Start the script with `accel launch` or `torchrun`, or unset {name}.",
                )
        check_unplaced(environ)
        return settings
    slurms = integer(environ, "SLURM_RESTART_COUNT", default=0) if place.launcher == "slurm" else 0
    restarts = integer(environ, "TORCHELASTIC_RESTART_COUNT", default=slurms)
    return msgspec.structs.replace(settings, restarts=restarts, **place._asdict())


def _settings(environ: Mapping[str, str]) -> LaunchEnv:
    check_spelling(environ, SETTINGS)
    return LaunchEnv(
        device=environ.get("ACCEL_DEVICE") or None,
        backend=environ.get("ACCEL_BACKEND") or None,
        precision=_chosen(environ, "ACCEL_PRECISION", PrecisionName),
        accumulation=integer(environ, "ACCEL_ACCUMULATION", least=1) if environ.get("ACCEL_ACCUMULATION") else None,
        strategy=_chosen(environ, "ACCEL_STRATEGY", StrategyName),
        mesh=environ.get("ACCEL_MESH") or None,
        timeout_s=seconds(environ, "ACCEL_TIMEOUT_S"),
        tpu_hosts=max(1, len(pod_hosts(environ))),
    )


def _chosen(environ: Mapping[str, str], name: str, names: Any) -> Any:
    """Return what a variable says, one of the names of a `Literal`; None if it says nothing."""
    if not (said := environ.get(name)):
        return None
    what = name.removeprefix("ACCEL_").lower()
    fix = precision_fix(said) if names is PrecisionName else ""
    check_choice(said, get_args(names), f"unknown {what}", where=name, error=EnvError, fix=fix)
    return said
