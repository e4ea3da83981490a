# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints lie: a path of a file system, or the URL of an object store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from accel.errors import ConfigError

_LOCAL = ("file://", "local://")


class RemotePath(msgspec.Struct, frozen=True):
    """A place in a store that fsspec reaches, such as `s3://bucket/run`; used like a path, but it is no path.

    Attributes:
        url: the store's scheme and the place in it, without "/" at the end.
        options: what fsspec passes to the store, such as `{"endpoint_url": ...}`; never shown.

    Raises:
        ConfigError: the URL names no place.
    """

    url: str
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        scheme, mark, inside = self.url.partition("://")
        if not scheme or not mark or not inside.strip("/"):
            raise ConfigError("not a place in a store", expected="a URL such as s3://bucket/run", got=repr(self.url))
        msgspec.structs.force_setattr(self, "url", self.url.rstrip("/"))

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The place that this one lies in, unless it is the first in its store."""
        return RemotePath(self.url.rpartition("/")[0], self.options)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}", self.options)

    def __hash__(self) -> int:
        return hash(self.url)

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"


Place: TypeAlias = Path | RemotePath


def as_place(where: str | os.PathLike[str] | RemotePath) -> Place:
    """Return what a caller named: a text with "://" is a URL, and `file://` one of a path.

    Raises:
        ConfigError: no file system takes it.
    """
    if isinstance(where, RemotePath):
        return where
    text = os.fspath(where)
    if "\0" in text:
        raise ConfigError("a path with a zero byte", expected="a path or URL", got=repr(text))
    if text.startswith(_LOCAL):
        return Path(text.partition("://")[2])
    return RemotePath(text) if isinstance(where, str) and "://" in text else Path(text)
