# SPDX-License-Identifier: Apache-2.0
"""Settings of the launcher, and an axis cp of the mesh, without effect in the script: refused at the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from accel.comm import MERGED
from accel.context import DistContext
from accel.errors import ConfigError
from accel.optim import Accumulation, parameters_of
from accel.parallel import ENGINES, check_context_used, name_of, runs_without_autocast
from accel.tensors import is_dtensor, split_dims
from accel.topology import AXIS_NAMES, SHARED_DIMS

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_BY_PREPARE = ("plan", "compile")


def check_settings(ctx: DistContext, accum: Accumulation | None, optimizers: Sequence[Optimizer]) -> None:
    """Raise `ConfigError` if a setting of the launcher, or an axis cp, has no effect on a step. No communication."""
    if "accumulation" in ctx.launched:
        _check_accumulation(ctx, accum)
    if "precision" in ctx.launched or "mesh" in ctx.launched:
        parameters = parameters_of(optimizers)
        if "precision" in ctx.launched and runs_without_autocast(parameters):
            raise ConfigError(
                "the precision of this run has no effect",
                expected=f"forward passes in {ctx.precision.compute} ({ctx.launched['precision']})",
                got="a prepared model whose forward ran without autocast",
                where="optimizer_step",
                fix="Run forward and loss in the block `with accel.autocast(ctx):`. For a model that is to have its"
                " own: ctx = accel.replace(ctx, precision='fp32').",
            )
        if "mesh" in ctx.launched:
            _check_mesh(ctx, parameters)
    if ctx.strategy not in ENGINES and not ctx.launched.keys().isdisjoint(_BY_PREPARE):
        _check_prepared(ctx, parameters_of(optimizers))
    check_context_used(ctx)


def _check_accumulation(ctx: DistContext, accum: Accumulation | None) -> None:
    steps = 1 if accum is None else accum.steps
    if steps == ctx.accumulation:
        return
    raise ConfigError(
        "the accumulation of this run has no effect",
        expected=f"accumulation={ctx.accumulation} ({ctx.launched['accumulation']})",
        got=f"a step of {steps}, by " + ("no Accumulation" if accum is None else f"Accumulation(steps={steps})"),
        where="optimizer_step",
        fix="Take the setting: accel.train_state(ctx), or accel.Accumulation(ctx.accumulation); the number of a"
        " checkpoint is replaced by msgspec.structs.replace(accum, steps=ctx.accumulation). For a loop that is to have"
        f" its own: ctx = accel.replace(ctx, accumulation={steps}).",
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


def _check_mesh(ctx: DistContext, parameters: Sequence[torch.Tensor]) -> None:
    # `check_context_used` asks for those of a sequence, and `prepare` cuts every model along those of a pipeline
    others = {*SHARED_DIMS, *AXIS_NAMES["expert"]} - {*AXIS_NAMES["context"], *AXIS_NAMES["pipeline"]}
    asked = {name: axis.size for name, axis in ctx.position.axes if axis.size > 1 and name in others}
    if not asked:
        return
    used = {name for each in parameters if is_dtensor(each) for name in _split_along(each)}
    if idle := [f"{name}={size}" for name, size in asked.items() if name not in used]:
        raise ConfigError(
            "a dimension of this run's mesh has no effect",
            expected=f"parameters that are spread along {', '.join(asked)} ({ctx.launched['mesh']})",
            got=f"none along {', '.join(idle)}",
            where="optimizer_step",
            fix="Spread the model along it before prepare, or leave it out of the mesh. If your own code uses it in"
            " another way: ctx = accel.replace(ctx, mesh=ctx.mesh).",
        )


def _split_along(parameter: DTensor) -> Iterator[str]:
    """Names of the axes along which ranks hold different elements."""
    names = parameter.device_mesh.mesh_dim_names
    if names is not None:
        for dim in split_dims(parameter):
            yield from names[dim].split(MERGED)
