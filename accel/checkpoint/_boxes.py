# SPDX-License-Identifier: Apache-2.0
"""Plans without tensors: overlaps and tilings of boxes, the rank that holds, writes or checks each, and their bytes in
files."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

import msgspec

K = TypeVar("K", bound=Any)  # ordered and hashable

_MOST_DIMS = 64
_MOST_SPLIT_DIMS = 8
_GAP = 32 << 10  # unwanted bytes between two rows that cost less than another request
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


class StridedPart(msgspec.Struct, frozen=True):
    """A box of a tensor in a file."""

    file: str  # name of the file, or of a tensor in memory
    start: int  # byte of the box's first element
    box: Box  # place in the tensor
    strides: tuple[int, ...]  # bytes from an element to the next, one a dimension


class Strided(msgspec.Struct, frozen=True):
    """A tensor in files."""

    dtype: str  # safetensors' name of its dtype, such as "BF16"
    shape: tuple[int, ...]  # its sizes
    parts: tuple[StridedPart, ...]  # boxes that together hold each element once


class ElementRun(msgspec.Struct, frozen=True):
    """Elements of a part that one read brings, with the elements between them."""

    start: int  # first byte in the file
    nbytes: int  # bytes from there to the end of the last element
    box: Box  # place in the part
    strides: tuple[int, ...]  # bytes from an element to the next, one a dimension


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of elements in row-major order."""
    sizes = [*shape[1:], itemsize] if shape else []
    return tuple(reversed(list(itertools.accumulate(reversed(sizes), lambda a, b: a * b))))


def in_file(dtype: str, shape: Sequence[int], itemsize: int, file: str, start: int) -> Strided:
    """Return a tensor that one file holds in row-major order from a byte on."""
    box = Box((0,) * len(shape), tuple(shape))
    return Strided(dtype, tuple(shape), (StridedPart(file, start, box, row_major(shape, itemsize)),))


def cut(tensor: Strided, box: Box) -> Strided:
    """Return a box of a tensor as a separate tensor."""
    found: list[StridedPart] = []
    for part in tensor.parts:
        shared = intersect(part.box, box)
        if shared is not None:
            skipped = zip(shared.offset, part.box.offset, part.strides, strict=True)
            start = part.start + sum((at - first) * stride for at, first, stride in skipped)
            found.append(StridedPart(part.file, start, _moved(shared, box.offset, -1), part.strides))
    return Strided(tensor.dtype, box.shape, tuple(found))


def concat(tensors: Sequence[Strided], dim: int) -> Strided:
    """Join tensors along a dimension; the other sizes are equal."""
    parts: list[StridedPart] = []
    length = 0
    for tensor in tensors:
        shift = tuple(length if at == dim else 0 for at in range(len(tensor.shape)))
        parts += [msgspec.structs.replace(part, box=_moved(part.box, shift, 1)) for part in tensor.parts]
        length += tensor.shape[dim]
    first = tensors[0]
    return Strided(first.dtype, (*first.shape[:dim], length, *first.shape[dim + 1 :]), tuple(parts))


def split(tensor: Strided, sizes: Sequence[int], dim: int) -> list[Strided]:
    """Cut a tensor along a dimension; the sizes add up to its own."""
    found: list[Strided] = []
    start = 0
    for size in sizes:
        offset = tuple(start if at == dim else 0 for at in range(len(tensor.shape)))
        found.append(cut(tensor, Box(offset, (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))))
        start += size
    return found


def stack(tensors: Sequence[Strided], dim: int) -> Strided:
    """Join tensors of one shape along a new dimension."""

    def widened(tensor: Strided) -> Strided:
        return _reshaped(tensor, lambda values, added: (*values[:dim], added, *values[dim:]))

    return concat([widened(tensor) for tensor in tensors], dim)


def unstack(tensor: Strided, dim: int) -> list[Strided]:
    """Cut a tensor into those along a dimension, which falls away."""
    pieces = split(tensor, [1] * tensor.shape[dim], dim)
    return [_reshaped(piece, lambda values, _: (*values[:dim], *values[dim + 1 :])) for piece in pieces]


def transpose(tensor: Strided, one: int, other: int) -> Strided:
    """Swap two dimensions."""
    order = list(range(len(tensor.shape)))
    order[one] = other
    order[other] = one
    return _reshaped(tensor, lambda values, _: tuple(values[at] for at in order))


def file_order(part: StridedPart) -> list[int]:
    """Return the dimensions of a part in the order of its bytes, slowest first."""
    return sorted(range(len(part.strides)), key=lambda dim: (-part.strides[dim], dim))


def is_contiguous(part: StridedPart, itemsize: int) -> bool:
    """Return whether a part's elements follow each other in the file in row-major order."""
    expected = row_major(part.box.shape, itemsize)
    facts = zip(part.box.shape, part.strides, expected, strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in facts)


def runs(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, most: int, gap: int = _GAP
) -> Iterator[ElementRun]:
    """Plan the reads of a strided part: boxes that hold each element once, of at most `most` bytes a read. `strides`
    descend; `gap` is the most unwanted bytes between two rows of a read."""
    if not shape:
        yield ElementRun(0, itemsize, Box((), ()), ())
        return
    if 0 in shape:
        return
    inner = itemsize + sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True))
    stride = strides[0]
    # a row alone exceeds a read: its inner rows are planned in turn
    if inner > most:
        for at in range(shape[0]):
            for run in runs(shape[1:], strides[1:], itemsize, most, gap):
                box = Box((at, *run.box.offset), (1, *run.box.shape))
                yield ElementRun(at * stride + run.start, run.nbytes, box, (stride, *run.strides))
        return
    # bytes of a small gap cost less than one more request
    step = 1 if stride - inner > gap else 1 + (most - inner) // max(stride, 1)
    for at in range(0, shape[0], step):
        rows = min(step, shape[0] - at)
        box = Box((at,) + (0,) * (len(shape) - 1), (rows, *shape[1:]))
        yield ElementRun(at * stride, inner + (rows - 1) * stride, box, tuple(strides))


def _moved(box: Box, shift: Sequence[int], sign: int) -> Box:
    return Box(tuple(at + sign * by for at, by in zip(box.offset, shift, strict=True)), box.shape)


def _reshaped(tensor: Strided, change: Callable[[Sequence[int], int], tuple[int, ...]]) -> Strided:
    """Change the dimensions of a tensor and its parts: `change` takes a value for each, and the value for a new one."""
    parts = (
        StridedPart(
            part.file,
            part.start,
            Box(change(part.box.offset, 0), change(part.box.shape, 1)),
            change(part.strides, 0),
        )
        for part in tensor.parts
    )
    return Strided(tensor.dtype, change(tensor.shape, 1), tuple(parts))
