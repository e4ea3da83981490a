# SPDX-License-Identifier: Apache-2.0
"""From a mapping to the record: the place by the launcher's variables, the settings, and where ranks meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from accel.config._schema import from_text
from accel.config._settings import COLUMNS_VARIABLE, SETTINGS, SOURCES_VARIABLE
from accel.env._launch_env import LaunchEnv, integer
from accel.env._launchers import check_unplaced, find_place, pod_hosts
from accel.errors import ConfigError, EnvError
from accel.errors._checks import check_spelling
from accel.topology import fit_axes


def with_meeting(environ: Mapping[str, str], init_method: str) -> Mapping[str, str]:
    """Return a launcher's variables with the address of an `init_method`, or raise `ConfigError` for an invalid one."""
    host, port = _address(init_method)
    return {**environ, "MASTER_ADDR": host, "MASTER_PORT": str(port)}


def meeting_file(init_method: str) -> str | None:
    """Return the path of the file that an `init_method` names; None if it names none."""
    return unquote(urlsplit(init_method).path) if init_method.startswith("file://") else None


def _address(init_method: str) -> tuple[str, int]:
    """Return host and port; of a file, placeholders."""
    try:
        parts = urlsplit(init_method)
        host, port = parts.hostname or "", parts.port or 0
    except (ValueError, AttributeError, TypeError) as error:
        raise _no_meeting(init_method) from error
    bare = not parts.query and not parts.fragment
    if parts.scheme == "tcp" and bare and host and port and parts.path in ("", "/"):
        return host, port
    if parts.scheme == "file" and bare and not parts.netloc and len(parts.path) > 1:
        return "localhost", 1  # ranks meet in the file; the variables need an address all the same
    raise _no_meeting(init_method)


def _no_meeting(init_method: object) -> ConfigError:
    return ConfigError(
        "the rendezvous address is not valid",
        expected='"env://", "tcp://HOST:PORT" or "file:///PATH"',
        got=repr(init_method),
        where="init_method=",
        fix="Ranks are numbered by the launcher: set RANK and WORLD_SIZE.",
    )


def read_env(environ: Mapping[str, str], *, init_method: str | None = None) -> LaunchEnv:
    """Read a launcher's variables, or none, and the `ACCEL_*` settings out of a mapping.

    The known launchers are `accel launch`, torchrun, Open MPI, MVAPICH, MPICH, Intel MPI, Slurm's `srun`, Kubeflow's
    PyTorchJob, SageMaker, and torch_xla; the first of these that is there counts.

    Args:
        environ: variable names to values, `os.environ` or any other mapping.
        init_method: place where ranks meet instead of the variables' address, as for `from_env`.

    Returns:
        The record; rank 0 of 1 for a process that no launcher started.

    Raises:
        EnvError: variables contradict each other, are missing although others are set, or have invalid values.
        ConfigError: an `init_method` that names no such place.
    """
    values, sources = _settings(environ)
    if init_method not in (None, "", "env://"):
        environ = with_meeting(environ, init_method)
        values["init_method"] = init_method
    place = find_place(environ) or _alone(environ)
    by_slurm = integer(environ, "SLURM_RESTART_COUNT", default=0) if place.launcher == "slurm" else 0
    restarts = integer(environ, "TORCHELASTIC_RESTART_COUNT", default=by_slurm) if place.launcher != "none" else 0
    hosts = max(1, len(pod_hosts(environ)))
    columns = integer(environ, COLUMNS_VARIABLE, default=0)
    facts = {"sources": sources, "restarts": restarts, "tpu_hosts": hosts, "columns": columns}
    env = msgspec.structs.replace(place, **values, **facts)
    _ = fit_axes(env.mesh, env.world_size, where=sources.get("mesh", ""), error=EnvError)
    return env


def _alone(environ: Mapping[str, str]) -> LaunchEnv:
    """Return the place of a process that no launcher started, or raise `EnvError` if a launcher's variables are set."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name in environ:
            raise EnvError(
                "the launcher's variables are incomplete",
                expected=f"RANK and WORLD_SIZE together with {name}",
                got=f"{name} without them",
                where="the environment",
                fix=f"Start the script with `accel launch` or `torchrun`, or unset {name}.",
            )
    check_unplaced(environ)
    return LaunchEnv()


def _settings(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings that variables hold, and the place where the user wrote each."""
    check_spelling(environ, [COLUMNS_VARIABLE, SOURCES_VARIABLE, *(field.variable for field in SETTINGS)])
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
    except (msgspec.DecodeError, RecursionError) as error:
        fix = f"Unset {SOURCES_VARIABLE}: `accel launch` sets it for its ranks."
        raise EnvError("the launcher's value is not valid", got=str(error), where=SOURCES_VARIABLE, fix=fix) from None
