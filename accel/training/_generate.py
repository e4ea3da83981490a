# SPDX-License-Identifier: Apache-2.0
"""`generate`: tokens that a model adds to sequences, on any mesh."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accel.comm import all_reduce_flat
from accel.context import DistContext, context_first
from accel.errors import ConfigError
from accel.errors._checks import with_article
from accel.parallel._engines import engine_of
from accel.parallel._micro_batches import first_tensor
from accel.parallel._modules import unwrap_model
from accel.parallel.axes.pipeline import pipeline_of
from accel.random import Key
from accel.tensors import integers
from accel.training._decoding import (
    CachedTokens,
    Decoder,
    Sampling,
    WholeSequences,
    decode,
    numbers_of,
    plain_number,
    takes_cache,
)

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
    rows: Sequence[int] | Tensor | None = None,
    eos: int | None = None,
    cache: bool | None = None,
    inputs_of: Callable[[Tensor], Any] | None = None,
    select: Callable[[Any], Tensor] = first_tensor,
    vocab_parallel: bool = False,
) -> Tensor:
    """Return sequences with the tokens that a causal model adds, on every rank. A collective, of all ranks alike.

    Ranks that share samples, along `pp` and `tp`, pass the same sequences and get the same tokens: the last stage
    chooses them, and sends them to all. Ranks along `dp` have different sequences, and take as many steps. The mode
    of the model is the caller's: see `evaluating`.

    Models of transformers keep the keys and values of earlier tokens. Others run the whole sequence for each token.

    Args:
        ctx: the context.
        model: from `prepare` or `prepare_model`; causal: later tokens do not affect earlier ones.
        ids: prompts, int64 of shape [rows, length], on the context's device.
        max_new_tokens: number of tokens to add, from 1.
        attention_mask: 1 for tokens and 0 for padding before them, shape [rows, length]; for a cache. None for prompts
            of one length.
        temperature, top_k, top_p: as in transformers: 0 for the most probable token; else a divisor of the logits, and
            limits on the tokens that may be drawn.
        key: source of the draws; equal on every rank. A token is drawn by a number that depends on the key, the row's
            number and the token's place, so that any number of ranks draws the same tokens, but where the
            arithmetic of another batch rounds the logits otherwise.
        rows: numbers of this rank's rows among all ranks' rows, each once, from 0. By default each rank counts the rows
            of the ranks before it, by a small message where there is a key.
        eos: token that ends a sequence, and fills it up to the length of the others. None to add all tokens.
        cache: whether to keep keys and values; None for what the model can do.
        inputs_of: maps ids, [rows, length], to the inputs of a model without a cache; the ids themselves by default.
            Inputs have the length of the longest sequence, padded with 0.
        select: maps the model's output to logits, [rows, positions, classes]; its first tensor by default.
        vocab_parallel: whether each rank along `tp` has logits of a share of the classes, as for `vocab_cross_entropy`.

    Returns:
        Prompts and new tokens, int64 of shape [rows, length + new].

    Raises:
        ConfigError: an encoder-decoder, a model without a language head, a mesh with `cp`, an engine, arguments out of
            range, a mask that is not for prompts padded in front, or a cache of a model that has none.
        DataError: tokens or positions that the model's tables do not have, on the CPU.
        StageError, PeerError: as for `forward`.

    Examples:
        >>> class Next(nn.Module):
        ...     def forward(self, ids):
        ...         return nn.functional.one_hot((ids + 1) % 5, 5).float()
        >>> accel.training.generate(accel.single(), Next(), torch.tensor([[3]]), max_new_tokens=3)
        tensor([[3, 4, 0, 1]])
    """
    ctx.comm.check_open()
    check_causal(
        model, max_new_tokens, attention_mask, by_inputs=inputs_of is not None, by_select=select is not first_tensor
    )
    if select is first_tensor:
        select = partial(first_tensor, containers=ctx.containers)
    sampling = Sampling(temperature=plain_number(temperature), top_k=top_k, top_p=plain_number(top_p))
    sampling.check(has_key=key is not None, where=_WHERE)
    cached = takes_cache(model) if cache is None else cache
    _check(ctx, model, ids, max_new_tokens, attention_mask, cached=cached, has_inputs=inputs_of is not None)
    numbered = _checked_rows(rows, len(ids), has_key=key is not None)
    decoder: Decoder
    if cached:
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(ids)
        decoder = CachedTokens(ctx, model, mask, select)
    else:
        given: Callable[[Tensor], Any] = inputs_of or (lambda ids: ids)
        decoder = WholeSequences(ctx, model, ids.shape[1] + max_new_tokens - 1, given, select)
    numbers = None
    if key is not None:
        keys = [key.fold_in("generate", row) for row in _row_numbers(ctx, numbered, len(ids))]
        numbers = numbers_of(keys, max_new_tokens, ids.device)
    stop = () if eos is None else (eos,)
    options: Any = {"count": max_new_tokens, "numbers": numbers, "stop": stop}
    options |= {"vocab_parallel": vocab_parallel, "where": _WHERE}
    return torch.cat([ids, decode(ctx, model, decoder, ids, sampling, **options).tokens], 1)


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
        problem, got, fix = "an engine runs its own models", f"strategy {ctx.strategy}", "Use another strategy."
    elif ctx.axis("cp").size > 1:
        problem, got = "a token at a time cannot be shared along cp", f"cp={ctx.axis('cp').size}"
        fix = "Generate on a mesh without cp: load the checkpoint there."
    elif ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        problem, expected, got = "not prompts", "int64 of shape [rows, length]", f"{ids.dtype} of shape {shape}"
    elif type(max_new_tokens) is not int or max_new_tokens < 1:
        problem, expected, got = (
            "the number of tokens is not valid",
            "an integer from 1",
            f"max_new_tokens={max_new_tokens!r}",
        )
    elif cached and not takes_cache(model):
        problem, got = "the model keeps no keys and values", with_article(type(unwrap_model(model)).__name__)
        expected, fix = "a model of transformers with past_key_values in its forward", "Leave cache out."
    elif cached and has_inputs:
        problem, got, fix = "inputs_of has no effect with a cache", "both", "Pass cache=False, or leave it out."
    elif mask is not None and not cached:
        problem, got, fix = "a mask has no effect without a cache", "attention_mask=", "Let inputs_of give it."
    elif mask is not None and (mask.shape != ids.shape or not _pads_in_front(mask)):
        problem, expected = "the mask does not fit prompts that are padded in front", f"0s, then 1s, of shape {shape}"
        got, fix = f"shape {list(mask.shape)}", 'Tokenize with padding_side="left".'
    if problem:
        raise ConfigError(problem, expected=expected, got=got, where=_WHERE, fix=fix)


def _checked_rows(rows: Sequence[int] | Tensor | None, count: int, *, has_key: bool) -> Sequence[int] | None:
    """Return numbers of rows as integers; raise `ConfigError` for others. No communication."""
    if rows is None:
        return None
    found = integers(rows) if isinstance(rows, Tensor) else [int(operator.index(each)) for each in rows]
    problem = ""
    if not has_key:
        problem = "no key: without draws rows= has no effect"
    elif len(found) != count:
        problem = f"{len(found)} numbers for {count} rows"
    elif len({*found}) != count or min(found) < 0:
        problem = f"rows={found}"
    if problem:
        expected = "the number of each row among the rows of all ranks, from 0, each once, with key="
        raise ConfigError("the numbers of the rows are not valid", expected=expected, got=problem, where=_WHERE)
    return found


def check_causal(
    model: nn.Module,
    count: int,
    mask: Tensor | None = None,
    *,
    by_inputs: bool = False,
    by_select: bool = False,
    where: str = _WHERE,
) -> None:
    """Raise `ConfigError` for a model of transformers that cannot generate without the caller's functions."""
    inner = unwrap_model(model)
    config: Any = getattr(inner, "config", None)
    can_generate: Any = getattr(inner, "can_generate", None)
    named = type(inner).__name__
    if getattr(config, "is_encoder_decoder", False) and not by_inputs:
        main = str(getattr(inner, "main_input_name", "input_ids"))
        given = f"{main}={'ids' if main == 'input_ids' else main}" + ", attention_mask=attention_mask" * (
            mask is not None
        )
        whole = pipeline_of(inner) is None
        line = f"accel.unwrap_model(model).generate({given}, max_new_tokens={count})"
        raise ConfigError(
            "an encoder-decoder does not add tokens to its inputs",
            expected="a causal model, or inputs_of= with cache=False, which gives the decoder's tokens",
            got=f"{with_article(named)} with is_encoder_decoder=True in its config",
            where=where,
            fix=f"Call the model's own: {line}" if whole else f"On a mesh without pp call the model's own: {line}",
        )
    if _sees_later_tokens(inner, config) and not by_inputs:
        raise ConfigError(
            "the model attends to later tokens, so an added token changes the outputs of earlier ones",
            expected="a causal model, with is_decoder=True in its config",
            got=f"{with_article(named)} with is_decoder=False in its config",
            where=where,
            fix=f"Make the model with config.is_decoder = True: {named}(config).",
        )
    if callable(can_generate) and not by_select and not can_generate():
        raise ConfigError(
            "transformers does not generate from this model: its outputs are no logits of a causal model",
            expected="a model with a language head, or select=, which maps its outputs to logits",
            got=f"{with_article(named)}: its can_generate() is False",
            where=where,
            fix=f"Build the class with a head in the place of {named}, such as AutoModelForCausalLM's.",
        )


def _sees_later_tokens(model: nn.Module, config: Any) -> bool:
    """Return whether a model of transformers is configured as an encoder, as BERT is without is_decoder=True."""
    # GPT-NeoX inherits is_decoder=False, and its attention is causal all the same
    causal = [each for module in model.modules() if isinstance(each := getattr(module, "is_causal", None), bool)]
    return getattr(config, "is_decoder", True) is False and bool(causal) and not any(causal)


def _pads_in_front(mask: Tensor) -> bool:
    return bool((mask[:, 1:] >= mask[:, :-1]).all() & (mask[:, -1] == 1).all())


def _row_numbers(ctx: DistContext, rows: Sequence[int] | None, count: int) -> Sequence[int]:
    """Return the numbers of this rank's rows; without `rows`, counted after the lower ranks' by a message."""
    if rows is not None:
        return rows
    place, places = ctx.data_parallel
    if places == 1:
        return range(count)
    mine = torch.zeros(places, dtype=torch.int64, device=ctx.comm.control)
    mine[place] = count
    counts = integers(all_reduce_flat(ctx.comm, mine, "max"))
    return range(sum(counts[:place]), sum(counts[: place + 1]))
