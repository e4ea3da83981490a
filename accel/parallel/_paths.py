# SPDX-License-Identifier: Apache-2.0
"""Paths of a model's modules, and the patterns by which plans name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import cast

from torch import nn


def named_modules(model: nn.Module, *, every_path: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model with their paths, the model itself first, as "".

    Args:
        model: the model.
        every_path: whether a module that stands in several places comes with each path; else with its first.
    """
    return cast("Iterator[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=not every_path))


def matching(paths: Iterable[str], pattern: str) -> list[str]:
    """Return the paths that a pattern matches, in which `*` stands for one component."""
    rule = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
    return [path for path in paths if rule.fullmatch(path)]
