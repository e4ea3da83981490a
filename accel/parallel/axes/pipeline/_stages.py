# SPDX-License-Identifier: Apache-2.0
"""A model is cut into pipeline stages: each rank keeps the modules of its own, under the names of the whole model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from accel.comm import Call, adopt, agreed, agreed_values
from accel.context import DistContext, group_of
from accel.errors import PrepareError
from accel.errors._checks import with_article
from accel.mixins import add_mixin
from accel.parallel._calls import let_answer
from accel.parallel._empty import make_room, move_model
from accel.parallel._fakes import without_memory
from accel.parallel._labels import drop_parameter, label_parameters
from accel.parallel._modules import is_pipelined, named_modules, named_tensors, unwrap_model, wrapped_name
from accel.parallel._private import is_compiled
from accel.parallel._spread import Spread, SpreadOptions, begin_with_rank_0_, compare_models
from accel.parallel.axes.pipeline._held import drop_others, view_of
from accel.parallel.axes.pipeline._pipeline import Pipeline, Pipelined, attach, open_ties, stage_of, tied_names
from accel.parallel.axes.pipeline._replayed import Calls, ReplayedModule
from accel.parallel.axes.pipeline._replays import Planned, Replays, planned, planned_by_paths
from accel.parallel.axes.pipeline._skipped import remove_modules, stage_view
from accel.parallel.axes.pipeline._stage_module import MicroBatch, StageModule, example_batch
from accel.parallel.axes.pipeline._stage_plan import (
    Layout,
    Stages,
    batch_norms,
    check_norms,
    check_stages,
    make_layout,
    own_stages,
    stage_plan,
)
from accel.parallel.axes.pipeline._trial import Trial, skeleton_of, trial_batch
from accel.topology import Dimension, Plan, dimension_of
from accel.tree import map_tensors

if TYPE_CHECKING:
    from accel.parallel._sharded import GatheredFormat
    from accel.parallel.axes.pipeline._trace_export import StageGraphs
    from accel.parallel.axes.pipeline._traced import Traces
    from accel.parallel.axes.tensor import Division

_BESIDE: tuple[Dimension, ...] = ("pipeline", "expert", "tensor", "context", "data", "replicate", "shard")
_WHERE = "prepare_model, plan=, stages"
_OF_PIECES = (
    "%d batch norms (%s the first) take the statistics of each of the plan's %d micro-batches, as in one process too;"
    ' Plan(schedule="GPipe", micro_batches=1) takes those of whole batches'
)


class StageOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of pipelines; see `Plan`."""

    stages: Sequence[Sequence[str]] | None = None
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    micro_batches: int | None = None
    find_unused_parameters: bool = False
    cut: str = "chain"
    units: Any = "auto"
    example: Any = None
    division: Any = None  # from a whole model to the `Division` of its graphs among ranks along tp; None without tp
    gathered: Any = None  # from a whole model to the `GatheredFormat` of its shards; None without any
    plan: Plan = Plan()  # all of it, for the lines of errors

    def describe(self) -> str:
        """Return the options without the example, a batch of the rank's own, functions, and others' options."""
        return repr(msgspec.structs.replace(self, example=None, division=None, gathered=None, plan=Plan()))


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
    if options.cut == "trace":
        _check_uncompiled(model)
    if is_compiled(model):
        raise PrepareError(
            "a model that is compiled whole cannot be cut into stages: nothing calls it as one",
            expected="compiled blocks, or a compilation after prepare_model",
            got=f"the call of {with_article(type(model).__name__)}, compiled",
            where=_WHERE,
            fix='Call accel.compile_model(model) after prepare_model; or accel.compile_model(model, "repeated").',
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
    if options.cut == "trace":
        _check_traced(ctx, model, options)
    elif options.cut == "replay":
        _ = _layout(ctx, options)
    else:
        layout, stages = _plan(ctx, model, options)
        if ctx.world_size > layout.ranks:
            _check_ties(model, layout, stages)
    check_norms(batch_norms(model), _layout(ctx, options), PrepareError, _WHERE)


def _check_uncompiled(model: nn.Module) -> None:
    """Raise for regions that torch compiles of a model to be traced: graphs of stages call no modules."""
    compiled = [path or "the model" for path, module in named_modules(model) if is_compiled(module)]
    if compiled:
        raise PrepareError(
            "stages that are cut by tracing are graphs of operators, which call no compiled modules",
            expected="a model that is compiled after prepare_model",
            got=f"compiled: {', '.join(compiled[:5])}",
            where=_WHERE,
            fix="Call accel.compile_model(model) after prepare_model: it compiles the graphs of the stages.",
        )


def _check_traced(ctx: DistContext, model: nn.Module, options: StageOptions) -> None:
    """Raise for what graphs of stages do not know."""
    from accel.parallel.axes.pipeline._traced import modes_of  # torch.export takes long to import

    _ = _layout(ctx, options)
    if options.example is None:
        raise PrepareError(
            "a model is traced with a batch",
            expected="example=, a batch as the model takes it",
            got="none",
            where=_WHERE,
            fix="Pass accel.prepare(ctx, model, optimizer, plan=plan, example=batch): a tensor, a tuple of arguments"
            " or a mapping.",
        )
    _check_mesh(ctx, options)
    _ = modes_of(model)


def _check_mesh(ctx: DistContext, options: StageOptions) -> None:
    """Raise for axes that the stages of a traced model are not divided along."""
    beside = {name: axis.size for name, axis in ctx.position.axes if axis.size > 1 and name != "pp"}
    kinds = {name: dimension_of(name) for name in beside}
    if found := [name for name in beside if kinds[name] in ("expert", "context", "sequence")]:
        raise PrepareError(
            "a traced model cannot be divided along these axes within its stages",
            expected="axes for replicas, shards and tensor parallelism beside pp",
            got=", ".join(f"{name}={beside[name]}" for name in found),
            where=_WHERE,
            fix='Leave them out of the mesh, or cut the model as a chain: Plan(cut="chain").',
        )
    if any(kind != "tensor" for kind in kinds.values()) and options.units != "auto":
        raise PrepareError(
            "a traced stage is sharded as one unit, which its graph reads whole",
            expected='units="auto" beside replicas and shards',
            got=f"units={options.units!r}",
            where=_WHERE,
            fix="Leave it out of the plan.",
        )


def _check_ties(model: nn.Module, layout: Layout, stages: Stages) -> None:
    """Raise for a parameter of two stages of one rank."""
    _check_shared([(names, [stage_of(name, stages) for name in names]) for names in tied_names(model)], layout)


def _check_shared(found: Sequence[tuple[Sequence[str], Sequence[int]]], layout: Layout) -> None:
    """Raise for a parameter of two stages of one rank, where `fully_shard` would shard one only. `found`: its names
    and stages."""
    for names, at in found:
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
    layout = _layout(ctx, options)
    if options.stages is None:
        try:
            return layout, stage_plan(model, layout.stages)
        except PrepareError as error:
            batch = trial_batch(model, options.example, ctx.containers)
            raise _trial(ctx, model, options).with_outcome(error, batch) from error
    stages = tuple(map(tuple, options.stages))
    check_stages(model, stages, _WHERE)
    return layout, stages


def _trial(ctx: DistContext, model: nn.Module, options: StageOptions) -> Trial:
    """A cut by tracing instead of one of the chain."""
    layout = _layout(ctx, options)
    default = Plan()
    names = [name for name in Plan.__struct_fields__ if name not in ("cut", "stages")]
    own = {name: getattr(options.plan, name) for name in names}
    given = {name: value for name, value in own.items() if value != getattr(default, name)}
    plan = ", ".join(['cut="trace"', *(f"{name}={value!r}" for name, value in given.items())])
    lines: list[tuple[Stages | int, str]] = [(layout.stages, plan)]
    if options.stages is not None:  # paths that begin a stage of a chain may begin none of a graph
        stages = tuple(map(tuple, options.stages))
        lines.insert(0, (stages, f"{plan}, stages={stages!r}"))
    obstacle = ""
    try:
        _check_mesh(ctx, options)
    except PrepareError as error:
        obstacle = f"{error.problem}, here {error.got}"
    return Trial(model, ctx.device, lines, obstacle, options.division)


def _layout(ctx: DistContext, options: StageOptions) -> Layout:
    """The pipeline's numbers; stages of another number are a `PrepareError`."""
    ranks = ctx.axis("pp").size
    layout = make_layout(options.schedule, ranks, options.stages_per_rank, options.micro_batches)
    if options.stages is not None and len(options.stages) != layout.stages:
        raise PrepareError(
            "the plan has another number of stages than the mesh",
            expected=f"{layout.stages}: stages_per_rank={options.stages_per_rank} on each of {ranks} ranks along pp",
            got=str(len(options.stages)),
            where=_WHERE,
            fix=f"Leave stages out, or take accel.parallel.stage_plan(model, {layout.stages}).",
        )
    return layout


def _spread(ctx: DistContext, model: nn.Module, options: StageOptions, *, is_empty: bool) -> nn.Module:
    norms = batch_norms(model)
    count = _layout(ctx, options).micro_batches
    if ctx.rank == 0 and count > 1 and any(each.training for _, each in norms):
        logging.getLogger("accel.parallel").warning(_OF_PIECES, len(norms), norms[0][0], count)
    if options.cut == "trace":
        return _spread_traced(ctx, model, options, is_empty=is_empty)
    if options.cut == "replay":
        return _spread_replayed(ctx, model, options, is_empty=is_empty)
    layout, stages = _plan(ctx, model, options)
    compare_models(ctx, options, dict(model.named_parameters()))
    names = tied_names(model)
    trial = _trial(ctx, skeleton_of(model), options)
    order = tuple(model.state_dict(keep_vars=True))
    mine = own_stages(layout, ctx.axis("pp").rank)
    elsewhere = [path for at, paths in enumerate(stages) if at not in mine for path in paths]
    if not is_empty:
        _begin_alike(ctx, model, _kept(model, elsewhere))
    for each in remove_modules(model, elsewhere):
        drop_parameter(each)
    move_model(model, ctx.streams)
    modules = [_stage(ctx, model, stages, mine, at) for at in mine]
    label_parameters(model)
    group = group_of(ctx, "pp")
    assert group is not None  # this is the answer for more than one rank

    def stages_with(aliases: Sequence[str]) -> list[int]:
        return [stage_of(name, stages) for name in aliases]

    ties = open_ties(ctx, model, names, stages_with, layout)
    add_mixin([model], Pipelined)
    along = adopt(group, ctx.device)
    unused = options.find_unused_parameters
    attach(model, Pipeline(along, group, layout, names, order, ties, may_be_unused=unused, trial=trial), modules)
    return model


def _spread_replayed(ctx: DistContext, model: nn.Module, options: StageOptions, *, is_empty: bool) -> nn.Module:
    """Cut a model into stages that replay its forward: ranks keep what the calls of their stages read."""
    layout = _layout(ctx, options)
    compare_models(ctx, options, dict(model.named_parameters()))
    ghost = without_memory(model, ctx.device)
    plan = _planned(ctx, ghost, model, options)
    aliases = _aliases(model)

    def stages_with(names: Sequence[str]) -> list[int]:
        return [at for at, held in enumerate(plan.holds) if not held.isdisjoint(names)]

    shards = ctx.world_size > layout.ranks
    if shards:
        _check_shared([(names, stages_with(names)) for names in aliases], layout)
    order = tuple(model.state_dict(keep_vars=True))
    mine = own_stages(layout, ctx.axis("pp").rank)
    kept = frozenset[str]().union(*(plan.holds[at] for at in mine))
    if not is_empty:
        _begin_alike(ctx, model, {id(each) for name, each in named_tensors(model) if name in kept})
    calls = Calls()
    for path in plan.units:
        let_answer(model.get_submodule(path), calls.of(path))
    for each in drop_others(model, kept, plan.units, ctx.device):
        drop_parameter(each)
    move_model(model, ctx.streams)
    label_parameters(model)
    group = group_of(ctx, "pp")
    assert group is not None  # this is the answer for more than one rank
    ties = open_ties(ctx, model, aliases, stages_with, layout)
    modules: list[ReplayedModule] = []
    with agreed(ctx.comm, Call("prepare_model: stages")):
        for at in mine:
            view = view_of(model, plan.holds[at] if shards else kept, plan.units, ctx.device)
            modules.append(ReplayedModule(view, calls, at, ctx.rank, layout.stages, plan.own[at]))
    add_mixin([model], Pipelined)
    names = [each for each in aliases if len(each) > 1]
    pipeline = Pipeline(
        adopt(group, ctx.device),
        group,
        layout,
        names,
        order,
        ties,
        may_be_unused=options.find_unused_parameters,
        replays=Replays(ghost, plan, ctx.device),
    )
    attach(model, pipeline, modules)
    return model


def _planned(ctx: DistContext, ghost: nn.Module, model: nn.Module, options: StageOptions) -> Planned:
    """The stages of a model by a record of the example, or by the order of its modules. A collective; ranks that cut
    otherwise are a `PrepareError` on all."""
    stages = _layout(ctx, options).stages if options.stages is None else options.stages
    batch = trial_batch(model, options.example, ctx.containers)
    made: list[Planned] = []

    def plan() -> str:
        if batch is None:
            made.append(planned_by_paths(ghost, _plan_in_order(model, stages)))
        else:
            made.append(planned(ghost, _on_device(batch, ctx.device), stages))
        return repr((made[0].units, made[0].starts, sorted(map(sorted, made[0].holds))))

    plans = agreed_values(ctx.comm, Call("prepare_model: record"), plan, str)
    if len(set(plans)) > 1:
        raise PrepareError(
            "ranks cut the model at different places",
            expected="an example whose forward calls the same modules on every rank",
            got=", ".join(path for path, _ in made[0].starts or ()),
            where=_WHERE,
            fix="Pass examples of the same shapes and paths on all ranks.",
        )
    return made[0]


def _plan_in_order(model: nn.Module, stages: Sequence[Sequence[str]] | int) -> Stages:
    """The modules of each stage in the order of their registration."""
    if isinstance(stages, int):
        return stage_plan(model, stages)
    check_stages(model, stages, _WHERE)
    return tuple(map(tuple, stages))


def _on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """An example with values on a device; zeros for those that have none."""

    def there(each: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(each, device=device) if each.is_meta else each.to(device)

    return batch._replace(args=map_tensors(there, batch.args), kwargs=map_tensors(there, dict(batch.kwargs)))


def _spread_traced(ctx: DistContext, model: nn.Module, options: StageOptions, *, is_empty: bool) -> nn.Module:
    """Cut a model by tracing: ranks keep what the graphs of their stages read."""
    # torch.export takes long to import
    from accel.parallel.axes.pipeline._traced import (
        TracedModule,
        drop_others as drop,
        holdings_of,
        view_of as traced_view,
    )

    layout = _layout(ctx, options)
    compare_models(ctx, options, dict(model.named_parameters()))
    batch = example_batch(options.example, ctx.containers)
    division = None if options.division is None else options.division(model)
    paths = layout.stages if options.stages is None else options.stages
    gathered = None if options.gathered is None else options.gathered(model)
    traces, trace = _traces(ctx, model, batch, paths, division, gathered)
    holdings = holdings_of(model, trace.stages)
    aliases = _aliases(model)
    if ctx.world_size > layout.ranks:
        _check_shared([(names, holdings.stages_of(names)) for names in aliases], layout)
    order = tuple(model.state_dict(keep_vars=True))
    mine = own_stages(layout, ctx.axis("pp").rank)
    kept = frozenset[str]().union(*(holdings.names[at] for at in mine))
    if not is_empty:
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        _begin_alike(ctx, model, {id(each) for name, each in named if name in kept})
    for each in drop(model, kept):
        drop_parameter(each)
    move_model(model, ctx.streams)
    label_parameters(model)
    group = group_of(ctx, "pp")
    assert group is not None  # this is the answer for more than one rank
    ties = open_ties(ctx, model, aliases, holdings.stages_of, layout)
    with agreed(ctx.comm, Call("prepare_model: stages")):
        names_of = holdings.names if ctx.world_size > layout.ranks else [kept] * layout.stages
        modules = [TracedModule(traced_view(model, names_of[at]), at, ctx.rank, layout.stages, division) for at in mine]
    add_mixin([model], Pipelined)
    names = [each for each in aliases if len(each) > 1]
    unused = options.find_unused_parameters
    pipeline = Pipeline(
        adopt(group, ctx.device), group, layout, names, order, ties, may_be_unused=unused, traces=traces
    )
    attach(model, pipeline, modules)
    return model


def _traces(
    ctx: DistContext,
    model: nn.Module,
    batch: MicroBatch,
    stages: Sequence[Sequence[str]] | int,
    division: Division | None,
    gathered: GatheredFormat | None,
) -> tuple[Traces, StageGraphs]:
    """The graphs of all stages. A collective: ranks along tp, whose parts may differ in size, cut at one place."""
    from accel.parallel.axes.pipeline._traced import Traces  # torch.export takes long to import

    made: list[tuple[Traces, StageGraphs]] = []

    def export(stages: Sequence[Sequence[str]] | int = stages) -> list[list[str]]:
        made.append(Traces.begin(model, ctx.device, batch, stages, division, gathered))
        return list(map(list, made[-1][1].paths))

    first, *others = agreed_values(ctx.comm, Call("prepare_model: export"), export, list[list[str]])
    if any(each != first for each in others):
        _ = agreed_values(ctx.comm, Call("prepare_model: export"), partial(export, first), list[list[str]])
    return made[-1]


def _aliases(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(map(tuple, names.values()))


def _begin_alike(ctx: DistContext, model: nn.Module, kept: set[int]) -> None:
    """Give every rank rank 0's values, one tensor after another. `kept`: the `id` of those that this rank keeps."""
    for each in [*model.parameters(), *model.buffers()]:
        if each.is_meta and id(each) not in kept:
            begin_with_rank_0_(ctx, [torch.empty_like(each.detach(), device=ctx.device)])
            continue
        make_room([each], ctx.device)
        begin_with_rank_0_(ctx, [each])


def _kept(model: nn.Module, elsewhere: Sequence[str]) -> set[int]:
    """The `id` of each tensor that is in a module outside of some paths."""
    held = [module for path, module in named_modules(model) if not _below(path, elsewhere)]
    return {id(each) for module in held for each in (*module.parameters(recurse=False), *module.buffers(recurse=False))}


def _below(path: str, above: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{each}.") for each in above)


def _stage(ctx: DistContext, model: nn.Module, stages: Stages, mine: Sequence[int], at: int) -> StageModule:
    others = [path for other in mine if other != at for path in stages[other]]
    view = stage_view(model, stages[at], others)
    return StageModule(view, at, ctx.rank, stages)


PIPELINE = Spread(
    dimension="pipeline", options=StageOptions, is_done=_is_done, check=_check, spread=_spread, replaces=False
)
