# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel: ranks along tp share each layer's parameters and products, by a plan resolved for each module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from torch import nn

from accel.comm import Comm, broadcast_flat, mesh_of_dims
from accel.context import DistContext
from accel.errors import ConfigError, PrepareError
from accel.errors._checks import did_you_mean, with_article
from accel.mixins import Mixin
from accel.parallel._compile import add_within
from accel.parallel._empty import values_or_room
from accel.parallel._labels import heir_of, label_parameters, replace_parameter
from accel.parallel._modules import matching, named_modules, unwrap_model
from accel.parallel._refused import check_quantized
from accel.parallel._spread import Spread, SpreadOptions, compare_models, stage_comm
from accel.parallel.axes.tensor._dropout import drop_apart
from accel.parallel.axes.tensor._layers import Attention, Layer, mixin_for
from accel.parallel.axes.tensor._pairs import guard_pairs
from accel.parallel.axes.tensor._styles import (
    COLWISE,
    COPYING,
    STYLES,
    Rule,
    is_adapted,
    is_linear,
    is_transposed,
    output_dim,
    problems_of,
    rule_for,
    uneven_heads,
    with_lora,
)
from accel.parallel.axes.tensor._tensor_plan import found_pairs, patterns_of, tensor_plan
from accel.tensors import is_dtensor, mesh_of
from accel.topology import TensorStyle, dimension_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_WHERE = "prepare_model, plan.tensor"
_FAST_PATHS: Mapping[type[nn.Module], Mapping[str, int]] = {
    # torch's fused inference reads the parameters of modules that it never calls
    nn.TransformerEncoderLayer: {"activation_relu_or_gelu": 0},
    nn.TransformerEncoder: {"use_nested_tensor": 0},
}


def rules_of(
    model: nn.Module, plan: Mapping[str, TensorStyle], size: int, *, is_stage: bool = False
) -> dict[str, Rule]:
    """Return the rule of each module that has parameters or that the plan names, by path.

    Raises `PrepareError` with all problems. `is_stage`: modules without parameters are other stages', without a rule.
    """
    styles, problems = match(plan, [path for path, _ in named_modules(model)])
    if is_stage:
        full = (path for path in styles if any(True for _ in model.get_submodule(path).parameters()))
        styles = {path: styles[path] for path in full}
    styles = with_lora(model, {**_attention_outputs(model, styles), **styles}, problems)
    known = {path: cast(TensorStyle, style) for path, style in styles.items() if style in STYLES}
    complete = {**{path: "replicated" for path, module in named_modules(model) if _holds(module)}, **known}
    rules: dict[str, Rule] = {}
    attributes: dict[str, dict[str, int]] = {}
    for path, style in cast("dict[str, TensorStyle]", complete).items():
        module = model.get_submodule(path)
        found = list(problems_of(module, style, size))
        heads, local, wrong = _heads(model, path, style, size)
        problems += [f"{path or 'the model'}: {each}" for each in (*found, *wrong)]
        if not found and not wrong:
            rules[path] = rule_for(module, style, size, copied=_is_copied(path, known), heads=heads)
            for holder, values in local.items():
                attributes.setdefault(holder, {}).update(values)
    problems += _tied_problems(model, rules)
    if problems:
        raise _refused(problems, size)
    return _with_attributes(model, rules, attributes)


def match(plan: Mapping[str, str], paths: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return styles by path, and the problems of patterns, where `*` is one component of a path."""
    listed = list(paths)
    found: dict[str, str] = {}
    by: dict[str, str] = {}
    problems: list[str] = []
    for pattern, style in plan.items():
        if style not in STYLES:
            hint = did_you_mean(str(style), STYLES) or f"Styles are {', '.join(STYLES)}."
            problems.append(f"{pattern}: unknown style {style!r}. {hint}".rstrip("."))
        hits = matching(listed, pattern)
        if not hits:
            problems.append(f"{pattern}: matches no module")
        for path in hits:
            if path in found:
                problems.append(f"{path}: both {by[path]!r} and {pattern!r} match it")
            found[path], by[path] = style, pattern
    return found, problems


def _holds(module: nn.Module) -> bool:
    """Whether a module has parameters that nothing has spread, as expert parallelism spreads those of experts."""
    return any(not is_dtensor(each) for each in module.parameters(recurse=False))


def _attention_outputs(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """The projection that ends an nn.MultiheadAttention, which nobody needs to name."""
    paths = [path for path, style in styles.items() if style == "multihead_attention"]
    named = {path: model.get_submodule(path) for path in paths}
    return {f"{path}.out_proj": "rowwise" for path, each in named.items() if isinstance(each, nn.MultiheadAttention)}


def _is_copied(path: str, styles: Mapping[str, str]) -> bool:
    """Whether the nearest module around it that the plan names sums the gradients of its input."""
    while path:
        path = path.rpartition(".")[0]
        if path in styles:
            return styles[path] in COPYING
    return False


def _heads(model: nn.Module, path: str, style: str, size: int) -> tuple[int, dict[str, dict[str, int]], list[str]]:
    """Numbers of heads in a projection's outputs, attributes of the attention around it, and problems of both."""
    module = model.get_submodule(path)
    holder = _holder(model, path)
    around = model.get_submodule(holder)
    if is_transposed(module) and style in COLWISE:
        local = {path: {"nf": cast(int, module.nf) // size}}
        if style.startswith("packed") and type(getattr(around, "split_size", None)) is int:
            local[holder] = {"split_size": cast(int, around.split_size) // size}
        return 0, local, []
    width: Any = getattr(around, "head_dim", None) or getattr(around, "attention_head_size", None)
    if style != "colwise" or type(width) is not int or not is_linear(module):
        return 0, {}, []
    outputs = module.get_parameter("weight").shape[output_dim(module)]
    heads = outputs // width
    if outputs % width or not heads or heads % size == 0:
        return 0, {}, []
    groups: Any = getattr(around, "num_key_value_groups", None)
    if size % heads == 0 and outputs % size == 0 and type(groups) is int and heads * groups % size == 0:
        # a rank has heads * groups / size queries for one head of keys
        return heads, {holder: {"num_key_value_groups": heads * groups // size}}, []
    return 0, {}, [uneven_heads(heads, size)]


def _holder(model: nn.Module, path: str) -> str:
    """The path of the module that calls a layer, or calls what adapts it."""
    holder = path.rpartition(".")[0]
    while holder and (
        is_adapted(model.get_submodule(holder)) or isinstance(model.get_submodule(holder), nn.ModuleDict)
    ):
        holder = holder.rpartition(".")[0]
    return holder


def _tied_problems(model: nn.Module, rules: Mapping[str, Rule]) -> list[str]:
    """Parameters that two modules share must be divided alike."""
    seen: dict[int, tuple[str, int | None]] = {}
    found: list[str] = []
    for path, rule in rules.items():
        for name, parameter in model.get_submodule(path).named_parameters(recurse=False):
            own = f"{path}.{name}" if path else name
            dim = rule.dims.get(name)
            first, other = seen.setdefault(id(parameter), (own, dim))
            if other != dim:
                found.append(f"{own}: tied to {first}, and {_split(dim)} beside {_split(other)}")
    return found


def _split(dim: int | None) -> str:
    return "whole" if dim is None else f"split along dimension {dim}"


def _with_attributes(
    model: nn.Module, rules: Mapping[str, Rule], attributes: Mapping[str, Mapping[str, int]]
) -> dict[str, Rule]:
    found = {path: dict(values) for path, values in attributes.items()}
    styled = [path for path, rule in rules.items() if rule.style != "replicated"]
    for path, module in named_modules(model):
        for kind, values in _FAST_PATHS.items():
            if isinstance(module, kind) and any(each.startswith(f"{path}." if path else "") for each in styled):
                found.setdefault(path, {}).update(values)
    bare = {path: rules.get(path) or Rule(style="replicated") for path in (*rules, *found)}
    return {path: msgspec.structs.replace(rule, attributes=found.get(path, {})) for path, rule in bare.items()}


def _refused(problems: list[str], size: int) -> PrepareError:
    listed = list(dict.fromkeys(problems))
    shown = "; ".join(listed[:20]) + (f"; and {len(listed) - 20} more" if len(listed) > 20 else "")
    return PrepareError(
        "the model cannot be spread by this tensor-parallel plan",
        expected=f"styles of its modules that {size} ranks along tp can share",
        got=shown,
        where=_WHERE,
        fix="Print accel.parallel.tensor_plan(model), change it, and pass it as accel.parallel.Plan(tensor=...).",
    )


class TensorOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of tensor parallelism."""

    tensor: Mapping[str, TensorStyle] | str = "model"
    sequence: bool = False

    def check(self) -> None:
        """Raise `ConfigError` for a plan of one's own beside `sequence`."""
        if self.sequence and self.tensor != "model":
            raise ConfigError(
                "sequence has no effect beside styles of one's own",
                expected='tensor="model"',
                got="a mapping",
                where="plan.sequence",
                fix="Take the styles of accel.parallel.tensor_plan(model, sequence=True), and leave sequence out.",
            )


def _is_done(_ctx: DistContext, model: nn.Module) -> bool:
    """A model that its user has spread along tp in part stays unchanged."""
    parameters = list(unwrap_model(model).parameters())
    meshes = {id(mesh): mesh for each in parameters if (mesh := mesh_of(each)) is not None}
    names = {name for mesh in meshes.values() for name in mesh.mesh_dim_names or ("tp",)}
    return not parameters or any(dimension_of(name) == "tensor" for name in names)


def _check(ctx: DistContext, model: nn.Module, options: TensorOptions) -> None:
    inner = unwrap_model(model)
    check_quantized(inner, _WHERE)
    _ = rules_of(inner, _styles(inner, options), _size(ctx))
    for name, parameter in inner.named_parameters():
        if heir_of(parameter) is not None:
            raise PrepareError(
                "another model shares a parameter, and has been spread with it",
                got=name,
                where=_WHERE,
                fix="Prepare both as one module.",
            )


def _spread(ctx: DistContext, model: nn.Module, options: TensorOptions, *, is_empty: bool) -> nn.Module:
    inner = unwrap_model(model)
    is_stage = ctx.axis("pp").size > 1
    styles = _styles(inner, options)
    rules = rules_of(inner, styles, _size(ctx), is_stage=is_stage)
    pairs = [] if isinstance(options.tensor, Mapping) else found_pairs(inner)
    compare_models(ctx, options, dict(inner.named_parameters()))
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
    _install(inner, rules, mesh)
    drop_apart(inner, rules, mesh.get_local_rank(), ctx.device)
    guard_pairs(inner, pairs, patterns_of(pairs, styles))
    for module in inner.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if is_empty and buffer.is_meta:
                continue
            values = buffer.detach().to(ctx.device) if is_empty else _first_values(ctx, stage, buffer)
            if values.device != buffer.device:
                setattr(module, name, values)
    label_parameters(inner)
    return model


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


def _install(model: nn.Module, rules: Mapping[str, Rule], mesh: DeviceMesh) -> None:
    """Let modules compute by their rules; those of one class stay of one class, for torch.compile to compile once."""
    modules: dict[type[Mixin], list[nn.Module]] = {}
    for path, rule in rules.items():
        module = model.get_submodule(path)
        for name, value in rule.attributes.items():
            setattr(module, name, value)
        cast(Any, module).accel_layer = Layer(rule, mesh)
        modules.setdefault(mixin_for(rule) or Attention, []).append(module)
    for mixin, own in modules.items():
        add_within(own, mixin)


def _styles(model: nn.Module, options: TensorOptions) -> Mapping[str, TensorStyle]:
    if isinstance(options.tensor, Mapping):
        return options.tensor
    styles = tensor_plan(model, sequence=options.sequence)
    if not styles:
        raise PrepareError(
            "no tensor-parallel plan is known for the model, and ranks along tp would all compute the same",
            expected="a model of transformers with a tp_plan, GPT-2, or torch's own attention and Sequential layers",
            got=with_article(type(model).__name__),
            where=_WHERE,
            fix='Say how: plan=accel.parallel.Plan(tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}); '
            "or tensor={} to keep it whole on each of them.",
        )
    return styles


def _size(ctx: DistContext) -> int:
    return ctx.axis("tp").size


def _mesh(ctx: DistContext) -> DeviceMesh:
    mesh = ctx.mesh
    assert mesh is not None  # an axis of more than one rank is that of a mesh
    dims = [at for at, name in enumerate(mesh.mesh_dim_names or ()) if dimension_of(name) == "tensor"]
    return mesh_of_dims(mesh, dims)


TENSOR = Spread(
    dimension="tensor", options=TensorOptions, is_done=_is_done, check=_check, spread=_spread, replaces=True
)
