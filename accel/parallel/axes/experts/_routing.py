# SPDX-License-Identifier: Apache-2.0
"""The choice of experts for each token, and the loss that keeps experts equally busy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accel.comm import copied, summed
from accel.context import DistContext, context_first, group_of
from accel.errors import ConfigError


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        indices: experts of each token, most probable first, integers of shape [tokens, k].
        weights: factors of their outputs, shape [tokens, k].
        probabilities: of all experts, shape [tokens, experts]; for `balance_loss`.
    """

    indices: Tensor
    weights: Tensor
    probabilities: Tensor


def route_tokens(logits: Tensor, k: int, *, normalize: bool = True) -> Routing:
    """Return the k most probable experts of each token: softmax, then top-k. No communication.

    Args:
        logits: outputs of the router, shape [tokens, experts]. The softmax is computed in float32 at least.
        k: number of experts of each token.
        normalize: whether the weights of a token sum to 1; else they are its probabilities.

    Raises:
        ConfigError: logits of another shape, or a k outside of 1 to the number of experts.

    Reference: Shazeer et al. 2017, arXiv:1701.06538.

    Examples:
        >>> routing = accel.parallel.route_tokens(torch.tensor([[0.0, 2.0, 1.0]]), 2)
        >>> routing.indices.tolist(), float(routing.weights.sum())
        ([[1, 2]], 1.0)
    """
    if logits.ndim != 2 or not 1 <= k <= logits.shape[1]:
        raise ConfigError(
            "tokens cannot be routed by these logits",
            expected="logits of shape [tokens, experts], and a k of 1 to the number of experts",
            got=f"shape {list(logits.shape)} and k={k}",
            where="route_tokens",
        )
    wide = logits if logits.element_size() >= 4 else logits.float()
    probabilities = wide.softmax(-1)
    weights, indices = probabilities.topk(k, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(indices, weights.to(logits.dtype), probabilities)


_WITH_OWN_TOKENS = ("dp", "dp_replicate", "dp_shard", "cp")  # axes along which ranks have tokens of their own


@context_first
def balance_loss(ctx: DistContext, probabilities: Tensor, indices: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the load-balancing loss of the tokens of all ranks; 1 where experts are equally busy. A collective.

    It is the number of experts times the sum, over experts, of the share of choices that fell on the expert and its
    mean probability. Both are summed over the ranks before they are multiplied, so the loss is that of one process
    with all tokens; its backward is a collective too. Add it to a mean loss, times a coefficient such as 0.01.

    Args:
        ctx: the context.
        probabilities: of all experts, shape [tokens, experts], as `route_tokens` returns them. Tokens of several layers
            may be concatenated.
        indices: experts of each token, integers of shape [tokens, k].
        mask: 1 for tokens that count and 0 for padding, shape [tokens]; None if all count.

    Returns:
        A scalar, alike on all ranks; 0 where no token counts.

    Raises:
        ConfigError: shapes that do not fit.

    Reference: Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, equations 4 to 6.

    Examples:
        >>> routing = accel.parallel.route_tokens(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 1)
        >>> float(accel.parallel.balance_loss(accel.single(), routing.probabilities, routing.indices))
        1.0
    """
    tokens = probabilities.shape[0]
    if probabilities.ndim != 2 or indices.shape[:1] != (tokens,) or (mask is not None and mask.numel() != tokens):
        raise ConfigError(
            "not the probabilities and experts of the same tokens",
            expected="shapes [tokens, experts] and [tokens, k], and [tokens] of a mask",
            got=", ".join(str(list(each.shape)) for each in (probabilities, indices, mask) if each is not None),
            where="balance_loss",
        )
    experts = probabilities.shape[1]
    counted = probabilities.new_ones(tokens) if mask is None else mask.reshape(-1).to(probabilities.dtype)
    weights = counted.repeat_interleave(indices.numel() // max(tokens, 1))
    chosen = counted.new_zeros(experts).index_add(0, indices.flatten(), weights)
    totals = torch.cat([chosen, (probabilities * counted[:, None]).sum(0), counted.sum().reshape(1)])
    group = group_of(ctx, *_WITH_OWN_TOKENS)
    if group is not None:
        totals = copied(summed(totals, group), group)  # each rank's loss has its own weight, so gradients are summed
    choices, probable, number = torch.split(totals, [experts, experts, 1])
    share = choices / choices.sum().clamp(min=1)
    return experts * (share * probable / number.clamp(min=1)).sum()
