# SPDX-License-Identifier: Apache-2.0
"""Losses as sums with the weight that `backward` takes: averages of tokens and of sequences, and losses of pairs.

A rank's weight is its part of the divisor, so the sums of all ranks and micro-batches over their weights are one mean.
Along cp a rank holds some positions of each sequence: numbers of whole sequences take one message there.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from accel.comm import adopt, all_reduce_flat
from accel.context import DistContext, context_first, group_of
from accel.errors import ConfigError
from accel.errors._checks import check_choice

Average = Literal["token", "sequence"] | float
# a shape, and what helps where numbers have another
_TOKENS = ("[rows, tokens]", "Shift all to the predicted tokens: logprobs, targets and mask have one place for each.")
_PAIRS = ("[pairs]", "Pass one number for each pair, such as outputs[:, 0] of a head with one output.")


class LossSum(msgspec.Struct, frozen=True):
    """A sum of losses, and the weight that it is divided by.

    Attributes:
        sum: the sum of this rank's losses, shape [].
        weight: this rank's part of the divisor, shape []; no gradient.
    """

    sum: Tensor
    weight: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean for `accel.backward(ctx, loss.mean, state, weight=loss.weight)`; 0 if nothing counts."""
        return mean_of(self.sum, self.weight)


def mean_of(total: Tensor, weight: Tensor) -> Tensor:
    """Return a sum over its weight, or the sum, which is 0, for no weight."""
    return total / torch.where(weight > 0, weight, 1.0)


@context_first
def weighted_sum(
    ctx: DistContext,
    losses: Tensor,
    mask: Tensor,
    *,
    average: Average = "token",
    documents: Tensor | None = None,
) -> LossSum:
    """Return the sum of losses of tokens, weighted for an average over tokens or over sequences.

    A collective along cp, if `average` is not "token" (one message); elsewhere no communication.

    Args:
        ctx: the context.
        losses: losses of tokens, shape [rows, tokens]; along cp this rank's positions.
        mask: tokens that count, bool, or their factors, of the shape of `losses`. Losses of other tokens may be NaN.
        average: "token" for the mean over the tokens of all ranks; "sequence" for the mean over sequences of the mean
            over their tokens; a number of tokens for the mean over sequences of the sum over their tokens, divided
            by it. A sequence without a token that counts counts for nothing.
        documents: number of each token's sequence in its row, from 0, int64 of the shape of `losses`; None if each row
            is one sequence.

    Returns:
        Sum and weight: of tokens, or of sequences. Along cp a rank has its part of a sequence's weight.

    Raises:
        ConfigError: shapes that do not fit each other, another `average`, or, on the CPU, factors below 0 or NaN.
    """
    factors, losses = masked(losses, mask)
    return averaged(ctx, losses, factors, average, documents)


@context_first
def loss_weight(
    ctx: DistContext, mask: Tensor, *, average: Average = "token", documents: Tensor | None = None
) -> Tensor:
    """Return the weight that losses of these tokens have, before there are losses, as `forward_backward` needs it.

    A collective along cp, as `weighted_sum` is.

    Args:
        ctx: the context.
        mask: tokens that count, or their factors, shape [rows, tokens].
        average: as for `weighted_sum`.
        documents: as for `weighted_sum`.

    Returns:
        The weight, shape [].
    """
    losses = torch.zeros_like(mask, dtype=torch.float32)
    return weighted_sum(ctx, losses, mask, average=average, documents=documents).weight


@context_first
def sequence_sums(ctx: DistContext, values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over each row of the tokens that count, from which gradients flow back to this rank's tokens.

    A collective along cp, of one message: every rank there gets the sums over all positions.

    Args:
        ctx: the context.
        values: log-probabilities of tokens, shape [rows, tokens]; along cp this rank's positions.
        mask: tokens that count, or their factors, of the same shape.

    Returns:
        Sums of shape [rows], for `dpo_loss`.
    """
    counted, values = masked(values, mask)
    own = (values * counted).sum(1)
    group = group_of(ctx, "cp")
    if group is None:
        return own
    total = all_reduce_flat(adopt(group, ctx.device), own.detach().clone(), "sum")
    # Each rank along cp counts its copy of a row's loss, and only reaches its own tokens.
    copies = group.size()
    return total + copies * (own - own.detach())


class PairLoss(LossSum, frozen=True):
    """A sum of losses of pairs of answers.

    Attributes:
        margin: mean of the chosen answer's score less the rejected one's, shape []; no gradient.
        accuracy: share of pairs in which the chosen answer has the higher score, shape []; no gradient.
    """

    margin: Tensor
    accuracy: Tensor


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    kind: Literal["sigmoid", "ipo"] = "sigmoid",
    weights: Tensor | None = None,
) -> PairLoss:
    """Return the loss of direct preference optimization. No communication.

    A pair's score is `beta` times the gain of the answer's log-probability on the reference.

    Args:
        chosen: log-probabilities of the chosen answers, shape [pairs], from `sequence_sums`.
        rejected: log-probabilities of the rejected answers.
        reference_chosen: log-probabilities of the chosen answers under the reference, shape [pairs].
        reference_rejected: log-probabilities of the rejected answers under the reference.
        beta: strength of the reference, above 0.
        kind: "sigmoid" for DPO; "ipo" for the squared distance of the log-ratio from `1 / (2 * beta)`.
        weights: factor of each pair, such as 0 for a placeholder, or bool, shape [pairs]; None for 1.

    Returns:
        The sum, with the weight of pairs, margins and accuracy.

    Raises:
        ConfigError: shapes that do not fit each other, another `kind`, or `beta` of 0 or less.

    Reference:
        Rafailov et al. 2023, arXiv:2305.18290; Azar et al. 2023, arXiv:2310.12036, for IPO.
    """
    check_choice(kind, ("sigmoid", "ipo"), "unknown loss of pairs", where="dpo_loss(kind=)")
    if not 0 < beta < math.inf:
        raise ConfigError("beta is out of its range", expected="a number above 0", got=repr(beta), where="dpo_loss")
    given = (rejected, reference_chosen.detach(), reference_rejected.detach())
    weights, gained, lost, before_gained, before_lost = masked(chosen, weights, *given, kind=_PAIRS, where="dpo_loss")
    ratio = (gained - before_gained) - (lost - before_lost)
    losses = -logsigmoid(beta * ratio) if kind == "sigmoid" else (ratio - 1 / (2 * beta)).square()
    return _pair_loss(losses, beta * ratio, weights)


def reward_loss(
    chosen: Tensor, rejected: Tensor, *, margins: Tensor | None = None, weights: Tensor | None = None
) -> PairLoss:
    """Return the loss of a reward model by Bradley and Terry: the chosen answer's score should be higher.

    No communication.

    Args:
        chosen: scores of the chosen answers, shape [pairs].
        rejected: scores of the rejected answers.
        margins: least distance of the two, shape [pairs]; None for 0.
        weights: factor of each pair, such as 0 for a placeholder, or bool, shape [pairs]; None for 1.

    Returns:
        The sum, with the weight of pairs, margins and accuracy.

    Raises:
        ConfigError: shapes that do not fit each other.
    """
    weights, high, low, least = masked(chosen, weights, rejected, margins, kind=_PAIRS, where="reward_loss")
    return _pair_loss(-logsigmoid(high - low - least), high - low, weights)


def _pair_loss(losses: Tensor, margins: Tensor, weights: Tensor) -> PairLoss:
    weight = weights.sum()
    margins = margins.detach()
    accuracy = mean_of((weights * (margins > 0)).sum(), weight)
    return PairLoss((losses * weights).sum(), weight, mean_of((weights * margins).sum(), weight), accuracy)


def masked(
    first: Tensor,
    mask: Tensor | None,
    *others: Tensor | None,
    kind: tuple[str, str] = _TOKENS,
    where: str = "accel.post_training",
) -> tuple[Tensor, ...]:
    """Return factors and numbers in float32 or float64, numbers without a factor as 0.

    So that nothing of tokens or pairs that do not count, inf and NaN included, meets an exponential or a gradient.

    Args:
        first: numbers of tokens or pairs.
        mask: their factors; None for 1.
        others: further numbers; None for 0.
        kind: the shape of all, and the fix for another, as an error shows them.
        where: the call that an error names.
    """
    shape, fix = kind
    given = [each for each in (first, mask, *others) if each is not None]
    sizes = 2 if shape == _TOKENS[0] else 1 if shape == _PAIRS[0] else first.ndim
    if first.ndim != sizes or any(each.shape != first.shape for each in given):
        raise ConfigError(
            "numbers do not fit each other",
            expected=f"all of one shape {shape}",
            got=f"shapes {', '.join(str(list(each.shape)) for each in given)}",
            where=where,
            fix=fix,
        )
    wide = torch.promote_types(first.dtype, torch.float32)
    factors = torch.ones_like(first, dtype=wide) if mask is None else mask.detach().to(wide)
    if has_values(factors) and not bool((factors >= 0).all()):
        raise ConfigError(
            "factors are below 0 or NaN",
            expected="True and False, or factors from 0",
            got=f"factors from {float(factors.min()):g} to {float(factors.max()):g}",
            where=where,
            fix="Pass a mask, such as labels != -100, in the place of labels.",
        )
    kept = [torch.zeros_like(factors) if each is None else each for each in (first, *others)]
    return factors, *(each.to(wide).masked_fill(factors == 0, 0.0) for each in kept)


def has_values(tensor: Tensor) -> bool:
    """Return whether a check may look at a tensor's values: without a wait for a device, and outside of traces."""
    return type(tensor) is Tensor and tensor.is_cpu and not torch.compiler.is_compiling()


def averaged(ctx: DistContext, losses: Tensor, factors: Tensor, average: Average, documents: Tensor | None) -> LossSum:
    """Return the weighted sum of losses and factors of `masked`; see `weighted_sum`. A collective along cp."""
    if average == "token":
        return LossSum((losses * factors).sum(), factors.sum())
    length = 1.0 if average == "sequence" else average
    if isinstance(length, str | bool) or not 0 < length < math.inf:
        raise ConfigError(
            "unknown average",
            expected='"token", "sequence", or a number of tokens above 0',
            got=repr(average),
            where="average=",
        )
    shares = mean_of(factors, sequence_totals(ctx, factors[None], documents)[0])
    times = shares if average == "sequence" else factors / length
    return LossSum((losses * times).sum(), shares.sum())


@torch.no_grad()
def sequence_totals(ctx: DistContext, numbers: Tensor, documents: Tensor | None) -> Tensor:
    """Return for each token the sum over its sequence. A collective along cp, of one message.

    Args:
        ctx: the context.
        numbers: several numbers of each token, shape [numbers, rows, tokens].
        documents: as for `weighted_sum`.

    Returns:
        Sums of the same shape.
    """
    group = group_of(ctx, "cp")
    if documents is None:
        totals = numbers.sum(2, keepdim=True)
        places = torch.zeros_like(numbers, dtype=torch.int64)
    else:
        size = numbers.shape[2] * (1 if group is None else group.size())
        check_documents(documents, numbers.shape[1:], size)
        places = documents.long().expand_as(numbers)
        totals = numbers.new_zeros(*numbers.shape[:2], size).scatter_add_(2, places, numbers)
    if group is not None:
        totals = all_reduce_flat(adopt(group, ctx.device), totals.contiguous(), "sum")
    return totals.gather(2, places)


def check_documents(documents: Tensor, shape: torch.Size, size: int) -> None:
    """Raise `ConfigError` for what does not number the sequences of rows."""
    got = f"{documents.dtype} of shape {list(documents.shape)}"
    is_right = documents.shape == shape and not documents.is_floating_point()
    if is_right and has_values(documents) and documents.numel():
        low = int(documents.min())
        high = int(documents.max())
        is_right, got = low >= 0 and high < size, f"numbers from {low} to {high}"
    if not is_right:
        raise ConfigError(
            "the numbers of sequences in their rows are not valid",
            expected=f"integers from 0 in each row, below {size}, of shape {list(shape)}",
            got=got,
            where="documents=",
            fix="Pass documents of PackedTokens, or None if each row is one sequence.",
        )
