# SPDX-License-Identifier: Apache-2.0
"""Engines: libraries that prepare, run backward, step, clip and keep state as a whole, in place of this room."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from accel.comm import foreign_call, raise_lost
from accel.context import DistContext

P = ParamSpec("P")
R = TypeVar("R")

# Strategy: module and function, which takes the context and returns the `Engine`. Imported when asked for.
ENGINES: Mapping[str, tuple[str, str]] = {"deepspeed": ("accel.engines.deepspeed._engine", "make")}


class StepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one optimizer step."""

    # Multiplies the gradients before anything else: it divides by the window's weight and the loss scale.
    factor: float | torch.Tensor
    max_norms: Sequence[float | None]  # longest norm for all optimizers together, or one for each; None does not clip
    joint: bool  # whether all optimizers share one norm
    norm_type: float  # p of the p-norm
    max_value: float | None  # largest absolute value of an element; None does not clip
    check_finite: bool  # whether gradients with inf or NaN leave the step out
    accumulation: int  # micro-batches of a full window


class EngineOutcome(NamedTuple):
    """Whether parameters were changed, whether gradients were finite, and their norm before clipping where known."""

    stepped: bool
    finite: bool
    grad_norm: torch.Tensor | None


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The functions of an engine. Records, weights and decisions of the loop stay accel's.

    Each function takes the context first, is called on every rank, and may communicate. It finds its live state by
    the objects that it gets, which `prepare` has returned. It raises an `AccelError` before it
    communicates, alike on all ranks; any other error that one rank alone has ends the context's group, as peers may
    wait for it.
    """

    # Takes models, optimizers, schedulers and prepared loaders. Returns what takes their places, in the same order.
    prepare: Callable[[DistContext, Sequence[Any]], Sequence[Any]]
    # Takes models, and whether gradients are exchanged. Returns the context manager of one forward and backward.
    hold: Callable[[DistContext, Sequence[nn.Module], bool], AbstractContextManager[None]]
    # Takes the scaled loss, and whether to keep its graph. Adds to the gradients.
    backward: Callable[[DistContext, torch.Tensor, bool], None]
    # Takes optimizers and a request. Steps and clears the gradients; where they are not finite and that is checked,
    # leaves parameters and gradients as they are.
    step: Callable[[DistContext, Sequence[Optimizer], StepRequest], EngineOutcome]
    clear: Callable[[DistContext, Sequence[Optimizer]], None]  # clears the gradients without a step
    # Takes parameters, the longest norm, its type and the factor of the step to come, under which the norm holds.
    # Returns the norm before.
    clip_norm: Callable[[DistContext, Sequence[torch.Tensor], float, float, float | torch.Tensor], torch.Tensor]
    # Takes parameters, the largest absolute value and that factor.
    clip_value: Callable[[DistContext, Sequence[torch.Tensor], float, float | torch.Tensor], None]
    # Takes items of a checkpoint. Returns items by the same names in which each object of the engine is replaced by one
    # that gives and takes its state, such as a module, a `Part` or an object with state_dict and load_state_dict.
    items: Callable[[DistContext, Mapping[str, object]], Mapping[str, object]]
    # Takes the items of a load, and the results of `items` with their new state. Forwards it to the engine.
    loaded: Callable[[DistContext, Mapping[str, object], Mapping[str, object]], None]


def engine_of(ctx: DistContext, table: Mapping[str, tuple[str, str]] = ENGINES) -> Engine | None:
    """Return the engine of the context's strategy, by a table of modules and functions; None where the model is spread
    by this room."""
    named = table.get(ctx.settings.strategy)
    if named is None:
        return None
    module, function = named
    engine: Engine = getattr(importlib.import_module(module), function)(ctx)
    return engine if ctx.world_size == 1 else _guarded(engine)


def _guarded(engine: Engine) -> Engine:
    """Return an engine that informs peers of a rank that fails between its collectives."""
    return Engine(
        prepare=_within_call(engine.prepare, opens=True),
        hold=partial(_held, engine),
        backward=_within_call(engine.backward),
        step=_within_call(engine.step),
        clear=_within_call(engine.clear),
        clip_norm=_within_call(engine.clip_norm),
        clip_value=_within_call(engine.clip_value),
        items=_within_call(engine.items),
        loaded=_within_call(engine.loaded),
    )


def _within_call(
    function: Callable[Concatenate[DistContext, P], R], *, opens: bool = False
) -> Callable[Concatenate[DistContext, P], R]:
    def call(ctx: DistContext, *args: P.args, **kwargs: P.kwargs) -> R:
        with foreign_call(ctx.comm, opens=opens):
            return function(ctx, *args, **kwargs)

    return call


@contextlib.contextmanager
def _held(engine: Engine, ctx: DistContext, models: Sequence[nn.Module], exchanges: bool) -> Generator[None]:
    """Hold models, and report a lost peer; errors of the user's code in the block stay unchanged."""
    try:
        with engine.hold(ctx, models, exchanges):
            yield
    except RuntimeError as error:
        raise_lost(ctx.comm, error)
        raise


def engine_items(ctx: DistContext, items: Mapping[str, object]) -> Mapping[str, object]:
    """Return items of a checkpoint with each object of the context's engine replaced by one that gives its state."""
    engine = engine_of(ctx)
    return items if engine is None else engine.items(ctx, items)


def engine_loaded(ctx: DistContext, items: Mapping[str, object], made: Mapping[str, object]) -> None:
    """Hand state that was loaded into the result of `engine_items` on to the context's engine."""
    engine = engine_of(ctx)
    if engine is not None:
        engine.loaded(ctx, items, made)


def whole_model(ctx: DistContext, model: nn.Module) -> nn.Module:
    """Return a model that gives its tensors: an engine's replaced by one that has them, any other as it is."""
    return cast(nn.Module, engine_items(ctx, {"model": model})["model"]) if ctx.settings.strategy in ENGINES else model
