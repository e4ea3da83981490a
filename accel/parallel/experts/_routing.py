# SPDX-License-Identifier: Apache-2.0
"""The choice of experts for each token. No communication."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

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

    Example:
        >>> routing = accel.route_tokens(torch.tensor([[0.0, 2.0, 1.0]]), 2)
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
