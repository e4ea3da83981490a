# SPDX-License-Identifier: Apache-2.0
"""Gradients that share memory, as backward passes of compiled functions leave them: each gets its own.

torch keeps the tensor that a backward returns as the gradient, a view too. If two parameters get views of the same
elements, the next backward adds to both through each of them, and so does every pass that scales gradients in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch

from accel.tensors import is_dtensor, local_part

_COMPILED = "CompiledFunctionBackward"  # class of the node that torch makes for each compiled graph


def compiled_leaves(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves without a gradient that a backward from `roots` reaches, if torch has compiled a part of it.

    Without a compiled part the list is empty. Only call it if `has_compiled` is true, because it walks the graph.
    """
    leaves: list[torch.Tensor] = []
    has_compiled_part = False
    for node in _nodes(roots):
        has_compiled_part = has_compiled_part or type(node).__name__ == _COMPILED
        if not node.next_functions and (leaf := getattr(node, "variable", None)) is not None and leaf.grad is None:
            leaves.append(leaf)
    return leaves if has_compiled_part else []


def reaches(root: torch.Tensor, kind: str) -> bool:
    """Return whether a backward from `root` reaches a node of a class. Walks the graph."""
    return any(type(node).__name__ == kind for node in _nodes([root]))


def _nodes(roots: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield the nodes that a backward reaches, each once."""
    waiting: list[Any] = [each.grad_fn for each in roots if each.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def separate_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Give each gradient that shares elements with another its own memory. Mutates `.grad`; no communication.

    Views of one storage without a common element stay, such as the views of DDP's buckets.
    """
    storages: dict[int, list[torch.Tensor]] = {}
    for each in parameters:
        if each.grad is not None and each.grad.layout is torch.strided:
            memory = local_part(each.grad).untyped_storage().data_ptr()
            storages.setdefault(memory, []).append(each)
    for memory, sharing in storages.items():
        if memory and len(sharing) > 1:  # without elements there is no memory
            for each in _overlapping(sharing):
                each.grad = _copied(each)


def _copied(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter's gradient, with the parameter's strides, as DDP's buckets have them."""
    grad = cast(torch.Tensor, parameter.grad)
    return grad.clone() if is_dtensor(grad) else torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)


class _Span(NamedTuple):
    """The part of a storage that holds a gradient."""

    start: int  # its first byte
    end: int  # the byte behind its last
    part: torch.Tensor  # this rank's elements
    parameter: torch.Tensor  # parameter of the gradient

    @property
    def is_dense(self) -> bool:
        """Whether each byte of the span is the gradient's."""
        return self.end - self.start == self.part.nbytes


def _span(parameter: torch.Tensor) -> _Span:
    part = local_part(cast(torch.Tensor, parameter.grad))
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    start = int(part.storage_offset()) * part.itemsize
    return _Span(start, start + (int(last) + 1) * part.itemsize, part, parameter)


def _overlapping(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield parameters with a gradient that shares an element with one before it. All are in one storage."""
    spans = [_span(each) for each in parameters if cast(torch.Tensor, each.grad).numel()]
    reaching: list[_Span] = []  # gradients that stay, as far as they reach into the next span
    for each in sorted(spans, key=lambda span: (span.start, -span.end)):
        reaching = [other for other in reaching if other.end > each.start]
        if any(_share_elements(each, other) for other in reaching):
            yield each.parameter
        else:
            reaching.append(each)


def _share_elements(first: _Span, second: _Span) -> bool:
    """Return whether two gradients with overlapping spans have a common element."""
    if (first.is_dense and second.is_dense) or first.part.itemsize != second.part.itemsize:
        return True
    size = first.part.itemsize
    begin = min(first.start, second.start)
    taken = torch.zeros((max(first.end, second.end) - begin) // size, dtype=torch.bool)
    first_offset, second_offset = (first.start - begin) // size, (second.start - begin) // size
    _ = taken.as_strided(first.part.shape, first.part.stride(), first_offset).fill_(True)
    return bool(taken.as_strided(second.part.shape, second.part.stride(), second_offset).any())
