# SPDX-License-Identifier: Apache-2.0
"""Hooks around the calls of streamed blocks: torch's own, removed on close."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accel.bigmodel.run._slots import Block
from accel.bigmodel.run._stream import Stream

P = ParamSpec("P")
R = TypeVar("R")


def hook_block(stream: Stream, block: Block) -> list[RemovableHandle]:
    """Register the hooks of a block; return what removes them."""

    begin = untraced(stream.enter)
    end = untraced(stream.leave)

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        begin(block)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        own = _own(output, block)
        end(block)
        return own

    return [
        block.module.register_forward_pre_hook(before, prepend=True),
        block.module.register_forward_hook(after, always_call=True),
    ]


def _own(output: Any, block: Block) -> Any:
    """Return a copy of an output that is a weight of the block, as the slot will hold others; None for any other."""
    slot = block.slot
    if slot is None or type(output) not in (torch.Tensor, nn.Parameter) or output.device != slot.memory.device:
        return None
    shared = output.untyped_storage().data_ptr() == slot.memory.untyped_storage().data_ptr()
    return output.clone() if shared else None


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
