# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel: ranks along tp split each layer's parameters and matmuls, by a plan resolved for each module."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import torch
from torch import nn

from accel.comm import (
    Call,
    Comm,
    broadcast_flat,
    broadcast_value,
    call_site,
    mesh_of_dims,
    shared_failure,
)
from accel.context import DistContext
from accel.errors import AccelError, ConfigError, PrepareError
from accel.errors._checks import with_article
from accel.formats import Compile
from accel.parallel._empty import values_or_room
from accel.parallel._labels import heir_of, label_parameters, replace_parameter
from accel.parallel._modules import example_of, is_pipelined, named_modules, stage_modules
from accel.parallel._private import is_compiled
from accel.parallel._refused import ModelRefusal, PrepareCall, RefusedFact, quantized_divided, raised, refused
from accel.parallel._spread import ModelView, ReplicateOptions, Spread, SpreadOptions, compare_models, stage_comm
from accel.parallel._watches import refuse_changes
from accel.parallel.axes.tensor._layers import Layer
from accel.parallel.axes.tensor._overlap import with_overlap
from accel.parallel.axes.tensor._rules import WHERE, install, lines_of, log_share, rules_of
from accel.parallel.axes.tensor._styles import Rule, problems_of
from accel.parallel.axes.tensor._tensor_plan import (
    collapsed,
    declared_plan,
    declares,
    finds,
    found_beside,
    found_for,
    left_whole,
    tensor_plan,
    with_head,
)
from accel.parallel.logits._vocabulary import gathered_note, set_own_loss
from accel.parallel.parts import RowLayout
from accel.parallel.parts._attention import use_own_heads
from accel.tensors import is_dtensor, mesh_of
from accel.topology import HeadStyle, Plan, TensorStyle, dimension_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TensorOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of tensor parallelism."""

    tensor: Mapping[str, TensorStyle] | str = "model"
    head: HeadStyle | None = None
    sequence: bool = False
    overlap: bool = False
    example: Any = None
    regions: Mapping[str, Mapping[str, RowLayout]] = {}  # found, also for what a declared plan passes over
    is_found: bool = False  # whether `tensor` has styles that were found, and logged

    def describe(self) -> str:
        """Return the options without what follows from them, and without the example."""
        return repr(msgspec.structs.replace(self, example=None, regions={}))

    def check(self) -> None:
        """Raise `ConfigError` for a user's plan together with `head`."""
        if self.head is not None and self.tensor != "model":
            raise ConfigError(
                "head has no effect with your own styles",
                expected='tensor="model"',
                got="a mapping",
                where="plan.head",
                fix="Use the styles of accel.parallel.tensor_plan(model, head=...), and leave head out.",
            )


def _is_done(_ctx: DistContext, view: ModelView) -> bool:
    """A model that its user has spread along tp in part stays unchanged."""
    parameters = list(view.inner.parameters.values())
    meshes = {id(mesh): mesh for each in parameters if (mesh := mesh_of(each)) is not None}
    names = {name for mesh in meshes.values() for name in mesh.mesh_dim_names or ("tp",)}
    return not parameters or any(dimension_of(name) == "tensor" for name in names)


def _options_from(plan: Plan, _keywords: ReplicateOptions, view: ModelView) -> TensorOptions:
    return TensorOptions(
        tensor=plan.tensor, head=plan.head, sequence=plan.sequence, overlap=plan.overlap, example=view.example
    )


def _shared(asked: PrepareCall) -> RefusedFact | None:
    names = [name for name, each in asked.view.inner.parameters.items() if heir_of(each) is not None]
    return RefusedFact(", ".join(names), WHERE) if names else None


def _compiled(ctx: DistContext, model: nn.Module) -> list[str]:
    """Regions that torch compiles, and the setting by which it does."""
    compiled = [path or "the model" for path, each in named_modules(model) if is_compiled(each)]
    return [*compiled, "--compile"] if isinstance(ctx.settings.compile, Compile) else compiled


def _overlaps(asked: PrepareCall) -> RefusedFact | None:
    """Regions or a device on which messages cannot overlap with matmuls."""
    if not asked.options.overlap:
        return None
    compiled = _compiled(asked.ctx, asked.view.inner.model)
    if not compiled and asked.ctx.device.type != "xla":
        return None
    return RefusedFact(", ".join(compiled) or str(asked.ctx.device), "prepare_model, plan.overlap")


_REFUSED = (
    quantized_divided(WHERE),
    ModelRefusal(
        "only eager layers can overlap messages and matmuls",
        _overlaps,
        expected="no region that torch compiles, and no device of XLA",
        fix="Leave overlap out: plan=accel.parallel.Plan(overlap=False).",
        error=ConfigError,
    ),
    ModelRefusal(
        "another model shares a parameter, and has been spread with it",
        _shared,
        fix="Prepare both as one module.",
    ),
)


def _refusals(ctx: DistContext, view: ModelView, options: TensorOptions) -> list[AccelError]:
    inner = view.inner.model

    def check() -> None:
        if not _is_found(inner, options):  # what is found has been proved
            _ = _rules(ctx, inner, _styles(inner, options, _size(ctx)), options)

    return [*refused(PrepareCall(ctx, view, options=options), _REFUSED), *raised([check])]


def _is_found(model: nn.Module, options: TensorOptions) -> bool:
    if options.tensor != "model":
        return False
    return finds(model) or (options.example is not None and not declares(model))


def _resolve(ctx: DistContext, view: ModelView, options: TensorOptions) -> TensorOptions:
    """Replace "model" by the styles that rank 0 finds and proves, or add them to the styles that the model declares. A
    collective if the model declares none, or passes over attention."""
    inner = view.inner.model
    is_found = _is_found(inner, options)
    if not is_found and not _has_more(inner, options):
        if ctx.rank == 0 and options.tensor == "model":
            rules = rules_of(inner, _styles(inner, options, _size(ctx)), _size(ctx))
            log_share(inner, rules, _size(ctx), "the plan that it declares or its known layers", {})
        return options
    call = Call("prepare_model", "styles of tensor parallelism", call_site())
    plan = _SentPlan({}, {})
    with shared_failure(ctx.comm, call):
        if ctx.rank == 0:
            with ctx.comm.standing_alone():
                plan = _found(ctx, inner, options) if is_found else _found_beside(inner, _size(ctx), options)
    plan = broadcast_value(ctx.comm, call, plan, _SentPlan)
    if not is_found:
        return msgspec.structs.replace(options, regions=plan.regions, example=None)
    styles = plan.styles if options.head is None else with_head(inner, plan.styles, options.head)
    return msgspec.structs.replace(
        options,
        tensor=styles,
        regions=plan.regions,
        is_found=True,
        example=None,
    )


class _SentPlan(NamedTuple):
    """Styles by pattern and layouts of parameters, as rank 0 sends them."""

    styles: dict[str, TensorStyle]
    regions: dict[str, dict[str, RowLayout]]


def _has_more(model: nn.Module, options: TensorOptions) -> bool:
    """Whether styles may be found in addition to the styles that a model declares."""
    if options.tensor != "model" or not left_whole(model):
        return False
    return options.example is not None or example_of(model) is not None


def _inputs(options: TensorOptions) -> Any:
    return [options.example] if isinstance(options.example, torch.Tensor) else options.example


def _found(ctx: DistContext, model: nn.Module, options: TensorOptions) -> _SentPlan:
    inputs = None if finds(model) else _inputs(options)
    size = _size(ctx)
    plan = found_for(
        model,
        size,
        inputs,
        shares_tokens=options.sequence,
        divides_head=options.head is not None,
    )
    styles = collapsed(model, plan.styles)
    if not plan.is_seen:
        styles = tensor_plan(model)
    if not styles and not plan.regions:
        got = "; ".join([with_article(type(model).__name__), *lines_of(plan.left)[:5]])
        raise _unknown(model, size, got, _REFUTED if plan.left.keys() - {""} else _NOT_FOUND)
    way = "a plan that is found and proved" if plan.is_seen else "the styles of its known layers"
    if options.sequence and plan.is_seen:
        way += ", with shared tokens" + (f" (gathered for {', '.join(plan.gathers)})" if plan.gathers else "")
    log_share(model, rules_of(model, styles, size, regions=plan.regions), size, way, plan.left)
    return _SentPlan(styles, {path: {**layouts} for path, layouts in plan.regions.items()})


def _found_beside(model: nn.Module, size: int, options: TensorOptions) -> _SentPlan:
    plan = found_beside(model, size, _inputs(options))
    styles = declared_plan(model, head=options.head)
    way = "the plan that it declares" + (", and one in addition that is found and proved" if plan.regions else "")
    log_share(model, rules_of(model, styles, size, regions=plan.regions), size, way, plan.left)
    return _SentPlan({}, {path: {**layouts} for path, layouts in plan.regions.items()})


def _spread(ctx: DistContext, view: ModelView, options: TensorOptions, *, is_empty: bool) -> nn.Module:
    inner = view.inner.model
    styles = _styles(inner, options, _size(ctx))
    rules = _rules(ctx, inner, styles, options, is_stage=ctx.axis("pp").size > 1)
    compare_models(ctx, options, view.inner.parameters)
    if ctx.rank == 0 and styles is options.tensor and styles and not options.is_found:
        log_share(inner, rules, _size(ctx), "styles of your own", {})
    mesh = _mesh(ctx)
    stage = stage_comm(ctx)
    made: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for path, rule in rules.items():
        module = inner.get_submodule(path)
        for name, whole in list(module.named_parameters(recurse=False)):
            if is_dtensor(whole):  # of experts
                continue
            if id(whole) not in made:
                values = whole.detach() if is_empty else _first_values(ctx, stage, whole)
                made[id(whole)] = _divided(mesh, whole, values, rule.dims.get(name))
                replace_parameter(f"{path}.{name}" if path else name, whole, made[id(whole)])
            module.register_parameter(name, made[id(whole)])
    nests = ctx.axis("cp").size > 1
    ranks = install(inner, rules, lambda rule: Layer(rule, mesh), nests=nests)
    for root in _stage_views(inner):
        own = {path: rule for path, rule in rules.items() if _is_copied(root, inner, path)}
        _ = install(root, own, lambda rule: Layer(rule, mesh), ranks)
    use_own_heads(inner)
    for module in view.inner.modules.values():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if is_empty and buffer.is_meta:
                continue
            values = buffer.detach().to(ctx.device) if is_empty else _first_values(ctx, stage, buffer)
            if values.device != buffer.device:
                setattr(module, name, values)
    after = view.after()
    label_parameters(after.inner.parameters)
    for root in _stage_views(inner) or [after.inner.model]:
        refuse_changes(ModelView(root))
    if options.head == "colwise":
        for root in (inner, *_stage_views(inner)):
            set_own_loss(ctx, root)
    elif ctx.rank == 0 and (note := _note(inner, rules, _size(ctx))):
        logging.getLogger("accel.parallel").warning(note)
    return view.model


def _stage_views(model: nn.Module) -> list[nn.Module]:
    """The views of this rank's stages, which share most modules with a pipelined model."""
    return [cast(Any, stage).module for stage in stage_modules(model)] if is_pipelined(model) else []


def _is_copied(view: nn.Module, model: nn.Module, path: str) -> bool:
    """Whether a view has a copy of a module, as some parameters below it are of other stages."""
    return view.get_submodule(path) is not model.get_submodule(path)


def _note(model: nn.Module, rules: Mapping[str, Rule], size: int) -> str:
    """The line about a head that gathers many logits; "" for none."""
    gathered = [path for path, rule in rules.items() if rule.style == "colwise_gather_output"]
    weights = [model.get_submodule(path).get_parameter("weight") for path in gathered]
    words = max(weights, key=lambda each: each.shape[0], default=None)
    return "" if words is None else gathered_note(words.shape[0], words.itemsize, size)


def _first_values(ctx: DistContext, stage: Comm, tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that a stage's first rank has of a tensor. A collective."""
    values = values_or_room(tensor, ctx.device).contiguous()
    broadcast_flat(stage, values, source=0)
    return values


def _divided(mesh: DeviceMesh, whole: nn.Parameter, values: torch.Tensor, dim: int | None) -> nn.Parameter:
    """Make the DTensor of a parameter from its values, or from nothing on the meta device. Frees the whole's memory."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placement = Replicate() if dim is None else Shard(dim)
    part = values if dim is None else values.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
    stored = DTensor.from_local(
        part.contiguous(), mesh, [placement], run_check=False, shape=values.shape, stride=values.stride()
    )
    if part is not values and not whole.is_meta:
        whole.data = values.new_empty(0)
    return nn.Parameter(stored, whole.requires_grad)


def _styles(model: nn.Module, options: TensorOptions, size: int) -> Mapping[str, TensorStyle]:
    if isinstance(options.tensor, Mapping):
        return options.tensor
    styles = declared_plan(model, head=options.head)
    if not styles:
        raise _unknown(model, size, with_article(type(model).__name__), _UNKNOWN)
    return styles


def _rules(
    ctx: DistContext,
    model: nn.Module,
    styles: Mapping[str, TensorStyle],
    options: TensorOptions,
    *,
    is_stage: bool = False,
) -> dict[str, Rule]:
    rules = rules_of(
        model,
        styles,
        _size(ctx),
        regions=options.regions,
        shares_tokens=options.sequence,
        is_stage=is_stage,
        skips_experts=options.is_found or options.tensor == "model",
    )
    return with_overlap(model, rules) if options.overlap else rules


_WHOLE = "or tensor={} to keep it whole on each of them."
_UNKNOWN = f"Let accel.prepare(ctx, model, optimizer, example=batch) find it; name layers to divide; {_WHOLE}"
_NOT_FOUND = f"Name layers to divide; {_WHOLE}"
_REFUTED = (
    "Plans of these modules were tried, and ranks would compute something else. Keep the model whole on each of them: "
    "plan=accel.parallel.Plan(tensor={}); or name layers elsewhere that may be divided: tensor={path: style}."
)


def _unknown(model: nn.Module, size: int, got: str, fix: str) -> PrepareError:
    known = "a model of transformers, or torch's own attention and Sequential layers"
    return PrepareError(
        "no tensor-parallel plan is known for the model, and ranks along tp would all compute the same",
        expected=known if fix is _UNKNOWN else "attention or pairs of linear layers, proved in a forward of the model",
        got=got,
        where=WHERE,
        fix=fix if fix is _REFUTED else fix + _line_for(model, size),
    )


def _line_for(model: nn.Module, size: int) -> str:
    """The line that divides the largest linear layer of a model; "" where none can be divided."""
    style: TensorStyle = "colwise_gather_output"  # right behind any layer and before any
    widths = {
        path: each.weight.numel()
        for path, each in named_modules(model)
        if path and type(each) is nn.Linear and not any(problems_of(each, style, size))
    }
    if not widths:
        return ""
    return f' One layer: plan=accel.parallel.Plan(tensor={{"{max(widths, key=widths.__getitem__)}": "{style}"}}).'


def _size(ctx: DistContext) -> int:
    return ctx.axis("tp").size


def _mesh(ctx: DistContext) -> DeviceMesh:
    mesh = ctx.mesh
    assert mesh is not None  # an axis of more than one rank belongs to a mesh
    dims = [at for at, name in enumerate(mesh.mesh_dim_names or ()) if dimension_of(name) == "tensor"]
    return mesh_of_dims(mesh, dims)


TENSOR = Spread(
    dimension="tensor",
    options_from=_options_from,
    is_done=_is_done,
    refusals=_refusals,
    spread=_spread,
    resolve=_resolve,
    replaces=True,
)
