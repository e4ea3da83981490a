# SPDX-License-Identifier: Apache-2.0
"""Attention functions of transformers, such as flex and flash attention, compute with plain tensors of some heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from accel.parallel.parts._attention import attention_of_heads

_BY_RULES = ("eager", "sdpa")  # implementations that call functions of torch, which have rules for parts


class ByHeads:
    """An attention function as transformers calls it, which gives the function this rank's heads of parts."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **keywords: Any
    ) -> Any:
        """Return the outputs and weights of the attention."""
        keywords = {**dict(zip(("scaling", "dropout"), args, strict=False)), **keywords}
        return attention_of_heads(self.function, module, query, key, value, attention_mask, **keywords)


def use_own_heads(model: nn.Module) -> None:
    """Let the attention functions that a model of transformers names take parts. Mutates transformers' list of these
    functions; others call them as before."""
    configs = (getattr(each, "config", None) for each in model.modules())
    names = {getattr(each, "_attn_implementation", None) for each in configs}
    names = {name for name in names if isinstance(name, str) and name not in _BY_RULES}
    if not names:
        return
    interface: Any = getattr(import_module("transformers"), "AttentionInterface", dict)
    known: Mapping[str, Any] = interface()
    for name in names & {*known}:
        if not isinstance(known[name], ByHeads):
            interface.register(name, ByHeads(known[name]))
