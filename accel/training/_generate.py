# SPDX-License-Identifier: Apache-2.0
"""`generate`: tokens that a model adds to sequences, on any mesh."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import Tensor, nn

from accel.comm import adopt, all_reduce_flat, broadcast_flat, gathered
from accel.context import DistContext, context_first, group_of
from accel.errors import ConfigError
from accel.errors._checks import with_article
from accel.parallel._engines import engine_of
from accel.parallel._labels import micro_batches_of
from accel.parallel._micro_batches import MicroBatch, first_rows, first_tensor, split_batch
from accel.parallel._modules import stage_modules, unwrap_model
from accel.parallel.axes.pipeline import ByStage, Pipeline, ReplayedModule, Work, pipeline_of
from accel.precision._amp import autocast
from accel.random import Key
from accel.seeding import rank_key

_CACHE = "past_key_values"


class Decoder(Protocol):
    """A way to get the logits of the next tokens."""

    def logits(self, ids: Tensor) -> Tensor | None:
        """Return the logits behind sequences, [rows, classes]; None without the last stage. A collective along pp.

        `ids` has the sequences up to now, [rows, length], one token longer at each call.
        """
        ...


def takes_cache(model: nn.Module) -> bool:
    """Return whether a model is one of transformers that keeps keys and values between forwards."""
    inner = _first_forward(model)
    return _CACHE in inspect.signature(inner.forward).parameters and hasattr(inner, "config")


class WholeSequences:
    """Runs whole sequences for each token, filled up to one length, so that shapes stay as they are.

    Args:
        ctx: the context.
        model: causal.
        length: of the longest sequence to come.
        inputs_of: maps ids of shape [rows, length] to the inputs of the model.
        select: maps the model's output to logits, [rows, length, classes].
    """

    def __init__(
        self,
        ctx: DistContext,
        model: nn.Module,
        length: int,
        inputs_of: Callable[[Tensor], Any],
        select: Callable[[Any], Tensor],
    ) -> None:
        self._ctx = ctx
        self._model = model
        self._length = length
        self._inputs_of = inputs_of
        self._select = select

    def logits(self, ids: Tensor) -> Tensor | None:
        """Return the logits behind the sequences; see `Decoder`."""
        at = ids.shape[1] - 1
        # Shapes that never change: a pipeline keeps its buffers, and a compiled model its code.
        filled = nn.functional.pad(ids, (0, self._length - ids.shape[1]))
        micro = _split(self._ctx, self._model, self._inputs_of(filled))
        return _run(self._ctx, self._model, micro, lambda output: self._select(output)[:, at])


class CachedTokens:
    """Runs the prompt, then each new token alone, with the keys and values of those before it.

    Each stage of a pipeline keeps those of its own layers, for each micro-batch.

    Args:
        ctx: the context.
        model: of transformers.
        attention_mask: of the prompt, 1 for tokens and 0 for padding before them, shape [rows, length].
        select: maps the model's output to logits, [rows, positions, classes].
    """

    def __init__(
        self, ctx: DistContext, model: nn.Module, attention_mask: Tensor, select: Callable[[Any], Tensor]
    ) -> None:
        self._ctx = ctx
        self._model = model
        self._mask = attention_mask
        self._select = select
        self._caches: list[ByStage] = []
        self._seen = 0
        inner = _first_forward(model)
        self._config = cast(Any, inner).config
        # Every stage of a pipeline would cut off the positions before the last.
        is_whole = pipeline_of(unwrap_model(model)) is None
        self._last_only = is_whole and "logits_to_keep" in inspect.signature(inner.forward).parameters

    def logits(self, ids: Tensor) -> Tensor | None:
        """Return the logits behind the sequences; see `Decoder`."""
        new = ids[:, self._seen :]
        grown = ids.shape[1] - self._mask.shape[1]
        mask = nn.functional.pad(self._mask, (0, grown), value=1)
        # Padding in front takes no position, or prompts of one batch would shift against each other.
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, self._seen :]
        self._seen = ids.shape[1]
        inputs: dict[str, Any] = {"input_ids": new, "attention_mask": mask, "position_ids": positions}
        inputs["use_cache"] = True
        if self._last_only:
            inputs["logits_to_keep"] = 1
        micro = _split(self._ctx, self._model, inputs)
        # A pipeline finds its shapes by a forward; on an empty cache, as it would leave its keys in the real one.
        fresh = _split(self._ctx, self._model, {**inputs, "attention_mask": mask[:, -new.shape[1] :]})
        if not self._caches:
            self._caches = [ByStage(self._new_cache) for _ in micro]
        held = [_with(each, cache) for each, cache in zip(micro, self._caches, strict=True)]
        probe = [_with(each, ByStage(self._new_cache)) for each in fresh[:1]]
        return _run(self._ctx, self._model, held, lambda output: self._select(output)[:, -1], probe, (new,))

    def _new_cache(self) -> Any:
        return import_module("transformers").DynamicCache(config=self._config)


def _first_forward(model: nn.Module) -> nn.Module:
    """The module whose forward takes the model's inputs: of a pipelined model a stage."""
    first = stage_modules(unwrap_model(model))[0]
    return first.module if isinstance(first, ReplayedModule) else first


def _split(ctx: DistContext, model: nn.Module, inputs: Any) -> list[MicroBatch]:
    pipeline = pipeline_of(unwrap_model(model))
    count = micro_batches_of(model) if pipeline is None else pipeline.layout.micro_batches
    return split_batch(inputs, None, count, equal=pipeline is not None, containers=ctx.containers)


def _with(batch: MicroBatch, cache: ByStage) -> MicroBatch:
    return batch._replace(kwargs={**batch.kwargs, _CACHE: cache})


def _run(
    ctx: DistContext,
    model: nn.Module,
    micro: list[MicroBatch],
    select: Callable[[Any], Tensor],
    probe: list[MicroBatch] | None = None,
    shapes: Any = None,
) -> Tensor | None:
    """Run micro-batches without gradients; return what `select` makes of the last stage's outputs, on its ranks."""
    found: list[Tensor] = []

    def keep(output: Any, batch: MicroBatch) -> Tensor:
        found.append(first_rows(select(output), batch.rows)[: batch.rows.real])
        return first_tensor(output, ctx.containers)

    pipeline: Pipeline | None = pipeline_of(unwrap_model(model))
    with torch.no_grad():
        if pipeline is None:
            for each in micro:
                kwargs = {
                    name: value.of(0) if isinstance(value, ByStage) else value for name, value in each.kwargs.items()
                }
                with autocast(ctx):
                    _ = keep(model(*each.args, **kwargs), each)
        else:
            work = Work(micro, keep, lambda: autocast(ctx), ctx.containers, probe, shapes)
            _ = pipeline.run(ctx, unwrap_model(model), work, trains=False)
    return torch.cat(found) if found else None


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
            problem, expected = (
                f"temperature={self.temperature} without key=",
                "key=accel.seeding.Key(seed), to draw from",
            )
        elif not self.temperature and (has_key or self.top_k is not None or self.top_p is not None):
            problem, expected = "key, top_k or top_p without a temperature", "temperature above 0 beside them"
        if problem:
            raise ConfigError("tokens cannot be drawn like this", expected=expected, got=problem, where="generate")


def next_tokens(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """Return a token for each row of logits, the most probable one without a generator; in fp32 for 16 bits.

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
        model: from `prepare` or `prepare_model`; causal: later tokens do not affect earlier ones.
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
        ConfigError: an encoder-decoder, a model without a language head, a mesh with `cp`, an engine, arguments out of
            range, a mask that is not for prompts padded in front, or a cache of a model that has none.
        StageError, PeerError: as of `forward`.

    Examples:
        >>> class Next(nn.Module):
        ...     def forward(self, ids):
        ...         return nn.functional.one_hot((ids + 1) % 5, 5).float()
        >>> accel.training.generate(accel.single(), Next(), torch.tensor([[3]]), max_new_tokens=3)
        tensor([[3, 4, 0, 1]])
    """
    ctx.comm.check_open()
    _check_causal(
        model, max_new_tokens, attention_mask, by_inputs=inputs_of is not None, by_select=select is not first_tensor
    )
    if select is first_tensor:
        select = partial(first_tensor, containers=ctx.containers)
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
    # Folded in by the step, not drawn in turn, so that the numbers of a step depend on no earlier one.
    draws = None if key is None else rank_key(ctx, key).fold_in("generate")
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for step in range(max_new_tokens):
        logits = decoder.logits(ids)
        # A buffer on every rank: those without the last stage receive the tokens in it.
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
        # All ranks stop together: a rank that stopped alone would leave the others in the next forward's collectives.
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
        problem, got = "the model keeps no keys and values", with_article(type(unwrap_model(model)).__name__)
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


def _check_causal(model: nn.Module, count: int, mask: Tensor | None, *, by_inputs: bool, by_select: bool) -> None:
    """Raise `ConfigError` for a model of transformers that adds no tokens to its inputs, unless the caller says how it
    is called and what its logits are. No communication."""
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
            got=f"{with_article(named)}, whose config has is_encoder_decoder=True",
            where=_WHERE,
            fix=f"Call the model's own: {line}" if whole else f"On a mesh without pp call the model's own: {line}",
        )
    if _sees_later_tokens(inner, config) and not by_inputs:
        raise ConfigError(
            "the model attends to later tokens, so tokens that are added change what it made of those before",
            expected="a causal model, whose config has is_decoder=True",
            got=f"{with_article(named)}, whose config has is_decoder=False",
            where=_WHERE,
            fix=f"Make the model with config.is_decoder = True: {named}(config).",
        )
    if callable(can_generate) and not by_select and not can_generate():
        raise ConfigError(
            "transformers does not generate from this model: its outputs are no logits of a causal model",
            expected="a model with a language head, or select=, which maps its outputs to logits",
            got=f"{with_article(named)}, whose can_generate() is False",
            where=_WHERE,
            fix=f"Build the class with a head in the place of {named}, such as AutoModelForCausalLM's.",
        )


def _sees_later_tokens(model: nn.Module, config: Any) -> bool:
    """Return whether a model of transformers is configured as an encoder, as BERT is without is_decoder=True."""
    # GPT-NeoX inherits is_decoder=False, and its attention is causal all the same
    causal = [each for module in model.modules() if isinstance(each := getattr(module, "is_causal", None), bool)]
    return getattr(config, "is_decoder", True) is False and bool(causal) and not any(causal)


def _pads_in_front(mask: Tensor) -> bool:
    return bool((mask[:, 1:] >= mask[:, :-1]).all() & (mask[:, -1] == 1).all())
