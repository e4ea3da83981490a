# SPDX-License-Identifier: Apache-2.0
"""The answer for context parallelism: a model keeps all its parameters, and its attention crosses ranks."""

from __future__ import annotations

from typing import get_args

from torch import nn

from accel.context import DistContext
from accel.errors import ConfigError, check_choice
from accel.parallel._spread import Spread, SpreadOptions, compare_models
from accel.parallel.context._notes import has_plan, plan_method, planned_method
from accel.parallel.context._transformers import check_transformers, transformers_models, use_context_attention
from accel.topology import ContextMethod

_MARK = "accel_context_method"  # attribute of a prepared module


class ContextOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of context parallelism: `context` of `Plan`."""

    context: ContextMethod = "gather"

    def check(self) -> None:
        """Raise `ConfigError` for an unknown method."""
        check_choice(
            self.context, get_args(ContextMethod), "unknown method of context parallelism", where="plan.context"
        )


def _is_done(ctx: DistContext, model: nn.Module) -> bool:
    """Return whether a model was prepared, or lies on a mesh of the user's, whose axes are the user's own."""
    return not ctx.position.opened or any(hasattr(module, _MARK) for module in model.modules())


def _check(ctx: DistContext, model: nn.Module, options: ContextOptions) -> None:
    if has_plan(ctx) and planned_method(ctx) != options.context:
        raise ConfigError(
            "two methods of context parallelism in one context",
            expected=f"{planned_method(ctx)!r}, as of the model before",
            got=repr(options.context),
            where="plan.context",
            fix="Prepare both models with one plan; a call of context_attention may have a method= of its own.",
        )
    for path, each in transformers_models(model):
        check_transformers(path, each)


def _spread(ctx: DistContext, model: nn.Module, options: ContextOptions, *, is_empty: bool) -> nn.Module:
    _ = is_empty
    compare_models(ctx, options, {})
    plan_method(ctx, options.context)
    setattr(model, _MARK, options.context)
    for _, each in transformers_models(model):
        use_context_attention(ctx, each, options.context)
    return model


CONTEXT = Spread(
    dimension="context", options=ContextOptions, is_done=_is_done, check=_check, spread=_spread, replaces=False
)
