# SPDX-License-Identifier: Apache-2.0
"""State of torch.compile that the threads of a process share, and blocks in which functions run as they are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable
from functools import partial
from typing import Any, NamedTuple, cast

import torch


class CompilerState(NamedTuple):
    """State of torch.compile in the process."""

    stance: Any  # of torch.compiler.set_stance; None if nobody has compiled anything yet
    breaks_are_errors: bool = False  # as in a block of `torch._dynamo.error_on_graph_break(True)`


def compiler_state() -> CompilerState:
    """Return the state of torch.compile."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return CompilerState(None)
    return CompilerState(frames._stance, frames._get_error_on_graph_break())


def set_compiler_state(state: CompilerState) -> None:
    """Set the state of torch.compile to one that `compiler_state` returned."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None:
        frames._stance = frames.DynamoStance() if state.stance is None else state.stance
        frames._set_error_on_graph_break(state.breaks_are_errors)


class _Uncompiled:
    """A stance of torch.compile that runs functions as they are, everywhere or in one backward.

    torch calls nothing at the end of a backward that fails. This stance stays then, and is the one before.
    """

    def __init__(self, before: Any, *, of_model: bool, backward: int | None = None) -> None:
        self.before = before
        self.of_model = of_model
        self.backward = backward

    @property
    def is_active(self) -> bool:
        """Whether functions run as they are now."""
        return self.backward is None or self.backward == _number_of_backward()

    @property
    def stance(self) -> str:
        """The name of the stance, as torch reads it."""
        return "force_eager" if self.is_active else self.before.stance

    def __getattr__(self, name: str) -> Any:
        return getattr(self.before, name)


@contextlib.contextmanager
def uncompiled(*, of_model: bool = False) -> Generator[None]:
    """Let functions that torch compiles by themselves run as they are, except in blocks of `compiled`.

    Parts of tensors report other sizes than they have in memory, and torch.compile cannot guard on them: a model that
    calls such a function runs it on parts. So does a backward that computes a part of such a model again, see
    `uncompiled_in_backward`. `of_model`: whether this is a model's forward; one in another, or in a backward, changes
    nothing.
    """
    before = _stance()
    if before is None or (of_model and _runs_uncompiled_model(before)):
        yield
        return
    with _stance_set(_Uncompiled(before, of_model=of_model)):
        yield


@contextlib.contextmanager
def compiled() -> Generator[None]:
    """Let torch.compile do what it does around a block of `uncompiled`, or around a backward without compilation."""
    present = _stance()
    if not isinstance(present, _Uncompiled):
        yield
        return
    with _stance_set(present.before):
        yield


@contextlib.contextmanager
def compiled_as(state: CompilerState) -> Generator[None]:
    """Let torch.compile do what it did at another time."""
    if state.stance is None:
        yield
        return
    with _stance_set(state.stance):
        yield


def uncompiled_in_backward(outputs: Iterable[torch.Tensor]) -> None:
    """Let the backward of outputs run functions as they are that torch compiles by themselves, since it may compute
    parts of their forward again, as `torch.utils.checkpoint` does."""
    if _stance() is None:
        return
    for each in outputs:
        if each.grad_fn is not None:
            _facts_of(each.grad_fn)[_BEGINS] = True
            _ = each.grad_fn.register_prehook(_begin_uncompiled_backward)


def compiled_before(inputs: Iterable[torch.Tensor]) -> None:
    """Let a backward through a model do again what torch.compile does, where it reaches what the inputs come from,
    unless that is another such model, or this one is in another."""
    stance = _stance()
    if stance is None or _runs_uncompiled_model(stance):
        return
    for each in inputs:
        if each.grad_fn is not None and _BEGINS not in _facts_of(each.grad_fn):
            _ = each.grad_fn.register_prehook(_end_uncompiled_backward)


def _facts_of(node: Any) -> dict[str, Any]:
    return node.metadata  # which torch's types call a method


_BEGINS = "accel: a backward runs functions as they are from here on"


def _begin_uncompiled_backward(*_gradients: object) -> None:
    before = _stance()
    if not _runs_uncompiled_model(before):
        frames: Any = sys.modules["torch._dynamo.eval_frame"]
        outer = before.before if isinstance(before, _Uncompiled) and not before.is_active else before
        frames._stance = own = _Uncompiled(outer, of_model=True, backward=_number_of_backward())
        cast(Any, torch.autograd).Variable._execution_engine.queue_callback(partial(_end_uncompiled, own))


def _end_uncompiled(own: _Uncompiled) -> None:
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    if frames._stance is own:
        frames._stance = own.before


def _end_uncompiled_backward(*_gradients: object) -> None:
    present = _stance()
    if isinstance(present, _Uncompiled) and present.backward is not None and present.is_active:
        _end_uncompiled(present)


def _runs_uncompiled_model(stance: Any) -> bool:
    return isinstance(stance, _Uncompiled) and stance.of_model and stance.is_active


def _number_of_backward() -> int:
    return cast(Any, torch)._C._current_graph_task_id()


def _stance() -> Any:
    """The stance alone: each forward and backward of a model that computes with parts asks for it."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    return None if frames is None else frames._stance


@contextlib.contextmanager
def _stance_set(wanted: Any) -> Generator[None]:
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    before = frames._stance
    frames._stance = wanted
    try:
        yield
    finally:
        frames._stance = before
