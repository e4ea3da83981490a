# SPDX-License-Identifier: Apache-2.0
"""A linear head and its cross entropy without the logits of all rows: chunks of rows, on one rank or split along tp.

Gradients are made in one of two ways. In the forward: three matmuls, and the weight's gradient stays in memory until
the backward. Or in the backward, from logits made again: four matmuls; it keeps the inputs and a few numbers a row, and
all chunks share one message along tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel.comm import Comm, adopt, all_gather_flat, copied, ranks_of_group
from accel.context import DistContext, context_first, group_of
from accel.errors import ConfigError
from accel.parallel.axes.tensor._layers import local_of
from accel.tensors import is_dtensor, is_half, split_dims

Reduction = Literal["mean", "sum", "none"]

_LEAST_ROWS = 256  # of a chunk by default: fewer make matmuls slow
_BLOCK_BYTES = 2**24  # of the part of a gradient in 16 bits that is added to its sum at a time


class Words(NamedTuple):
    """The classes of this rank.

    Attributes:
        first: its first class.
        total: number of classes of all ranks.
        comm: of the ranks along tp that split the classes; None where each has all of them.
    """

    first: int | Tensor
    total: int | Tensor
    comm: Comm | None


class _Settings(NamedTuple):
    """Constants of a call; `chunk`: rows whose logits exist at a time."""

    chunk: int
    softcap: float | None
    scale: float
    z_loss: float
    recompute: bool


class _Factors(NamedTuple):
    """Factors of a call's losses.

    Attributes:
        target: each row's class, counted from the first of this rank, int64 of shape [rows].
        times: factor of each row's loss, 0 for rows that do not count, shape [rows].
        hard: factor of the target's class in each row's loss, shape [rows].
        soft: factor of each class of this rank in every row's loss, for label smoothing, shape [classes]; None without.
        soft_sum: sum of `soft` over the classes of all ranks, shape []; None without.
    """

    target: Tensor
    times: Tensor
    hard: Tensor
    soft: Tensor | None
    soft_sum: Tensor | None


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

    The result is that of `cross_entropy(linear(input, linear_weight, linear_bias), target, ...)`. Logits exist for
    `chunk_size` rows at a time, in float32 for 16-bit inputs. Along tp, where ranks have different classes, the forward
    makes one all-gather of two numbers a row (three with label smoothing), and the backward one all-reduce of the
    gradient of `input`. A plain `linear_weight` takes one more message there. Elsewhere there is no communication.

    Args:
        ctx: the context.
        input: hidden states, shape [..., features]; alike on all ranks along tp.
        linear_weight: the head's weight, shape [classes, features]. Along tp a parameter of a prepared model, or a
            plain tensor of this rank's classes: classes / tp rounded up, less on the last rank.
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
        chunk_size: rows whose logits exist at a time. None for logits about as large as `input`, at least 256 rows.
        recompute: False makes gradients in the forward, which is faster and holds the gradient of `linear_weight` until
            the backward, which can run once. True makes logits again in the backward. None is True along tp, for
            `reduction="none"` and for fp16, whose gradients need the loss scale of the backward.

    Returns:
        The loss: shape [], or that of `target` for "none". float64 for inputs of float64, else float32.

    Raises:
        ConfigError: shapes that do not fit each other, a weight that is sharded along dp, an option out of its range,
            `recompute=False` where it is not possible, or a second backward after it.

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
    group = group_of(ctx, "tp")
    part = _part_of(linear_weight, group)
    own_bias = None if linear_bias is None else _part_of(linear_bias, group)
    words = _words_of(ctx, linear_weight, part, group)
    if words.comm is not None:
        input = copied(_in_autocast(input), cast("dist.ProcessGroup", group))
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


def loss_of_rows(
    input: Tensor,
    part: Tensor,
    target: Tensor,
    words: Words,
    *,
    bias: Tensor | None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    chunk_size: int | None = None,
    recompute: bool | None = None,
) -> Tensor:
    """Return the loss from this rank's part of the head. A collective where `words` has a communicator."""
    rows = _in_autocast(input.reshape(-1, input.shape[-1]))
    again = _recomputes(recompute, rows, words, reduction)
    if chunk_size is None:
        chunk_size = max(_LEAST_ROWS, -(-rows.numel() // max(part.shape[0], 1)))
    by = _Settings(chunk_size, softcap, float(scale), float(z_loss), again)
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        times = torch.ones_like(target, dtype=wide) if token_weights is None else token_weights.to(wide)
        classes = (None if weight is None else weight.to(wide), label_smoothing)
        factors = _factors(target.flatten(), ignore_index, times.flatten(), classes, reduction, words, part.shape[0])
    losses = cast(Any, _Head).apply(rows, part, bias, *factors, words.comm, by)
    return losses.view(target.shape) if reduction == "none" else losses.sum()


def _in_autocast(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype of autocast, where it is on."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def _check(input: Tensor, linear_weight: Tensor, target: Tensor, token_weights: Tensor | None) -> None:
    """Raise `ConfigError` for tensors that do not fit each other."""
    if target.is_floating_point():
        raise _error(
            "targets that are probabilities of classes",
            "classes, int64",
            str(target.dtype),
            "For probabilities, call torch.nn.functional.linear_cross_entropy.",
        )
    if input.shape[:-1] != target.shape or input.shape[-1:] != linear_weight.shape[1:]:
        expected = f"input of shape {[*target.shape, *linear_weight.shape[1:]]}"
        raise _error("input, weight and targets do not fit", expected, f"shape {list(input.shape)}")
    if token_weights is not None and token_weights.shape != target.shape:
        expected = f"shape {list(target.shape)}"
        raise _error("token weights do not fit the targets", expected, f"shape {list(token_weights.shape)}")
    if token_weights is not None and token_weights.requires_grad:
        raise _error(
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
            raise _error(f"{name} is out of its range", expected, repr(got))


def _error(what: str, expected: str, got: str, fix: str = "") -> ConfigError:
    return ConfigError(what, expected=expected, got=got, where="linear_cross_entropy", fix=fix)


def _recomputes(recompute: bool | None, rows: Tensor, words: Words, reduction: str) -> bool:
    """Whether gradients are made in the backward."""
    reasons = {
        "classes that ranks along tp split": words.comm is not None,
        'reduction="none"': reduction == "none",
        "inputs of float16, whose gradients need the loss scale": rows.dtype == torch.float16,
    }
    needed = ", ".join([reason for reason, holds in reasons.items() if holds])
    if recompute is False and needed:
        raise _error(
            "gradients cannot be made in the forward", "recompute=True or None", needed, "Leave recompute=False out."
        )
    return bool(needed) if recompute is None else recompute


def _part_of(weight: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's part of a weight or bias, from which gradients flow back."""
    if not is_dtensor(weight):
        return weight
    if not split_dims(weight) and group is None:
        return weight.to_local()
    mesh = weight.device_mesh
    if mesh.ndim > 1 or group is None or ranks_of_group(mesh.get_group()) != ranks_of_group(group):
        raise _error(
            "a weight that is sharded along dp",
            "the gathered parameter of a unit of fsdp, in the forward of that unit",
            f"a DTensor of placements {tuple(weight.placements)}",
            "Call linear_cross_entropy in the forward of the model, and return the loss.",
        )
    return local_of(weight, summands=False, fresh=True)


def _words_of(ctx: DistContext, weight: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> Words:
    """Return the classes of this rank. A collective for plain weights along tp, of one number."""
    if group is None or (is_dtensor(weight) and not split_dims(weight)):
        return Words(0, part.shape[0], None)
    comm = adopt(group, ctx.device)
    if is_dtensor(weight):
        total = weight.shape[0]
        return Words(min(-(-total // comm.size) * comm.rank, total), total, comm)
    sizes = all_gather_flat(comm, torch.tensor([part.shape[0]], device=part.device))
    return Words(sizes[0, 0] * comm.rank, sizes.sum(), comm)


def _factors(
    target: Tensor,
    ignored: int,
    times: Tensor,
    classes: tuple[Tensor | None, float],
    reduction: str,
    words: Words,
    count: int,
) -> _Factors:
    """Return the factors; `classes`: those of the call, and the label smoothing; `count`: of classes on this rank."""
    weight, smoothing = classes
    counted = target != ignored
    is_class = (target >= 0) & (target < words.total)
    known = target.masked_fill(~(counted & is_class), 0)
    times = torch.where(counted, times, 0.0)
    hard = torch.ones_like(times) if weight is None else weight[known]
    if reduction == "mean":
        times = times / (hard * times).sum()
    times = torch.where(counted & ~is_class, torch.nan, times)
    if not smoothing:
        return _Factors(known - words.first, times, hard, None, None)
    total = times.new_ones(()) * words.total
    each = smoothing / total
    if weight is None:
        soft = times.new_ones(count)
    else:
        total = weight.sum()
        soft = weight[torch.arange(count, device=weight.device) + words.first]
    return _Factors(known - words.first, times, hard * (1 - smoothing), soft * each, total * each)


class _Head(torch.autograd.Function):
    """Losses of rows: shape [rows] where gradients are made in the backward, else their sum, shape []."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        times: Tensor,
        hard: Tensor,
        soft: Tensor | None,
        soft_sum: Tensor | None,
        comm: Comm | None,
        by: _Settings,
    ) -> Tensor:
        factors = _Factors(target, times, hard, soft, soft_sum)
        needs = tuple(ctx.needs_input_grad[:3])
        sums = _Sums(rows, weight, bias, needs, times.dtype) if any(needs) and not by.recompute else None
        with torch.autocast(rows.device.type, enabled=False):
            numbers = _through_chunks(rows, weight, bias, factors, sums, by)
        if comm is not None:
            numbers = _joined(numbers, comm)
        losses = times * hard * (numbers[0] - numbers[1])
        if soft_sum is not None:
            losses = losses + times * (soft_sum * numbers[0] - numbers[2])
        if by.z_loss:
            losses = losses + times * by.z_loss * numbers[0].square()
        ctx.by, ctx.needs, ctx.is_used = by, needs, False
        if by.recompute:
            ctx.save_for_backward(rows, weight, bias, *factors, numbers[0])
            return losses
        ctx.save_for_backward(*(() if sums is None else sums.done()))
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - decorated
        (grad,) = grad_outputs
        if ctx.by.recompute:
            rows, weight, bias, target, times, hard, soft, soft_sum, lse = ctx.saved_tensors
            factors = _Factors(target, times * grad, hard, soft, soft_sum)
            sums = _Sums(rows, weight, bias, ctx.needs, times.dtype)
            with torch.autocast(rows.device.type, enabled=False):
                _again(rows, weight, bias, factors, lse, sums, ctx.by)
            return (*sums.done(), *[None] * 7)
        if ctx.is_used:  # scaled in place below, which spares a second copy of the weight
            raise _error(
                "a second backward through one loss",
                "one backward, as gradients are made in the forward",
                "a graph that was retained",
                "Pass recompute=True to linear_cross_entropy, or to accel.defer_logits.",
            )
        ctx.is_used = True
        made = ctx.saved_tensors
        return (*(None if each is None else each.mul_(grad.to(each.dtype)) for each in made), *[None] * 7)


def _through_chunks(
    rows: Tensor, weight: Tensor, bias: Tensor | None, factors: _Factors, sums: _Sums | None, by: _Settings
) -> Tensor:
    """Return log-sum-exp and target's logit over this rank's classes, and the weighted sum of logits with label
    smoothing, shape [2 or 3, rows]; add gradients to `sums`."""
    head = weight.to(rows.dtype)
    kinds = 2 + (factors.soft is not None)
    found = [torch.zeros((kinds, 0), dtype=factors.times.dtype, device=rows.device)]
    for first in range(0, rows.shape[0], by.chunk):
        cut = slice(first, first + by.chunk)
        logits = _logits(rows[cut], head, bias, by)
        at, here = _own_targets(factors.target[cut], weight.shape[0])
        numbers = [torch.where(here, logits.gather(1, at[:, None])[:, 0], 0.0)]
        if factors.soft is not None:
            numbers.append(logits @ factors.soft)
        cap = None if sums is None else _cap_slope(logits, by)
        largest = logits.amax(1)
        powers = logits.sub_(largest[:, None]).exp_()
        total = powers.sum(1)
        lse = total.log().add_(largest)
        if sums is not None:
            slope = _slope(powers, total.reciprocal(), lse, cap, cut, factors, by)
            sums.add(cut, slope, rows[cut], head)
            del slope
        found.append(torch.stack([lse, *numbers]))
        del logits, powers, cap  # before the next chunk's
    return torch.cat(found, 1)


def _again(
    rows: Tensor, weight: Tensor, bias: Tensor | None, factors: _Factors, lse: Tensor, sums: _Sums, by: _Settings
) -> None:
    """Make logits a second time, and add gradients to `sums`."""
    head = weight.to(rows.dtype)
    for first in range(0, rows.shape[0], by.chunk):
        cut = slice(first, first + by.chunk)
        logits = _logits(rows[cut], head, bias, by)
        cap = _cap_slope(logits, by)
        powers = logits.sub_(lse[cut, None]).exp_()
        slope = _slope(powers, None, lse[cut], cap, cut, factors, by)
        sums.add(cut, slope, rows[cut], head)
        del logits, powers, cap, slope


def _logits(rows: Tensor, head: Tensor, bias: Tensor | None, by: _Settings) -> Tensor:
    """Return logits of a chunk in float32 or float64, with scale and cap."""
    logits = rows @ head.t()
    logits = logits.float() if is_half(logits) else logits
    if bias is not None:
        logits += bias
    if by.scale != 1.0:
        logits *= by.scale
    return logits if by.softcap is None else logits.div_(by.softcap).tanh_().mul_(by.softcap)


def _cap_slope(logits: Tensor, by: _Settings) -> Tensor | None:
    return None if by.softcap is None else (logits / by.softcap).square_().neg_().add_(1)


def _own_targets(target: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return places among this rank's classes, and whether they are the targets'."""
    here = (target >= 0) & (target < count)
    return target.masked_fill(~here, 0), here


def _slope(
    powers: Tensor,
    factor: Tensor | None,
    lse: Tensor,
    cap: Tensor | None,
    cut: slice,
    factors: _Factors,
    by: _Settings,
) -> Tensor:
    """Return the gradient by the matmul's outputs, in the memory of `powers`, which `factor` makes probabilities."""
    times = factors.times[cut] * by.scale
    of_all = factors.hard[cut] if factors.soft_sum is None else factors.hard[cut] + factors.soft_sum
    if by.z_loss:
        of_all = of_all + 2 * by.z_loss * lse
    of_all = times * of_all
    powers *= (of_all if factor is None else of_all * factor)[:, None]
    at, here = _own_targets(factors.target[cut], powers.shape[1])
    powers.scatter_add_(1, at[:, None], torch.where(here, -times * factors.hard[cut], 0.0)[:, None])
    if factors.soft is not None:
        powers.addr_(times, factors.soft, alpha=-1)
    return powers if cap is None else powers.mul_(cap)


class _Sums:
    """Gradients of rows in their dtype, and of weight and bias as sums over chunks in float32 or float64."""

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool], wide: torch.dtype
    ) -> None:
        self._dtypes = (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        self._rows = torch.empty_like(rows) if needs[0] else None
        self._weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        self._bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None

    def add(self, cut: slice, slope: Tensor, rows: Tensor, head: Tensor) -> None:
        """Add the gradients of a chunk, from `slope`, the gradient by its logits."""
        narrow = slope.to(rows.dtype)
        if self._rows is not None:
            self._rows[cut] = narrow @ head
        if self._weight is not None and narrow.dtype == self._weight.dtype:
            self._weight.addmm_(narrow.t(), rows)
        elif self._weight is not None:
            width = max(1, _BLOCK_BYTES // max(rows.shape[1] * rows.itemsize, 1))
            for first in range(0, narrow.shape[1], width):
                block = slice(first, first + width)
                self._weight[block] += narrow[:, block].t() @ rows
        if self._bias is not None:
            self._bias += slope.sum(0)

    def done(self) -> Sequence[Tensor | None]:
        """Return the gradients in the dtypes of what they belong to."""
        found = (self._rows, self._weight, self._bias)
        return [None if each is None else each.to(kind) for each, kind in zip(found, self._dtypes, strict=True)]


def _joined(numbers: Tensor, comm: Comm) -> Tensor:
    """Return numbers of rows over the classes of all ranks. One message for all chunks."""
    every = all_gather_flat(comm, numbers.flatten()).view(-1, *numbers.shape)
    return torch.cat([every[:, :1].logsumexp(0), every[:, 1:].sum(0)])
