# SPDX-License-Identifier: Apache-2.0
"""From a mapping to the record: the place by the launcher that left its variables, and the settings."""

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
from accel.topology import fit_axes


def read_env(environ: Mapping[str, str]) -> LaunchEnv:
    """Read a launcher's variables, or none, and the `ACCEL_*` settings out of a mapping.

    Known are those of `accel launch` and torchrun, Open MPI, MVAPICH, MPICH and Intel MPI, Slurm's `srun`, Kubeflow's
    PyTorchJob, SageMaker, and torch_xla; the first of these that is there counts.

    Args:
        environ: variable names to values, `os.environ` or any other mapping.

    Returns:
        The record; rank 0 of 1 for a process that no launcher started.

    Raises:
        EnvError: variables contradict each other, are missing beside others, or hold what they cannot mean.
    """
    values, sources = _settings(environ)
    place = find_place(environ) or _alone(environ)
    by_slurm = integer(environ, "SLURM_RESTART_COUNT", default=0) if place.launcher == "slurm" else 0
    restarts = integer(environ, "TORCHELASTIC_RESTART_COUNT", default=by_slurm) if place.launcher != "none" else 0
    hosts = max(1, len(pod_hosts(environ)))
    env = msgspec.structs.replace(place, **values, sources=sources, restarts=restarts, tpu_hosts=hosts)
    _ = fit_axes(env.mesh, env.world_size, where=sources.get("mesh", ""), error=EnvError)
    return env


def _alone(environ: Mapping[str, str]) -> LaunchEnv:
    """Return the place of a process that no launcher started.

    Raises:
        EnvError: variables of a launcher are there all the same.
    """
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
    return LaunchEnv()


def _settings(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings that variables hold, and the place where the user wrote each."""
    check_spelling(environ, [SOURCES_VARIABLE, *(field.variable for field in SETTINGS)])
    places = _launcher_sources(environ)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for field in SETTINGS:
        text = environ.get(field.variable, "")
        place = places.get(f"{field.variable}={text}", field.variable)
        value = from_text(field, text, where=place, error=EnvError) if text else field.default
        if value != field.default:
            values[field.name] = value
            sources[field.name] = place
    return values, sources


def _launcher_sources(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the flags and files behind variables that a launcher has set, by "NAME=value"."""
    try:
        return msgspec.json.decode(environ.get(SOURCES_VARIABLE) or "{}", type=dict[str, str])
    except msgspec.DecodeError as error:
        fix = f"Unset {SOURCES_VARIABLE}: `accel launch` sets it for its ranks."
        raise EnvError("not what a launcher writes", got=str(error), where=SOURCES_VARIABLE, fix=fix) from None
