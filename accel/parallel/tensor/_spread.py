# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel: ranks along tp share each layer's parameters and products, by a plan of styles.

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198, for the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from accel.comm import Comm, broadcast_flat, mesh_of_dims
from accel.context import DistContext
from accel.errors import ConfigError, PrepareError
from accel.mixins import add_mixin
from accel.parallel._empty import values_or_room
from accel.parallel._labels import heir_of, label_parameters, replace_parameter
from accel.parallel._quantized import check_quantized
from accel.parallel._replicas import stage_comm
from accel.parallel._spread import Spread, SpreadOptions, compare_models
from accel.parallel._unwrap import unwrap_model
from accel.parallel.tensor._attention import Attention
from accel.parallel.tensor._dropout import drop_apart
from accel.parallel.tensor._layers import Layer, mixin_for
from accel.parallel.tensor._plan import tensor_plan
from accel.parallel.tensor._resolve import rules_of
from accel.parallel.tensor._styles import Rule
from accel.tensors import is_dtensor, mesh_of
from accel.topology import TensorStyle, dimension_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WHERE = "prepare_model, plan.tensor"


class TensorOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of tensor parallelism."""

    tensor: Mapping[str, TensorStyle] | str = "model"
    sequence: bool = False

    def check(self) -> None:
        """Raise `ConfigError` for a plan that is none, or one of one's own beside `sequence`."""
        if not isinstance(self.tensor, Mapping) and self.tensor != "model":
            raise ConfigError(
                "not a tensor-parallel plan",
                expected='styles by pattern, or "model"',
                got=repr(self.tensor),
                where="plan.tensor",
            )
        if self.sequence and self.tensor != "model":
            raise ConfigError(
                "sequence has no effect beside styles of one's own",
                expected='tensor="model"',
                got="a mapping",
                where="plan.sequence",
                fix="Take the styles of accel.tensor_plan(model, sequence=True), and leave sequence out.",
            )


def _is_done(_ctx: DistContext, model: nn.Module) -> bool:
    """A model that somebody has spread along tp in part stays as it is."""
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
    rules = rules_of(inner, _styles(inner, options), _size(ctx), is_stage=is_stage)
    compare_models(ctx, options, dict(inner.named_parameters()))
    mesh = _mesh(ctx)
    stage = stage_comm(ctx)
    made: dict[int, nn.Parameter] = {}  # what is tied stays tied
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
        _install(module, rule, mesh)
    drop_apart(inner, rules, mesh.get_local_rank(), ctx.device)
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


def _install(module: nn.Module, rule: Rule, mesh: DeviceMesh) -> None:
    for name, value in rule.attributes.items():
        setattr(module, name, value)
    cast(Any, module).accel_layer = Layer(rule, mesh)
    add_mixin([module], mixin_for(rule) or Attention)


def _styles(model: nn.Module, options: TensorOptions) -> Mapping[str, TensorStyle]:
    if isinstance(options.tensor, Mapping):
        return options.tensor
    styles = tensor_plan(model, sequence=options.sequence)
    if not styles:
        raise PrepareError(
            "no tensor-parallel plan is known for the model, and ranks along tp would all compute the same",
            expected="a model of transformers with a tp_plan, GPT-2, or torch's own attention and Sequential layers",
            got=f"a {type(model).__name__}",
            where=_WHERE,
            fix='Say how: plan=accel.Plan(tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}); or tensor={}'
            " to keep it whole on each of them.",
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
