# SPDX-License-Identifier: Apache-2.0
"""Plans without tensors: overlaps and tilings of boxes, and the rank that holds, writes or checks each."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

import msgspec

K = TypeVar("K", bound=Any)  # ordered and hashable

_MOST_DIMS = 64
_MOST_SPLIT_DIMS = 8
_MOST_ELEMENTS = 2**59  # of the widest dtype, 16 bytes, these are as many bytes as 63 bits count


class Box(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A part of a tensor without holes."""

    offset: tuple[int, ...]  # its first element in the whole tensor, one index a dimension
    shape: tuple[int, ...]  # its extent

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


NamedBox = tuple[str, Box]  # a tensor's name, and which of its elements


class Split(msgspec.Struct, frozen=True):
    """The split of a tensor along a dimension of a mesh.

    Attributes:
        dim: the tensor's dimension.
        after: number of parts into which later mesh dimensions have split the dimension before; 1 for none. This is
            torch's `split_factor`: parts into which tensor parallelism has already split the dimension.
    """

    dim: int
    after: int = 1


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, None if it is empty."""
    low = tuple(map(max, one.offset, other.offset))
    ends = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    shape = tuple(min(a + n, b + m) - start for start, (a, n, b, m) in zip(low, ends, strict=True))
    return Box(low, shape) if all(extent > 0 for extent in shape) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return a box as an index into the tensor of an outer box."""
    starts = [mine - its for mine, its in zip(box.offset, outer.offset, strict=True)]
    return tuple(slice(start, start + extent) for start, extent in zip(starts, box.shape, strict=True))


def shape_problem(shape: Sequence[int]) -> str:
    """Return the reason why a shape is impossible, "" for none. Fast for any numbers."""
    if len(shape) > _MOST_DIMS:
        return f"has {len(shape)} dimensions, the most is {_MOST_DIMS}"
    if max(shape, default=0) > _MOST_ELEMENTS or math.prod(extent for extent in shape if extent) > _MOST_ELEMENTS:
        return "has more elements than any memory holds"
    return ""


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return the reason why boxes do not tile a tensor of a shape that `shape_problem` accepts; "" if they do."""
    if any(len(box.offset) != len(shape) or len(box.shape) != len(shape) for box in boxes):
        return "has a piece of another number of dimensions"
    if not math.prod(shape):
        return "" if list(boxes) == [whole(shape)] else "has no elements, and is not in one piece"
    for box in boxes:
        sides = zip(box.offset, box.shape, shape, strict=True)
        if any(start < 0 or extent < 1 or start + extent > limit for start, extent, limit in sides):
            return "has a piece that is empty or reaches out of it"
    split = [dim for dim in range(len(shape)) if any(box.shape[dim] != shape[dim] for box in boxes)]
    if len(split) > _MOST_SPLIT_DIMS:
        return f"is split along {len(split)} dimensions, the most is {_MOST_SPLIT_DIMS}"
    corners = _corners(whole(shape), split, 1)
    for box in boxes:
        corners.update(_corners(box, split, -1))
    if any(corners.values()):
        total = sum(box.size for box in boxes)
        return f"has pieces of {total} elements that do not cover its {math.prod(shape)} once each"
    return ""


def local_box(
    shape: Sequence[int], mesh: Sequence[int], place: Sequence[int], splits: Sequence[Split | None]
) -> Box | None:
    """Return the box of a position in a mesh, empty for a rank without elements; None if splits contradict each other.
    `mesh` and `place` have an extent and an index a dimension; `splits` None for copies."""
    offset = [0] * len(shape)
    extents = list(shape)
    for dim in range(len(shape)):
        axes = _order(dim, mesh, splits)
        if axes is None:
            return None
        for axis in axes:
            # rounded up, as in `torch.chunk`: the last ranks may have less, or nothing
            part = -(-extents[dim] // mesh[axis])
            start = min(part * place[axis], extents[dim])
            offset[dim] += start
            extents[dim] = min(part, extents[dim] - start)
    return Box(tuple(offset), tuple(extents))


def plan_writes(
    sizes: Mapping[K, int], holders: Mapping[K, Sequence[int]], world_size: int
) -> tuple[tuple[K, ...], ...]:
    """Divide parts among ranks so that they write about equally many bytes: each part once, at one of its holders. All
    ranks hold parts without an entry in `holders`. If they hold all, ranks differ by the largest part at most."""
    found: list[list[K]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    # parts with one holder first: they have no other place; what all can write evens out the loads at the end
    order = sorted(sizes, key=lambda part: (part not in holders, len(holders.get(part, ())) > 1, -sizes[part], part))
    listed = [part for part in order if part in holders]
    for part in listed:
        rank = min(holders[part], key=lambda rank: (loads[rank], rank))
        found[rank].append(part)
        loads[rank] += sizes[part]
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for part in order[len(listed) :]:
        load, rank = heap[0]
        found[rank].append(part)
        heapq.heapreplace(heap, (load + sizes[part], rank))
    return tuple(tuple(sorted(parts)) for parts in found)


def main_readers(wanted: Sequence[Sequence[int]], ranks: Sequence[int]) -> list[list[int]]:
    """Return the ranks that read at least half as much of a file as any other, by file; none of an unread file."""
    most = [max(of_file) for of_file in zip(*wanted, strict=True)]
    return [
        [rank for rank, mine in zip(ranks, wanted, strict=True) if 2 * mine[at] >= largest] if largest else []
        for at, largest in enumerate(most)
    ]


def plan_checks(counts: Mapping[str, int], readers: Mapping[str, Sequence[int]], rank: int) -> dict[str, range]:
    """Return a rank's share of checking files: consecutive parts of each, by the ranks that read it. Shares of the
    readers of a file differ by at most one part."""
    found: dict[str, range] = {}
    for at, (name, count) in enumerate(sorted(counts.items())):
        shares = len(readers[name])
        if rank in readers[name]:  # files of few parts begin with different readers
            share = (readers[name].index(rank) + at) % shares
            found[name] = range(share * count // shares, (share + 1) * count // shares)
    return found


def _order(dim: int, mesh: Sequence[int], splits: Sequence[Split | None]) -> list[int] | None:
    """Return the mesh dimensions that split a dimension, in order of the splits; None if there is no such order."""
    order: list[int] = []
    for axis in reversed(range(len(mesh))):
        split = splits[axis]
        if split is None or split.dim != dim:
            continue
        position, parts = 0, 1
        while parts < split.after and position < len(order):
            parts *= mesh[order[position]]
            position += 1
        if parts != split.after:
            return None
        order.insert(position, axis)
    return order


def _corners(box: Box, dims: Iterable[int], sign: int) -> Counter[tuple[int, ...]]:
    """Return a box's corners in some dimensions, with the signs of its differences."""
    sides = [((box.offset[dim], 1), (box.offset[dim] + box.shape[dim], -1)) for dim in dims]
    found: Counter[tuple[int, ...]] = Counter()
    for corner in product(*sides):
        found[tuple(at for at, _ in corner)] += sign * math.prod(factor for _, factor in corner)
    return found
