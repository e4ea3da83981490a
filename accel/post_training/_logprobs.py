# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens from a model's logits: deferred, real, or divided along tp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast, overload

from torch import Tensor

from accel.comm import adopt
from accel.context import DistContext, context_first, group_of
from accel.errors import ConfigError
from accel.parallel.axes.tensor import row_scores
from accel.parallel.axes.tensor._logits import DeferredLogits
from accel.tensors import is_dtensor, is_half, split_dims

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_IGNORED = -100


@overload
def token_logprobs(
    ctx: DistContext,
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: Literal[False] = False,
    vocab_parallel: bool = False,
) -> Tensor: ...


@overload
def token_logprobs(
    ctx: DistContext,
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: Literal[True],
    vocab_parallel: bool = False,
) -> tuple[Tensor, Tensor]: ...


@context_first
def token_logprobs(
    ctx: DistContext,
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    vocab_parallel: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-probability of each target under a model's logits, from which gradients flow back.

    Where ranks along tp have different classes it is a collective along tp, of two messages, and none in the backward;
    elsewhere there is no communication. Call it in the loop, or in `loss_fn` of `forward_backward`.

    Args:
        ctx: the context.
        logits: outputs of the model, shape [..., classes]; fp16 and bf16 are computed in fp32. Logits that
            `accel.defer_logits` leaves out are not made, except for `entropy`.
        targets: the token that each place predicts, int64 of shape [...]: ids shifted by one, as `pack` and
            `accel.parallel.split_sequence` give them. -100 gives 0; another one that is no class NaN.
        temperature: divisor of the logits, above 0, by which the tokens were sampled.
        entropy: True returns the entropy of each place's distribution, too.
        vocab_parallel: whether `logits` are a tensor of this rank's classes along tp, as for `vocab_cross_entropy`.
            A DTensor shows it itself.

    Returns:
        Log-probabilities of the shape of `targets`, in fp32 or float64; with `entropy`, a pair of them and entropies.

    Raises:
        ConfigError: shapes that do not fit each other, a temperature of 0 or less, or a DTensor that is sharded in
            another dimension.

    Examples:
        >>> logits, targets = torch.zeros(1, 2, 4), torch.tensor([[1, -100]])
        >>> logprobs = post_training.token_logprobs(ctx, logits, targets)
        >>> [round(each, 3) for each in logprobs.exp()[0].tolist()]
        [0.25, 1.0]
    """
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            "logits and targets do not fit",
            expected=f"targets of shape {list(logits.shape[:-1])}",
            got=f"shape {list(targets.shape)}",
            where="token_logprobs",
            fix="Score the logits that predict a token: token_logprobs(ctx, logits[:, :-1], ids[:, 1:]).",
        )
    if not temperature > 0:
        raise ConfigError(
            "temperature is out of its range", expected="above 0", got=repr(temperature), where="token_logprobs"
        )
    scaled = logits if temperature == 1.0 else logits / temperature  # deferred logits note the factor
    if isinstance(scaled, DeferredLogits):
        losses = None if entropy else scaled.loss(targets, is_split=vocab_parallel, reduction="none")
        if losses is not None:
            return -losses
        logits = cast(DeferredLogits, logits).made()
    if is_dtensor(logits):
        logits, vocab_parallel = _own_logits(logits)
    group = group_of(ctx, "tp") if vocab_parallel else None
    rows = logits.flatten(0, -2)
    rows = rows.float() if is_half(rows) else rows
    rows = rows if temperature == 1.0 else rows / temperature
    counted = targets != _IGNORED
    known = targets.masked_fill(~counted, 0).flatten()
    losses, entropies = row_scores(rows, known, None if group is None else adopt(group, ctx.device), entropy=entropy)
    logprobs = -losses.view(targets.shape).masked_fill(~counted, 0.0)
    return (logprobs, entropies.view(targets.shape)) if entropy else logprobs


def _own_logits(logits: DTensor) -> tuple[Tensor, bool]:
    """Return this rank's logits of a DTensor, and whether ranks have different classes."""
    last = logits.ndim - 1
    split = [logits.placements[at] for at in split_dims(logits)]
    if any(not each.is_shard(last) for each in split):
        raise ConfigError(
            "logits that are not sharded by classes",
            expected="a DTensor that is replicated, or sharded in its last dimension",
            got=f"placements {tuple(logits.placements)}",
            where="token_logprobs",
            fix="Pass this rank's rows: logits.to_local().",
        )
    return logits.to_local(), bool(split)
