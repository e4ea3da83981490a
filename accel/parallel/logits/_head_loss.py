# SPDX-License-Identifier: Apache-2.0
"""The cross entropy of a linear head without the logits of all rows, on one rank or split along tp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from accel.comm import adopt, all_gather_flat, copied, ranks_of_group
from accel.context import DistContext, context_first, group_of
from accel.devices import as_autocast
from accel.parallel._local import local_of
from accel.parallel._modules import tensor_notes
from accel.parallel._private import without_subclasses
from accel.parallel.logits._head_chunks import Reduction, Words, head_error, loss_of_rows
from accel.parallel.logits._vocabulary import own_words
from accel.parallel.parts import PartTensor, RowLayout, make, plain_of
from accel.parallel.parts._layout import no_rule
from accel.parallel.parts._nested import NestedPart
from accel.parallel.parts._part import own_rows
from accel.tensors import checksums, integers, is_dtensor, split_dims


@context_first
def linear_cross_entropy(
    ctx: DistContext,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    chunk_size: int | None = None,
    recompute: bool | None = None,
) -> Tensor:
    """Return the cross entropy of a linear head without making the logits of all rows.

    The result equals `cross_entropy(linear(input, linear_weight, linear_bias), target, ...)`. Logits exist for
    `chunk_size` rows at a time, in float32 for 16-bit inputs. Along tp, where ranks have different classes, the forward
    makes one all-gather of two numbers a row (three with label smoothing), and the backward one all-reduce of the
    gradient of `input`. A plain `linear_weight` takes one more message there, and waits for the device, to find whether
    it is full or this rank's part. In the forward of a model along cp, the loss is of all positions, with one message
    for a sum and two for a mean. Elsewhere there is no communication.

    Args:
        ctx: the context.
        input: hidden states, shape [..., features]; alike on all ranks along tp.
        linear_weight: the head's weight, shape [classes, features]. Along tp a parameter of a prepared model, a plain
            tensor with all classes and the same values on each rank, or a plain tensor of this rank's classes:
            classes / tp rounded up, less on the last rank.
        target: classes, int64 of shape [...], alike on all ranks along tp. One that is no class makes the loss and the
            gradients NaN.
        linear_bias: the head's bias, shape [classes], split as `linear_weight` is.
        weight: factor of each class in the loss, shape [all classes]. It gets no gradient.
        reduction: "mean" over the factors of the targets that count, "sum", or "none".
        ignore_index: target of rows that do not count; None for -100.
        label_smoothing: part of the target that goes to all classes alike, from 0 to 1.
        softcap: logits become `softcap * tanh(logits / softcap)`; None for none.
        scale: factor of logits, before `softcap`.
        z_loss: factor of the square of each row's log-sum-exp, which is added to its loss.
        token_weights: factor of each row in the loss, and in the divisor of "mean"; shape [...]. It gets no gradient.
        chunk_size: number of rows with logits in memory at a time. None for logits about as large as `input`, at least
            256 rows.
        recompute: False makes gradients in the forward, which is faster and holds the gradient of `linear_weight` until
            the backward, which can run once. True makes logits again in the backward. None is True along tp, for
            `reduction="none"` and for fp16, because fp16 gradients need the loss scale of the backward.

    Returns:
        The loss: shape [], or the shape of `target` for "none". float64 for inputs of float64, else float32.

    Raises:
        ConfigError: shapes that do not fit each other, a weight that is sharded along dp, equal plain weights that may
            be full or parts, an option out of its range, `recompute=False` where it is not possible, or a second
            backward after it.

    Reference:
        torch.nn.functional.linear_cross_entropy, for names and defaults; Wijmans et al. 2024, "Cut your losses in
        large-vocabulary language models", arXiv:2411.09009; Shoeybi et al. 2019, arXiv:1909.08053, along tp.

    Examples:
        >>> hidden, head = torch.zeros(2, 8), torch.zeros(4, 8)
        >>> loss = accel.parallel.linear_cross_entropy(accel.single(), hidden, head, torch.tensor([1, -100]))
        >>> round(float(loss.exp()), 3)
        4.0
    """
    _check(input, linear_weight, target, token_weights)
    _check_options(reduction, label_smoothing, softcap, chunk_size)
    rows = input.rows if isinstance(input, NestedPart) else input
    if isinstance(rows, PartTensor) and rows.ranks.keeps_rows and rows.division is not None:
        own = _OwnPositions(rows, rows.division)
        options = {"linear_bias": linear_bias, "label_smoothing": label_smoothing, "softcap": softcap, "scale": scale}
        made = {"z_loss": z_loss, "chunk_size": chunk_size, "recompute": recompute}
        loss_of = partial(linear_cross_entropy, ctx, plain_of(rows), linear_weight, **options, **made)
        return own.loss(loss_of, target, token_weights, weight, ignore_index, reduction)
    group = group_of(ctx, "tp")
    part = _part_of(_own_rows(linear_weight, group), group)
    words = _words_of(ctx, linear_weight, part, group)
    own_bias = None if linear_bias is None else _part_of(_own_rows(linear_bias, group), group)
    if words.comm is not None:
        input = copied(as_autocast(input), cast("dist.ProcessGroup", group))
    return loss_of_rows(
        input,
        part,
        target,
        words,
        bias=own_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        scale=scale,
        z_loss=z_loss,
        token_weights=token_weights,
        chunk_size=chunk_size,
        recompute=recompute,
    )


class _OwnPositions(NamedTuple):
    """Hidden states of this rank's positions, in the forward of a model that computes with parts of them."""

    rows: PartTensor
    layout: RowLayout

    def loss(
        self,
        loss_of: Callable[..., Tensor],
        target: Tensor,
        token_weights: Tensor | None,
        weight: Tensor | None,
        ignore_index: int | None,
        reduction: Reduction,
    ) -> Tensor:
        """Return the loss of all positions, from the losses of this rank's. A collective, but for "none"."""
        ranks: Any = self.rows.ranks
        if self.layout.dim == self.rows.dim() - 1 or self.layout.cut.is_shared(ranks.size):
            raise no_rule("linear_cross_entropy of other rows than a rank's positions")
        labels = self._own(target)
        times = None if token_weights is None else self._own(token_weights)
        ignored = -100 if ignore_index is None else ignore_index
        by = "none" if reduction == "none" else "sum"
        found = loss_of(labels, token_weights=times, weight=weight, ignore_index=ignored, reduction=by)
        if reduction == "none":
            return make(found, self.layout, ranks)
        counted = (labels != ignored).to(found.dtype)
        if weight is not None:
            counted = counted * weight.to(found.dtype)[labels.clamp(0, len(weight) - 1)]
        count = (counted if times is None else counted * times.to(found.dtype)).sum()
        return ranks.loss(found, count if reduction == "mean" else None)

    def _own(self, tensor: Tensor) -> Tensor:
        tensor = tensor.rows if isinstance(tensor, NestedPart) else tensor
        with without_subclasses():
            return plain_of(own_rows(tensor, self.layout.dim, self.layout.cut, self.rows.ranks))


def _check(input: Tensor, linear_weight: Tensor, target: Tensor, token_weights: Tensor | None) -> None:
    """Raise `ConfigError` for tensors that do not fit each other."""
    if target.is_floating_point():
        raise head_error(
            "targets that are probabilities of classes",
            "classes, int64",
            str(target.dtype),
            "For probabilities, call torch.nn.functional.linear_cross_entropy.",
        )
    if input.shape[:-1] != target.shape or input.shape[-1:] != linear_weight.shape[1:]:
        expected = f"input of shape {[*target.shape, *linear_weight.shape[1:]]}"
        raise head_error("input, weight and targets do not fit", expected, f"shape {list(input.shape)}")
    if token_weights is not None and token_weights.shape != target.shape:
        expected = f"shape {list(target.shape)}"
        raise head_error("token weights do not fit the targets", expected, f"shape {list(token_weights.shape)}")
    if token_weights is not None and token_weights.requires_grad:
        raise head_error(
            "token weights that need a gradient",
            "factors without one",
            "requires_grad=True",
            'Pass reduction="none" without token_weights, and multiply the losses.',
        )


def _check_options(reduction: str, label_smoothing: float, softcap: float | None, chunk_size: int | None) -> None:
    choices = (
        ("reduction", reduction in ("mean", "sum", "none"), '"mean", "sum" or "none"', reduction),
        ("label_smoothing", 0.0 <= label_smoothing <= 1.0, "from 0 to 1", label_smoothing),
        ("softcap", softcap is None or softcap > 0, "above 0, or None", softcap),
        ("chunk_size", chunk_size is None or chunk_size > 0, "at least 1, or None", chunk_size),
    )
    for name, is_right, expected, got in choices:
        if not is_right:
            raise head_error(f"{name} is out of its range", expected, repr(got))


def _own_rows(weight: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's classes of a weight or bias that the forward of a divided model reads, or all of them."""
    is_whole = isinstance(weight, PartTensor) and weight.division is None
    return plain_of(weight) if is_whole else own_words(weight, 0, group)


def _part_of(weight: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's part of a weight or bias, from which gradients flow back."""
    if not is_dtensor(weight):
        return weight
    if not split_dims(weight) and group is None:
        return weight.to_local()
    mesh = weight.device_mesh
    if mesh.ndim > 1 or group is None or ranks_of_group(mesh.get_group()) != ranks_of_group(group):
        raise head_error(
            "a weight that is sharded along dp",
            "the gathered parameter of a unit of fsdp, in the forward of that unit",
            f"a DTensor of placements {tuple(weight.placements)}",
            "Call linear_cross_entropy in the forward of the model, and return the loss.",
        )
    return local_of(weight, summands=False, fresh=True)


def _words_of(ctx: DistContext, weight: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> Words:
    """Return the classes of this rank. A collective for plain weights along tp."""
    if group is None or _is_whole(weight):
        return Words(0, part.shape[0], None)
    comm = adopt(group, ctx.device)
    if is_dtensor(weight) or isinstance(weight, PartTensor):
        total = weight.shape[0]
        return Words(min(-(-total // comm.size) * comm.rank, total), total, comm)
    bits = checksums({"": part}, by_position=True)[""]
    found = integers(all_gather_flat(comm, torch.tensor([part.shape[0], bits], device=part.device)).flatten())
    sizes = found[::2]
    if len({*zip(sizes, found[1::2], strict=True)}) > 1:
        return Words(sizes[0] * comm.rank, sum(sizes), comm)
    if bits == 0 or (weight.is_leaf and weight.requires_grad):
        raise head_error(
            "ranks along tp have equal weights, which may be a full head, or parts of one",
            "the parameter of a prepared model, or other values on each rank",
            f"a plain tensor of {'zeros' if bits == 0 else 'equal values'} on each rank, shape {list(part.shape)}",
            "Pass the parameter itself, as head.weight in the forward of a prepared model, without a conversion.",
        )
    return Words(0, part.shape[0], None)


def _is_whole(weight: Tensor) -> bool:
    """Return whether every rank along tp is known to hold all classes."""
    if isinstance(weight, PartTensor):
        return weight.division is None
    if is_dtensor(weight):
        return not split_dims(weight)
    return tensor_notes(weight).get("replicated", False)
