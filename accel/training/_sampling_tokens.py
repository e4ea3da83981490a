# SPDX-License-Identifier: Apache-2.0
"""The choice of next tokens from logits. No communication."""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from accel.errors import ConfigError


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Rule by which tokens are chosen.

    Attributes:
        temperature: divisor of the logits; 0 takes the most probable token.
        top_k: number of the most probable tokens that may be drawn; None for all.
        top_p: least sum of probabilities of the most probable tokens that may be drawn, above 0; None for all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self, *, has_key: bool) -> None:
        """Raise `ConfigError` for values out of range, or without effect."""
        problem = expected = ""
        if not 0 <= self.temperature < math.inf:
            problem, expected = f"temperature={self.temperature}", "a number from 0"
        elif self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            problem, expected = f"top_k={self.top_k!r}", "an integer from 1"
        elif self.top_p is not None and not 0 < self.top_p <= 1:
            problem, expected = f"top_p={self.top_p}", "a number above 0, up to 1"
        elif self.temperature and not has_key:
            problem, expected = f"temperature={self.temperature} without key=", "key=accel.Key(seed), to draw from"
        elif not self.temperature and (has_key or self.top_k is not None or self.top_p is not None):
            problem, expected = "key, top_k or top_p without a temperature", "temperature above 0 beside them"
        if problem:
            raise ConfigError("tokens cannot be drawn like this", expected=expected, got=problem, where="generate")


def next_tokens(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """Return a token for each row of logits.

    Args:
        logits: shape [rows, classes]; fp16 and bf16 are computed in fp32.
        sampling: rule of the choice.
        generator: source of random numbers, on the device of the logits; None takes the most probable tokens.

    Returns:
        int64 of shape [rows].

    Reference: Holtzman et al. 2020, "The curious case of neural text degeneration", arXiv:1904.09751.
    """
    if generator is None:
        return logits.argmax(-1)
    wide = logits if logits.element_size() >= 4 else logits.float()
    wide = wide / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < wide.shape[-1]:
        least = wide.topk(sampling.top_k, -1).values[:, -1:]
        wide = wide.masked_fill(wide < least, -math.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = wide.softmax(-1).sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # the most probable token always stays
        left_out = torch.zeros_like(wide, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        wide = wide.masked_fill(left_out, -math.inf)
    return torch.multinomial(wide.softmax(-1), 1, generator=generator)[:, 0]
