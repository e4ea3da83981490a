# SPDX-License-Identifier: Apache-2.0
"""What the environment says about this process, read once and checked, as one frozen record.

`read_env` is the only function that knows the names of the variables which make a process a rank. It is pure: a mapping
in, a `LaunchEnv` out, so that a test needs no monkeypatch and two contexts can come from two mappings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from accel.errors import EnvError, check_choice, check_spelling
from accel.formats import PrecisionName

SETTINGS = ("ACCEL_DEVICE", "ACCEL_BACKEND", "ACCEL_PRECISION", "ACCEL_TIMEOUT_S")


class LaunchEnv(msgspec.Struct, frozen=True, kw_only=True):
    """Who this process is in the job, and the settings that came by `ACCEL_*`.

    Attributes:
        rank, world_size: position among all processes.
        local_rank, local_world_size: position among the processes of this node.
        node_rank, num_nodes: position of this node.
        master_addr, master_port: where rank 0 listens for the rendezvous; None without a launcher.
        device, backend, precision, timeout_s: settings, None where the environment says nothing.
        launcher: who set the variables.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    device: str | None = None
    backend: str | None = None
    precision: PrecisionName | None = None
    timeout_s: float | None = None
    launcher: Literal["torchrun", "none"] = "none"


def read_env(environ: Mapping[str, str]) -> LaunchEnv:
    """Read torchrun's variables, or none, and the `ACCEL_*` settings out of a mapping.

    Args:
        environ: variable names to values, `os.environ` or any other mapping.

    Returns:
        The record; a process that no launcher started is rank 0 of 1.

    Raises:
        EnvError: variables contradict each other, are missing beside others, or hold what they cannot mean.
    """
    settings = _settings(environ)
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            if name in environ:
                raise EnvError(
                    "the launcher's variables are incomplete",
                    expected=f"RANK and WORLD_SIZE beside {name}",
                    got=f"{name} without them",
                    where="the environment",
                    fix=f"Start the script with `accel launch` or `torchrun`, or unset {name}.",
                )
        return msgspec.structs.replace(settings, launcher="none")
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE", least=1)
    _below("RANK", rank, "WORLD_SIZE", world_size)
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", least=1, default=world_size)
    if world_size % local_world_size:
        raise EnvError(
            "the processes do not divide into equal nodes",
            expected=f"a LOCAL_WORLD_SIZE that divides WORLD_SIZE={world_size}",
            got=f"LOCAL_WORLD_SIZE={local_world_size}",
            where="the environment",
            fix="Start as many processes on every node.",
        )
    local_rank = _integer(environ, "LOCAL_RANK", default=rank % local_world_size)
    _below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    num_nodes = world_size // local_world_size
    node_rank = _integer(environ, "GROUP_RANK", default=rank // local_world_size)
    _below("GROUP_RANK", node_rank, "the number of nodes", num_nodes)
    return msgspec.structs.replace(
        settings,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=_master_addr(environ, world_size),
        master_port=_integer(environ, "MASTER_PORT", least=1) if world_size > 1 else None,
        launcher="torchrun",
    )


def _settings(environ: Mapping[str, str]) -> LaunchEnv:
    check_spelling(environ, SETTINGS)
    precision = environ.get("ACCEL_PRECISION") or None
    if precision is not None:
        check_choice(precision, get_args(PrecisionName), "unknown precision", where="ACCEL_PRECISION", error=EnvError)
    return LaunchEnv(
        device=environ.get("ACCEL_DEVICE") or None,
        backend=environ.get("ACCEL_BACKEND") or None,
        precision=msgspec.convert(precision, PrecisionName | None),
        timeout_s=_seconds(environ, "ACCEL_TIMEOUT_S"),
    )


def _master_addr(environ: Mapping[str, str], world_size: int) -> str | None:
    if world_size == 1:
        return None
    if not environ.get("MASTER_ADDR"):
        raise EnvError(
            "nobody says where rank 0 listens",
            expected=f"MASTER_ADDR beside WORLD_SIZE={world_size}",
            got="no MASTER_ADDR",
            where="the environment",
            fix="Start the script with `accel launch` or `torchrun`.",
        )
    return environ["MASTER_ADDR"]


def _integer(
    environ: Mapping[str, str], name: str, *, least: int = 0, most: int | None = None, default: int | None = None
) -> int:
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        present = sorted({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & environ.keys())
        raise EnvError(
            "the launcher's variables are incomplete",
            expected=name,
            got=f"{', '.join(present)} without it",
            where="the environment",
            fix=f"Start the script with `accel launch` or `torchrun`, or unset {', '.join(present)}.",
        )
    digits = text.strip()
    value = int(digits) if digits.isdecimal() else -1
    if value < least or (most is not None and value > most):
        raise EnvError(
            "a variable does not hold a usable integer",
            expected=f"an integer of at least {least}" + (f" and at most {most}" if most is not None else ""),
            got=repr(text),
            where=name,
            fix=f"Correct {name}, or let `accel launch` set it.",
        )
    return value


def _below(name: str, value: int, bound_name: str, bound: int) -> None:
    if value >= bound:
        raise EnvError(
            "the environment contradicts itself",
            expected=f"{name} below {bound_name}={bound}",
            got=f"{name}={value}",
            where="the environment",
            fix="Two launchers may have set variables; start from a clean environment.",
        )


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise EnvError(
            "a variable does not hold a usable time",
            expected="seconds, above 0",
            got=repr(text),
            where=name,
            fix=f"Correct or unset {name}.",
        )
    return value
