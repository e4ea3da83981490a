# SPDX-License-Identifier: Apache-2.0
"""Models that torch's `fully_shard` or tensor parallelism has spread already: adopted, never wrapped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import hooks

from accel.comm import ranks_around, ranks_of_group
from accel.context import DistContext
from accel.errors import PrepareError
from accel.parallel._labels import name_of, term_of_parameters
from accel.parallel._modules import is_unit, note_tensor, sharded_roots, tensor_notes
from accel.parallel._private import mixes_dtensors
from accel.parallel._torch_fsdp import is_kept, shards_of
from accel.tensors import is_dtensor, mesh_of
from accel.topology import Dimension, dimension_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Ranks along these hold different parameters, so gradients of one parameter never cross them.
MODEL_DIMENSIONS: tuple[Dimension, ...] = ("pipeline", "tensor")
_MOST_LISTED = 8


def is_sharded(model: nn.Module) -> bool:
    """Return whether somebody has spread the model's parameters over ranks."""
    return any(map(is_dtensor, model.parameters())) or bool(sharded_roots(model))


def load_plain(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the `load_state_dict` of a module with DTensors; raise `PrepareError` if it is given plain tensors."""
    try:
        return load(*args, **kwargs)
    except RuntimeError as error:
        if not mixes_dtensors(error):
            raise
        raise PrepareError(
            "the module holds parts of its parameters, and the state dict has plain tensors",
            expected="a state dict that is loaded before prepare, or a file",
            got="load_state_dict of plain tensors",
            where="load_state_dict",
            fix="Call load_state_dict before accel.prepare. From files, each rank loads its parts by "
            "accel.bigmodel.load_checkpoint_in_model(ctx, model, path).",
        ) from error


def note_shards(units: Iterable[nn.Module]) -> None:
    """Note the parameters of modules that `fully_shard` was called on: torch writes their gradients past hooks. A
    backward that reaches one itself raises `StepError`. Mutates the parameters."""
    for unit in units:
        for part in shards_of(unit):
            parameter = part.parameter
            if "sharded" in tensor_notes(parameter):
                continue
            is_differentiable = parameter.is_floating_point() or parameter.is_complex()
            if is_differentiable:
                is_trained = parameter.requires_grad
                refuse = partial(_refuse_direct, name_of(parameter))
                # a hook is of a tensor that requires a gradient, and a frozen one may be trained later
                _ = cast(Any, parameter.requires_grad_()).register_hook(cast(Any, hooks).unserializable_hook(refuse))
                _ = parameter.requires_grad_(is_trained)
            note_tensor(parameter, sharded=int(is_differentiable))


def _refuse_direct(name: str, _grad: torch.Tensor) -> None:
    """Refuse the gradient of a loss that computes with shards: ranks would not weigh it by their units."""
    raise term_of_parameters(f"a term of {name or 'a parameter'}")


def spans_all(ctx: DistContext, named: Mapping[str, nn.Parameter]) -> bool:
    """Return whether gradients of a model without modules of `fully_shard` are exchanged between all ranks, but for
    other pipeline stages and tensor-parallel parts."""
    return _left_out(ctx, named) is None


def check_sharded(ctx: DistContext, model: nn.Module) -> None:
    """Reshard parameters left gathered by an evaluation forward; refuse ranks that do not exchange their gradients.

    A mesh that leaves ranks out, and a trainable parameter that `fully_shard` did not take, are a `PrepareError`.
    """
    with_fsdp = bool(sharded_roots(model))
    if _left_out(ctx, dict(model.named_parameters()), with_fsdp=with_fsdp) is None:
        return
    kept: dict[int, nn.Parameter] = {}  # parameters that a graph of a backward reads, by the `id` of the whole ones
    for module in filter(is_unit, model.modules()):
        if is_kept(module):
            kept |= {id(each.whole): cast(nn.Parameter, each.parameter) for each in shards_of(module)}
        else:
            cast(Any, module).reshard()
    named = {name: kept.get(id(each), each) for name, each in model.named_parameters()}
    if (found := _left_out(ctx, named, with_fsdp=with_fsdp)) is not None:
        name, ranks = found
        is_added = ranks is None and any("name" in tensor_notes(each) for each in model.parameters())
        raise _unreached(
            ctx,
            name,
            len(_replica_ranks(ctx) or range(ctx.world_size)),
            "a plain parameter next to sharded ones" if ranks is None else f"a mesh of {ranks}",
            "Add it before accel.prepare: make the model of peft first, and prepare that model."
            if is_added
            else "Call fully_shard on the full model too, on a mesh of all ranks.",
        )


def check_adopted(ctx: DistContext, model: nn.Module) -> None:
    """Raise as `check_sharded`, and for a mesh of as many ranks as the context has that are not the context's."""
    check_sharded(ctx, model)
    ranks = ranks_of_group(ctx.comm.group)
    for name, parameter in model.named_parameters():
        mesh = mesh_of(parameter)
        if mesh is None or not parameter.requires_grad or mesh.size() != ctx.world_size or ranks is None:
            continue
        if (found := ranks_of_mesh(mesh)) != ranks:
            raise _unreached(
                ctx,
                name,
                len(ranks),
                f"a mesh of {len(found)}, the ranks {_listed(found)}",
                f"Call fully_shard on a mesh of the ranks {_listed(ranks)}.",
            )


def check_replicated(ctx: DistContext, replica: DistributedDataParallel) -> None:
    """Refuse a DDP of the user's that exchanges gradients between others than the ranks with the same parameters.

    No communication: a group that torch has not opened is adopted, because only its manager knows its ranks.
    """
    group = cast(Any, replica).process_group
    if group is ctx.comm.group and ctx.mesh is None:
        return
    found = ranks_of_group(group)
    # ranks may hold replicas along axes of the user's own, or other parts: both are adopted
    least, most = (_replica_ranks(ctx, named_alone=each) or ranks_of_group(ctx.comm.group) for each in (True, False))
    if found is None or least is None or most is None or least <= found <= most:
        return
    named = cast("Iterable[tuple[str, nn.Parameter]]", cast(Any, replica).module.named_parameters())
    for name, parameter in named:
        if parameter.requires_grad and _is_whole(parameter):
            raise _unreached(
                ctx,
                name,
                len(most),
                f"a mesh of {len(found)}, the ranks {_listed(found)} of DistributedDataParallel",
                "Pass the module itself, which prepare_model wraps; or give DistributedDataParallel the group of "
                f"the ranks {_listed(most)} as process_group=.",
                alone=least <= found,
            )


def _unreached(ctx: DistContext, name: str, needed: int, got: str, fix: str, *, alone: bool = False) -> PrepareError:
    same = "" if needed == ctx.world_size else " with the same parameters"
    return PrepareError(
        "the gradient of a parameter would not reach every rank" + ", and these alone" * alone,
        expected=f"a mesh of all {needed} ranks{same}",
        got=got,
        where=f"rank {ctx.rank}, {name}",
        fix=fix,
    )


def _listed(ranks: frozenset[int]) -> str:
    first = ", ".join(map(str, sorted(ranks)[:_MOST_LISTED]))
    return first + ", ..." * (len(ranks) > _MOST_LISTED)


def _is_whole(parameter: nn.Parameter) -> bool:
    """Return whether ranks with other samples hold all of a parameter, or of this rank's tensor-parallel part of it."""
    mesh = mesh_of(parameter)
    names = () if mesh is None else mesh.mesh_dim_names or ("dp",)
    return all(dimension_of(name) in MODEL_DIMENSIONS for name in names)


def stage_size(ctx: DistContext) -> int:
    """Return the number of ranks of this rank's pipeline stage; all without a pipeline."""
    stages = (axis.size for name, axis in ctx.position.axes if dimension_of(name) == "pipeline")
    return ctx.world_size // math.prod(stages)


def _left_out(
    ctx: DistContext, named: Mapping[str, nn.Parameter], *, with_fsdp: bool = False
) -> tuple[str, int | None] | None:
    """The first parameter with a gradient that would not reach every rank, and the size of its mesh, if it has one."""
    known: dict[DeviceMesh, bool] = {}
    for name, parameter in named.items():
        mesh = mesh_of(parameter)
        if mesh is None:
            if with_fsdp and parameter.requires_grad:
                return name, None
        elif parameter.requires_grad and mesh.size() != ctx.world_size:
            if mesh not in known:
                ranks = _replica_ranks(ctx)
                known[mesh] = ranks is not None and ranks <= ranks_of_mesh(mesh)
            if not known[mesh]:
                return name, mesh.size()
    return None


def _replica_ranks(ctx: DistContext, *, named_alone: bool = False) -> frozenset[int] | None:
    """The ranks with parameters in common with this one's, on the context's mesh; None for all. `named_alone` leaves
    out the user's own axes."""
    mesh = ctx.mesh
    if mesh is None or mesh.mesh_dim_names is None:
        return None
    model_dimensions = (*MODEL_DIMENSIONS, None) if named_alone else MODEL_DIMENSIONS
    names = enumerate(mesh.mesh_dim_names)
    return ranks_around(mesh, [at for at, name in names if dimension_of(name) not in model_dimensions])


def sample_ranks(ctx: DistContext) -> frozenset[int] | None:
    """Return the ranks that get the same samples as this one on the context's mesh; None without a mesh."""
    if ctx.mesh is None:
        return None
    return ranks_around(ctx.mesh, {*range(ctx.mesh.ndim)}.difference(ctx.position.data_dims))


def ranks_of_mesh(mesh: DeviceMesh) -> frozenset[int]:
    """Return the ranks of a mesh, as the default group counts them."""
    return frozenset(cast(Any, mesh.mesh).flatten().tolist())
