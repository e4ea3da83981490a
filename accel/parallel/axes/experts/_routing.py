# SPDX-License-Identifier: Apache-2.0
"""The choice of experts for each token, what keeps them equally busy, and the way of tokens to experts and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel.comm import copied, exchanged, summed
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


def expert_counts(indices: Tensor, experts: int, *, mask: Tensor | None = None) -> Tensor:
    """Return the number of choices that fell on each expert. No communication, and no wait for the device.

    Args:
        indices: experts of each token, integers of shape [..., k]; one expert a token where they have one dimension.
        experts: number of all experts.
        mask: 1 for tokens that count and 0 for padding, one entry a token, or one for equally many neighbours, such as
            a sample's; None if all count.

    Returns:
        Integers of shape [experts].

    Raises:
        ConfigError: indices that are no integers, or a mask of other tokens.

    Examples:
        >>> accel.parallel.expert_counts(torch.tensor([[0, 1], [1, 3]]), 4).tolist()
        [1, 2, 0, 1]
        >>> accel.parallel.expert_counts(torch.tensor([[0, 1], [1, 3]]), 4, mask=torch.tensor([1, 0])).tolist()
        [1, 1, 0, 0]
    """
    tokens = indices.numel() if indices.ndim < 2 else indices.shape[:-1].numel()
    marks = 1 if mask is None else mask.numel()
    if indices.is_floating_point() or (mask is not None and (tokens % marks if marks else tokens)):
        raise ConfigError(
            "the experts do not fit the tokens",
            expected=f"integers of shape [tokens, k]{'' if mask is None else f', and {tokens} tokens in the mask'}",
            got=f"{indices.dtype} of shape {list(indices.shape)}" + ("" if mask is None else f", and {marks} entries"),
            where="expert_counts",
        )
    chosen = indices.flatten().long()
    ones = torch.ones_like(chosen)
    if mask is not None:
        kept = mask.reshape(-1).to(chosen.device, non_blocking=True) != 0
        ones = kept.long().repeat_interleave(len(chosen) // max(marks, 1))
    return chosen.new_zeros(experts).index_add_(0, chosen, ones)


def balanced_bias(bias: Tensor, counts: Tensor, speed: float) -> Tensor:
    """Return the bias of a router after a step: lower by `speed` for overloaded experts, higher for the others.

    A router adds it to the scores by which it chooses experts, not to their weights, so experts are balanced without
    a loss. Experts with the mean number of tokens keep theirs. No communication, and no wait for the device.

    Args:
        bias: one entry an expert, of any shape.
        counts: tokens of each expert in the step, over all ranks, integers of shape [experts].
        speed: size of a step, such as 0.001.

    Raises:
        ConfigError: another number of experts, or a bias in 16 bits, which would lose the steps.

    Reference: Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2.

    Examples:
        >>> accel.parallel.balanced_bias(torch.zeros(3), torch.tensor([4, 2, 0]), 0.1).tolist()
        [-0.10000000149011612, 0.0, 0.10000000149011612]
    """
    if bias.numel() != counts.numel() or bias.element_size() < 4 or not bias.is_floating_point():
        raise ConfigError(
            "the bias does not fit the experts",
            expected=f"{counts.numel()} entries in float32 or float64",
            got=f"{bias.numel()} in {bias.dtype}",
            where="balanced_bias",
            fix="Convert it after the model: router.e_score_correction_bias = router.e_score_correction_bias.float().",
        )
    missing = counts.sum() - counts * counts.numel()  # the sign of the mean less the count, in integers
    return bias + missing.sign().to(bias.dtype).reshape(bias.shape) * speed


WITH_OWN_TOKENS = ("dp", "dp_replicate", "dp_shard", "cp")  # axes along which ranks have different tokens


@context_first
def balance_loss(ctx: DistContext, probabilities: Tensor, indices: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the load-balancing loss of the tokens of all ranks; 1 where experts are equally busy. A collective.

    It is the number of experts times the sum, over experts, of the share of choices that fell on the expert and its
    mean probability. Both are summed over the ranks before they are multiplied, so the loss is the same as in one
    process with all tokens; its backward is a collective too. Add it to a mean loss, times a coefficient such as 0.01.

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
            "the probabilities and the experts do not fit each other",
            expected="shapes [tokens, experts] and [tokens, k], and [tokens] of a mask",
            got=", ".join(str(list(each.shape)) for each in (probabilities, indices, mask) if each is not None),
            where="balance_loss",
        )
    experts = probabilities.shape[1]
    counted = probabilities.new_ones(tokens) if mask is None else mask.reshape(-1).to(probabilities.dtype)
    weights = counted.repeat_interleave(indices.numel() // max(tokens, 1))
    chosen = counted.new_zeros(experts).index_add(0, indices.flatten(), weights)
    totals = torch.cat([chosen, (probabilities * counted[:, None]).sum(0), counted.sum().reshape(1)])
    group = group_of(ctx, *WITH_OWN_TOKENS)
    if group is not None:
        totals = copied(summed(totals, group), group)  # each rank's loss has its own weight, so gradients are summed
    choices, probable, number = torch.split(totals, [experts, experts, 1])
    share = choices / choices.sum().clamp(min=1)
    return experts * (share * probable / number.clamp(min=1)).sum()


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
    """An exchange of rows."""

    arrivals: Permutation  # order by expert of the rows, which came in one part a rank
    sent: Sequence[int]  # number of rows to each rank
    received: Sequence[int]  # number of rows from each rank
    group: dist.ProcessGroup  # ranks of the exchange


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DispatchedTokens:
    """The tokens of the experts that this rank holds, and the way back.

    Attributes:
        rows: one row for each choice of one of these experts, in the experts' order, shape [rows, ...].
        counts: number of rows of each expert of this rank, in order; some may be 0.
        choices: order in which this rank's own choices left, for `combine_tokens`.
        journey: exchange that brought the rows; None if they only came from this rank.
    """

    rows: Tensor
    counts: Sequence[int]
    choices: Permutation
    journey: Journey | None = None

    @property
    def experts(self) -> Tensor:
        """The expert of each row, counted among this rank's experts: integers of shape [rows]."""
        # the host does not wait for what the device has to do before such a copy
        counts = torch.tensor(self.counts).to(self.rows.device, non_blocking=True)
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

    Examples:
        >>> tokens = torch.tensor([[1.0], [2.0], [3.0]])
        >>> sent = accel.parallel.dispatch_tokens(tokens, torch.tensor([[1], [0], [1]]), experts=2)
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

    Examples:
        >>> sent = accel.parallel.dispatch_tokens(torch.tensor([[1.0], [2.0]]), torch.tensor([[1], [0]]), experts=2)
        >>> accel.parallel.combine_tokens(sent.rows * 10, sent, torch.tensor([[0.5], [1.0]])).flatten().tolist()
        [5.0, 20.0]
    """
    return bring_back(outputs, dispatched.choices, dispatched.journey, weights)


def bring_back(outputs: Tensor, choices: Permutation, journey: Journey | None, weights: Tensor) -> Tensor:
    """Bring outputs back and sum them, as `combine_tokens`; callers drop the dispatched rows first.

    Rows on their way have one name: each copy is freed once the next is made.
    """
    count = len((choices if journey is None else journey.arrivals).order)
    if outputs.shape[:1] != (count,) or weights.numel() != len(choices.order):
        raise ConfigError(
            "these are not outputs of the dispatched tokens",
            expected=f"{count} rows, and {len(choices.order)} weights",
            got=f"shapes {list(outputs.shape)} and {list(weights.shape)}",
            where="combine_tokens",
        )
    if journey is not None:
        outputs = _taken(outputs, journey.arrivals.inverted())
        outputs = exchanged(outputs, journey.received, journey.sent, journey.group)
    outputs = _taken(outputs, choices.inverted())
    factors = weights.reshape(*weights.shape, *[1] * (outputs.ndim - 1))
    by_token = outputs.reshape(*weights.shape, *outputs.shape[1:])
    return (by_token * factors).sum(1).to(outputs.dtype)


class _Taken(torch.autograd.Function):
    """Rows in another order. Its gradient is a read too; the gradient of an index adds in no fixed order on GPUs."""

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
            "the experts do not fit the tokens",
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
            fix="Use an ep that divides the number of experts.",
        )
