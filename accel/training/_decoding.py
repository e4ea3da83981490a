# SPDX-License-Identifier: Apache-2.0
"""Decoding on any mesh: logits of the next tokens with or without a cache, the choice of tokens, and the loop."""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec
import torch
from torch import Tensor, nn

from accel.comm import adopt, all_gather_flat, all_reduce_flat, broadcast_flat, gathered
from accel.context import DistContext, group_of
from accel.errors import ConfigError, DataError
from accel.parallel._micro_batches import ByStage, MicroBatch, first_rows, first_tensor
from accel.parallel._modules import stage_modules, unwrap_model
from accel.parallel.axes.pipeline import ReplayedModule, Work, pipeline_of
from accel.parallel.logits import divided_words
from accel.precision._amp import autocast
from accel.random import Key
from accel.tensors import integers
from accel.training._forward_backward import run_forward, split_for

_CACHE = "past_key_values"


class OutsideTableError(IndexError):
    """A model's forward asks for a place that a table does not have; no error of a function around the model."""


def takes_cache(model: nn.Module) -> bool:
    """Return whether a model is one of transformers that keeps keys and values between forwards."""
    inner = _first_forward(model)
    return _CACHE in inspect.signature(inner.forward).parameters and hasattr(inner, "config")


@dataclasses.dataclass(frozen=True, eq=False)
class WholeSequences:
    """Runs whole sequences for each token, filled up to one length, so that shapes stay as they are."""

    ctx: DistContext
    model: nn.Module  # causal
    length: int  # of the longest sequence to come
    inputs_of: Callable[[Tensor], Any]  # maps ids of shape [rows, length] to the inputs of the model
    select: Callable[[Any], Tensor]  # maps the model's output to logits, [rows, length, classes]

    def logits(self, ids: Tensor) -> Tensor | None:
        """Return the logits behind sequences, [rows, classes]; None without the last stage. A collective along pp.

        `ids` has the sequences up to now, [rows, length], one token longer at each call.
        """
        at = ids.shape[1] - 1
        # Shapes that never change: a pipeline keeps its buffers, and a compiled model its code.
        filled = nn.functional.pad(ids, (0, self.length - ids.shape[1]))
        return self.run(filled, lambda logits: logits[:, at])

    def every(self, ids: Tensor) -> Tensor | None:
        """Return the logits of all positions of full sequences, [rows, length, classes]; None as for `logits`."""
        return self.run(ids, lambda logits: logits)

    def run(self, ids: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return a part of the logits of sequences."""
        micro = split_for(self.ctx, self.model, self.inputs_of(ids))
        return _run(self.ctx, self.model, micro, lambda output: part(self.select(output)))

    def keep(self, rows: Tensor) -> bool:
        """Drop the rows of the next calls but some; return whether it could. A pipeline keeps its shapes."""
        return pipeline_of(unwrap_model(self.model)) is None


class CachedTokens:
    """Runs the prompt, then each new token alone, with the keys and values of those before it.

    Each stage of a pipeline has a cache of its layers for each micro-batch.

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
        """Return the logits behind sequences; see `WholeSequences`."""
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
        micro = split_for(self._ctx, self._model, inputs)
        # A pipeline finds its shapes by a forward; on an empty cache, as it would leave its keys in the real one.
        fresh = split_for(self._ctx, self._model, {**inputs, "attention_mask": mask[:, -new.shape[1] :]})
        if not self._caches:
            self._caches = [ByStage(self._new_cache) for _ in micro]
        held = [_with(each, cache) for each, cache in zip(micro, self._caches, strict=True)]
        probe = [_with(each, ByStage(self._new_cache)) for each in fresh[:1]]
        return _run(self._ctx, self._model, held, lambda output: self._select(output)[:, -1], probe, (new,))

    def keep(self, rows: Tensor) -> bool:
        """Drop the keys and values of other rows; return whether it could. Pipelines keep their shapes."""
        if pipeline_of(unwrap_model(self._model)) is not None or len(self._caches) != 1:
            return False
        self._caches[0].of(0).batch_select_indices(rows)
        self._mask = self._mask[rows]
        return True

    def _new_cache(self) -> Any:
        return import_module("transformers").DynamicCache(config=self._config)


Decoder: TypeAlias = WholeSequences | CachedTokens


def _first_forward(model: nn.Module) -> nn.Module:
    """Return the module that takes the model's inputs: the first stage of a pipelined model."""
    first = stage_modules(unwrap_model(model))[0]
    return first.module if isinstance(first, ReplayedModule) else first


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
    """Run micro-batches without gradients; return what `select` makes of the last stage's outputs, on its ranks.

    Raises:
        OutsideTableError: an `IndexError` of the model; one of `select` stays what it is.
    """
    found: list[Tensor] = []
    in_model = True

    def keep(output: Any, batch: MicroBatch) -> Tensor:
        nonlocal in_model
        in_model = False
        found.append(first_rows(select(output), batch.rows)[: batch.rows.real])
        in_model = True
        return first_tensor(output, ctx.containers)

    try:
        run_forward(ctx, model, Work(micro, keep, lambda: autocast(ctx), ctx.containers, probe, shapes))
    except IndexError as error:
        if not in_model:
            raise
        raise OutsideTableError(str(error)) from error
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

    def check(self, *, has_key: bool, where: str) -> None:
        """Raise `ConfigError` for values out of range, or without effect."""
        problem = expected = ""
        if not isinstance(self.temperature, int | float) or not 0 <= self.temperature < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance] - from users
            problem, expected = f"temperature={self.temperature!r}", "a number from 0"
        elif self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            problem, expected = f"top_k={self.top_k!r}", "an integer from 1"
        elif self.top_p is not None and not (isinstance(self.top_p, int | float) and 0 < self.top_p <= 1):  # pyright: ignore[reportUnnecessaryIsInstance] - from users
            problem, expected = f"top_p={self.top_p!r}", "a number above 0, up to 1"
        elif self.temperature and not has_key:
            problem, expected = (
                f"temperature={self.temperature} without key=",
                "key=accel.seeding.Key(seed), to draw from",
            )
        elif not self.temperature and (has_key or self.top_k is not None or self.top_p is not None):
            problem, expected = "key, top_k or top_p without a temperature", "a temperature above 0 with them"
        if problem:
            raise ConfigError("tokens cannot be drawn like this", expected=expected, got=problem, where=where)


def plain_number(value: Any) -> Any:
    """Return a number of numpy or torch as a float; other values as they are, for `Sampling.check`."""
    if isinstance(value, int | float) or not hasattr(value, "__float__"):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # several numbers
        return value


def next_tokens(logits: Tensor, sampling: Sampling, numbers: Tensor | None, *, scores: bool = False) -> Tensor:
    """Return a token for each row, the most probable one or by the inverse distribution function of a number, and with
    `scores` its log-probability: of shape [1 or 2, rows], float64 where there are numbers or scores, int64 elsewhere.

    A row's token depends on its logits and its number alone, and not on the other rows of the batch.
    """
    if numbers is None and not scores:
        return logits.argmax(-1)[None]  # no float64, which MPS and XLA do not have
    chances = log_chances(logits, sampling)
    tokens = logits.argmax(-1) if numbers is None else tokens_at(chances, numbers)
    return torch.stack([tokens, *([chances.gather(-1, tokens[:, None])[:, 0]] if scores else [])]).double()


def numbers_of(keys: Sequence[Key], count: int, device: torch.device) -> Tensor:
    """Return numbers in [0, 1) by the rows' keys, float64 of shape [rows, count]; a longer count extends the rows."""
    drawn = [[each / 2**53 for each in key.integers(count, bits=53)] for key in keys]
    return torch.tensor(drawn, dtype=torch.float64, device=device)


def tokens_at(chances: Tensor, numbers: Tensor) -> Tensor:
    """Return the token of each row at a number in [0, 1), by the inverse of the distribution function.

    Args:
        chances: log-probabilities in float64, [rows, classes].
        numbers: a number for each row, float64 of shape [rows].
    """
    sums = chances.exp().cumsum(-1)
    found = torch.searchsorted(sums, numbers.to(sums)[:, None] * sums[:, -1:], right=True)
    return found[:, 0].clamp(max=chances.shape[-1] - 1)


def log_chances(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the log-probabilities that a rule draws from, [rows, classes]; -inf for tokens that it leaves out. In
    float64: in fp32 the sums over many classes round small probabilities away.

    Reference: Holtzman et al. 2020, "The curious case of neural text degeneration", arXiv:1904.09751.
    """
    wide = logits.double() / (sampling.temperature or 1.0)
    if sampling.top_k is not None and sampling.top_k < wide.shape[-1]:
        least = wide.topk(sampling.top_k, -1).values[:, -1:]
        wide = wide.masked_fill(wide < least, -math.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = wide.softmax(-1).sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # the most probable token always stays
        left_out = torch.zeros_like(wide, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        wide = wide.masked_fill(left_out, -math.inf)
    return wide.log_softmax(-1)


def whole_rows(ctx: DistContext, logits: Tensor, counts: Sequence[int] = ()) -> tuple[Tensor, Sequence[int]]:
    """Gather the classes of the ranks along tp; return them with the number of each rank's classes. Without these
    numbers, which are alike in all calls, it waits for the device."""
    group = group_of(ctx, "tp")
    if group is None:
        return logits, (logits.shape[-1],)
    if not counts:
        own = torch.tensor([logits.shape[-1]], device=logits.device)
        counts = integers(all_gather_flat(adopt(group, ctx.device), own).flatten())
    padded = nn.functional.pad(logits, (0, max(counts) - logits.shape[-1]))  # messages are of one length
    return gathered(padded.contiguous(), -1, group)[..., : sum(counts)], counts


def share_tokens(ctx: DistContext, model: nn.Module, tokens: Tensor) -> None:
    """Give all ranks with the same samples the tokens of the last stage's first rank. Mutates them."""
    group = group_of(ctx, "tp")
    if group is not None:
        broadcast_flat(adopt(group, ctx.device), tokens, source=0)
    pipeline = pipeline_of(unwrap_model(model))
    if pipeline is not None:
        broadcast_flat(pipeline.comm, tokens, source=pipeline.last_rank)


class DecodedTokens(NamedTuple):
    """Tokens that were added to sequences."""

    tokens: Tensor  # new tokens, int64 of shape [rows, new], filled up by the first of those that end a sequence
    counts: Tensor  # number of tokens of each row up to the one that ends it, int64 of shape [rows]
    logprobs: Tensor | None  # log-probabilities of the tokens, float64 of the shape of `tokens`; None without `scores`


def decode(
    ctx: DistContext,
    model: nn.Module,
    decoder: Decoder,
    ids: Tensor,
    sampling: Sampling,
    *,
    count: int,
    numbers: Tensor | None,
    stop: Sequence[int],
    vocab_parallel: bool,
    together: bool = True,
    drops: bool = False,
    scores: bool = False,
    where: str,
) -> DecodedTokens:
    """Add tokens to sequences until all have ended. A collective if the model is spread over ranks, or `together`.

    Args:
        ctx: the context.
        model: causal.
        decoder: gives the logits of the next tokens.
        ids: sequences, int64 of shape [rows, length].
        sampling: rule of choice.
        count: most tokens to add.
        numbers: number in [0, 1) of each token, float64 of shape [rows, count]; None for the most probable ones.
        stop: tokens that end a sequence; none to add all tokens.
        vocab_parallel: whether each rank along tp has the logits of its share of the classes.
        together: whether all ranks take as many steps. A rank that stopped alone would leave the others in the
            collectives of the next forward.
        drops: whether rows that have ended leave the batch where the decoder can drop them.
        scores: whether log-probabilities are returned.
        where: the call that errors name.

    Raises:
        DataError: tokens or positions that the model's tables do not have, on the CPU.
    """
    longest = ids.shape[1]
    _warn_long(model, longest + count)
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    counts = torch.full((len(ids),), 0 if stop else count, device=ids.device)
    wide = torch.float64 if scores or numbers is not None else torch.int64  # as in `next_tokens`
    found = torch.zeros(1 + scores, len(ids), count, dtype=wide, device=ids.device)
    found[0] = stop[0] if stop else 0
    ends = torch.tensor(stop, dtype=ids.dtype, device=ids.device)
    live: Tensor | slice = slice(None)  # numbers of the rows that are still run
    classes: Sequence[int] = ()  # their numbers on each rank along tp
    step = 0
    for step in range(count):
        logits = _logits_behind(decoder, ids, longest, count, where)
        if logits is None:  # ranks without the last stage receive the tokens in it
            drawn = torch.zeros(1 + scores, len(ids), dtype=wide, device=ids.device)
        else:
            if vocab_parallel:
                logits, classes = whole_rows(ctx, logits, classes)
            drawn = next_tokens(logits, sampling, None if numbers is None else numbers[live, step], scores=scores)
            if step == 0:
                _mark_classes(ctx, model, drawn, logits, classes)
        share_tokens(ctx, model, drawn)
        if step == 0:
            _check_classes(ctx, model, drawn, vocab_parallel, where)
        tokens = drawn[0].to(ids.dtype)
        if stop:
            tokens = tokens.masked_fill(ended[live], stop[0])
            drawn[0] = tokens
        found[:, live, step] = drawn
        ids = torch.cat([ids, tokens[:, None]], 1)
        if not stop:
            continue
        counts[live] += ~ended[live]
        ended[live] |= torch.isin(tokens, ends)
        stay = (~ended[live]).nonzero()[:, 0]  # the one wait for the device
        if not (_of_all_ranks(ctx, len(stay)) if together else len(stay)):
            break
        if drops and len(stay) < len(ids) > 1:
            stay = stay if len(stay) else stay.new_zeros(1)  # one row keeps the ranks in step
            if decoder.keep(stay):
                ids = ids[stay]
                live = stay if isinstance(live, slice) else live[stay]
    tokens = found[0, :, : step + 1].to(ids.dtype)
    return DecodedTokens(tokens, counts, found[1, :, : step + 1] if scores else None)


def _mark_classes(ctx: DistContext, model: nn.Module, drawn: Tensor, logits: Tensor, classes: Sequence[int]) -> None:
    """Put minus the number of classes into drawn tokens if logits have a part of the model's classes, or each class
    twice. Ranks of other stages see it by the tokens that they receive.

    `classes`: their numbers on each rank along tp, if these were joined; else none.
    """
    size = ctx.axis("tp").size
    count = logits.shape[-1]
    if size == 1:
        return
    words = _count_words(model)
    if words is not None and (count == words * size if classes else words // size <= count <= -(-words // size)):
        _ = drawn.fill_(-count)
    elif len(set(classes)) == 1:
        by_rank = logits.view(*logits.shape[:-1], size, -1)
        are_alike = (by_rank == by_rank[..., :1, :]).all()
        is_flat = (logits == logits[..., :1]).all()  # as of a head of zeros
        _ = drawn.masked_fill_(are_alike & ~is_flat, -count)


def _check_classes(ctx: DistContext, model: nn.Module, drawn: Tensor, vocab_parallel: bool, where: str) -> None:
    """Raise `ConfigError` for tokens that `_mark_classes` has marked, on every rank that has received them."""
    size = ctx.axis("tp").size
    if size == 1 or not drawn.numel() or (first := int(drawn[0, 0])) >= 0:  # waits for the device, once
        return
    words = _count_words(model)
    raise ConfigError(
        "the logits do not have the classes of the model",
        expected="each class once" if words is None else f"{words} classes",
        got=f"{-first} along tp={size} with vocab_parallel={vocab_parallel}",
        where=where,
        fix=f"Pass vocab_parallel={not vocab_parallel}.",
    )


def _count_words(model: nn.Module) -> int | None:
    """Return the classes by the configuration of a model of transformers, or of the heads that ranks along tp divide;
    None if they do not state one number."""
    config: Any = getattr(_first_forward(model), "config", None)
    if not hasattr(config, "get_text_config"):
        return divided_words(unwrap_model(model))
    try:
        words = getattr(config.get_text_config(), "vocab_size", None)
    except ValueError:  # of a configuration with several texts
        return None
    return words or None


def _logits_behind(decoder: Decoder, ids: Tensor, longest: int, count: int, where: str) -> Tensor | None:
    """Return the logits behind sequences; raise `DataError` for tokens or positions outside of the model's tables."""
    try:
        return decoder.logits(ids)
    except OutsideTableError as error:
        raise DataError(
            "the model has not so many positions, or not these tokens",
            expected="prompts and new tokens within the model's context, and tokens within its vocabulary",
            got=f"prompts of up to {longest} tokens with {count} new ones, and tokens up to {int(ids.max())}: {error}",
            where=where,
            fix="Shorten the prompts, or lower max_new_tokens.",
        ) from error


def _warn_long(model: nn.Module, length: int) -> None:
    """Warn of sequences that are longer than what a model of transformers declares; rotary positions have no end."""
    config: Any = getattr(_first_forward(model), "config", None)
    most = getattr(config, "max_position_embeddings", None)
    grows = "dynamic" in f"{getattr(config, 'rope_parameters', None)} {getattr(config, 'rope_scaling', None)}"
    if isinstance(most, int) and length > most and not grows:
        text = f"prompts with their new tokens may exceed the {most} positions that the model's config declares"
        warnings.warn(text, stacklevel=3)


def _of_all_ranks(ctx: DistContext, count: int) -> int:
    """Return the sum of a count over all ranks."""
    if ctx.world_size == 1:
        return count
    total = torch.tensor([count], dtype=torch.int64, device=ctx.comm.control)
    return int(all_reduce_flat(ctx.comm, total, "sum").item())
