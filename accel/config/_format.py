# SPDX-License-Identifier: Apache-2.0
"""The format of our files: its number, what changed from one to the next, and older files in the present one.

A file says `format = 1`; one that says nothing is of format 0. A format whose keys are those of the present one is read
as it is; `accel config update` rewrites the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from accel.config._record import FIELDS
from accel.config._schema import from_plain
from accel.errors import ConfigError, did_you_mean

FORMAT_KEY = "format"
_FOREIGN = ("compute_environment", "distributed_type", "mixed_precision", "num_processes")  # keys of Accelerate's files


class FormatChange(msgspec.Struct, frozen=True, kw_only=True):
    """The change of keys from one format to the next.

    Attributes:
        renamed: pairs of an old key and its new name.
        removed: pairs of an old key and the reason why nothing takes its place.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    removed: tuple[tuple[str, str], ...] = ()


# CHANGES[n] leads from format n to n + 1. A renamed or removed key gets an entry in a new last element.
CHANGES: tuple[FormatChange, ...] = (FormatChange(),)  # format 1: files have the key `format`


class Updated(NamedTuple):
    """The values of a file in the present format, and a line for each change."""

    values: dict[str, Any]
    changes: tuple[str, ...]


def take_format(
    values: Mapping[str, Any], path: str, changes: Sequence[FormatChange] = CHANGES
) -> tuple[int, dict[str, Any]]:
    """Return the format of a file, and its values without it.

    Raises:
        ConfigError: it is no format, or one of a newer release.
    """
    rest = dict(values)
    given = rest.pop(FORMAT_KEY, 0)
    if type(given) is not int or not 0 <= given <= len(changes):
        raise ConfigError(
            "a file of a newer release" if type(given) is int and given > len(changes) else "not a format of files",
            expected=f"{FORMAT_KEY} = {len(changes)} at most",
            got=repr(given),
            where=path,
            fix="Update accel, or write the file anew with `accel config`.",
        )
    return given, rest


def is_old(key: str, changes: Sequence[FormatChange] | None = None) -> bool:
    """Return whether a key is one of an older format."""
    changes = CHANGES if changes is None else changes
    return any(key in dict(change.renamed) or key in dict(change.removed) for change in changes)


def update_values(values: Mapping[str, Any], path: str, changes: Sequence[FormatChange] = CHANGES) -> Updated:
    """Return a file's values in the present format. No communication.

    Args:
        values: keys and decoded values of a file of any format.
        path: its name, for messages.
        changes: change from each format to the next.

    Raises:
        ConfigError: it is of a newer release; or what cannot be mapped, all of it.
    """
    given, found = take_format(values, path, changes)
    told: list[str] = []
    problems: list[str] = []
    for change in changes[given:]:
        for old, new in change.renamed:
            if old in found and new in found:
                problems.append(f"{old!r} and its new name {new!r} are both set")
            elif old in found:
                found = {new if key == old else key: value for key, value in found.items()}
                told.append(f"{old} is now {new}")
        for old, why in change.removed:
            if old in found:
                told.append(f"{old} = {found.pop(old)!r} is gone: {why}")
    fields = {field.name: field for field in FIELDS}
    for key in list(found):
        if (same := key.replace("-", "_").lower()) != key and same in fields and same not in found:  # as in a flag
            found = {same if name == key else name: value for name, value in found.items()}
            told.append(f"{key} is now {same}")
    for key, value in found.items():
        if key not in fields:
            problems.append(f"{key!r} is no key: {did_you_mean(key, fields)}".rstrip("."))
            continue
        try:
            _ = from_plain(fields[key], value, where=f"key {key}")
        except ConfigError as error:
            problems.append(str(error).rstrip("."))
    if problems:
        foreign = any(key in _FOREIGN for key in found)
        raise ConfigError(
            "keys that cannot be mapped",
            got="; ".join(problems),
            where=path,
            fix=f"Turn one of Accelerate's into ours with `accel config import {path}`." if foreign else "",
        )
    if given < len(changes):
        told.append(f"{FORMAT_KEY} = {len(changes)}, from {given or 'none'}")
    return Updated(found, tuple(told))
