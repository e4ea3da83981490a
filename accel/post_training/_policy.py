# SPDX-License-Identifier: Apache-2.0
"""Losses and advantages of policy gradients: clipped ratios, values, groups, and whitening over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from accel.collectives import reduce
from accel.context import DistContext, context_first
from accel.errors import ConfigError
from accel.errors._checks import check_choice
from accel.post_training._losses import (
    Average,
    LossSum,
    averaged,
    check_documents,
    has_values,
    masked,
    mean_of,
    sequence_totals,
)
from accel.post_training._samples import check_rewards


class PolicyLoss(LossSum, frozen=True):
    """A sum of losses of a policy, and means over this rank's tokens that show whether it is healthy.

    Attributes:
        tokens: number of tokens that count on this rank, shape []: the weight of the means below.
        clipped: share of tokens with a limited ratio.
        kl: estimate of the divergence from the reference (k3 of Schulman), or from `old` without one.
        mismatch: mean distance of log-probabilities of trainer and sampler; 0 without a sampler.
        truncated: share of tokens with a limited importance weight.
    """

    tokens: Tensor
    clipped: Tensor
    kl: Tensor
    mismatch: Tensor
    truncated: Tensor


@context_first
def policy_loss(
    ctx: DistContext,
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    ratio: Literal["token", "sequence"] = "token",
    sampler: Tensor | None = None,
    cap: float = 2.0,
    reference: Tensor | None = None,
    beta: float = 0.0,
    average: Average = "token",
    documents: Tensor | None = None,
) -> PolicyLoss:
    """Return the clipped loss of a policy gradient, for PPO, GRPO, DAPO, Dr. GRPO and GSPO.

    A collective along cp, if `ratio` or `average` needs whole sequences (a message each); elsewhere no communication.

    Args:
        ctx: the context.
        new: log-probabilities of the sampled tokens, with gradient, shape [rows, tokens].
        old: log-probabilities before the update, without gradient; `new.detach()` in the first step on samples.
        advantages: shape [rows, tokens], or [rows] if each row is one sequence, without `documents`.
        mask: tokens that count, bool, or their factors, shape [rows, tokens]. It applies before exponentials: other
            tokens may have any log-probability.
        clip: largest distances of a ratio below 1, and above 1, from which the objective still gains.
        ratio: "token", or "sequence" for the geometric mean of a sequence's ratios, which reaches each token by its own
            log-probability (GSPO-token).
        sampler: log-probabilities by which the tokens were drawn; the loss gets the factor `exp(old - sampler)`, at
            most `cap`, without gradient. None for samples of the trainer itself.
        cap: limit of that factor, for each token.
        reference: log-probabilities of a reference; None for none.
        beta: factor of the divergence from the reference in the loss.
        average: as for `weighted_sum`: GRPO is "sequence", DAPO "token", Dr. GRPO a constant length.
        documents: as for `weighted_sum`.

    Returns:
        The sum with its weight, and means for the log.

    Raises:
        ConfigError: shapes that do not fit each other, or an option out of its range.

    Reference:
        Schulman et al. 2017, arXiv:1707.06347; Shao et al. 2024, arXiv:2402.03300; Yu et al. 2025, arXiv:2503.14476;
        Liu et al. 2025, arXiv:2503.20783; Zheng et al. 2025, arXiv:2507.18071.
    """
    check_choice(ratio, ("token", "sequence"), "unknown ratio", where="policy_loss(ratio=)")
    by_row = new.ndim == 2 and advantages.shape == new.shape[:1]
    _check_options(clip, cap, beta, has_reference=reference is not None, is_ambiguous=by_row and documents is not None)
    gains = advantages[:, None].expand_as(new) if by_row else advantages
    given = [None if each is None else each.detach() for each in (old, gains, sampler, reference)]
    factors, new, old, gains, sampled, referred = masked(new, mask, *given)
    gaps = new - old
    if ratio == "sequence":
        totals = sequence_totals(ctx, torch.stack([gaps.detach() * factors, factors]), documents)
        gaps = mean_of(*totals).masked_fill(factors == 0, 0.0) + new - new.detach()
    ratios = gaps.exp()
    free = ratios * gains
    limited = ratios.clamp(1 - clip[0], 1 + clip[1]) * gains
    losses = -torch.minimum(free, limited)
    distance = torch.zeros_like(old) if sampler is None else old - sampled
    importance = distance.exp()
    losses = losses * importance.clamp(max=cap)
    behind = (old if reference is None else referred) - new
    kl = behind.exp() - 1 - behind  # never below 0, and unbiased
    if beta:
        losses = losses + beta * kl
    counted = (factors != 0).to(factors.dtype)
    tokens = counted.sum()
    shown = [each.detach() * counted for each in (limited < free, kl, distance.abs(), importance > cap)]
    loss = averaged(ctx, losses, factors, average, documents)
    return PolicyLoss(loss.sum, loss.weight, tokens, *(mean_of(each.sum(), tokens) for each in shown))


def _check_options(
    clip: tuple[float, float], cap: float, beta: float, *, has_reference: bool, is_ambiguous: bool
) -> None:
    if not isinstance(clip, tuple | list) or len(clip) != 2:  # pyright: ignore[reportUnnecessaryIsInstance] - from users
        near = clip if isinstance(clip, int | float) and 0 <= clip <= 1 else 0.2
        fix = f"Pass clip=({near}, {near})."
        raise ConfigError("clip is no pair", expected="(0.2, 0.2)", got=repr(clip), where="policy_loss", fix=fix)
    least, most = clip
    referred = "Compute them in `with reference(ctx, model)`, or leave beta out."
    by_token = "Pass advantages of the shape of new, or leave documents out if each row is one sequence."
    for is_right, problem, expected, got, fix in (
        (0 <= least <= 1 and most >= 0, "clip is out of its range", "from 0 to 1, and 0 or above", clip, ""),
        (cap > 0, "cap is out of its range", "above 0", cap, ""),
        (beta >= 0, "beta is out of its range", "0 or above", beta, ""),
        (not beta or has_reference, "no reference to diverge from", "its log-probabilities", beta, referred),
        (not is_ambiguous, "rows of several sequences", "an advantage of each token", "of each row", by_token),
    ):
        if not is_right:
            raise ConfigError(problem, expected=expected, got=str(got), where="policy_loss", fix=fix)


@context_first
def value_loss(
    ctx: DistContext,
    values: Tensor,
    old: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = 0.2,
    average: Average = "token",
    documents: Tensor | None = None,
) -> LossSum:
    """Return half of the squared errors of values, the larger one of a value and of the value limited near `old`.

    A collective along cp, as `weighted_sum` is.

    Args:
        ctx: the context.
        values: predicted returns of tokens, with gradient, shape [rows, tokens].
        old: values before the update, of the same shape.
        returns: targets of the values, from `gae`.
        mask: tokens that count, or their factors.
        clip: largest distance of a value from `old`; None for any.
        average: as for `weighted_sum`.
        documents: as for `weighted_sum`.

    Returns:
        The sum with its weight.

    Raises:
        ConfigError: shapes that do not fit each other, or `clip` below 0.
    """
    if clip is not None and not clip >= 0:
        raise ConfigError(
            "clip is out of its range", expected="0 or above, or None", got=repr(clip), where="value_loss"
        )
    factors, values, old, returns = masked(values, mask, old.detach(), returns.detach())
    errors = (values - returns).square()
    if clip is not None:
        near = old + (values - old).clamp(-clip, clip)
        errors = torch.maximum(errors, (near - returns).square())
    return averaged(ctx, errors / 2, factors, average, documents)


@context_first
def group_advantages(
    ctx: DistContext,
    rewards: Tensor | Sequence[float],
    size: int,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
) -> Tensor:
    """Return rewards less the mean of their group, the answers to one prompt.

    A collective only with `scale="batch"` (two messages).

    Args:
        ctx: the context.
        rewards: rewards of this rank, shape [prompts * size], the answers to one prompt next to each other.
        size: number of answers to a prompt, at least 2.
        scale: "group" divides by the standard deviation of the group, "batch" by the standard deviation over
            all ranks, "none" by nothing.
        eps: added to the deviation.

    Returns:
        Advantages, shape [prompts * size], in float32 at least.

    Raises:
        ConfigError: rewards that are no whole groups, or another `scale`.
        DataError: rewards on the CPU that are inf or NaN.
    """
    check_choice(scale, ("group", "batch", "none"), "unknown scale of advantages", where="group_advantages(scale=)")
    rewards = torch.as_tensor(rewards)
    if not hasattr(size, "__index__") or size < 2 or rewards.ndim != 1 or rewards.shape[0] % size:
        raise ConfigError(
            "rewards do not form full groups",
            expected="shape [prompts * size], and size of at least 2",
            got=f"shape {list(rewards.shape)} and size {size}",
            where="group_advantages",
            fix="Draw several answers to each prompt: sample(..., n=size), with a size of at least 2.",
        )
    if has_values(rewards):
        check_rewards(rewards, "group_advantages")
    rewards = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    groups = rewards.view(-1, size)
    found = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        found = found / (groups.std(1, keepdim=True) + eps)
    if scale == "batch":
        _, variance = _moments(ctx, rewards, torch.ones_like(rewards))
        found = found / (variance.sqrt() + eps)
    return found.flatten()


@context_first
def whiten(ctx: DistContext, values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Return values with mean 0 and variance 1 over the tokens of all ranks that count. A collective, two messages.

    Along cp call it before the split, as `gae`.

    Args:
        ctx: the context.
        values: advantages of this rank's tokens, of any shape.
        mask: tokens that count, of the same shape.
        shift_mean: False keeps the mean.
        eps: added to the variance.

    Returns:
        The values, without gradient; 0 for tokens that do not count.
    """
    counted, values = masked(values.detach(), mask != 0, kind=("as the values", ""), where="whiten")
    mean, variance = _moments(ctx, values, counted)
    whitened = (values - mean) * (variance + eps).rsqrt()
    return (whitened if shift_mean else whitened + mean).masked_fill(counted == 0, 0.0)


def _moments(ctx: DistContext, values: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance over all ranks. Ranks that share samples each send their copy."""
    copies = ctx.world_size / ctx.data_parallel[1]
    count, total = reduce(ctx, torch.stack([factors.sum(), (values * factors).sum()]), "sum") / copies
    mean = total / count.clamp(min=1)
    squares = reduce(ctx, ((values - mean).square() * factors).sum(), "sum") / copies
    return mean, squares / (count - 1).clamp(min=1)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    discount: float = 1.0,
    decay: float = 0.95,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return generalized advantage estimates and returns. No communication; along cp call it before the split.

    Args:
        rewards: rewards of tokens, shape [rows, tokens]; the last token has the reward of a sequence.
        values: predicted returns of tokens, of the same shape.
        mask: tokens that count. Others, such as a tool's, are passed over: the next token that counts comes next.
        discount: factor of what comes later, gamma.
        decay: weight of later estimates, lambda.
        documents: number of each token's sequence in its row; None if each row is one sequence.

    Returns:
        Advantages, and returns for `value_loss`: shape [rows, tokens], 0 for tokens that do not count.

    Raises:
        ConfigError: shapes that do not fit each other.

    Reference:
        Schulman et al. 2015, arXiv:1506.02438.
    """
    factors, rewards, values = masked(rewards, mask, values)
    if documents is not None:
        check_documents(documents, rewards.shape, rewards.shape[1])
    counts = factors != 0
    advantages = torch.zeros_like(rewards)
    next_value = rewards.new_zeros(rewards.shape[0])
    next_advantage = rewards.new_zeros(rewards.shape[0])
    for at in reversed(range(rewards.shape[1])):
        if documents is not None and at + 1 < rewards.shape[1]:
            ends = documents[:, at] != documents[:, at + 1]
            next_value = next_value.masked_fill(ends, 0.0)
            next_advantage = next_advantage.masked_fill(ends, 0.0)
        error = rewards[:, at] + discount * next_value - values[:, at]
        advantage = error + discount * decay * next_advantage
        here = counts[:, at]
        next_value = torch.where(here, values[:, at], next_value)
        next_advantage = torch.where(here, advantage, next_advantage)
        advantages[:, at] = torch.where(here, advantage, 0.0)
    return advantages, (advantages + values).masked_fill(~counts, 0.0)
