# SPDX-License-Identifier: Apache-2.0
"""`HostFolder`: the user's name for a folder that each host has on a disk of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass

from accel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HostFolder:
    """A run's folder at the same path on each host, each on a disk of its own: for hosts that share no file system.

    `save_state`, `load_state` and `resume` take it in place of a path. Each host's folder gets what its ranks need to
    load again at the same layout: its shards, and a copy of all that is not sharded. A checkpoint counts once every
    host has committed it. Hosts are the nodes of the context.

    Attributes:
        path: the folder.

    Raises:
        ConfigError: no path, or an empty one.

    Example:
        >>> path = accel.save_state(ctx, accel.HostFolder("runs/local"), {"model": model}, step=3)
        >>> accel.load_state(ctx, accel.HostFolder("runs/local"), {"model": model}).path == path
        True
    """

    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if not _is_path(self.path):
            raise ConfigError("no path", expected="the path of a folder", got=repr(self.path), where="HostFolder")

    def __fspath__(self) -> str:
        return os.fspath(self.path)


def _is_path(given: object) -> bool:
    return isinstance(given, os.PathLike) or (isinstance(given, str) and given != "")
