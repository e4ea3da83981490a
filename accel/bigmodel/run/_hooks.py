# SPDX-License-Identifier: Apache-2.0
"""Hooks around the calls of streamed blocks: torch's own, removed on close."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accel import tree as trees
from accel.bigmodel.run._absent import AbsentTensor
from accel.bigmodel.run._no_memory import refuse_copy, refuse_pickle
from accel.bigmodel.run._slots import Block
from accel.bigmodel.run._stream import Stream
from accel.errors import TreeError

P = ParamSpec("P")
R = TypeVar("R")


class _Hooks:
    """The hooks of a block. A model is copied and pickled with its hooks, before its weights."""

    def __init__(self, stream: Stream, block: Block) -> None:
        self._stream = stream
        self._block = block
        self._begin = untraced(stream.enter)
        self._end = untraced(self._leave)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._begin(self._block)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._end(output)

    def _leave(self, output: Any) -> Any:
        try:
            return own_output(output, self._block)
        finally:
            self._stream.leave(self._block)

    def __deepcopy__(self, memo: object) -> NoReturn:
        refuse_copy(self._block.name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_pickle(self._block.name)


def hook_block(stream: Stream, block: Block) -> list[RemovableHandle]:
    """Register the hooks of a block; return what removes them."""
    hooks = _Hooks(stream, block)
    return [
        block.module.register_forward_pre_hook(hooks.before, prepend=True),
        block.module.register_forward_hook(hooks.after, always_call=True),
    ]


def own_output(output: Any, block: Block) -> Any:
    """Return a block's output with copies of the tensors in it that lie on its slot, which will hold other blocks.

    Returns:
        The output with copies; None if there is nothing to copy.
    """
    slot = block.slot
    if slot is None:
        return None
    memory = slot.memory.untyped_storage().data_ptr()
    if isinstance(output, torch.Tensor):
        return output.clone() if _lies_at(memory, output) else None
    try:
        leaves, _ = trees.flatten(output)
    except TreeError:  # a container of the user's own, which nobody can take apart
        return None
    if not any(_lies_at(memory, leaf) for leaf in leaves):
        return None
    return trees.map_tensors(lambda tensor: tensor.clone() if _lies_at(memory, tensor) else tensor, output)


def _lies_at(memory: int, leaf: object) -> bool:
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, AbsentTensor):
        return False
    try:
        return leaf.untyped_storage().data_ptr() == memory
    except (NotImplementedError, RuntimeError):  # sparse tensors and those of torch.func have no storage
        return False


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that torch.compile does not trace, without importing the compiler before somebody else does."""
    disabled: list[Callable[P, R]] = []

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(cast(Any, torch.compiler).disable(function))
        return disabled[0](*args, **kwargs)

    return call
