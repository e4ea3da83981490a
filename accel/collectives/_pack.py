# SPDX-License-Identifier: Apache-2.0
"""Tensors to bytes and back, aligned so that every dtype can be viewed in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from accel.errors import TreeError
from accel.tree import leaves

_ALIGN = 16  # the widest dtype's size


def tensor_leaves(tree: object, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """List the tensors of a tree with their paths.

    Raises:
        TreeError: a leaf that is no tensor, other than None; or a tensor that cannot be sent; by its path.
    """
    found: list[tuple[str, torch.Tensor]] = []
    for path, leaf in leaves(tree):
        if isinstance(leaf, torch.Tensor):
            check_packable(path, leaf, device)
            found.append((path, leaf))
        elif leaf is not None:
            raise TreeError(
                "only tensors are combined over ranks",
                expected="a tensor",
                got=f"{type(leaf).__name__} {leaf!r:.40}",
                where=path,
                fix="Pass torch.as_tensor(...) of numbers and arrays, and leave out what is none.",
            )
    return found


def check_packable(path: str, leaf: torch.Tensor, device: torch.device) -> None:
    """Raise `TreeError` for a tensor that has no plain memory, or lies on neither the CPU nor the rank's device."""
    if leaf.layout is not torch.strided or leaf.is_quantized:
        raise TreeError(
            "a tensor that cannot be sent",
            expected="a dense tensor",
            got=f"{leaf.layout}, quantized={leaf.is_quantized}",
            where=path,
            fix="Send its dense parts.",
        )
    if leaf.device.type != "cpu" and leaf.device != device:
        raise TreeError(
            "a tensor on a device that is not this rank's",
            expected=f"{device} or cpu",
            got=str(leaf.device),
            where=path,
            fix="Move it with .to(ctx.device).",
        )


def describe(leaf: torch.Tensor, *, ragged: bool) -> str:
    """Say dtype, shape and kind of device; the first dimension is left open when it may differ between ranks."""
    shape = list(map(str, leaf.shape))
    if ragged and shape:
        shape[0] = "*"
    place = "" if leaf.device.type == "cpu" else f" on {leaf.device.type}"
    return f"{str(leaf.dtype).removeprefix('torch.')}[{', '.join(shape)}]{place}"


def pack(leaves: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Lay tensors one after another into a new uint8 tensor on a device, each aligned."""
    sizes = [leaf.nbytes for leaf in leaves]
    buffer = torch.zeros(sum(map(_padded, sizes)), dtype=torch.uint8, device=device)
    for leaf, part in zip(leaves, _parts(buffer, sizes), strict=True):
        part.view(leaf.dtype).view(leaf.shape).copy_(leaf.detach())  # copies strides and conjugate views as they read
    return buffer


def unpack(buffer: torch.Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """View the tensors that `pack` laid into a buffer; they share its memory."""
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    parts = _parts(buffer, sizes)
    return [part.view(dtype).view(tuple(shape)) for part, dtype, shape in zip(parts, dtypes, shapes, strict=True)]


def packed_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return how many bytes a tensor takes in a packed buffer."""
    return _padded(dtype.itemsize * math.prod(shape))


def _parts(buffer: torch.Tensor, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    at = 0
    for size in sizes:
        yield buffer[at : at + size]
        at += _padded(size)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
