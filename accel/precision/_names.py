# SPDX-License-Identifier: Apache-2.0
"""Submodules by name and by pattern."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from accel.errors import ConfigError, did_you_mean


def submodules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List submodules with their names; first the model itself, named ""."""
    return list(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))


def matched(model: nn.Module, patterns: Sequence[str], where: str) -> set[str]:
    """Return the names of submodules that match a pattern, and of those inside them; of a shared one, the first name.

    Args:
        model: without wrappers.
        patterns: names with `*` for any text, such as "blocks.*.router".
        where: for errors.

    Raises:
        ConfigError: a pattern without a match.
    """
    every = list(cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False)))
    names = [name for name, _ in every if name]
    found: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise ConfigError(
                "no submodule has such a name",
                expected=f"a name in {type(model).__name__}",
                got=repr(pattern),
                where=where,
                fix=did_you_mean(pattern, names) if names else "Leave it out.",
            )
        found.update(hits)
    inside = {id(module) for name, module in every if any(f"{name}.".startswith(f"{hit}.") for hit in found)}
    return {name for name, module in submodules(model) if id(module) in inside}
