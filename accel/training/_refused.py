# SPDX-License-Identifier: Apache-2.0
"""Refusals before a parameter changes, for settings without effect and non-finite gradients; and a warning after it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accel.comm import MERGED, Call, adopt, all_reduce_flat, exchange_values, notes_of_ranks
from accel.context import DistContext, group_of
from accel.errors import ConfigError, NonFiniteError, StepError
from accel.items._kinds import unstorable
from accel.loop_state import Accumulation
from accel.optim import CLOSURE_LINE, first_nonfinite
from accel.parallel._engines import ENGINES
from accel.parallel._labels import name_of
from accel.parallel._watches import runs_without_autocast
from accel.parallel.axes.context import check_context_used
from accel.tensors import is_dtensor, parameters_of, split_dims
from accel.topology import AXIS_NAMES, SHARED_DIMS
from accel.training._window import StepWindow, blame

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_BY_PREPARE = ("plan", "compile")


def check_settings(ctx: DistContext, accum: Accumulation, optimizers: Sequence[Optimizer]) -> None:
    """Raise `ConfigError` if a setting of the launcher, or an axis cp, has no effect on a step.

    A collective of the first step of an optimizer on a mesh with pp; otherwise no communication.
    """
    if "accumulation" in ctx.launched:
        _check_accumulation(ctx, accum)
    if "precision" in ctx.launched and runs_without_autocast(parameters_of(optimizers)):
        raise ConfigError(
            "the precision of this run has no effect",
            expected=f"forward passes in {ctx.precision.compute} ({ctx.launched['precision']})",
            got="a prepared model that ran its forward without autocast",
            where="optimizer_step",
            fix="Run forward and loss in the block `with accel.autocast(ctx):`. For a model that is to have its"
            " own: ctx = accel.replace(ctx, precision='fp32').",
        )
    if "mesh" in ctx.launched:
        _check_mesh(ctx, optimizers)
    if ctx.strategy not in ENGINES and not ctx.launched.keys().isdisjoint(_BY_PREPARE):
        _check_prepared(ctx, parameters_of(optimizers))
    check_context_used(ctx)


def _check_accumulation(ctx: DistContext, accum: Accumulation) -> None:
    if accum.steps == ctx.accumulation:
        return
    raise ConfigError(
        "the accumulation of this run has no effect",
        expected=f"accumulation={ctx.accumulation} ({ctx.launched['accumulation']})",
        got=f"a step of {accum.steps}",
        where="optimizer_step",
        fix="Use the setting: accel.train_state(ctx), and accel.resume keeps the number; or, without a state,"
        " accel.Accumulation(ctx.accumulation). For a loop that is to have its own: ctx = accel.replace(ctx,"
        f" accumulation={accum.steps}).",
    )


def _check_prepared(ctx: DistContext, parameters: Sequence[torch.Tensor]) -> None:
    if any(map(name_of, parameters)):
        return
    idle = {name: ctx.launched[name] for name in _BY_PREPARE if name in ctx.launched}
    raise ConfigError(
        f"{' and '.join(idle)} of this run {'have' if len(idle) > 1 else 'has'} no effect",
        expected=f"models that prepare has taken ({', '.join(idle.values())})",
        got="parameters of none",
        where="optimizer_step",
        fix="Pass the model to accel.prepare, or leave the setting out.",
    )


def _check_mesh(ctx: DistContext, optimizers: Sequence[Optimizer]) -> None:
    # `check_context_used` checks the context axis, and `prepare` cuts every model along the pipeline axis
    others = {*SHARED_DIMS, *AXIS_NAMES["expert"]} - {*AXIS_NAMES["context"], *AXIS_NAMES["pipeline"]}
    asked = {name: axis.size for name, axis in ctx.position.axes if axis.size > 1 and name in others}
    if not asked:
        return
    used = _used_axes(ctx, optimizers)
    if idle := [f"{name}={size}" for name, size in asked.items() if name not in used]:
        raise ConfigError(
            "a dimension of this run's mesh has no effect",
            expected=f"parameters that are spread along {', '.join(asked)} ({ctx.launched['mesh']})",
            got=f"none along {', '.join(idle)}",
            where="optimizer_step",
            fix="Spread the model along it before prepare, or leave it out of the mesh. If your own code uses it in"
            " another way: ctx = accel.replace(ctx, mesh=ctx.mesh).",
        )


def _used_axes(ctx: DistContext, optimizers: Sequence[Optimizer]) -> set[str]:
    """Names of the axes along which a step's parameters are divided, in any stage of a pipeline. A collective of the
    first step of an optimizer on a mesh with pp."""
    used = {name for each in parameters_of(optimizers) if is_dtensor(each) for name in _split_along(each)}
    if ctx.axis("pp").size == 1:
        return used
    marks = [ctx.comm.marks.find(each, "axes") for each in optimizers]
    if None not in marks:
        return used.union(*(cast(Any, each).note for each in marks))
    by_rank = exchange_values(ctx.comm, Call("optimizer_step", ordered=False), [*used], list[str])
    used = {name for names in by_rank for name in names}
    for each in optimizers:
        ctx.comm.marks.put(each, "axes", used)
    return used


def _split_along(parameter: DTensor) -> Iterator[str]:
    """Names of the axes along which ranks hold different elements."""
    names = parameter.device_mesh.mesh_dim_names
    if names is not None:
        for dim in split_dims(parameter):
            yield from names[dim].split(MERGED)


_MOST_OVERFLOWS = 64  # in a row; halving that often takes any scale below what a float32 gradient can hold


def check_overflow(ctx: DistContext, window: StepWindow, optimizers: list[Optimizer], *, independent: bool) -> None:
    """Raise `NonFiniteError` for inf or NaN that no dynamic loss scale explains. A collective if some are sharded.

    It names the first such parameter, and the ranks with a loss that was not finite.
    """
    scaler, accum = window.scaler, window.accum
    if scaler.dynamic and scaler.overflows < _MOST_OVERFLOWS:
        return
    raise NonFiniteError(
        f"a gradient of step {accum.updates} is not finite",
        expected="finite gradients" if not scaler.dynamic else f"a finite step within {_MOST_OVERFLOWS}",
        got="inf or NaN" + blame(ctx, accum.losses.seen, independent=independent),
        where=_first_nonfinite(ctx, optimizers),
        fix="Lower the learning rate, clip with max_norm=, divide means by a count of at least 1 where a micro-batch"
        " may hold no unit, or pass nonfinite='skip' to leave such steps out.",
    )


def _first_nonfinite(ctx: DistContext, optimizers: list[Optimizer]) -> str:
    """Name the first parameter with inf or NaN in its gradient on any rank. A collective if some are sharded."""
    parameters = parameters_of(optimizers)
    # A second look at all gradients, which are still there: a refused step has changed nothing.
    at = first_nonfinite(parameters)
    if ctx.world_size > 1 and any(is_dtensor(each.grad) for each in parameters):
        at = int(all_reduce_flat(ctx.comm, torch.tensor([at], device=ctx.comm.control), "min").item())
    own = "" if at == len(parameters) else f"{list(_names(optimizers))[at]}, shape {list(parameters[at].shape)}"
    group = group_of(ctx, "pp")
    if group is not None:  # each stage has other parameters
        names = exchange_values(adopt(group, ctx.device), Call("optimizer_step", ordered=False), own, str)
        own = next(filter(None, names), "")
    return own or "the norm of all gradients, each finite by itself"


def first_of_ranks(ctx: DistContext, optimizers: Sequence[Optimizer], at: int | None, *, independent: bool) -> str:
    """Name the first of the parameters that ranks have found, each by its index; nothing if none has.

    A rank that calls this alone waits a second for the others; an `independent` one does not ask them.
    """
    own = ""
    if at is not None:
        shape = list(parameters_of(optimizers)[at].shape)
        own = f"{ctx.axis('pp').rank} {at} {list(_names(optimizers))[at]}, shape {shape}"
    by_rank = {ctx.rank: own} if independent else notes_of_ranks(ctx.comm, "parameters", own)
    found = [
        (int(stage), int(place), name)
        for stage, place, name in (each.split(" ", 2) for each in by_rank.values() if each)
    ]
    return min(found)[2] if found else ""


def _names(optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """Yield the parameters' names, from the optimizer or from `prepare_model`; else their positions."""
    for which, optimizer in enumerate(optimizers):
        for group_at, group in enumerate(optimizer.param_groups):
            known = group.get("param_names")
            for at, parameter in enumerate(group["params"]):
                name = known[at] if known else name_of(parameter)
                place = f"optimizer {which}, " if len(optimizers) > 1 or not name else ""
                yield place + (name or f"param_groups[{group_at}]['params'][{at}]")


def cannot_step(found: object, kind: type, where: str) -> ConfigError:
    if isinstance(found, torch.optim.LBFGS):
        return ConfigError(
            "LBFGS evaluates the loss within its step",
            expected="closure=, a function that returns the loss and calls no backward",
            where=where,
            fix=CLOSURE_LINE,
        )
    if isinstance(found, ReduceLROnPlateau):
        return ConfigError(
            "ReduceLROnPlateau needs a metric",
            where=where,
            fix="Call scheduler.step(metric) yourself, with a metric from accel.reduce, the same on every rank.",
        )
    return ConfigError("cannot be stepped", expected=f"a torch {kind.__name__}", got=type(found).__name__, where=where)


def refuse_in_closure(ctx: DistContext) -> None:
    """Raise `StepError` for a backward within a closure, which would leave gradients undivided, or scaled."""
    if ctx.comm.closure == "closure=":
        raise StepError(
            "the closure calls backward, which optimizer_step does itself",
            expected="a closure that returns the loss",
            got="a backward in the closure",
            where="optimizer_step, closure=",
            fix="Leave backward and zero_grad out of it, and return the loss: `return loss`, or `return loss, weight`.",
        )
    raise StepError(
        "the optimizer would step with gradients that nothing has divided",
        expected="a closure that returns the loss and calls no backward",
        got="accel.backward in the closure of optimizer.step",
        where="backward",
        fix=CLOSURE_LINE,
    )


def warn_unstorable(optimizer: Optimizer) -> None:
    """Log after an optimizer's first step, hours before the first save, which state a checkpoint cannot hold."""
    log = logging.getLogger("accel.training")
    kind = type(optimizer)
    if (error := unstorable(optimizer)) is not None:
        log.warning("save_state will refuse the state that %s has after its first step: %s", kind.__name__, error)
    if kind.state_dict is not Optimizer.state_dict:
        return
    for name, held in vars(optimizer).items():  # such as SAM: its state dict leaves out the inner optimizer's state
        if isinstance(held, Optimizer) and held.state and held.state is not optimizer.state:
            log.warning(
                "the state dict of %s leaves out the state of the optimizer inside of it: save and load that one too, "
                'as {"optimizer": optimizer, "inner": optimizer.%s}',
                kind.__name__,
                name,
            )
