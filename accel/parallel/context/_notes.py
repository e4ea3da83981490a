# SPDX-License-Identifier: Apache-2.0
"""Notes of context parallelism on a context's handle: the method of its models, and whether a loop uses the axis cp."""

from __future__ import annotations

from typing import cast

from accel.context import DistContext
from accel.errors import ConfigError
from accel.topology import ContextMethod, dimension_of

_METHOD = "context: method"
_ATTENDED = "context: attention ran"
_CUT = "context: a sequence was cut"


def plan_method(ctx: DistContext, method: ContextMethod) -> None:
    """Note the method of a plan. Mutates the context's handle."""
    ctx.comm.notes[_METHOD] = method


def planned_method(ctx: DistContext) -> ContextMethod:
    """Return the method of the plan of a prepared model; "gather" without one."""
    return cast(ContextMethod, ctx.comm.notes.get(_METHOD, "gather"))


def has_plan(ctx: DistContext) -> bool:
    """Return whether a model was prepared with a method."""
    return _METHOD in ctx.comm.notes


def note_attention(ctx: DistContext) -> None:
    """Note that attention crossed the ranks along cp. Mutates the context's handle."""
    ctx.comm.notes[_ATTENDED] = "yes"


def note_cut(ctx: DistContext) -> None:
    """Note that a loop knows its own positions. Mutates the context's handle."""
    ctx.comm.notes[_CUT] = "yes"


def check_context_used(ctx: DistContext) -> None:
    """Raise for a step on a mesh with an axis cp that nothing has used, so that its ranks computed the same.

    A mesh that the user made is not asked: its axes may be used in other ways. No communication.

    Raises:
        ConfigError: no `context_attention` ran, or no sequence was cut.
    """
    if not ctx.position.opened or (_ATTENDED in ctx.comm.notes and _CUT in ctx.comm.notes):
        return
    axes = {name: axis.size for name, axis in ctx.position.axes if dimension_of(name) == "context"}
    shared = ",".join(f"{name}={size}" for name, size in axes.items() if size > 1)
    if not shared:
        return
    if _CUT not in ctx.comm.notes:
        raise ConfigError(
            "ranks that share a sequence computed the same positions",
            expected=f"a loop that cuts its sequences along {shared}",
            got="none that were cut",
            where="optimizer_step, ctx.mesh",
            fix="Pass each batch through accel.split_sequence; where your data come cut already, take the positions "
            "from accel.sequence_positions. For context parallelism of your own: accel.replace(ctx, mesh=ctx.mesh).",
        )
    if ctx.axis("pp").size > 1:  # a stage may have no attention
        return
    raise ConfigError(
        "ranks that share a sequence did not see each other's positions",
        expected=f"attention across {shared}",
        got="none",
        where="optimizer_step, ctx.mesh",
        fix="Call accel.context_attention in the model, or prepare a model of transformers. For context parallelism of "
        "your own: accel.replace(ctx, mesh=ctx.mesh).",
    )
