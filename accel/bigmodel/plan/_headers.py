# SPDX-License-Identifier: Apache-2.0
"""The skeleton of a checkpoint, guessed from the names of its tensors; no model is built."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from accel.bigmodel.plan._skeleton import Segment, Skeleton
from accel.bigmodel.plan._weight import Weight

_BLOCK = re.compile(r"((?:.*?\.)?[0-9]+)\.")
_NUMBERS = re.compile(r"([0-9]+)")
_SMALL_BYTES = 2**20  # modules beside the blocks that do not stream


class Entry(Protocol):
    """Shape and safetensors' dtype of a stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


def guess_skeleton(entries: Mapping[str, Entry]) -> Skeleton:
    """Return the skeleton of a model whose checkpoint holds these tensors. Pure.

    Names up to their first number, such as "model.layers.7", are taken for blocks, and other tensors for modules by
    their path. Segments stand in the order of their names with numbers as numbers. Names tell no order of execution, no
    embeddings, no ties and no buffers that are not stored: describe the model where it can be built.

    Args:
        entries: stored tensors by name.
    """
    groups: dict[str, list[Weight]] = {}
    blocks = set[str]()
    for name, entry in entries.items():
        match = _BLOCK.match(name)
        path = name.rpartition(".")[0] if match is None else match[1]
        blocks |= {path} if match is not None else set()
        groups.setdefault(path, []).append(Weight(name=name, shape=entry.shape, dtype=entry.dtype))
    segments: list[Segment] = []
    for path in sorted(groups, key=_natural):
        large = sum(weight.memory for weight in groups[path]) >= _SMALL_BYTES
        movable = path in blocks or (large and path != "")
        segments.append(Segment(name=path, weights=tuple(groups[path]), movable=movable))
    return Skeleton(segments=tuple(segments))


def _natural(name: str) -> list[tuple[int, str]]:
    parts = _NUMBERS.split(name)
    return [(int(part), "") if at % 2 else (-1, part) for at, part in enumerate(parts)]
