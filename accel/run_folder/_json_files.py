# SPDX-License-Identifier: Apache-2.0
"""Records as JSON files, which a reader finds whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Write a value as JSON so that a reader finds all of it or nothing.

    Args:
        path: the file; its folder must exist, and one process alone writes it.
        value: a record, or what msgspec encodes.

    Raises:
        OSError: the file cannot be written.
    """
    partial = f"{os.fspath(path)}.partial"
    with open(partial, "wb") as file:
        _ = file.write(msgspec.json.encode(value))
    os.replace(partial, path)


def read_json(path: str | os.PathLike[str], type_: type[T]) -> T | None:
    """Return the value of a file of `write_json`; None if there is nothing, or nothing of that type."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=type_)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
