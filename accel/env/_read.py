# SPDX-License-Identifier: Apache-2.0
"""From a mapping to the record: who this process is, by the launcher that left its variables, and the settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from accel.config import SETTINGS, SOURCES_VARIABLE, from_text
from accel.env._launchers import check_unplaced, find_place
from accel.env._record import LaunchEnv
from accel.env._tpu import pod_hosts
from accel.env._values import integer
from accel.errors import EnvError, check_spelling
from accel.topology import fit_mesh


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
    _ = fit_mesh(env.mesh, env.world_size, where=env.sources.get("mesh", ""), error=EnvError)
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
    check_spelling(environ, [SOURCES_VARIABLE, *(field.variable for field in SETTINGS)])
    told = _told_sources(environ)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for field in SETTINGS:
        if text := environ.get(field.variable):
            place = told.get(f"{field.variable}={text}", field.variable)
            value = from_text(field, text, where=place, error=EnvError)
            if value != field.default:
                values[field.name] = value
                sources[field.name] = place
    return LaunchEnv(**values, sources=sources, tpu_hosts=max(1, len(pod_hosts(environ))))


def _told_sources(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the flags and files behind variables that a launcher has set, by "NAME=value"."""
    try:
        return msgspec.json.decode(environ.get(SOURCES_VARIABLE) or "{}", type=dict[str, str])
    except msgspec.DecodeError as error:
        fix = f"Unset {SOURCES_VARIABLE}: `accel launch` sets it for its ranks."
        raise EnvError("not what a launcher writes", got=str(error), where=SOURCES_VARIABLE, fix=fix) from None
