# SPDX-License-Identifier: Apache-2.0
"""The settings of a context: keywords over settings before, over the fallbacks of open choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from accel.config import SETTINGS, GroupKeywords, Settings, from_plain
from accel.errors import ConfigError, did_you_mean
from accel.formats import compilation, precision as precision_of
from accel.tree import Container

_CHECKED_ELSEWHERE = ("device", "precision")  # they take values of torch's and records, too


def settle(keywords: Mapping[str, Any], asked: Settings, known: type[GroupKeywords] = GroupKeywords) -> Settings:
    """Return the settings that hold: a keyword beats the setting before, which beats the fallback.

    Args:
        keywords: values by name of the setting; None says nothing.
        asked: settings of the environment, or of a context before.
        known: keywords that have an effect here.

    Raises:
        ConfigError: a keyword's value is outside its range.
        TypeError: there is no such keyword.
    """
    if unknown := sorted(keywords.keys() - known.__annotations__):
        raise TypeError(
            f"unexpected keyword argument {unknown[0]!r}. {did_you_mean(unknown[0], known.__annotations__)}"
        )
    given = {name: value for name, value in keywords.items() if value is not None}
    values = {field.name: getattr(asked, field.name) for field in SETTINGS} | given
    for field in SETTINGS:
        value = values[field.name]
        if field.name in given and field.name not in _CHECKED_ELSEWHERE:
            value = from_plain(field, value, where=f"{field.name}=")
        values[field.name] = field.fallback if value == "auto" else value
    values["precision"] = precision_of(values["precision"])
    values["compile"] = compilation(values["compile"])
    return Settings(**values)


def check_backend(name: str, where: str) -> None:
    """Raise `ConfigError`, with the place that names it, for a backend that this build of torch lacks."""
    if name != "auto" and not dist.is_backend_available(name.lower()):
        raise ConfigError(
            "this build of torch has no such backend",
            expected="gloo, nccl or another that torch.distributed.is_backend_available knows",
            got=repr(name),
            where=where,
        )


def check_containers(containers: Sequence[Container]) -> tuple[Container, ...]:
    """Return kinds of containers as a tuple.

    Raises:
        ConfigError: one of them is no `Container`.
    """
    for container in containers:
        if not isinstance(container, Container):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass classes
            raise ConfigError(
                "not a kind of container",
                expected="accel.Container(kind, take_apart, put_together)",
                got=repr(container),
                where="replace, containers=",
            )
    return tuple(containers)
