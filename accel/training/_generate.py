# SPDX-License-Identifier: Apache-2.0
"""`generate`: tokens that a model adds to sequences, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accel.comm import adopt, all_reduce_flat, broadcast_flat, gathered
from accel.context import DistContext, context_first, group_of
from accel.errors import ConfigError
from accel.parallel import engine_of, unwrap_model
from accel.parallel.pipeline import first_tensor, pipeline_of
from accel.random import Key
from accel.seeding import rank_key
from accel.training._decoding import CachedTokens, Decoder, WholeSequences, takes_cache
from accel.training._sampling_tokens import Sampling, next_tokens

_WHERE = "generate"


@context_first
def generate(
    ctx: DistContext,
    model: nn.Module,
    ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Key | None = None,
    eos: int | None = None,
    cache: bool | None = None,
    inputs_of: Callable[[Tensor], Any] | None = None,
    select: Callable[[Any], Tensor] = first_tensor,
    vocab_parallel: bool = False,
) -> Tensor:
    """Return sequences with the tokens that a causal model adds, on every rank. A collective, of all ranks alike.

    Ranks that share samples, along `pp` and `tp`, pass the same sequences and get the same tokens: the last stage
    chooses them, and sends them to all. Ranks along `dp` have sequences of their own, and take as many steps. The mode
    of the model is the caller's: see `evaluating`.

    Models of transformers keep the keys and values of earlier tokens. Others run the whole sequence for each token.

    Args:
        ctx: the context.
        model: from `prepare` or `prepare_model`; causal, so that what follows a token has no effect on it.
        ids: prompts, int64 of shape [rows, length], on the context's device.
        max_new_tokens: number of tokens to add, from 1.
        attention_mask: 1 for tokens and 0 for padding before them, shape [rows, length]; for a cache. None for prompts
            of one length.
        temperature, top_k, top_p: as of transformers: 0 for the most probable token; else a divisor of the logits, and
            limits on the tokens that may be drawn.
        key: source of the draws; equal on every rank. Ranks with other samples draw other numbers.
        eos: token that ends a sequence, and fills it up to the length of the others. None to add all tokens.
        cache: whether to keep keys and values; None for what the model can do.
        inputs_of: maps ids, [rows, length], to the inputs of a model without a cache; the ids themselves by default.
            Shapes are those of the longest sequence: what is not known yet is filled with 0.
        select: maps the model's output to logits, [rows, positions, classes]; its first tensor by default.
        vocab_parallel: whether each rank along `tp` has the logits of its own classes, as for `vocab_cross_entropy`.

    Returns:
        Prompts and new tokens, int64 of shape [rows, length + new].

    Raises:
        ConfigError: a mesh with `cp`, an engine, arguments out of range, a mask that is not for prompts padded in
            front, or a cache of a model that has none.
        StageError, PeerError: as of `forward`.

    Example:
        >>> class Next(nn.Module):
        ...     def forward(self, ids):
        ...         return nn.functional.one_hot((ids + 1) % 5, 5).float()
        >>> accel.generate(accel.single(), Next(), torch.tensor([[3]]), max_new_tokens=3)
        tensor([[3, 4, 0, 1]])
    """
    ctx.comm.check_open()
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    sampling.check(has_key=key is not None)
    cached = takes_cache(model) if cache is None else cache
    _check(ctx, model, ids, max_new_tokens, attention_mask, cached=cached, has_inputs=inputs_of is not None)
    decoder: Decoder
    if cached:
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(ids)
        decoder = CachedTokens(ctx, model, mask, select)
    else:
        decoder = WholeSequences(ctx, model, ids.shape[1] + max_new_tokens - 1, inputs_of or _as_they_are, select)
    draws = None if key is None else rank_key(ctx, key).fold_in("generate")
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for step in range(max_new_tokens):
        logits = decoder.logits(ids)
        tokens = ids.new_zeros(len(ids))
        if logits is not None:
            whole = _whole_rows(ctx, logits) if vocab_parallel else logits
            generator = None if draws is None else draws.fold_in(step).generator(whole.device)
            tokens = next_tokens(whole, sampling, generator)
        _share(ctx, model, tokens)
        if eos is not None:
            tokens = tokens.masked_fill(ended, eos)
            ended = ended | (tokens == eos)
        ids = torch.cat([ids, tokens[:, None]], 1)
        if eos is not None and _all_ended(ctx, ended):
            break
    return ids


def _as_they_are(ids: Tensor) -> Tensor:
    return ids


def _whole_rows(ctx: DistContext, logits: Tensor) -> Tensor:
    """Gather the classes of the ranks along tp."""
    group = group_of(ctx, "tp")
    return logits if group is None else gathered(logits.contiguous(), -1, group)


def _share(ctx: DistContext, model: nn.Module, tokens: Tensor) -> None:
    """Give all ranks with the same samples the tokens of the last stage's first rank. Mutates them."""
    group = group_of(ctx, "tp")
    if group is not None:
        broadcast_flat(adopt(group, ctx.device), tokens, source=0)
    pipeline = pipeline_of(unwrap_model(model))
    if pipeline is not None:
        broadcast_flat(pipeline.comm, tokens, source=pipeline.last_rank)


def _all_ended(ctx: DistContext, ended: Tensor) -> bool:
    """Return whether all sequences of all ranks have ended, so that ranks take equally many steps."""
    left = (~ended).sum().to(ctx.comm.control)
    if ctx.world_size > 1:
        left = all_reduce_flat(ctx.comm, left.view(1), "sum")
    return not int(left.item())


def _check(
    ctx: DistContext,
    model: nn.Module,
    ids: Tensor,
    max_new_tokens: int,
    mask: Tensor | None,
    *,
    cached: bool,
    has_inputs: bool,
) -> None:
    """Raise `ConfigError` for what cannot generate. No communication."""
    shape = list(ids.shape)
    problem = expected = got = fix = ""
    if engine_of(ctx) is not None:
        problem, got, fix = "an engine runs its own models", f"strategy {ctx.strategy}", "Take another strategy."
    elif ctx.axis("cp").size > 1:
        problem, got = "a token at a time cannot be shared along cp", f"cp={ctx.axis('cp').size}"
        fix = "Generate on a mesh without cp: load the checkpoint there."
    elif ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        problem, expected, got = "not prompts", "int64 of shape [rows, length]", f"{ids.dtype} of shape {shape}"
    elif type(max_new_tokens) is not int or max_new_tokens < 1:
        problem, expected, got = "not a number of tokens", "an integer from 1", f"max_new_tokens={max_new_tokens!r}"
    elif cached and not takes_cache(model):
        problem, got = "the model keeps no keys and values", f"a {type(unwrap_model(model)).__name__}"
        expected, fix = "a model of transformers whose forward takes past_key_values", "Leave cache out."
    elif cached and has_inputs:
        problem, got, fix = "inputs_of has no effect beside a cache", "both", "Pass cache=False, or leave it out."
    elif mask is not None and not cached:
        problem, got, fix = "a mask has no effect without a cache", "attention_mask=", "Let inputs_of give it."
    elif mask is not None and (mask.shape != ids.shape or not _pads_in_front(mask)):
        problem, expected = "not a mask of prompts that are padded in front", f"0s, then 1s, of shape {shape}"
        got, fix = f"shape {list(mask.shape)}", 'Tokenize with padding_side="left".'
    if problem:
        raise ConfigError(problem, expected=expected, got=got, where=_WHERE, fix=fix)


def _pads_in_front(mask: Tensor) -> bool:
    return bool((mask[:, 1:] >= mask[:, :-1]).all() & (mask[:, -1] == 1).all())
