# SPDX-License-Identifier: Apache-2.0
"""Forwards of generation: with caches of keys and values where a model takes them, else of whole sequences."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from accel.context import DistContext
from accel.parallel import micro_batches_of, stage_modules, unwrap_model
from accel.parallel.pipeline import (
    ByStage,
    MicroBatch,
    Pipeline,
    StageModule,
    Work,
    first_rows,
    first_tensor,
    pipeline_of,
    split_batch,
)
from accel.precision import autocast

_CACHE = "past_key_values"


class Decoder(Protocol):
    """A way to get the logits of the next tokens."""

    def logits(self, ids: Tensor) -> Tensor | None:
        """Return the logits of the tokens behind sequences, [rows, classes]; None on ranks without the last stage.

        A collective along the pipeline.

        Args:
            ids: the sequences up to now, one token longer at each call, shape [rows, length].
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
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, self._seen :]
        self._seen = ids.shape[1]
        inputs: dict[str, Any] = {"input_ids": new, "attention_mask": mask, "position_ids": positions}
        inputs["use_cache"] = True
        if self._last_only:
            inputs["logits_to_keep"] = 1
        micro = _split(self._ctx, self._model, inputs)
        is_prompt = not self._caches
        if is_prompt:
            self._caches = [ByStage(self._new_cache) for _ in micro]
        held = [_with(each, cache) for each, cache in zip(micro, self._caches, strict=True)]
        probe = [_with(each, ByStage(self._new_cache)) for each in micro[:1]]
        found = _run(self._ctx, self._model, held, lambda output: self._select(output)[:, -1], probe, (new,))
        if is_prompt:
            for cache in self._caches:
                for each in cache.made.values():
                    _stand_in(each)
        return found

    def _new_cache(self) -> Any:
        return import_module("transformers").DynamicCache(config=self._config)


def _stand_in(cache: Any) -> None:
    """Put a layer of this stage in the place of those of other stages, which the model asks for the length."""
    own = [each for each in cache.layers if getattr(each, "is_initialized", True)]
    for at, layer in enumerate(cache.layers):
        if own and not any(layer is each for each in own):
            cache.layers[at] = next((each for each in own if type(each) is type(layer)), own[0])


def _first_forward(model: nn.Module) -> nn.Module:
    """The module whose forward takes the model's inputs: of a pipelined model a stage."""
    first = stage_modules(unwrap_model(model))[0]
    return first.module if isinstance(first, StageModule) else first


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
        return first_tensor(output)

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
