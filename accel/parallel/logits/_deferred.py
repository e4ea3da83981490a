# SPDX-License-Identifier: Apache-2.0
"""Losses without logits in models as they are: a head returns a placeholder, from which a loss is computed.

The head's `__call__` returns `DeferredLogits` without running. A cross entropy of them calls it with a function in
place of its forward, so that hooks of `fully_shard` gather its weight. Any other use runs the head.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from accel.errors import PrepareError
from accel.mixins import Mixin, add_mixin, remove_mixin
from accel.parallel._modules import (
    RANKS,
    forget,
    is_elsewhere,
    is_unit,
    named_modules,
    note_module,
    notes_of,
    unwrap_model,
    written_class,
)
from accel.parallel._private import user_hooks
from accel.parallel.logits._head_calls import WHERE, HeadCall, is_resharded
from accel.parallel.logits._logits import DeferredLogits
from accel.parallel.parts import PartTensor, leave
from accel.tensors import word_layers

if TYPE_CHECKING:
    from accel.parallel.axes.tensor._layers import Layer
    from accel.parallel.axes.tensor._part_layers import LayerRanks

M = TypeVar("M", bound=nn.Module)

_LOG = logging.getLogger("accel.parallel")


class DefersLogits(Mixin):
    """A linear head that returns `DeferredLogits` when it is called."""

    accel_reshards: bool = False  # whether its parameters belong to an FSDP unit around it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the placeholder; the logits in proofs and regions of torch.compile, and where users' hooks look at
        them."""
        head = cast(nn.Module, self)
        if torch.compiler.is_compiling() or kwargs or len(args) != 1 or {"compute", "proves"} & notes_of(head).keys():
            return cast(Any, super()).__call__(*args, **kwargs)
        if cast(Any, torch.jit).is_tracing() or not _is_plain(head) or user_hooks(head):
            return cast(Any, super()).__call__(*args, **kwargs)
        # own positions along cp stay a part; of the tokens that ranks along tp share, all are needed
        hidden = args[0] if _has_own_positions(args[0]) else leave(args[0])
        if type(hidden) not in (Tensor, PartTensor):
            return cast(Any, super()).__call__(hidden)
        if is_unit(head):  # its hooks would gather its parameters for nothing
            return self._deferred(hidden)
        note_module(head, compute=self._deferred)
        try:
            return cast(Any, super()).__call__(hidden)
        finally:
            forget(head, "compute")

    def _deferred(self, hidden: Tensor) -> DeferredLogits:
        head = cast(nn.Module, self)
        call = HeadCall(head, hidden, super().forward)
        return cast(Any, DeferredLogits)(call, is_part=_gives_part(head))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run what the head is called for, its own forward by default."""
        compute = notes_of(cast(nn.Module, self)).get("compute")
        return super().forward(*args, **kwargs) if compute is None else compute(*args)


def _is_plain(head: nn.Module) -> bool:
    """Whether a head's outputs are `hidden @ weight.T + bias` of its classes or of this rank's classes."""
    layer: Layer | None = getattr(head, "accel_layer", None)
    if layer is None:
        return True
    rule = layer.rule
    is_by_classes = bool(rule.words) or rule.style == "colwise_gather_output"
    return is_by_classes or (not rule.layouts and rule.style in ("replicated", "colwise"))


def _has_own_positions(hidden: Any) -> bool:
    return type(hidden) is PartTensor and hidden.ranks.keeps_rows


def _gives_part(head: nn.Module) -> bool:
    """Whether a head is called in the forward of a divided model, and ranks have different classes."""
    ranks: LayerRanks | None = getattr(head, RANKS, None)
    return ranks is not None and ranks.runs and cast(Any, head).accel_layer.rule.style == "colwise"


def defer_logits(model: M, head: str | None = None, *, recompute: bool | None = None) -> M:
    """Let a model return placeholders of logits, from which losses are computed without them. Mutates the model.

    The layer that gives the logits is called only when a loss asks for it. `torch.nn.functional.cross_entropy`,
    `nn.CrossEntropyLoss`, `accel.parallel.vocab_cross_entropy` and the `labels=` of models of transformers then compute
    the loss by chunks of rows, as `accel.parallel.linear_cross_entropy` does, with the same values and gradients. Rows,
    views, conversions to float32, factors, soft caps and a bias may come between. Any other use makes the logits, and
    logs the line once. Whole-model torch.compile and users' hooks on the head get logits.

    Call it before or after `prepare`, or set `Plan(logits="deferred")`. No communication.

    Args:
        model: with one linear layer that gives the logits, in wrappers or not.
        head: path of that layer; None for the one that the model names, or ties to its embedding, or that has as many
            outputs as an embedding has rows.
        recompute: as for `linear_cross_entropy`: True makes logits again in the backward, which can run several times.

    Returns:
        The same model.

    Raises:
        PrepareError: no such layer, or several.

    Examples:
        >>> class Words(nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)
        ...     def forward(self, ids):
        ...         return self.head(self.embed(ids))
        >>> model = accel.defer_logits(Words())
        >>> logits = model(torch.tensor([[1, 2]]))
        >>> tuple(logits.shape), nn.functional.cross_entropy(logits[0], torch.tensor([2, 3])).requires_grad
        ((1, 2, 10), True)
    """
    inner = unwrap_model(model)
    path = head_path(inner, head)
    note_module(inner.get_submodule(path), recompute=recompute)
    place_deferral(inner, path)
    return model


def head_path(model: nn.Module, head: str | None = None) -> str:
    """Return the path of the layer with logits that can be deferred; `PrepareError` for none, or several."""
    modules = dict(named_modules(model))
    heads = word_layers(model).heads if head is None else {head: modules.get(head)}
    found = [path for path, each in heads.items() if isinstance(each, nn.Linear) and _is_linear(each)]
    if len(found) != 1:
        raise PrepareError(
            "the layer that gives the logits is not known",
            expected="one nn.Linear with as many outputs as an embedding has rows, or the model's own "
            "get_output_embeddings",
            got=", ".join(f"{path}: {type(each).__name__}" for path, each in heads.items()) or "none",
            where=WHERE,
            fix='Name it: accel.defer_logits(model, "head").',
        )
    return found[0]


def _is_linear(head: nn.Module) -> bool:
    """Whether a layer computes as nn.Linear does, whatever its weight is made of."""
    return cast(Any, written_class(head)).forward is nn.Linear.forward


def place_deferral(model: nn.Module, path: str) -> None:
    """Let a head defer its logits, in front of what parallelism has put before its class. Mutates the model."""
    head = model.get_submodule(path)
    if not is_elsewhere(head):
        add_mixin([head], DefersLogits, accel_reshards=is_resharded(head) and not is_unit(head))


def take_deferral(model: nn.Module) -> str | None:
    """Undo `defer_logits` before a model is spread; return the path of the head, None where there is none. Mutates the
    model."""
    for path, each in named_modules(model):
        if isinstance(each, DefersLogits):
            remove_mixin([each], DefersLogits)
            return path
    return None


@contextlib.contextmanager
def deferral_after(model: nn.Module, *, asked: bool, obstacle: str) -> Generator[None]:
    """Let a model that is spread in this block defer its logits afterwards, if it did before or if that is `asked`.

    `obstacle`: the reason to make real logits; "" for none.
    """
    inner = unwrap_model(model)
    taken = take_deferral(inner)
    path = head_path(inner) if taken is None and asked else taken
    try:
        yield
    finally:
        if path is not None and obstacle:
            _LOG.warning("logits are not deferred under %s", obstacle)
        elif path is not None:
            place_deferral(inner, path)
