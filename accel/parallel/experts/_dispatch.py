# SPDX-License-Identifier: Apache-2.0
"""Tokens travel to the ranks that hold their experts, and the outputs travel back: two all-to-alls, nothing dropped.

Lepikhin et al. 2020, "GShard", arXiv:2006.16668, without its limit on the tokens of an expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel.comm import exchanged
from accel.errors import ConfigError


class Permutation:
    """An order of rows, each source row `copies` times.

    Attributes:
        order: place of each new row among the copies.
        copies: number of copies of each source row, side by side.
        inverse: new row of each copy.
    """

    __slots__ = ("copies", "inverse", "order")

    def __init__(self, order: Tensor, copies: int, inverse: Tensor | None = None) -> None:
        self.order = order
        self.copies = copies
        if inverse is None:
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=order.device)
        self.inverse = inverse

    def inverted(self) -> Permutation:
        """Return the order that undoes this one, of one copy."""
        return Permutation(self.inverse, 1, self.order)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Journey:
    """An exchange of rows.

    Attributes:
        arrivals: order of the rows by expert, of which ranks sent one part each.
        sent, received: number of rows to and from each rank.
        group: ranks of the exchange.
    """

    arrivals: Permutation
    sent: Sequence[int]
    received: Sequence[int]
    group: dist.ProcessGroup


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DispatchedTokens:
    """The tokens of the experts that this rank holds, and the way back.

    Attributes:
        rows: one row for each choice of one of these experts, in the experts' order, shape [rows, ...].
        counts: number of rows of each expert of this rank, in order; some may be 0.
        choices: order in which this rank's own choices left, for `combine_tokens`.
        journey: exchange that brought the rows; None if they came from this rank alone.
    """

    rows: Tensor
    counts: Sequence[int]
    choices: Permutation
    journey: Journey | None = None

    @property
    def experts(self) -> Tensor:
        """The expert of each row, counted among those of this rank: integers of shape [rows]."""
        counts = torch.tensor(self.counts, device=self.rows.device)
        own = torch.arange(len(self.counts), device=self.rows.device)
        return own.repeat_interleave(counts, output_size=self.rows.shape[0])


def dispatch_tokens(
    tokens: Tensor, indices: Tensor, *, experts: int, group: dist.ProcessGroup | None = None
) -> DispatchedTokens:
    """Bring tokens to the ranks that hold their experts. A collective of the group, as its backward.

    Of E experts on R ranks, rank r holds those from r * E / R on. Every choice is kept, however many tokens an expert
    gets; ranks may have different numbers of tokens, or none. The host waits once for the device, for the counts.

    Args:
        tokens: this rank's, shape [tokens, ...].
        indices: experts of each token, integers of shape [tokens, k], as `route_tokens` returns them.
        experts: number of all experts; the group's size divides it.
        group: ranks that share the experts, as `accel.group_of(ctx, "ep")` returns them; None if all are here.

    Raises:
        ConfigError: an index of another shape, or a number of experts that the ranks cannot share.

    Example:
        >>> tokens = torch.tensor([[1.0], [2.0], [3.0]])
        >>> sent = accel.dispatch_tokens(tokens, torch.tensor([[1], [0], [1]]), experts=2)
        >>> sent.rows.flatten().tolist(), sent.counts
        ([2.0, 1.0, 3.0], (1, 2))
    """
    ranks = 1 if group is None else group.size()
    _check(tokens, indices, experts, ranks)
    chosen = indices.flatten()
    choices = Permutation(chosen.argsort(stable=True), indices.shape[1])
    sent = chosen.new_zeros(experts).index_add_(0, chosen, torch.ones_like(chosen))  # bincount waits for the device
    rows = _taken(tokens, choices)
    if group is None:
        return DispatchedTokens(rows, _listed(sent), choices)
    received = torch.empty_like(sent)
    _ = cast(Any, dist).all_to_all_single(received, sent, group=group)
    own = experts // ranks
    per_rank = sent.view(ranks, own).sum(1)
    counted = _listed(torch.cat([per_rank, received]))  # the one wait for the device
    to = counted[:ranks]
    from_each = [counted[at : at + own] for at in range(ranks, len(counted), own)]
    back = tuple(map(sum, from_each))
    came = exchanged(rows, to, back, group)
    by_expert = torch.arange(own, device=chosen.device).repeat(ranks).repeat_interleave(received, output_size=sum(back))
    arrivals = Permutation(by_expert.argsort(stable=True), 1)
    counts = tuple(map(sum, zip(*from_each, strict=True)))
    return DispatchedTokens(_taken(came, arrivals), counts, choices, Journey(arrivals, to, back, group))


def combine_tokens(outputs: Tensor, dispatched: DispatchedTokens, weights: Tensor) -> Tensor:
    """Bring outputs of experts back, and sum them by token. A collective of the dispatch's group, as its backward.

    Args:
        outputs: of the rows of `dispatched`, in their order, shape [rows, ...].
        dispatched: result of `dispatch_tokens`.
        weights: factor of each output, shape [tokens, k], as `route_tokens` returns them.

    Returns:
        The weighted sums in the dtype of `outputs`, shape [tokens, ...].

    Raises:
        ConfigError: another number of rows or weights than was dispatched.

    Example:
        >>> sent = accel.dispatch_tokens(torch.tensor([[1.0], [2.0]]), torch.tensor([[1], [0]]), experts=2)
        >>> accel.combine_tokens(sent.rows * 10, sent, torch.tensor([[0.5], [1.0]])).flatten().tolist()
        [5.0, 20.0]
    """
    choices = dispatched.choices
    journey = dispatched.journey
    if outputs.shape[:1] != dispatched.rows.shape[:1] or weights.numel() != len(choices.order):
        raise ConfigError(
            "these are not outputs of the dispatched tokens",
            expected=f"{dispatched.rows.shape[0]} rows, and {len(choices.order)} weights",
            got=f"shapes {list(outputs.shape)} and {list(weights.shape)}",
            where="combine_tokens",
        )
    if journey is not None:
        by_rank = _taken(outputs, journey.arrivals.inverted())
        outputs = exchanged(by_rank, journey.received, journey.sent, journey.group)
    placed = _taken(outputs, choices.inverted())
    by_token = placed.reshape(*weights.shape, *outputs.shape[1:])
    factors = weights.reshape(*weights.shape, *[1] * (outputs.ndim - 1))
    return (by_token * factors).sum(1).to(outputs.dtype)


class _Taken(torch.autograd.Function):
    """Rows in another order. Its gradient reads too, where that of an index adds in no fixed order on GPUs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return rows.index_select(0, permutation.order // permutation.copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - decorated
        permutation = ctx.permutation
        grad = grad_outputs[0].index_select(0, permutation.inverse)
        if permutation.copies > 1:
            sources = grad.shape[0] // permutation.copies
            grad = grad.reshape(sources, permutation.copies, *grad.shape[1:]).sum(1)
        return grad, None


def _taken(rows: Tensor, permutation: Permutation) -> Tensor:
    return cast(Any, _Taken).apply(rows, permutation)


def _listed(counts: Tensor) -> tuple[int, ...]:
    return tuple(cast("list[int]", cast(Any, counts).tolist()))


def _check(tokens: Tensor, indices: Tensor, experts: int, ranks: int) -> None:
    if indices.ndim != 2 or indices.shape[0] != tokens.shape[0] or indices.is_floating_point():
        raise ConfigError(
            "not the experts of these tokens",
            expected=f"integers of shape [{tokens.shape[0]}, k]",
            got=f"{indices.dtype} of shape {list(indices.shape)}",
            where="dispatch_tokens",
        )
    if experts < 1 or experts % ranks:
        raise ConfigError(
            "the experts cannot be divided among the ranks",
            expected=f"a multiple of {ranks}",
            got=f"{experts} experts",
            where="dispatch_tokens",
            fix="Take an ep that divides the number of experts.",
        )
