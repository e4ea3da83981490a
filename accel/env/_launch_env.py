# SPDX-License-Identifier: Apache-2.0
"""The record of a launch's environment, and variables as numbers, or an error that names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from accel.config._settings import Settings
from accel.errors import EnvError


class LaunchEnv(Settings, frozen=True, kw_only=True):
    """This process's place in the job, and the settings that came by `ACCEL_*`.

    Attributes:
        device, precision, accumulation, strategy, mesh, backend, timeout_s: settings; "auto", or an empty mesh, where
            the environment sets none.
        rank, world_size: position among all processes.
        local_rank, local_world_size: position among the processes of this node.
        node_rank, num_nodes: position of this node.
        master_addr, master_port: address where rank 0 listens for the rendezvous; None without a launcher.
        init_method: place where ranks meet, as torch's: "tcp://HOST:PORT" or "file:///PATH"; "" for the launcher's
            address.
        restarts: number of times that the launcher, or Slurm, has started the job again.
        launcher: program that set the variables.
        tpu_hosts: hosts of this machine's TPU slice, as far as variables name them.
        columns: columns of the launcher's terminal for a line of this process, which it redraws; 0 without one.
        sources: for each setting of the environment the place where the user wrote it: a variable, or a flag or file
            of `accel launch`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    init_method: str = ""
    restarts: int = 0
    launcher: Literal[
        "torchrun", "slurm", "openmpi", "mpich", "mvapich", "kubernetes", "sagemaker", "torch_xla", "none"
    ] = "none"
    tpu_hosts: int = 1
    columns: int = 0
    sources: Mapping[str, str] = {}


def integer(
    environ: Mapping[str, str],
    name: str,
    *,
    least: int = 0,
    most: int | None = None,
    default: int | None = None,
    related: Iterable[str] = (),
) -> int:
    """Return the integer of a variable, from `least` to `most`; a missing or invalid one is an `EnvError`.

    A `default` of None: the variable must be set. `related` are variables that come with it, for the error.
    """
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        present = sorted(set(related) & environ.keys())
        raise EnvError(
            "the launcher's variables are incomplete",
            expected=name,
            got=f"{', '.join(present)} without it",
            where="the environment",
            fix=f"Start the script with `accel launch` or `torchrun`, or unset {', '.join(present)}.",
        )
    digits = text.strip()
    value = int(digits) if digits.isdecimal() and len(digits) <= 20 else -1  # int() refuses thousands of digits
    if value < least or (most is not None and value > most):
        raise EnvError(
            "a variable does not hold a usable integer",
            expected=f"an integer of at least {least}" + (f" and at most {most}" if most is not None else ""),
            got=repr(text),
            where=name,
            fix=f"Correct {name}, or let `accel launch` set it.",
        )
    return value


def below(name: str, value: int, bound_name: str, bound: int) -> None:
    """Raise `EnvError` for a position that is not below the number of positions."""
    if value >= bound:
        raise EnvError(
            "the environment contradicts itself",
            expected=f"{name} below {bound_name}={bound}",
            got=f"{name}={value}",
            where="the environment",
            fix="Two launchers may have set variables; start from a clean environment.",
        )
