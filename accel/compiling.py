# SPDX-License-Identifier: Apache-2.0
"""State of torch.compile that the threads of a process share, and blocks in which functions run as they are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
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

    torch calls nothing at the end of a backward that fails. This stance stays in place then, and does what the one
    before it did.

    Attributes:
        before: the stance that this one replaces.
        of_model: whether it is of the forward or backward of a model with parts of tensors, see `ModelUncompiled`.
        backward: torch's number of the backward that it is for; None for a block of code.
        is_asked: whether torch may have asked it for its name. It asks for each function that it compiles, or never
            compiles, such as `torch.utils.checkpoint`.
    """

    def __init__(self, before: Any, *, of_model: bool, backward: int | None = None) -> None:
        self.before = before
        self.of_model = of_model
        self.backward = backward
        self.is_asked = True

    @property
    def is_active(self) -> bool:
        """Whether functions run as they are now."""
        return self.backward is None or self.backward == _number_of_backward()

    @property
    def stance(self) -> str:
        """The name of the stance, as torch reads it."""
        if not self.is_active:
            return self.before.stance
        self.is_asked = True
        return "force_eager"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.before, name)


def uncompiled() -> AbstractContextManager[None]:
    """Let functions that torch compiles by themselves run as they are, except in blocks of `compiled`."""
    before = _stance()
    return _stance_set(None if before is None else _Uncompiled(before, of_model=False))


class ModelUncompiled:
    """Context manager for the forward of a model: compiled functions in it run eagerly, except in blocks of `compiled`.

    Parts of tensors report other sizes than they have in memory, and torch.compile cannot guard on them: a model that
    calls such a function runs it on parts. So does a backward that computes a part of such a model again, see
    `end`. A forward in another, or in a backward, changes nothing.
    """

    __slots__ = ("_before", "_nodes", "_stance")

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        self._before = self._stance = before = _stance()
        self._nodes: list[Any] | None = None
        if before is not None and not _runs_uncompiled_model(before):
            self._stance = _Uncompiled(before, of_model=True)
            self._nodes = [each.grad_fn for each in inputs if each.grad_fn is not None]  # before it changes them

    def __enter__(self) -> None:
        if self._nodes is not None:
            self._stance.is_asked = False
            _frames()._stance = self._stance

    def __exit__(self, *_error: object) -> None:
        if self._nodes is not None:
            _frames()._stance = self._before

    def end(self, outputs: Iterable[torch.Tensor]) -> None:
        """Let the backward of outputs run functions as they are, too, unless there are none that torch compiles: it may
        compute parts of the forward again, as `torch.utils.checkpoint` does. It does again what torch.compile does
        where it reaches what the inputs come from, unless that is another such model, or this one is in another."""
        frames, stance = _frames(), self._stance
        if frames is None or not (stance is None or stance.is_asked or any(frames.cached_backends.values())):
            return  # torch forgets backends as its compiler is reset, and still compiles functions of before
        for each in outputs:
            if each.grad_fn is not None:
                cast(Any, each.grad_fn).metadata[_BEGINS] = True
                _ = each.grad_fn.register_prehook(_begin_uncompiled_backward)
        for node in self._nodes or ():
            if _BEGINS not in node.metadata:
                _ = node.register_prehook(_end_uncompiled_backward)


def compiled() -> AbstractContextManager[None]:
    """Let torch.compile do what it does around a block of `uncompiled`, or around a backward without compilation."""
    present = _stance()
    return _stance_set(present.before if isinstance(present, _Uncompiled) else None)


def compiled_as(state: CompilerState) -> AbstractContextManager[None]:
    """Let torch.compile do what it did at another time."""
    return _stance_set(state.stance)


_BEGINS = "accel: a backward runs functions as they are from here on"


def _begin_uncompiled_backward(*_gradients: object) -> None:
    before = _stance()
    if not _runs_uncompiled_model(before):
        outer = before.before if isinstance(before, _Uncompiled) and not before.is_active else before
        _frames()._stance = own = _Uncompiled(outer, of_model=True, backward=_number_of_backward())
        cast(Any, torch.autograd).Variable._execution_engine.queue_callback(partial(_end_uncompiled, own))


def _end_uncompiled(own: _Uncompiled) -> None:
    if _stance() is own:
        _frames()._stance = own.before


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
    frames = _frames()
    return None if frames is None else frames._stance


def _frames() -> Any:
    """The module of torch that has the stance; None if nobody has compiled anything yet."""
    return sys.modules.get("torch._dynamo.eval_frame")


@contextlib.contextmanager
def _stance_set(wanted: Any) -> Generator[None]:
    """Set a stance for a block; None leaves the present one."""
    if wanted is None:
        yield
        return
    frames = _frames()
    before = frames._stance
    frames._stance = wanted
    try:
        yield
    finally:
        frames._stance = before
