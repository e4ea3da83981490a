# SPDX-License-Identifier: Apache-2.0
"""The source of accel, parsed once for all tests of its rules."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from uncollected import no_collections

ACCEL = Path(__file__).parents[2] / "accel"


def walked(text: str) -> list[Any]:
    """The nodes of a source, its module first."""
    return [*ast.walk(ast.parse(text))]


@functools.cache
def source_nodes() -> Mapping[Path, Sequence[Any]]:
    """The nodes of each file, by its path: no dict, in which `accel.fakes` would look for tensors at each trace."""
    with no_collections():
        return MappingProxyType({path: walked(path.read_text()) for path in sorted(ACCEL.rglob("*.py"))})
