# SPDX-License-Identifier: Apache-2.0
"""Losses of a linear head by chunks of rows, and the entropies of their classes.

Gradients are made in one of two ways. In the forward: three matmuls, and the weight's gradient stays in memory until
the backward. Or in the backward, from logits made again: four matmuls; it keeps the inputs and a few numbers a row, and
all chunks share one message along tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel.comm import Comm, all_gather_flat
from accel.devices import as_autocast
from accel.errors import ConfigError
from accel.tensors import is_half

Reduction = Literal["mean", "sum", "none"]

_LEAST_ROWS = 256  # of a chunk by default: fewer make matmuls slow
_BLOCK_BYTES = 2**24  # of the part of a gradient in 16 bits that is added to its sum at a time
_LEAST_LOG = -800.0  # of a probability: its exponential is 0 in float64, so that 0 times it is no NaN


class Words(NamedTuple):
    """The classes of this rank."""

    first: int | Tensor  # its first class
    total: int | Tensor  # number of classes of all ranks
    comm: Comm | None  # of the ranks along tp that split the classes; None where each has all of them


class _Settings(NamedTuple):
    """Constants of a call; `chunk`: number of rows with logits in memory at a time."""

    chunk: int
    softcap: float | None
    scale: float
    z_loss: float
    recompute: bool
    entropy: bool


class _Factors(NamedTuple):
    """Factors of a call's losses."""

    target: Tensor  # each row's class, counted from the first of this rank, int64 of shape [rows]
    times: Tensor  # factor of each row's loss, 0 for rows that do not count, shape [rows]
    hard: Tensor  # factor of the target's class in each row's loss, shape [rows]
    # Factor of each class of this rank in every row's loss, for label smoothing, shape [classes]; None without.
    soft: Tensor | None
    soft_sum: Tensor | None  # sum of `soft` over the classes of all ranks, shape []; None without


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
    entropy: bool = False,
) -> Tensor:
    """Return the loss from this rank's part of the head. A collective where `words` has a communicator.

    With `entropy`, for `reduction="none"`: losses and the entropies of all rows, shape [2, *target.shape].
    """
    rows = as_autocast(input.reshape(-1, input.shape[-1]))
    again = _recomputes(recompute, rows, words, reduction)
    if chunk_size is None:
        chunk_size = max(_LEAST_ROWS, -(-rows.numel() // max(part.shape[0], 1)))
    by = _Settings(chunk_size, softcap, float(scale), float(z_loss), again, entropy)
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        times = torch.ones_like(target, dtype=wide) if token_weights is None else token_weights.to(wide)
        classes = (None if weight is None else weight.to(wide), label_smoothing)
        factors = _factors(target.flatten(), ignore_index, times.flatten(), classes, reduction, words, part.shape[0])
    losses = cast(Any, _Head).apply(rows, part, bias, *factors, words.comm, by)
    return losses.unflatten(-1, target.shape) if reduction == "none" else losses.sum()


def head_error(what: str, expected: str, got: str, fix: str = "") -> ConfigError:
    return ConfigError(what, expected=expected, got=got, where="linear_cross_entropy", fix=fix)


def _recomputes(recompute: bool | None, rows: Tensor, words: Words, reduction: str) -> bool:
    """Whether gradients are made in the backward."""
    reasons = {
        "classes that ranks along tp split": words.comm is not None,
        'reduction="none"': reduction == "none",
        "inputs of float16, because their gradients need the loss scale": rows.dtype == torch.float16,
    }
    needed = ", ".join([reason for reason, holds in reasons.items() if holds])
    if recompute is False and needed:
        raise head_error(
            "gradients cannot be made in the forward", "recompute=True or None", needed, "Leave recompute=False out."
        )
    return bool(needed) if recompute is None else recompute


def _factors(
    target: Tensor,
    ignored: int,
    times: Tensor,
    classes: tuple[Tensor | None, float],
    reduction: str,
    words: Words,
    count: int,
) -> _Factors:
    """Return the factors. `classes`: class weights and label smoothing of the call. `count`: classes on this rank."""
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
    """Losses of rows, shape [rows], and [2, rows] with entropies; their sum where gradients are made in the forward."""

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
            numbers = _joined(numbers, comm, entropy=by.entropy)
        losses = times * hard * (numbers[0] - numbers[1])
        if soft_sum is not None:
            losses = losses + times * (soft_sum * numbers[0] - numbers[2])
        if by.z_loss:
            losses = losses + times * by.z_loss * numbers[0].square()
        ctx.by, ctx.needs, ctx.is_used = by, needs, False
        if by.recompute:
            entropies = numbers[-1] if by.entropy else None
            ctx.save_for_backward(rows, weight, bias, *factors, numbers[0], entropies)
            return losses if entropies is None else torch.stack([losses, entropies])
        ctx.save_for_backward(*(() if sums is None else sums.done()))
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - decorated
        (grad,) = grad_outputs
        if ctx.by.recompute:
            rows, weight, bias, target, times, hard, soft, soft_sum, lse, entropies = ctx.saved_tensors
            grad, of_entropy = grad if ctx.by.entropy else (grad, None)
            factors = _Factors(target, times * grad, hard, soft, soft_sum)
            sums = _Sums(rows, weight, bias, ctx.needs, times.dtype)
            with torch.autocast(rows.device.type, enabled=False):
                _again(rows, weight, bias, factors, lse, sums, ctx.by, entropies, of_entropy)
            return (*sums.done(), *[None] * 7)
        if ctx.is_used:  # scaled in place below, which spares a second copy of the weight
            raise head_error(
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
    """Return numbers of rows over this rank's classes, shape [numbers, rows]; add gradients to `sums`.

    The log-sum-exp and the target's logit, with label smoothing the weighted sum of logits, and the entropy if asked.
    """
    head = weight.to(rows.dtype)
    kinds = 2 + (factors.soft is not None) + by.entropy
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
        if by.entropy:
            numbers.append(total.log() - torch.xlogy(powers, powers).sum(1) / total)
        if sums is not None:
            slope = _slope(powers, total.reciprocal(), lse, cap, cut, factors, by)
            sums.add(cut, slope, rows[cut], head)
            del slope
        found.append(torch.stack([lse, *numbers]))
        del logits, powers, cap  # before the next chunk's
    return torch.cat(found, 1)


def _again(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: _Factors,
    lse: Tensor,
    sums: _Sums,
    by: _Settings,
    entropies: Tensor | None,
    of_entropy: Tensor | None,
) -> None:
    """Make logits a second time, and add gradients to `sums`; `of_entropy`: the gradient by `entropies`."""
    head = weight.to(rows.dtype)
    for first in range(0, rows.shape[0], by.chunk):
        cut = slice(first, first + by.chunk)
        logits = _logits(rows[cut], head, bias, by)
        cap = _cap_slope(logits, by)
        logs = logits.sub_(lse[cut, None])
        lean = None
        if entropies is None or of_entropy is None:
            powers = logs.exp_()
        else:
            powers = logs.exp()
            lean = logs.clamp_(min=_LEAST_LOG).add_(entropies[cut, None]).mul_(-by.scale * of_entropy[cut, None])
        slope = _slope(powers, None, lse[cut], cap, cut, factors, by, lean)
        sums.add(cut, slope, rows[cut], head)
        del logits, logs, powers, lean, cap, slope


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
    lean: Tensor | None = None,
) -> Tensor:
    """Return the gradient by the matmul's outputs, in the memory of `powers`, which `factor` makes probabilities.

    `lean`: term of the entropy in the factor of each probability, shape of `powers`. It is changed in place.
    """
    times = factors.times[cut] * by.scale
    of_all = factors.hard[cut] if factors.soft_sum is None else factors.hard[cut] + factors.soft_sum
    if by.z_loss:
        of_all = of_all + 2 * by.z_loss * lse
    of_all = times * of_all
    of_all = (of_all if factor is None else of_all * factor)[:, None]
    powers *= of_all if lean is None else lean.add_(of_all)
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


def _joined(numbers: Tensor, comm: Comm, *, entropy: bool) -> Tensor:
    """Return numbers of rows over the classes of all ranks. One message for all chunks."""
    every = all_gather_flat(comm, numbers.flatten()).view(-1, *numbers.shape)
    lse = every[:, 0].logsumexp(0)
    joined = every.sum(0)
    joined[0] = lse
    if entropy:  # of a rank's classes, and of the choice among ranks
        share = (every[:, 0] - lse).exp()
        joined[-1] = (share * every[:, -1] - torch.xlogy(share, share)).sum(0)
    return joined
