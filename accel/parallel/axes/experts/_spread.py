# SPDX-License-Identifier: Apache-2.0
"""Expert parallel: each rank along `ep` holds some of the experts, stored as DTensors; tokens are sent to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import WeakSet

import torch
from torch import nn

from accel.comm import adopt, broadcast_flat
from accel.context import DistContext
from accel.errors import AccelError, PrepareError
from accel.mixins import add_mixin
from accel.parallel._empty import values_or_room
from accel.parallel._labels import replace_parameter
from accel.parallel._modules import matching, named_modules
from accel.parallel._refused import ModelRefusal, PrepareCall, RefusedFact, raised, refused
from accel.parallel._spread import ModelView, Spread, SpreadOptions, compare_models
from accel.parallel.axes.experts._expert_plan import (
    EP,
    LISTS,
    expert_modules,
    held_experts,
    open_expert_mesh,
    resolve_experts,
    shard_dim,
)
from accel.parallel.axes.experts._layer import RUNS, SharedExperts
from accel.parallel.axes.experts._listed import ListedBlock, ListedExperts, follow_calls, run_block, run_listed
from accel.topology import Plan, dimension_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WHERE = "prepare_model, ep of ctx.mesh"


class ExpertOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of expert parallelism; see `Plan`."""

    experts: Mapping[str, str] | Literal["model"] = "model"
    divided: tuple[str, ...] = ()  # patterns of the plan's styles along tp


def _options_from(plan: Plan) -> ExpertOptions:
    divided = () if isinstance(plan.tensor, str) else tuple(plan.tensor)
    return ExpertOptions(experts=plan.experts, divided=divided)


def _is_done(ctx: DistContext, view: ModelView) -> bool:
    return ctx.axis(EP).size == 1 or bool(expert_modules(view.inner.modules))


def _separate(asked: PrepareCall) -> RefusedFact | None:
    mesh = asked.ctx.mesh
    names = () if mesh is None else mesh.mesh_dim_names or ()
    is_separate = any(dimension_of(name) == "expert" for name in names)
    return RefusedFact(f"dimensions {', '.join(names)}", _WHERE) if is_separate else None


_REFUSED = (
    ModelRefusal(
        "a mesh with a separate ep does not show which ranks hold the same experts",
        _separate,
        expected="an ep together with the axes that it takes its ranks from",
        fix='Name the mesh by a text: accel.replace(ctx, mesh="dp=4,ep=2").',
    ),
)


def _refusals(ctx: DistContext, view: ModelView, options: ExpertOptions) -> list[AccelError]:
    # by such a mesh nothing can be said of the styles
    return refused(PrepareCall(ctx, view, options=options), _REFUSED) or raised(
        [lambda: _check_styles(ctx, view, options)]
    )


def _check_styles(ctx: DistContext, view: ModelView, options: ExpertOptions) -> None:
    styles = resolve_experts(view.inner.model, options.experts, ctx.axes.ep)
    alone = [path for path, style in styles.items() if style == "local"]
    if alone and ctx.axes.tp > 1:
        raise PrepareError(
            "ranks along tp have the same tokens, and each would dispatch all of them",
            expected='the style "dispatch" with tensor parallelism',
            got=f"local for {', '.join(alone)}",
            where=_WHERE,
            fix="Leave tp out of the mesh, or let the module's forward take (tokens, indices, weights).",
        )
    paths = [path for path, _ in named_modules(view.inner.model)]
    within = tuple(f"{path}." for path in styles)
    twice = [each for each in options.divided if any(f"{at}.".startswith(within) for at in matching(paths, each))]
    if twice and ctx.axes.tp > 1:
        raise PrepareError(
            "a plan divides experts along tp, which ranks along ep hold",
            expected="styles of layers outside of the experts",
            got=", ".join(twice),
            where="prepare_model, Plan.tensor",
            fix="Leave them out of Plan.tensor: ranks along tp dispatch a part of the tokens each, and divide the rest"
            " of the model.",
        )


def _spread(ctx: DistContext, view: ModelView, options: ExpertOptions, *, is_empty: bool) -> nn.Module:
    inner = view.inner.model
    compare_models(ctx, options, view.inner.parameters)
    styles = held_experts(inner, options.experts)
    mesh = open_expert_mesh(ctx)[EP]
    for path in styles:
        held = inner.get_submodule(path)
        for below, module in named_modules(held):
            at = ".".join(each for each in (path, below) if each)
            for name, parameter in list(module.named_parameters(recurse=False)):
                dim = (shard_dim(parameter, mesh.size()) or 0) if below else 0  # of stacked experts always the first
                part = _own_part(ctx, parameter, mesh, dim, is_empty=is_empty)
                setattr(module, name, part)
                replace_parameter(f"{at}.{name}" if at else name, parameter, part)
    _add_forwards(ctx, inner, styles)
    return view.model


def _add_forwards(ctx: DistContext, model: nn.Module, styles: Mapping[str, str]) -> None:
    """Let the modules of experts see this rank's parts, hidden from torch.compile, which cannot trace the exchange."""
    hide = cast(Any, torch.compiler).disable
    lists = [path for path in styles if isinstance(model.get_submodule(path), LISTS)]
    alike = ctx.mesh["tp"] if ctx.mesh is not None and ctx.axes.tp > 1 else None
    named = {path: style for path, style in styles.items() if path not in lists}
    for style, run in RUNS.items():
        called = [model.get_submodule(path) for path, own in named.items() if own == style]
        add_mixin(
            called,
            SharedExperts,
            accel_run=staticmethod(hide(run)),
            accel_style=style,
            accel_alike=alike,
            accel_proved=WeakSet[nn.Module](),
        )
    listed = [model.get_submodule(path) for path in lists]
    mesh = open_expert_mesh(ctx)
    add_mixin(listed, ListedExperts, accel_run=staticmethod(hide(run_listed)), accel_alike=alike, accel_mesh=mesh)
    for path, each in zip(lists, listed, strict=True):
        above, _, name = path.rpartition(".")
        follow_calls(model.get_submodule(above), each, name, path)
    blocks = {path.rpartition(".")[0] for path in lists}
    add_mixin(map(model.get_submodule, sorted(blocks)), ListedBlock, accel_run_block=staticmethod(hide(run_block)))


def _own_part(ctx: DistContext, parameter: nn.Parameter, mesh: DeviceMesh, dim: int, *, is_empty: bool) -> nn.Parameter:
    """Return this rank's part of a parameter, with the values of the first rank along `ep`; if it has none, sharding
    sends rank 0's."""
    from torch.distributed.tensor import DTensor, Shard

    whole = parameter.detach()
    if not is_empty:
        whole = values_or_room(whole, ctx.device)
        broadcast_flat(adopt(mesh.get_group(), ctx.device), whole, source=0)
    part = whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
    shape = whole.shape
    stride = whole.stride()
    spread = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
    if not parameter.is_meta:
        parameter.data = parameter.data.new_empty(0)  # an optimizer may hold it still
    return nn.Parameter(spread, requires_grad=parameter.requires_grad)


EXPERT = Spread(
    dimension="expert",
    options_from=lambda plan, _keywords, _view: _options_from(plan),
    is_done=_is_done,
    refusals=_refusals,
    spread=_spread,
    replaces=True,
)
