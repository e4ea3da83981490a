# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens and entropies from a model's logits: deferred, real, or split along tp. And the reference
that they are compared with: the model without its adapters, or a frozen one."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from accel.comm import adopt
from accel.context import DistContext, context_first, group_of
from accel.errors import ConfigError
from accel.parallel._modules import unwrap_model
from accel.parallel.logits import check_logits, check_split, own_words, row_scores
from accel.parallel.logits._logits import DeferredLogits
from accel.tensors import is_half
from accel.training._evaluating import evaluating


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

    Logits that `accel.defer_logits` leaves out are not made, and entropies need none. Where ranks along tp have
    different classes it is a collective along tp. Elsewhere there is no communication. Call it in the loop, or in
    `loss_fn` of `forward_backward`.

    Args:
        ctx: the context.
        logits: outputs of the model, shape [..., classes]; fp16 and bf16 are computed in fp32. Pass `to_local()`
            of a DTensor.
        targets: next token of each position, int64 of shape [...]: ids shifted by one, as `pack` and
            `accel.parallel.split_sequence` return them. -100 gives 0. Another number that is no class gives NaN.
        temperature: divisor of the logits, above 0, with which the tokens were sampled.
        entropy: True also returns the entropy of each position's distribution.
        vocab_parallel: whether `logits` hold this rank's classes along tp, as for `vocab_cross_entropy`.

    Returns:
        Log-probabilities of the shape of `targets`, in fp32 or float64. With `entropy`, a pair: log-probabilities and
        entropies.

    Raises:
        ConfigError: shapes that do not fit each other; a DTensor; a temperature of 0 or less; deferred logits of a head
            that `vocab_parallel` does not describe; with `vocab_parallel` equal logits on all ranks, as for
            `vocab_cross_entropy`.

    Examples:
        >>> logits, targets = torch.zeros(1, 2, 4), torch.tensor([[1, -100]])
        >>> logprobs = post_training.token_logprobs(ctx, logits, targets)
        >>> [round(each, 3) for each in logprobs.exp()[0].tolist()]
        [0.25, 1.0]
    """
    check_logits(logits, targets, where="token_logprobs", split=", vocab_parallel=True")
    if not temperature > 0:
        raise ConfigError(
            "temperature is out of its range", expected="above 0", got=repr(temperature), where="token_logprobs"
        )
    group = group_of(ctx, "tp") if vocab_parallel else None
    if isinstance(logits, DeferredLogits):
        fix = f"Pass vocab_parallel={logits.is_split}."
        check_split(logits, is_split=group is not None, where="token_logprobs", fix=fix)
        noted: Tensor = (logits if torch.is_grad_enabled() else logits.detach()) / temperature
        found = None
        if isinstance(noted, DeferredLogits):
            found = noted.loss(targets, is_split=group is not None, reduction="none", entropy=entropy)
        if found is not None:
            return (-found[0], found[1]) if entropy else -found
        logits = logits.made()
    logits = own_words(logits, -1) if vocab_parallel else logits
    wide = (logits.float() if is_half(logits) else logits) / temperature
    losses, entropies = row_scores(wide, targets, None if group is None else adopt(group, ctx.device), entropy=entropy)
    return (-losses, entropies) if entropy else -losses


@contextlib.contextmanager
@context_first
def reference(ctx: DistContext, model: nn.Module) -> Generator[nn.Module]:
    """Turn adapters off during a block, so that a model with LoRA is its own reference. No communication by itself.

    In the block the model is in evaluation mode, and nothing records gradients. Adapters are layers of peft, in a
    `PeftModel` or in a model of transformers with `add_adapter`. Behind the block everything is as before. All ranks
    enter it, as all run the forward in it.

    Args:
        ctx: the context.
        model: a prepared model with adapters, or a frozen model, which is its own reference.

    Yields:
        The model, to be called in the block.

    Raises:
        ConfigError: a model without adapters that trains.

    Examples:
        >>> frozen = nn.Linear(4, 4).requires_grad_(False)
        >>> with post_training.reference(ctx, frozen) as model:
        ...     before = model(torch.ones(1, 4))
        >>> before.requires_grad
        False
    """
    plain = unwrap_model(model)
    layers = [each for each in plain.modules() if _has_adapters(each)]
    needs = [(each, each.requires_grad) for each in plain.parameters()]
    if not layers and any(trains for _, trains in needs):
        raise ConfigError(
            "a model that trains is no reference of itself",
            expected="adapters of peft, or a frozen model",
            got=f"{type(plain).__name__} without adapters",
            where="reference",
            fix="Before prepare: frozen = accel.prepare_model(ctx, copy.deepcopy(model).requires_grad_(False)), and"
            " pass frozen here.",
        )
    were_on = [each for each in layers if not each.disable_adapters]
    try:
        _switch(were_on, needs, on=False)
        with evaluating(model), torch.no_grad():
            yield model
    finally:
        _switch(were_on, needs, on=True)


def _has_adapters(module: nn.Module) -> Any:
    """Whether a module is a layer of peft, which can leave its adapters out."""
    return isinstance(getattr(module, "disable_adapters", None), bool) and hasattr(module, "enable_adapters")


def _switch(layers: list[Any], needs: list[tuple[nn.Parameter, bool]], *, on: bool) -> None:
    """Turn adapters on or off. Peft freezes adapters that are off: FSDP units would gather them frozen from then on."""
    for each in layers:
        each.enable_adapters(on)
    for parameter, trains in needs:
        _ = parameter.requires_grad_(trains)
