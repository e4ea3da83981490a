# SPDX-License-Identifier: Apache-2.0
"""A model is cut into pipeline stages: each rank keeps the modules of its own, under the names of the whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from accel.comm import adopt
from accel.context import DistContext, group_of
from accel.errors import PrepareError
from accel.errors._checks import with_article
from accel.mixins import add_mixin
from accel.parallel._empty import make_room, move_model
from accel.parallel._labels import drop_parameter, label_parameters
from accel.parallel._modules import is_pipelined, named_modules, unwrap_model, wrapped_name
from accel.parallel._spread import Spread, SpreadOptions, begin_with_rank_0_, compare_models
from accel.parallel.axes.pipeline._pipeline import Pipeline, Pipelined, attach, open_ties, stage_of, tied_names
from accel.parallel.axes.pipeline._skipped import remove_modules, stage_view
from accel.parallel.axes.pipeline._stage_module import StageModule
from accel.parallel.axes.pipeline._stage_plan import Layout, Stages, check_stages, make_layout, own_stages, stage_plan
from accel.topology import Dimension, dimension_of

_BESIDE: tuple[Dimension, ...] = ("pipeline", "expert", "tensor", "context", "data", "replicate", "shard")
_WHERE = "prepare_model, plan=, stages"


class StageOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of pipelines; see `Plan`."""

    stages: Sequence[Sequence[str]] | None = None
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    micro_batches: int | None = None
    find_unused_parameters: bool = False


def _is_done(_ctx: DistContext, model: nn.Module) -> bool:
    return is_pipelined(unwrap_model(model))


def _check(ctx: DistContext, model: nn.Module, options: StageOptions) -> None:
    if ctx.device.type == "xla":
        raise PrepareError("pipelines do not know XLA devices", where=_WHERE, fix="Leave pp out of the mesh.")
    if (name := wrapped_name(model)) is not None:
        raise PrepareError(
            "a wrapped model cannot be cut into stages",
            expected="the model itself",
            got=f"{with_article(type(model).__name__)} with it as {name}",
            where=_WHERE,
            fix="Prepare the model inside; compile its blocks with accel.compile_model.",
        )
    beside = [name for name, axis in ctx.position.axes if axis.size > 1 and dimension_of(name) not in _BESIDE]
    if beside:
        raise PrepareError(
            "stages cannot be divided along these axes",
            expected="axes for replicas, shards, experts and tensor parallelism beside pp",
            got=", ".join(f"{name}={ctx.axis(name).size}" for name in beside),
            where="prepare_model, ctx.mesh",
            fix="Leave them out of the mesh, or leave pp out.",
        )
    layout, stages = _plan(ctx, model, options)
    if ctx.world_size > layout.ranks:
        _check_ties(model, layout, stages)


def _check_ties(model: nn.Module, layout: Layout, stages: Stages) -> None:
    """Raise for a parameter of two stages of one rank, where `fully_shard` would shard one only."""
    for names in tied_names(model):
        at = [stage_of(name, stages) for name in names]
        owners = [layout.owners[stage] for stage in dict.fromkeys(at)]
        if len(set(owners)) < len(owners):
            raise PrepareError(
                "a tied parameter is in two stages of one rank, which cannot be sharded or replicated",
                expected="stages of one rank without parameters in common",
                got=", ".join(names),
                where=_WHERE,
                fix="Take a schedule whose ranks have one stage or take turns, such as 1F1B or Interleaved1F1B.",
            )


def _plan(ctx: DistContext, model: nn.Module, options: StageOptions) -> tuple[Layout, Stages]:
    """The pipeline's numbers, and the modules of each stage."""
    ranks = ctx.axis("pp").size
    layout = make_layout(options.schedule, ranks, options.stages_per_rank, options.micro_batches)
    if options.stages is None:
        return layout, stage_plan(model, layout.stages)
    stages = tuple(map(tuple, options.stages))
    if len(stages) != layout.stages:
        raise PrepareError(
            "the plan has another number of stages than the mesh",
            expected=f"{layout.stages}: stages_per_rank={options.stages_per_rank} on each of {ranks} ranks along pp",
            got=str(len(stages)),
            where=_WHERE,
            fix=f"Leave stages out, or take accel.parallel.stage_plan(model, {layout.stages}).",
        )
    check_stages(model, stages, _WHERE)
    return layout, stages


def _spread(ctx: DistContext, model: nn.Module, options: StageOptions, *, is_empty: bool) -> nn.Module:
    layout, stages = _plan(ctx, model, options)
    compare_models(ctx, options, dict(model.named_parameters()))
    names = tied_names(model)
    order = tuple(model.state_dict(keep_vars=True))
    mine = own_stages(layout, ctx.axis("pp").rank)
    elsewhere = [path for at, paths in enumerate(stages) if at not in mine for path in paths]
    if not is_empty:
        _begin_alike(ctx, model, elsewhere)
    for each in remove_modules(model, elsewhere):
        drop_parameter(each)
    move_model(model, ctx.streams)
    modules = [_stage(ctx, model, stages, mine, at) for at in mine]
    label_parameters(model)
    group = group_of(ctx, "pp")
    assert group is not None  # this is the answer for more than one rank
    ties = open_ties(ctx, model, names, stages, layout)
    add_mixin([model], Pipelined)
    along = adopt(group, ctx.device)
    unused = options.find_unused_parameters
    attach(model, Pipeline(along, group, layout, names, order, ties, may_be_unused=unused), modules)
    return model


def _begin_alike(ctx: DistContext, model: nn.Module, elsewhere: Sequence[str]) -> None:
    """Give every rank rank 0's values, one tensor after another. Ranks keep none that only other ranks' stages have."""
    held = [module for path, module in named_modules(model) if not _below(path, elsewhere)]
    kept = {id(each) for module in held for each in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
    for each in [*model.parameters(), *model.buffers()]:
        if each.is_meta and id(each) not in kept:
            begin_with_rank_0_(ctx, [torch.empty_like(each.detach(), device=ctx.device)])
            continue
        make_room([each], ctx.device)
        begin_with_rank_0_(ctx, [each])


def _below(path: str, above: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{each}.") for each in above)


def _stage(ctx: DistContext, model: nn.Module, stages: Stages, mine: Sequence[int], at: int) -> StageModule:
    others = [path for other in mine if other != at for path in stages[other]]
    view = stage_view(model, stages[at], others)
    return StageModule(view, at, ctx.rank, stages)


PIPELINE = Spread(
    dimension="pipeline", options=StageOptions, is_done=_is_done, check=_check, spread=_spread, replaces=False
)
