# SPDX-License-Identifier: Apache-2.0
"""Records among the items, at any depth: asked before a save, and made again in their own classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import accel
from accel.checkpoint import Kept, Making, MisfitError, decode, make_record, named_classes, record_tag, stored_names
from accel.errors import ConfigError
from accel.items._problems import Problems
from accel.random import RngState

_OWN = ("TrainState", "Cursor", "Accumulation", "LossScale", "LocalSgd", "Sum", "Mean", "Key")
_NAMED_SINCE = 4  # the format whose values name the classes of the records in them


@runtime_checkable
class CheckedBeforeSave(Protocol):
    """A record that cannot be saved at every moment."""

    def check_saveable(self) -> None:
        """Raise `ConfigError` unless a checkpoint may be taken now."""
        ...


def check_records(kept: Kept) -> None:
    """Ask every record whether it can be saved now.

    Args:
        kept: the records, by path.

    Raises:
        ConfigError: one of them says no; `where` is its path.
    """
    for path, record in kept.items():
        if isinstance(record, CheckedBeforeSave):
            try:
                record.check_saveable()
            except ConfigError as error:
                facts = {"expected": error.expected, "got": error.got, "fix": error.fix}
                raise ConfigError(error.problem, where=f"item {path}", **facts) from error


def making(kept: Kept, own: Callable[[str, object], object], stored_format: int) -> Making:
    """Return how records are made: of the classes of the live ones, else of accel's.

    Args:
        kept: the live ones, by path.
        own: gives what becomes of a record that is made, by its path.
        stored_format: of the checkpoint.
    """
    classes = _own_classes() | dict(named_classes(map(type, kept.values())))
    return Making(kept=kept, classes=classes, own=own, exact=stored_format >= _NAMED_SINCE)


def compare_fields(name: str, live: object, fields: Mapping[str, Any], problems: Problems) -> None:
    """Note the fields that only a record or only the checkpoint has; what is None there may be no field by now."""
    names = {*stored_names(type(live)), *record_tag(live)}
    gone = {key for key in fields.keys() - names if fields[key] is None}
    if type(live).__module__.partition(".")[0] == "accel":
        names &= fields.keys()  # what an older accel did not know takes its default
    problems.compare_names(names, fields.keys() - gone, f"{name}.")


def make_item(live: object, stored: Mapping[str, Any], name: str, tensors: Mapping[str, Any], making: Making) -> object:
    """Make a record that is an item.

    Raises:
        MisfitError: the live one's class takes no such fields.
        CheckpointError: it is nothing that was saved.
    """
    tag = record_tag(live)
    fields = {key: value for key, value in stored.items() if key not in tag}
    if any(stored.get(key) != value for key, value in tag.items()):
        raise MisfitError(name, expected=str(tag), got=str({key: stored.get(key) for key in tag}))
    where = f"item {name}"
    made = {key: decode(value, where, tensors, f"{name}.{key}", making) for key, value in fields.items()}
    return making.own(name, make_record(type(live), made, name, exact=making.exact))


def _own_classes() -> dict[str, tuple[type, ...]]:
    # by accel's own table of public names, because `TrainState` belongs to a room above this one
    return dict(named_classes([*(getattr(accel, name) for name in _OWN), RngState]))
