# SPDX-License-Identifier: Apache-2.0
"""The answer for context parallelism: parameters stay whole, and attention crosses the ranks, torch's modules of it
among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from accel.context import DistContext
from accel.errors import AccelError, ConfigError
from accel.parallel._modules import (
    forward_names,
    is_pipelined,
    named_modules,
    note_prepared,
    prepared_of,
)
from accel.parallel._refused import ModelRefusal, PrepareCall, RefusedFact, raised, refused
from accel.parallel._spread import ModelView, Spread, SpreadOptions, compare_models
from accel.parallel.axes.context._checks import (
    SAMPLES,
    check_inputs,
    check_transformers,
    first_blocks,
    out_of_reach,
    takes_cut_tokens,
    transformers_models,
)
from accel.parallel.axes.context._forward import Traits, use_positions
from accel.parallel.axes.context._split import ALL_POSITIONS, plan_method, planned_method
from accel.parallel.axes.context._stages import ghost_of, use_stage_positions
from accel.parallel.axes.context._transformers import check_first, kept_for_padding, use_context_attention
from accel.topology import ContextMethod


class ContextOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of context parallelism: `context` of `Plan`."""

    context: ContextMethod = "gather"


def _is_done(ctx: DistContext, view: ModelView) -> bool:
    """Return whether a model was prepared, or is on a mesh that the user made, with the user's axes."""
    return not ctx.position.opened or any("context" in prepared_of(module) for module in view.modules.values())


def _staged(asked: PrepareCall) -> RefusedFact | None:
    others = [each for _, each in transformers_models(asked.view.modules) if each is not asked.view.inner.model]
    full = [each for each in others if not takes_cut_tokens(each) or first_blocks(each)]
    return RefusedFact(type(full[0]).__name__, "prepare_model") if full and asked.ctx.axis("pp").size > 1 else None


def _planned_before(asked: PrepareCall) -> RefusedFact | None:
    wanted = asked.options.context
    before = planned_method(asked.ctx) or wanted
    return None if before == wanted else RefusedFact(f"{wanted!r}, and {before!r} of a model before", "plan.context")


_METHODS = ModelRefusal(
    "two methods of context parallelism in one context",
    _planned_before,
    expected="the method of the model before",
    fix="Prepare both models with one plan; a call of context_attention may have another method=.",
    error=ConfigError,
)
_STAGED = ModelRefusal(
    "a model of transformers that takes full inputs, in stages of a model around it",
    _staged,
    expected="the model of transformers alone",
    fix="Leave cp or pp out of the mesh.",
)


def _refusals(ctx: DistContext, view: ModelView, options: ContextOptions) -> list[AccelError]:
    asked = PrepareCall(ctx, view, options=options)
    models = transformers_models(view.modules)
    unknown = raised(partial(check_transformers, path, each, options.context) for path, each in models)
    return [*refused(asked, [_METHODS]), *(unknown or refused(asked, [_STAGED]))]


def _spread(ctx: DistContext, view: ModelView, options: ContextOptions, *, is_empty: bool) -> nn.Module:
    _ = is_empty
    compare_models(ctx, options, {})
    plan_method(ctx, options.context)
    note_prepared(view.model, context=options.context)
    models = [each for _, each in transformers_models(view.modules)]
    # a record of a forward on stages passes the masks that they pass
    recorded = [each for _, each in transformers_models(dict(named_modules(ghost_of(view.model) or nn.Module())))]
    for each in (*models, *recorded):
        if not out_of_reach(each):
            use_context_attention(ctx, each)
    for each in models:
        _use_parts(ctx, each)
    if view.inner.model not in models:
        _begin(ctx, view.inner.model, Traits())
    return view.model


def _begin(ctx: DistContext, model: nn.Module, traits: Traits, within: Sequence[nn.Module] = ()) -> None:
    """Let a model, or its stages, compute with parts of positions. Mutates it, by classes and hooks."""
    (use_stage_positions if is_pipelined(model) else use_positions)(ctx, model, traits, within)


def _use_parts(ctx: DistContext, model: Any) -> None:
    """Let a model of transformers compute with parts of positions. Mutates it, by classes and hooks."""
    is_cut = takes_cut_tokens(model)
    _begin(ctx, model, Traits(is_cut, samples=SAMPLES, has_own_losses=is_cut), first_blocks(model))
    if is_cut:
        _ = model.register_forward_pre_hook(_GivenParts(ctx, model), prepend=True, with_kwargs=True)


class _GivenParts:
    """A hook of a model of transformers: refuses inputs that cannot follow a cut."""

    def __init__(self, ctx: DistContext, model: Any) -> None:
        self.ctx = ctx
        self.names = forward_names(model)
        self.is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
        self.padding = kept_for_padding(model)

    def __call__(self, _module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        if ALL_POSITIONS.holds(self.ctx):
            return
        known = {**dict(zip(self.names, inputs, strict=False)), **keywords}
        if self.is_pair:  # its labels are of its decoder's tokens; samples have a separate mask
            has_samples = any(known.get(name) is not None for name in SAMPLES)
            others = (*SAMPLES, "labels", *(["attention_mask"] if has_samples else []))
            known = {name: each for name, each in known.items() if name not in others}
        check_inputs(self.ctx, known, is_pair=self.is_pair)
        check_first(self.ctx, known.get("position_ids"), self.padding)


CONTEXT = Spread(
    dimension="context",
    options_from=lambda plan, _keywords, _view: ContextOptions(context=plan.context),
    is_done=_is_done,
    refusals=_refusals,
    spread=_spread,
    replaces=False,
)
