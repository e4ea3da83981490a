# SPDX-License-Identifier: Apache-2.0
"""Tensors as byte ranges of files: boxes of elements with strides, and what concat, split, stack and transpose do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from accel.checkpoint._plan import Box, intersect

_GAP = 32 << 10  # unwanted bytes between two rows that cost less than another request


class StridedPart(msgspec.Struct, frozen=True):
    """A box of a tensor in a file.

    Attributes:
        file: name of the file, or of the tensor whose memory is meant.
        start: byte of the box's first element.
        box: place in the tensor.
        strides: bytes from an element to the next, one a dimension.
    """

    file: str
    start: int
    box: Box
    strides: tuple[int, ...]


class Strided(msgspec.Struct, frozen=True):
    """A tensor in files.

    Attributes:
        dtype: safetensors' name of its dtype, such as "BF16".
        shape: its sizes.
        parts: boxes that together hold each element once.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StridedPart, ...]


class Run(msgspec.Struct, frozen=True):
    """Elements of a part that one read brings, with what lies between them.

    Attributes:
        start: first byte in the file.
        nbytes: bytes from there to the end of the last element.
        box: place in the part.
        strides: bytes from an element to the next, one a dimension.
    """

    start: int
    nbytes: int
    box: Box
    strides: tuple[int, ...]


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of elements in row-major order."""
    sizes = [*shape[1:], itemsize] if shape else []
    return tuple(reversed(list(itertools.accumulate(reversed(sizes), lambda a, b: a * b))))


def in_file(dtype: str, shape: Sequence[int], itemsize: int, file: str, start: int) -> Strided:
    """Return a tensor that one file holds in row-major order from a byte on."""
    box = Box((0,) * len(shape), tuple(shape))
    return Strided(dtype, tuple(shape), (StridedPart(file, start, box, row_major(shape, itemsize)),))


def cut(tensor: Strided, box: Box) -> Strided:
    """Return a box of a tensor as a tensor of its own."""
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
    return concat([_with_dim(tensor, dim) for tensor in tensors], dim)


def unstack(tensor: Strided, dim: int) -> list[Strided]:
    """Cut a tensor into those along a dimension, which falls away."""
    return [_without_dim(each, dim) for each in split(tensor, [1] * tensor.shape[dim], dim)]


def transpose(tensor: Strided, one: int, other: int) -> Strided:
    """Swap two dimensions."""
    order = list(range(len(tensor.shape)))
    order[one] = other
    order[other] = one
    return _permuted(tensor, order)


def file_order(part: StridedPart) -> list[int]:
    """Return the dimensions of a part in the order of its bytes, slowest first."""
    return sorted(range(len(part.strides)), key=lambda dim: (-part.strides[dim], dim))


def is_contiguous(part: StridedPart, itemsize: int) -> bool:
    """Return whether a part's elements follow each other in the file in row-major order."""
    expected = row_major(part.box.shape, itemsize)
    facts = zip(part.box.shape, part.strides, expected, strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in facts)


def runs(shape: Sequence[int], strides: Sequence[int], itemsize: int, most: int, gap: int = _GAP) -> Iterator[Run]:
    """Plan the reads of a strided part.

    Args:
        shape: its sizes.
        strides: bytes from an element to the next, one a dimension, in descending order.
        itemsize: bytes of an element.
        most: largest read in bytes.
        gap: largest number of unwanted bytes between two rows of a read.

    Returns:
        Reads whose boxes hold each element once; `start` counts from the part's first element.
    """
    if not shape:
        yield Run(0, itemsize, Box((), ()), ())
        return
    if 0 in shape:
        return
    inner = itemsize + sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True))
    stride = strides[0]
    if inner > most:
        for at in range(shape[0]):
            for run in runs(shape[1:], strides[1:], itemsize, most, gap):
                box = Box((at, *run.box.offset), (1, *run.box.shape))
                yield Run(at * stride + run.start, run.nbytes, box, (stride, *run.strides))
        return
    step = 1 if stride - inner > gap else 1 + (most - inner) // max(stride, 1)
    for at in range(0, shape[0], step):
        rows = min(step, shape[0] - at)
        box = Box((at,) + (0,) * (len(shape) - 1), (rows, *shape[1:]))
        yield Run(at * stride, inner + (rows - 1) * stride, box, tuple(strides))


def _moved(box: Box, shift: Sequence[int], sign: int) -> Box:
    return Box(tuple(at + sign * by for at, by in zip(box.offset, shift, strict=True)), box.shape)


def _permuted(tensor: Strided, order: Sequence[int]) -> Strided:
    def pick(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[at] for at in order)

    parts = (
        StridedPart(part.file, part.start, Box(pick(part.box.offset), pick(part.box.shape)), pick(part.strides))
        for part in tensor.parts
    )
    return Strided(tensor.dtype, pick(tensor.shape), tuple(parts))


def _with_dim(tensor: Strided, dim: int) -> Strided:
    def put(values: Sequence[int], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim:])

    parts = (
        StridedPart(part.file, part.start, Box(put(part.box.offset, 0), put(part.box.shape, 1)), put(part.strides, 0))
        for part in tensor.parts
    )
    return Strided(tensor.dtype, put(tensor.shape, 1), tuple(parts))


def _without_dim(tensor: Strided, dim: int) -> Strided:
    def drop(values: Sequence[int]) -> tuple[int, ...]:
        return (*values[:dim], *values[dim + 1 :])

    parts = (
        StridedPart(part.file, part.start, Box(drop(part.box.offset), drop(part.box.shape)), drop(part.strides))
        for part in tensor.parts
    )
    return Strided(tensor.dtype, drop(tensor.shape), tuple(parts))
