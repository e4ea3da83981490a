# SPDX-License-Identifier: Apache-2.0
"""A call of a head with deferred logits: its input and mode, and how the head runs later."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from accel.devices import autocast_dtype
from accel.errors import PrepareError
from accel.parallel._modules import forget, is_unit, note_module
from accel.parallel.parts import plain_of
from accel.tensors import is_dtensor, split_dims

WHERE = "defer_logits"


class HeadCall:
    """One call of a head.

    Attributes:
        head: the layer.
        hidden: its input.
        forward: the head's own forward.
        autocast: dtype of autocast then; None where it was off, and for float64, which stays.
        grad: whether autograd recorded then.
        kept: copies of parameters that are resharded before they are needed; None for the layer's parameters.
        hooks: hooks by which torch.distributed waits for the backward to begin, by number.
    """

    __slots__ = ("autocast", "forward", "grad", "head", "hidden", "hooks", "kept")

    def __init__(self, head: nn.Module, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> None:
        self.head: Any = head
        self.hidden = hidden
        self.forward = forward
        self.autocast = None if hidden.dtype == torch.float64 else autocast_dtype(hidden.device.type)
        self.grad = torch.is_grad_enabled()
        self.kept = None if self.grad or not self.head.accel_reshards else _copies(self.head)
        self.hooks = OrderedDict[int, Callable[[Tensor], Any]]()

    def detached(self) -> HeadCall:
        """Return the same call without autograd."""
        found = copy.copy(self)
        found.hidden = self.hidden.detach()
        found.grad = False
        found.hooks = OrderedDict[int, Callable[[Tensor], Any]]()
        return found

    def run(self, function: Callable[[Tensor], Any] | None = None) -> Any:
        """Call a function of the input where the head's parameters are there; None for the head's own forward."""
        kind = self.hidden.device.type
        with torch.autocast(kind, self.autocast, enabled=self.autocast is not None), _parameters(self.head, self.kept):
            if not is_unit(self.head):
                _refuse_resharded(self.head)
                return (function or self.forward)(self.hidden)
            note_module(self.head, compute=function or self.forward)
            try:
                return nn.Module.__call__(self.head, self.hidden)
            finally:
                forget(self.head, "compute")

    def hooked(self, output: Tensor) -> Tensor:
        """Return the output with the hooks that run when the backward begins at it."""
        if output.requires_grad:
            for hook in self.hooks.values():
                _ = cast(Any, output).register_hook(hook)
        return output


def parameters_of(head: Any) -> Mapping[str, Any]:
    """The parameters that a head computes with on this rank."""
    if hasattr(head, "accel_layer"):
        return {name: plain_of(each) for name, each in head.parameters_here(head._parameters).items()}
    return {"weight": head.weight, "bias": head.bias}


def _copies(head: Any) -> dict[str, Tensor | None]:
    return {name: None if each is None else each.detach().clone() for name, each in parameters_of(head).items()}


@contextlib.contextmanager
def _parameters(head: Any, kept: dict[str, Tensor | None] | None) -> Generator[None]:
    """Let a head compute with other tensors in this block."""
    if kept is None:
        yield
        return
    own = cast(dict[str, Any], vars(head))
    stored: Any = own["_parameters"]
    own["_parameters"] = kept
    try:
        yield
    finally:
        own["_parameters"] = stored


def _refuse_resharded(head: nn.Module) -> None:
    if is_resharded(head):
        raise PrepareError(
            "the loss is computed after the head's parameters were resharded",
            expected="the loss in the model's forward, or a head with unsharded parameters",
            got="Plan(reshard_after_forward=...) of the unit around the head",
            where=WHERE,
            fix="Compute the loss in the forward, as labels= of transformers does; or leave reshard_after_forward out: "
            'plan=accel.parallel.Plan(logits="deferred").',
        )


def is_resharded(head: nn.Module) -> bool:
    """Whether ranks along dp hold parts of a head's weight."""
    weight = cast(Any, head)._parameters.get("weight")
    if weight is None or not is_dtensor(weight):
        return False
    return weight.device_mesh.ndim > 1 or (not hasattr(head, "accel_layer") and bool(split_dims(weight)))
