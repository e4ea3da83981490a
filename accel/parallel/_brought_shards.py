# SPDX-License-Identifier: Apache-2.0
"""Models that their users or another library have divided over ranks: which of these must get the same samples."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from accel.comm import ranks_around, ranks_of_group
from accel.context import DistContext
from accel.errors import PrepareError
from accel.parallel._modules import named_modules, note_tensor, sharded_units, tensor_notes
from accel.parallel._private import root_mesh
from accel.parallel._sharded import MODEL_DIMENSIONS, ranks_of_mesh, sample_ranks
from accel.parallel._torch_fsdp import meshes_of
from accel.parallel.axes.experts import holds_experts
from accel.tensors import is_dtensor, split_dims
from accel.topology import DATA_DIMS, data_dimension, dimension_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WHERE = "prepare_model"


class _Brought(NamedTuple):
    """A DTensor of a model."""

    path: str  # its name in the model
    owner: nn.Module  # the module that holds it
    is_buffer: bool  # whether it is a buffer
    mesh: DeviceMesh  # its mesh
    split: tuple[int, ...]  # dimensions of the mesh along which ranks hold different parts, or summands
    # Those along which `fully_shard` gathers it and reduces its gradient; None where it has not taken it.
    exchanged: tuple[int, ...] | None

    def is_computed(self) -> bool:
        """Return whether its module computes with something that a parametrization, or a property, makes of it."""
        name = self.path.rpartition(".")[2]
        is_property = isinstance(getattr(type(self.owner), name, None), property)
        return is_property or isinstance(self.owner, ParametrizationList)

    def data_dims(self) -> tuple[int, ...]:
        """Return the dimensions along which ranks may have different samples."""
        names = self.mesh.mesh_dim_names or ()
        whole = (at for at, name in enumerate(names) if name in DATA_DIMS and at not in self.split)
        return tuple(sorted({*(self.exchanged or ()), *whole}))


def check_divided(ctx: DistContext, model: nn.Module) -> None:
    """Raise `PrepareError` if ranks that hold parts of a tensor would get different samples. No communication.

    Parts along which `fully_shard` manages a parameter, and accel's own experts, are for ranks with their own samples.
    Ranks outside of the context are not judged.
    """
    if ctx.world_size == 1:
        return
    here = ranks_of_group(ctx.comm.group)
    if here is None:
        return
    same = sample_ranks(ctx) or {dist.get_rank(dist.group.WORLD)}
    row = cache(ranks_around)
    found: list[tuple[_Brought, list[int]]] = []
    for each in _divided(model, row):
        dims = [at for at in each.split if at not in (each.exchanged or ())]
        if not _are_experts(each, dims):
            found.append((each, [at for at in dims if not row(each.mesh, (at,)) & here <= same]))
    unshared = sorted((each for each in found if each[1]), key=lambda each: not each[0].is_computed())
    if unshared:
        raise _unshared(ctx, *unshared[0], here)


def _divided(model: nn.Module, row: Any) -> Iterator[_Brought]:
    """Yield the DTensors of a model, except accel's own experts."""
    managed = _managed(model)
    experts = [f"{name}." if name else "" for name, module in named_modules(model) if holds_experts(module)]
    for prefix, owner in named_modules(model):
        parameters = owner.named_parameters(recurse=False)
        for name, tensor in chain(parameters, owner.named_buffers(recurse=False)):
            path = f"{prefix}.{name}" if prefix else name
            if not is_dtensor(tensor) or path.startswith(tuple(experts)):
                continue
            split = split_dims(tensor)
            if not split:
                continue
            mesh = tensor.device_mesh
            along = managed.get((id(owner), name))
            exchanged = None if along is None else tuple(at for at in range(mesh.ndim) if row(mesh, (at,)) <= along)
            yield _Brought(path, owner, not isinstance(tensor, nn.Parameter), mesh, split, exchanged)


def _managed(model: nn.Module) -> Mapping[tuple[int, str], frozenset[int]]:
    """Return the ranks among which `fully_shard` exchanges each parameter, by its name and the `id` of its owner."""
    ranks = cache(ranks_of_mesh)
    units = sharded_units(model)
    return {(id(owner), name): ranks(mesh) for unit in units for owner, name, mesh in meshes_of(unit)}


def _are_experts(each: _Brought, dims: Sequence[int]) -> bool:
    """Return whether a parameter belongs to experts that get the tokens of all ranks. Raise `PrepareError` for experts
    of another library that `fully_shard` has not taken, because nothing scales their gradients."""
    names = each.mesh.mesh_dim_names or ()
    if not any(dimension_of(names[at]) == "expert" for at in dims if names):
        return False
    if each.exchanged is None:
        raise PrepareError(
            "another library has divided experts over ranks, without fully_shard",
            expected="experts that prepare divides, or that fully_shard has taken with the model",
            got=str(each.mesh),
            where=f"{_WHERE}, {each.path}",
            fix="Load the full model, and let prepare divide it: accel.replace(ctx, mesh='dp=2,ep=2').",
        )
    return True


def _unshared(ctx: DistContext, each: _Brought, dims: Sequence[int], here: frozenset[int]) -> PrepareError:
    names = each.mesh.mesh_dim_names
    shown = ", ".join(names[at] if names else f"dimension {at}" for at in dims)
    line = _line(ctx, each, here)
    facts = {"got": f"parts along {shown} of {each.mesh}", "where": f"{_WHERE}, {each.path}"}
    if each.is_computed():
        return PrepareError(
            "a parametrization computes with parts of a parameter, and may gather them for samples of each rank",
            expected="a model that prepare shards, or ranks that get the same samples",
            fix='If it gathers, pass the model before it is sharded, with accel.replace(ctx, strategy="fsdp"). '
            f"If it does not: ctx = {line}",
            **facts,
        )
    text = f"Replace the context before anything is prepared or seeded: ctx = {line}"
    if not here <= ranks_of_mesh(root_mesh(each.mesh)):
        text = (
            "torch shards along other dimensions of the same mesh alone: divide the model along a part of one mesh of "
        )
        text += f"all ranks, as in {line}"
    return PrepareError(
        "ranks hold parts of one tensor, but would get different samples",
        expected="a mesh of the context along which these ranks share samples",
        fix=text,
        **facts,
    )


def _line(ctx: DistContext, each: _Brought, here: frozenset[int]) -> str:
    """Return the call that makes the context right."""
    if ranks_of_mesh(each.mesh) == here:
        getter = "get_buffer" if each.is_buffer else "get_parameter"
        stated = _stated(each.mesh.mesh_dim_names, each.mesh.shape, each.data_dims())
        return f'accel.replace(ctx, mesh=model.{getter}("{each.path}").device_mesh{stated})'
    found = _whole_mesh(each, len(here)) if ctx.comm.group is dist.group.WORLD else None
    if found is None:
        return "accel.replace(ctx, mesh=mesh), with the mesh of the context's ranks that this one is a part of"
    names, sizes, data = found
    made = f'init_device_mesh("{each.mesh.device_type}", {sizes}, mesh_dim_names={names})'.replace("'", '"')
    # under ddp prepare exchanges gradients only next to dimensions of known names
    known = all(at in data or dimension_of(name) in MODEL_DIMENSIONS for at, name in enumerate(names))
    strategy = "" if known or data_dimension(ctx.strategy) == "shard" else ', strategy="fsdp"'
    return f"accel.replace(ctx, mesh={made}{_stated(names, sizes, data)}{strategy})"


def _stated(names: Sequence[str] | None, sizes: Sequence[int], data: Sequence[int]) -> str:
    """Return the argument that names the data dimensions, where the dimensions' own names do not."""
    if names is None:
        return ", data_dims=()"
    large = [at for at, size in enumerate(sizes) if size > 1]
    if all(map(dimension_of, names)) and all((names[at] in DATA_DIMS) == (at in data) for at in large):
        return ""
    listed = tuple(names[at] for at in data)
    return f", data_dims={listed}".replace("'", '"')


def _whole_mesh(each: _Brought, world_size: int) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Return names, sizes and data dimensions of a mesh of all ranks in order, if a mesh of some is one of its rows."""
    ranks = cast("list[int]", cast(Any, each.mesh.mesh).flatten().tolist())
    first, step = ranks[0], ranks[1] - ranks[0]
    rows = world_size // len(ranks)
    if each.mesh.ndim > 1 or each.exchanged or step not in (1, rows):
        return None
    begin = first - first % len(ranks) if step == 1 else first % rows
    if ranks != list(range(begin, begin + step * len(ranks), step)):
        return None
    own = (each.mesh.mesh_dim_names or ("tp",))[0]
    other = "dp" if own != "dp" else "rows"
    if step == 1:
        return (other, own), (rows, len(ranks)), (0,)
    return (own, other), (len(ranks), rows), (1,)


_SUMMING = "replicated_with_grad_allreduce"  # a style of transformers


def sum_each_backward(model: nn.Module) -> None:
    """Make gradients right that transformers sums over ranks after each backward, though a window has several.

    The sum counts what earlier micro-batches left once for each rank, so as much is taken off before it. Mutates the
    model, by hooks; without effect on others. No communication.
    """
    for module in model.modules():
        if not getattr(module, "is_distributed_loading_by_transformers", False):
            continue
        plan = cast(Any, module).tp_plan
        size = cast(Any, module).config.distributed_config.tp_size
        for path, layer in named_modules(module):
            if size > 1 and plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path)) == _SUMMING:
                adjust = partial(_adjust_each, size)
                _ = layer.register_forward_pre_hook(cast(Any, torch.compiler).disable(adjust))


def _adjust_each(size: int, layer: nn.Module, _inputs: Any) -> None:
    """Let the parameters that a layer has in this forward adjust their gradients: `fully_shard` has others between."""
    for each in layer.parameters(recurse=False):
        if each.requires_grad and torch.is_grad_enabled() and tensor_notes(each).get("adjusted") != id(each):
            _ = cast(Any, each).register_hook(partial(_adjusted, size, weakref.ref(each)))
            note_tensor(each, adjusted=id(each))


def _adjusted(size: int, parameter: weakref.ref[torch.Tensor], grad: torch.Tensor) -> torch.Tensor:
    owner = parameter()
    if owner is None or owner.grad is None:
        return grad
    return grad - owner.grad * (1 - 1 / size)
