# SPDX-License-Identifier: Apache-2.0
"""Fully sharded: each rank keeps its part of every parameter, and torch's `fully_shard` gathers a block at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from accel.comm import Comm, adopt, broadcast_flat
from accel.context import DistContext
from accel.errors import AccelError, ConfigError, DeviceError, PrepareError
from accel.mixins import add_mixin
from accel.parallel._containers import fill_containers
from accel.parallel._empty import allocate_empty, make_room, move_model
from accel.parallel._entries import refuse_parts, refuse_parts_of_units
from accel.parallel._labels import label_parameters, replace_parameter
from accel.parallel._leftovers import watch_used
from accel.parallel._modules import is_pipelined, layerdrops, sharded_roots, stage_modules, written_class
from accel.parallel._refused import PrepareCall, quantized_divided, raised, refused
from accel.parallel._sharded import note_shards, spans_all
from accel.parallel._spread import (
    ModelView,
    PendingForward,
    ReplicateOptions,
    Spread,
    compare_models,
    follow_first_,
    stage_comm,
)
from accel.parallel._torch_fsdp import is_kept, keep_for_graphs, shards_of, sum_in_one_format, sum_unused
from accel.parallel._watches import refuse_changes
from accel.parallel.axes.experts import exchange_mesh, expert_modules, listed_prefixes, shard_experts
from accel.parallel.axes.pipeline import SPLIT_BACKWARDS, pipeline_of
from accel.parallel.axes.replicate._ddp import replica_of
from accel.parallel.axes.shard._options import (
    ShardOptions,
    check_formats,
    check_mesh,
    compute_in,
    open_shard_mesh,
    reshard_setting,
    wide_parameters,
    wire_format,
)
from accel.parallel.axes.shard._running import CalledUnit, EndedUnit, note_units, reach_outputs, reduce_in_one_order
from accel.parallel.axes.shard._units import (
    check_ignored,
    ignored_ids,
    is_indivisible,
    modules_named,
    plan_units,
    together_ids,
    units_in,
)
from accel.parallel.axes.shard._whole import keep_whole, see_plain
from accel.tensors import is_dtensor, local_part
from accel.topology import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def prefetch(units: Sequence[nn.Module], ahead: int) -> None:
    """Gather the next `ahead` units in forward, and those before in backward, while one computes; units run in the
    order of their list."""
    model = units[-1]
    known = {id(each) for each in units}
    order = [cast(Any, each) for each in model.modules() if id(each) in known]
    for at, unit in enumerate(order):
        unit.set_modules_to_forward_prefetch(order[at + 1 : at + 1 + ahead])
        unit.set_modules_to_backward_prefetch(order[max(at - ahead, 0) : at][::-1])


def begin_with_root(units: Sequence[nn.Module]) -> None:
    """Let a unit be called before the model: torch takes the first unit that is called for the outermost one, which
    is the last of the list."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    root = cast(Any, units[-1])
    handles: list[Any] = []

    def begin(module: nn.Module, _inputs: Any) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
        if module is not root:
            root.accel_begin = lambda: None
            register_fsdp_forward_method(root, "accel_begin")
            root.accel_begin()
            del root.accel_begin
            root.reshard()

    hook = cast(Any, torch.compiler).disable(begin)
    handles += [unit.register_forward_pre_hook(hook, prepend=True) for unit in units]


def gather_outside_of_inference(unit: nn.Module) -> None:
    """Make whole parameters ordinary tensors, also where the first forward is in torch.inference_mode."""

    def gather(module: nn.Module, _inputs: Any) -> None:
        if torch.is_inference_mode_enabled():
            # training cannot use tensors made in that mode, and `fully_shard` keeps the first forward's
            with torch.inference_mode(False):
                cast(Any, module).unshard()

    _ = unit.register_forward_pre_hook(cast(Any, torch.compiler).disable(gather), prepend=True)


def reshard_after_evaluation(units: Sequence[nn.Module]) -> None:
    """Shard all units again after a forward without backward; `fully_shard` would leave some whole, and changes of
    those are lost."""

    def reshard(_module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if not torch.is_grad_enabled():
            for unit in units:
                if not is_kept(unit):
                    cast(Any, unit).reshard()

    _ = units[-1].register_forward_hook(cast(Any, torch.compiler).disable(reshard))


def refuse_layerdrop(view: ModelView, units: Sequence[nn.Module]) -> None:
    """Refuse forwards that leave out FSDP units by chance: ranks draw different numbers, and one would gather another
    block's parameters than the others. Mutates the model, by hooks of the modules that do so in training."""
    known = {id(unit) for unit in units}

    def check(module: nn.Module, _inputs: Any) -> None:
        if module.training and (rates := [each for each in layerdrops(module) if each]):
            raise ConfigError(
                "each rank drops blocks at random, so ranks would gather the parameters of different blocks",
                expected="layerdrop=0 in training",
                got=f"{rates[0]} in {written_class(module).__name__}",
                where="forward of a model by the strategy fsdp",
                fix="Set layerdrop to 0 in the model's config before it is made, or take the strategy ddp with "
                "find_unused_parameters=True.",
            )

    for module in view.modules.values():
        lists = [each for each in module.children() if isinstance(each, nn.ModuleList)]
        divides = any(id(inner) in known for each in lists for inner in each.modules())
        if divides and any(layerdrops(module)):
            _ = module.register_forward_pre_hook(cast(Any, torch.compiler).disable(check))


def follow_first(stage: Comm, model: nn.Module) -> None:
    """Replace buffers by the first rank's of the stage, as DDP does: before the first forward of each backward and
    those without gradients, or a pipeline's batch."""
    pending = PendingForward()

    def follow(module: nn.Module, _inputs: Any = None) -> None:
        if not pending.keeps_buffers():
            follow_first_(stage, filterfalse(is_dtensor, module.buffers()))

    def note(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        pending.note(outputs)

    if hasattr(model, "before_batch"):
        # not before each forward: a micro-batch's backward may need what the next forward would replace
        cast(Any, model).before_batch = functools.partial(follow, model)
        return
    for hook, register in ((follow, model.register_forward_pre_hook), (note, model.register_forward_hook)):
        _ = register(cast(Any, torch.compiler).disable(hook))


def begin_alike(ctx: DistContext, stage: Comm, mesh: DeviceMesh, tensors: Iterable[torch.Tensor]) -> None:
    """Give the ranks of a stage its first rank's values; of a DTensor, the first's with the same local part.

    A collective of one message for each tensor, which needs no memory for a second copy.
    """
    along = [adopt(mesh.get_group(dim), ctx.device) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    for tensor in tensors:
        if is_dtensor(tensor):
            part = local_part(tensor)
            for comm in along:
                broadcast_flat(comm, part, source=0)
        else:
            broadcast_flat(stage, tensor.detach(), source=0)


_WHERE = "prepare_model, strategy fsdp"


def _is_done(ctx: DistContext, view: ModelView) -> bool:
    """Tensor parallelism over some of the ranks leaves the others to shard over, experts the dense parameters."""
    if replica_of(view.model) is not None or sharded_roots(view.model):
        return True
    return view.is_sharded and not expert_modules(view.modules) and spans_all(ctx, view.parameters)


def _options_from(plan: Plan, keywords: ReplicateOptions, _view: ModelView) -> ShardOptions:
    return ShardOptions(
        find_unused_parameters=keywords.find_unused_parameters,
        broadcast_buffers=keywords.broadcast_buffers,
        gather_dtype=plan.gather_dtype,
        reduce_dtype=plan.reduce_dtype,
        units=plan.units,
        together=plan.together,
        ignored=plan.ignored,
        reshard_after_forward=plan.reshard_after_forward,
        prefetch=plan.prefetch,
        offload=plan.offload is True,  # else of an optimizer's state
        methods=plan.methods,
    )


_QUANTIZED = quantized_divided(_WHERE, lambda asked: ignored_ids(asked.view.inner, asked.options.ignored))


def _refusals(ctx: DistContext, view: ModelView, options: ShardOptions) -> list[AccelError]:
    inner = view.inner
    checks = (
        lambda: _check_device(ctx),
        lambda: check_formats(options.gather_dtype, ctx.precision),
        lambda: check_ignored(inner, options.ignored),
        lambda: modules_named(inner, options.together, where="Plan.together"),
        lambda: _unit_names(inner, inner, options),
        lambda: check_mesh(ctx, inner, options.reshard_after_forward),
    )
    return [*refused(PrepareCall(ctx, view, options=options), [_QUANTIZED]), *raised(checks)]


def _check_device(ctx: DistContext) -> None:
    if ctx.device.type == "xla":
        raise ConfigError("fully_shard does not know XLA devices", where=_WHERE, fix="Use the strategy ddp.")
    if ctx.device.type == "cpu":
        return
    current = torch.get_device_module(ctx.device).current_device()
    if current != ctx.device.index:
        raise DeviceError(
            "fully_shard computes on the current device",
            expected=str(ctx.device),
            got=f"{ctx.device.type}:{current}",
            where=_WHERE,
            fix="Call torch.cuda.set_device(ctx.device) first.",
        )


def _spread(ctx: DistContext, outer: ModelView, options: ShardOptions, *, is_empty: bool) -> nn.Module:
    view = outer.inner
    inner = view.model
    before = view.parameters
    compare_models(ctx, options, before)
    stage = stage_comm(ctx)
    mesh = open_shard_mesh(ctx, view)
    if mesh is None:
        move_model(view, ctx.streams)
        label_parameters(view.parameters)
        return outer.model
    below = ignored_ids(view, options.ignored)
    ignored = [each for each in view.parameters.values() if id(each) in below]
    roots = [view if root is inner else ModelView(root) for root in stage_modules(inner)]
    named = [_shard(ctx, view, root, mesh, stage, options, is_empty=is_empty) for root in roots]
    units = [list(each.values()) for each in named]
    if is_empty:
        if options.offload:  # only shards: the device computes with all else where it is
            taken = {id(part.parameter) for each in units for unit in each for part in shards_of(unit)}
            allocate_empty(inner, torch.device("cpu"), taken)
        allocate_empty(inner, ctx.device)
    else:
        make_room(ignored, ctx.device)
        _move(ignored, ctx.device)
        begin_alike(ctx, stage, mesh, ignored)
    after = view.after()
    for name, each in after.parameters.items():
        if each is not before[name]:
            replace_parameter(name, before[name], each)
    # ranks know together which experts of a list nobody calls, so no gradient waits for an exchange
    label_parameters(after.parameters, needed=not options.find_unused_parameters, spared=listed_prefixes(after.modules))
    for each in units:
        note_shards(each)
    for root in roots:
        sum_in_one_format(root.modules.values())
    for each in named:
        _let_units_run(ctx, each, view)
    if options.find_unused_parameters:
        for each in units:
            sum_unused(each[-1])
            watch_used(each)
            reduce_in_one_order(each)
    if not is_empty:
        begin_alike(ctx, stage, mesh, after.buffers.values())
    if ctx.data_parallel[1] > 1:
        refuse_layerdrop(after, [unit for each in units for unit in each])
    for each, root in zip(units, roots, strict=True):
        keep_for_graphs(each)
        refuse_changes(root.after())
        begin_with_root(each)
        if not is_pipelined(inner):
            refuse_parts(root, {id(part.parameter) for part in shards_of(each[-1])}, options.methods)
        if options.prefetch is not None:
            prefetch(each, options.prefetch)
        reshard_after_evaluation(each)
        if options.broadcast_buffers and root.buffers:
            follow_first(stage, each[-1])
    return outer.model


def _let_units_run(ctx: DistContext, units: Mapping[str, nn.Module], whole: ModelView) -> None:
    """Let units be called in any of the ways that models call them, or refuse it. Mutates the units, by path and the
    model itself last. `whole`: the model that they are a stage of, or the same model."""
    note_units(ctx.comm, units)
    refuse_parts_of_units({whole.places.get(id(each), [path])[0]: each for path, each in units.items()})
    reach_outputs(units)
    inner = list(units.values())[:-1]  # the model's own has no loss of its blocks in its containers yet
    _ = fill_containers(inner)
    add_mixin(inner, CalledUnit)
    add_mixin(units.values(), EndedUnit)


def _shard_unit(
    ctx: DistContext, unit: nn.Module, along: DeviceMesh, name: str, how: dict[str, Any], *, holds_experts: bool
) -> None:
    """Shard one unit along a mesh, with torch's options; what torch refuses is a `PrepareError`."""
    from torch.distributed.fsdp import fully_shard

    try:
        if holds_experts:
            shard_experts(ctx, unit, along, **how)
        else:
            fully_shard(unit, mesh=along, **how)
    except (ValueError, AssertionError, NotImplementedError, RuntimeError) as error:
        where = f"{_WHERE}, {name or type(unit).__name__}"
        raise PrepareError("torch cannot shard this", got=str(error), where=where) from error
    gather_outside_of_inference(unit)


def _shard(
    ctx: DistContext,
    whole: ModelView,
    view: ModelView,
    mesh: DeviceMesh,
    stage: Comm,
    options: ShardOptions,
    *,
    is_empty: bool,
) -> Mapping[str, nn.Module]:
    """Shard one unit after another, so that the device needs room for one whole one at a time; return them by path."""
    # its import takes most of a second
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    own_parameters = list(view.parameters.values())
    below = ignored_ids(whole, options.ignored)
    alone = [each for each in own_parameters if is_indivisible(each) and id(each) not in below]
    ignored = {each for each in own_parameters if is_indivisible(each) or id(each) in below}
    waiting = set(map(id, own_parameters)) - set(map(id, ignored))
    experts = expert_modules(view.modules)
    same_experts = exchange_mesh(ctx) if experts else mesh
    wide = wide_parameters(view)
    names = _unit_names(view, whole, options, experts)
    plain = see_plain(view, names, below)
    # memory is pinned where it is copied to a device
    offload = CPUOffloadPolicy(pin_memory=ctx.device.type != "cpu") if options.offload else OffloadPolicy()
    owned = _owned(view, names, waiting)
    formats = {
        name: wire_format(own, wide, ctx.precision, options.gather_dtype, options.reduce_dtype)
        for name, own in owned.items()
    }
    compute_in({view.modules[name]: each.gather for name, each in formats.items()}, ctx.device.type)
    for name, own in owned.items():
        unit = view.modules[name]
        along = same_experts if name in experts else mesh
        if not is_empty:
            tensors = [*own, *(unit.buffers() if name else view.buffers.values())]
            make_room(tensors, ctx.device)
            _move(tensors, ctx.device)
            begin_alike(ctx, stage, along, own)
        # a stage stays whole between micro-batches; experts do where gradients of weights come later, as that looks for
        # the parameters that the forward has used
        stays = is_pipelined(whole.model) and (name not in experts or _splits_backward(whole.model))
        reshard = False if stays else reshard_setting(options.reshard_after_forward, along.size(along.ndim - 1))
        how: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(formats[name].gather, formats[name].reduce, cast_forward_inputs=False),
            "offload_policy": offload,
            "reshard_after_forward": reshard,
            "ignored_params": ignored or None,
        }
        _shard_unit(ctx, unit, along, name, how, holds_experts=name in experts)
        for each in own:
            if not is_dtensor(each):  # an optimizer may hold the whole one still, so its memory is freed
                each.data = each.data.new_empty(0)
    if not is_empty:
        make_room(alone, ctx.device)
        _move(alone, ctx.device)
        begin_alike(ctx, stage, mesh, alone)
    keep_whole(view, mesh, plain, below, watch=options.find_unused_parameters)
    return {name: view.modules[name] for name in names}


def _unit_names(
    root: ModelView, whole: ModelView, options: ShardOptions, experts: Sequence[str] = ()
) -> tuple[str, ...]:
    """The names of the units of a model, or of one of its stages."""
    return plan_units(
        root,
        experts,
        units=options.units if root is whole else units_in(root, whole, options.units),
        wide=wide_parameters(root),
        ignored=ignored_ids(whole, options.ignored),
        together=together_ids(whole, options.together),
    )


def _owned(view: ModelView, names: Iterable[str], waiting: set[int]) -> dict[str, list[nn.Parameter]]:
    """The parameters of each unit: of those waiting, those that no unit before it has."""
    found: dict[str, list[nn.Parameter]] = {}
    for name in names:
        below = view.modules[name].parameters() if name else view.parameters.values()
        found[name] = [each for each in below if id(each) in waiting]
        waiting = waiting - {id(each) for each in found[name]}
    return found


def _splits_backward(model: nn.Module) -> bool:
    pipeline = pipeline_of(model)
    return pipeline is not None and pipeline.layout.schedule in SPLIT_BACKWARDS


def _move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move tensors in place; not those that inner units have sharded, which may have been offloaded."""
    for each in tensors:
        if each.device != device:
            each.data = each.data.to(device)


SHARD = Spread(
    dimension="shard",
    options_from=_options_from,
    keywords=("find_unused_parameters", "broadcast_buffers"),
    is_done=_is_done,
    refusals=_refusals,
    spread=_spread,
    replaces=True,
)
