# SPDX-License-Identifier: Apache-2.0
"""Tensors with values that a block replaces until its end: no call may save or change them meanwhile.

The block marks the tensors and their memory, by identity and weakly, until its end. The memory is marked too, as a
state dict holds other tensor objects over it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

import torch

from accel.comm._marks import Mark, Marks
from accel.errors import StepError
from accel.tensors import local_part


class _Replacement(NamedTuple):
    """The note of a mark.

    Attributes:
        name: name of the block's function.
        line: line that opens the block.
        steps: whether the block itself steps the tensors.
    """

    name: str
    line: str
    steps: bool


@contextlib.contextmanager
def replaced(tensors: Iterable[torch.Tensor], name: str, line: str, *, steps: bool = False) -> Generator[None]:
    """Mark tensors in this block, which replaces their values and puts them back at its end. Blocks may nest.

    Args:
        tensors: live tensors that get other values.
        name, line: name of the block's function and the line that opens it, for errors.
        steps: whether steps of the tensors belong to the block, so that only saves and loads are refused.
    """
    marks = Marks()
    held = list(tensors)
    memory = [each for each in map(_memory, held) if each is not None]
    for each in (*held, *memory):
        marks.put(each, "replaced", _Replacement(name, line, steps))
    try:
        yield
    finally:
        marks.clear("replaced")


def is_replaced(tensor: torch.Tensor) -> bool:
    """Return whether a block holds other values in a tensor."""
    return next(_blocks(tensor), None) is not None


def refuse_replaced(tensors: Iterable[torch.Tensor], call: str, where: str = "") -> None:
    """Raise `StepError` if a block holds other values in some of these tensors. For steps: no look at their memory.

    Args:
        tensors: live tensors that the call changes.
        call: name of the refused function.
        where: argument or item that holds the tensors.
    """
    tensors = list(tensors)
    if any(map(weakref.getweakrefcount, tensors)):  # 17 ns for each; most parameters have none
        _refuse((block for each in tensors for block in _blocks(each) if not block.steps), call, where)


def refuse_replaced_memory(tensors: Iterable[torch.Tensor], call: str, where: str = "") -> None:
    """Raise `StepError` as `refuse_replaced`, for saves and loads: looks at the memory of the tensors, too."""
    for each in tensors:
        _refuse(_blocks(each), call, where)
        if (memory := _memory(each)) is not None:
            _refuse(_blocks(memory), call, where)


def _refuse(blocks: Iterable[_Replacement], call: str, where: str) -> None:
    for block in blocks:
        raise StepError(
            f"the weights are replaced until the end of a block: leave {block.name} first",
            expected=f"{call} after the block `with {block.line}:`, which puts the weights back",
            got=f"{call} inside of it",
            where=where or call,
            fix=f"End the block `with {block.line}:` before the line that calls {call}.",
        )


def _blocks(record: object) -> Iterator[_Replacement]:
    for each in weakref.getweakrefs(record):
        # An error that someone keeps may hold a mark beyond its block: it counts while its owner has it.
        if (
            isinstance(each, Mark)
            and isinstance(each.note, _Replacement)
            and each.owner.find(record, "replaced") is each
        ):
            yield each.note


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of this rank's part; None of a tensor without one, such as a sparse one."""
    part = local_part(tensor)
    try:
        return part.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
