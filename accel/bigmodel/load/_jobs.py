# SPDX-License-Identifier: Apache-2.0
"""Jobs that fill a tensor: bytes straight to its memory where they fit, else chunks that torch copies."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from accel.bigmodel._dtypes import copy_in_range, dtype_of
from accel.checkpoint import Box, Strided, StridedPart, file_order, is_contiguous, runs
from accel.storage import CHUNK, PAGE, Passed, Wanted

_LARGE = 1 << 20  # from here on memory has pages of its own
_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def plan_jobs(
    stored: Strided, target: torch.Tensor, *, name: str, is_shared: bool = False, has_peers: bool = False
) -> Iterator[Wanted | Passed]:
    """Plan the reads that fill a tensor; other dtypes, strides and devices cost a chunk of memory at a time.

    Args:
        stored: the stored tensor, or a box of one.
        target: plain tensor of its shape, of any floating-point dtype for a floating-point one.
        name: its name, for errors.
        is_shared: whether other processes of the host read the same elements.
        has_peers: whether other processes of the host read elements that lie between these.
    """
    dtype = dtype_of(stored.dtype)
    plain = target.device.type == "cpu" and target.dtype == dtype != torch.bool
    with torch.no_grad():
        torch.autograd.graph.increment_version(target)
        for part in stored.parts:
            inside = target.detach()[_index(part.box)]
            if not inside.numel():
                continue
            if plain and inside.is_contiguous() and is_contiguous(part, dtype.itemsize):
                yield Wanted(part.file, part.start, inside.nbytes, inside.data_ptr(), is_shared)
            else:
                yield from _passes(part, inside, dtype, partial(copy_in_range, name=name), is_shared, has_peers)


def plan_comparison(stored: Strided, target: torch.Tensor, differs: Callable[[], object]) -> Iterator[Passed]:
    """Plan the reads that compare a CPU tensor with a stored one; calls `differs` for each read that differs."""
    dtype = dtype_of(stored.dtype)
    for part in stored.parts:
        inside = target.detach()[_index(part.box)]
        if inside.numel():
            yield from _passes(part, inside, dtype, lambda view, read: view.equal(read.to(view)) or differs())


def new_memory(shape: Sequence[int], dtype: torch.dtype, page_offset: int | None) -> torch.Tensor:
    """Return an empty CPU tensor that begins as many bytes into a page as its file's bytes do."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < _LARGE or page_offset is None or page_offset % dtype.itemsize:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, page_offset + nbytes, flags=_OWN)  # the default is shared with forks, and slower
    return torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=page_offset).view(tuple(shape))


def page_offset(stored: Strided, itemsize: int) -> int | None:
    """Return how far into a page a stored tensor begins; None unless it is one range of bytes."""
    if len(stored.parts) != 1 or not is_contiguous(stored.parts[0], itemsize):
        return None
    return stored.parts[0].start % PAGE


def _passes(
    part: StridedPart,
    target: torch.Tensor,
    dtype: torch.dtype,
    use: Callable[[torch.Tensor, torch.Tensor], object],
    is_shared: bool = False,
    has_peers: bool = False,
) -> Iterator[Passed]:
    """Plan reads in the order of the file; `use` gets each with the part of the target that it is for."""
    order = file_order(part)
    view = target.permute(order) if order else target
    strides = [part.strides[dim] for dim in order]
    for run in runs(tuple(view.shape), strides, dtype.itemsize, CHUNK):
        take = partial(_take, use, view[_index(run.box)], dtype, run.strides)
        others = has_peers and run.nbytes > run.box.size * dtype.itemsize
        yield Passed(part.file, part.start + run.start, run.nbytes, take, is_shared or others)


def _take(
    use: Callable[[torch.Tensor, torch.Tensor], object],
    inside: torch.Tensor,
    dtype: torch.dtype,
    strides: Sequence[int],
    memory: memoryview,
) -> None:
    with torch.no_grad():
        _ = use(inside, _elements(memory, dtype, tuple(inside.shape), strides))


def _elements(memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...], strides: Sequence[int]) -> torch.Tensor:
    """Return bytes of a file as a tensor, on the same memory where its alignment allows that."""
    read = torch.frombuffer(memory, dtype=torch.uint8)
    if dtype == torch.bool:  # a byte that is neither 0 nor 1 would be a bool that is neither true nor false
        read = read.ne(0)
    elif read.data_ptr() % dtype.itemsize:
        read = read.clone().view(dtype)
    else:
        read = read.view(dtype)
    return read.as_strided(shape, [stride // dtype.itemsize for stride in strides])


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
