# SPDX-License-Identifier: Apache-2.0
"""A model is cut into pipeline stages: each rank keeps its modules, under the names of the full model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel.comm import Call, adopt, agreed, agreed_values
from accel.context import DistContext, group_of
from accel.errors import AccelError, PrepareError
from accel.errors._checks import check_count, with_article
from accel.mixins import add_mixin
from accel.parallel._calls import let_answer
from accel.parallel._empty import make_room, move_model
from accel.parallel._fakes import free_large_buffers, without_memory
from accel.parallel._labels import drop_parameter, label_parameters
from accel.parallel._micro_batches import MicroBatch, example_batch, first_device
from accel.parallel._modules import example_of, is_pipelined, named_tensors, wrapped_name
from accel.parallel._private import drop_forward_hooks, is_compiled
from accel.parallel._refused import ModelRefusal, PrepareCall, RefusedFact, raised, refused
from accel.parallel._spread import (
    ModelView,
    ReplicateOptions,
    Spread,
    SpreadOptions,
    begin_with_rank_0_,
    compare_models,
)
from accel.parallel.axes.pipeline._held import drop_others, view_of
from accel.parallel.axes.pipeline._layout import Layout, batch_norms, check_norms, make_layout
from accel.parallel.axes.pipeline._pipeline import Pipeline, Pipelined, attach, open_ties
from accel.parallel.axes.pipeline._planned import Planned, planned, recorded_costs
from accel.parallel.axes.pipeline._replayed import Calls, ReplayedModule
from accel.parallel.axes.pipeline._replays import Replays
from accel.topology import Balance, CallCosts, Dimension, Plan, dimension_of
from accel.tree import map_tensors
from accel.tree._walk import Containers

_BESIDE: tuple[Dimension, ...] = ("pipeline", "expert", "tensor", "context", "data", "replicate", "shard")
_WHERE = "prepare_model, plan=, stages"
_OF_PIECES = (
    "%d batch norms (%s the first) take the statistics of each of the plan's %d micro-batches, as in one process too;"
    ' Plan(schedule="GPipe", micro_batches=1) takes statistics of whole batches'
)


class StageOptions(SpreadOptions, frozen=True, kw_only=True):
    """The plan, and a keyword of `prepare_model`."""

    plan: Plan
    find_unused_parameters: bool = False


def _is_done(_ctx: DistContext, view: ModelView) -> bool:
    return is_pipelined(view.inner.model)


def _options_from(plan: Plan, keywords: ReplicateOptions, _view: ModelView) -> StageOptions:
    return StageOptions(plan=plan, find_unused_parameters=keywords.find_unused_parameters)


def _on_xla(asked: PrepareCall) -> RefusedFact | None:
    return RefusedFact(str(asked.ctx.device), _WHERE) if asked.ctx.device.type == "xla" else None


def _wrapped(asked: PrepareCall) -> RefusedFact | None:
    if (name := wrapped_name(asked.view.model)) is None:
        return None
    return RefusedFact(f"{with_article(type(asked.view.model).__name__)} with it as {name}", _WHERE)


def _beside(asked: PrepareCall) -> RefusedFact | None:
    axes = [(name, axis.size) for name, axis in asked.ctx.position.axes if axis.size > 1]
    named = [f"{name}={size}" for name, size in axes if dimension_of(name) not in _BESIDE]
    return RefusedFact(", ".join(named), "prepare_model, ctx.mesh") if named else None


def _compiled(asked: PrepareCall) -> RefusedFact | None:
    name = with_article(type(asked.view.model).__name__)
    is_whole = is_compiled(asked.view.model) and wrapped_name(asked.view.model) is None
    return RefusedFact(f"the call of {name}, compiled", _WHERE) if is_whole else None


_REFUSED = (
    ModelRefusal(
        "pipelines do not know XLA devices",
        _on_xla,
        fix="Leave pp out of the mesh.",
    ),
    ModelRefusal(
        "a wrapped model cannot be cut into stages",
        _wrapped,
        expected="the model itself",
        fix="Prepare the model inside; compile its blocks with accel.compile_model.",
    ),
    ModelRefusal(
        "a model that is compiled as one cannot be cut into stages: no call runs all of it",
        _compiled,
        expected="compiled blocks, or a compilation after prepare_model",
        fix='Call accel.compile_model(model) after prepare_model; or accel.compile_model(model, "repeated").',
    ),
    ModelRefusal(
        "stages cannot be divided along these axes",
        _beside,
        expected="axes for replicas, shards, experts and tensor parallelism with pp",
        fix="Leave them out of the mesh, or leave pp out.",
    ),
)


def _refusals(ctx: DistContext, view: ModelView, options: StageOptions) -> list[AccelError]:
    def check() -> None:
        check_norms(batch_norms(view.modules), _layout(ctx, options), PrepareError, _WHERE)

    return [*refused(PrepareCall(ctx, view, options=options), _REFUSED), *raised([check])]


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
                fix="Use a schedule in which ranks have one stage or take turns, such as 1F1B or Interleaved1F1B.",
            )


def _layout(ctx: DistContext, options: StageOptions) -> Layout:
    """The pipeline's numbers; stages of another number are a `PrepareError`."""
    ranks, plan = ctx.axis("pp").size, options.plan
    layout = make_layout(plan.schedule, ranks, plan.stages_per_rank, plan.micro_batches)
    if plan.stages is not None and len(plan.stages) != layout.stages:
        raise PrepareError(
            "the plan has another number of stages than the mesh",
            expected=f"{layout.stages}: stages_per_rank={plan.stages_per_rank} on each of {ranks} ranks along pp",
            got=str(len(plan.stages)),
            where=_WHERE,
            fix=f"Leave stages out, or take accel.parallel.stage_plan(model, {layout.stages}).",
        )
    return layout


def _pad_between_layers(view: ModelView) -> None:
    """Let torch's encoders keep padding between their layers in eval mode, as nested tensors cannot be sent. Mutates
    these encoders."""
    for each in view.modules.values():
        if isinstance(each, nn.TransformerEncoder):
            each.use_nested_tensor = False


def _spread(ctx: DistContext, view: ModelView, options: StageOptions, *, is_empty: bool) -> nn.Module:
    model = view.model
    norms = batch_norms(view.modules)
    layout = _layout(ctx, options)
    if ctx.rank == 0 and layout.micro_batches > 1 and any(each.training for _, each in norms):
        logging.getLogger("accel.parallel").warning(_OF_PIECES, len(norms), norms[0][0], layout.micro_batches)
    compare_models(ctx, options, view.parameters)
    _pad_between_layers(view)
    ghost = without_memory(model, ctx.device)
    plan = _planned(ctx, ghost, view, options)
    aliases = [*view.owners.values()]

    def stages_with(names: Sequence[str]) -> list[int]:
        return [at for at, held in enumerate(plan.holds) if not held.isdisjoint(names)]

    shards = ctx.world_size > layout.ranks
    if shards:
        _check_shared([(names, stages_with(names)) for names in aliases], layout)
    order = tuple(model.state_dict(keep_vars=True))
    mine = layout.of(ctx.axis("pp").rank)
    kept = frozenset[str]().union(*(plan.holds[at] for at in mine))
    if not is_empty:
        _begin_alike(ctx, view, {id(each) for name, each in named_tensors(model) if name in kept})
    calls = Calls()
    for path in plan.units:
        let_answer(model.get_submodule(path), calls.of(path))
    for each in drop_others(view, kept, plan.units, ctx.device):
        drop_parameter(each)
    move_model(view.after(), ctx.streams)
    free_large_buffers(ghost, model)
    label_parameters(view.after().parameters)
    group = group_of(ctx, "pp")
    assert group is not None  # this is the answer for more than one rank
    ties = open_ties(ctx, model, aliases, stages_with, layout)
    modules: list[ReplayedModule] = []
    with agreed(ctx.comm, Call("prepare_model: stages")):
        for at in mine:
            stage = view_of(model, plan.holds[at], plan.units, ctx.device, shards=shards)
            if at + 1 < layout.stages:  # its forward ends before the model's, and hooks see the model's output
                drop_forward_hooks(stage)
            modules.append(ReplayedModule(stage, calls, at, ctx.rank, layout.stages, plan.own[at]))
    add_mixin([model], Pipelined)
    pipeline = Pipeline(
        adopt(group, ctx.device),
        layout,
        [each for each in aliases if len(each) > 1],
        order,
        ties,
        Replays(ghost, plan, ctx.device, several=layout.stages > layout.ranks),
        may_be_unused=options.find_unused_parameters,
    )
    attach(model, pipeline, modules)
    return model


def _planned(ctx: DistContext, ghost: nn.Module, view: ModelView, options: StageOptions) -> Planned:
    """The stages of a model by a record of the example, or by the order of its modules. A collective; ranks that cut
    otherwise are a `PrepareError` on all."""
    stages = options.plan.stages or _layout(ctx, options).stages
    batch = _example(view.model, view.example, ctx.containers)
    made: list[Planned] = []

    def plan() -> str:
        made.append(planned(ghost, batch and _on_device(batch, ctx.device, ctx.containers), stages, ctx.containers))
        return repr((made[0].units, made[0].starts, sorted(map(sorted, made[0].holds))))

    plans = agreed_values(ctx.comm, Call("prepare_model: record"), plan, str)
    if len(set(plans)) > 1:
        raise PrepareError(
            "ranks cut the model at different places",
            expected="an example for which the forward calls the same modules on every rank",
            got=", ".join(path for path, _ in made[0].starts or ()),
            where=_WHERE,
            fix="Pass examples of the same shapes and paths on all ranks.",
        )
    return made[0]


def _example(model: nn.Module, example: Any, containers: Containers) -> MicroBatch | None:
    """Return an example as a micro-batch; without one, small inputs for a model of transformers, None for another."""
    if example is not None:
        return example_batch(example, containers)
    made = example_of(model)
    if made is None:
        return None
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
    return example_batch({name: _like(each, dtype) for name, each in made.items()})


def _like(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _on_device(batch: MicroBatch, device: torch.device, containers: Containers = ()) -> MicroBatch:
    """An example with values on a device; zeros for those that have none."""

    def there(each: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(each, device=device) if each.is_meta else each.to(device)

    args, kwargs = map_tensors(there, (batch.args, dict(batch.kwargs)), containers)
    return batch._replace(args=args, kwargs=kwargs)


def _begin_alike(ctx: DistContext, view: ModelView, kept: set[int]) -> None:
    """Give every rank rank 0's values, one tensor after another. `kept`: the `id` of those that this rank keeps."""
    for each in [*view.parameters.values(), *view.buffers.values()]:
        if each.is_meta and id(each) not in kept:
            each = torch.empty_like(each.detach(), device=ctx.device)
        else:
            make_room([each], ctx.device)
        begin_with_rank_0_(ctx, [each])


def stage_plan(
    model: nn.Module,
    stages: int,
    *,
    costs: Mapping[str, float] | None = None,
    balance: Balance | None = None,
    example: Any = None,
) -> tuple[tuple[str, ...], ...]:
    """Return the paths of the modules of each pipeline stage. No communication; the model may be on the meta device.

    The forward is recorded on the example without memory, and its calls are divided so that stages have nearly equal
    costs and send little. For a model of transformers small inputs are made. Without an example, the modules of another
    model are taken in the order of registration, and stages begin behind its repeated blocks, if there are enough.
    Change the result as you like, and pass it as `Plan(stages=...)`.

    Args:
        model: on any device.
        stages: number of stages.
        costs: cost of modules by path, in the place of the balance's.
        balance: cost of the others: "time" for the FLOPs of the forward; "memory" for the bytes of parameters; "blocks"
            for 1 a block and 0 for another module. By default "time"; "blocks" for modules in the order of
            registration, where "time" is the number of elements in weights of matmuls.
        example: a batch as the model takes it.

    Returns:
        Paths by stage, of modules with parameters.

    Raises:
        PrepareError: the forward calls fewer modules than stages.
        StageError: stages cannot play back the forward of the example.
        ConfigError: not a number of stages, an unknown balance, or costs that are no numbers from 0, or of other
            modules.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> accel.parallel.stage_plan(model, 2)
        (('0',), ('2',))
    """
    check_count(stages, "the number of stages is not valid", where="stages=")
    return planned(*_ghost(model, example), stages, (), balance, costs).own


def recorded_calls(model: nn.Module) -> tuple[CallCosts, ...]:
    """Return the costs of the calls that stages of a model of transformers are made of, without an example; of another
    model none. No communication; the model may be on the meta device."""
    ghost, batch = _ghost(model, None)
    return () if batch is None else recorded_costs(ghost, batch)


def _ghost(model: nn.Module, example: Any) -> tuple[nn.Module, MicroBatch | None]:
    """A model without memory, and its example."""
    batch = _example(model, example, ())
    device = torch.device("cpu") if batch is None else first_device(batch)
    return without_memory(model, device), batch and _on_device(batch, device)


PIPELINE = Spread(
    dimension="pipeline",
    options_from=_options_from,
    keywords=("find_unused_parameters",),
    is_done=_is_done,
    refusals=_refusals,
    spread=_spread,
    replaces=False,
)
