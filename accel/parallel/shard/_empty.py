# SPDX-License-Identifier: Apache-2.0
"""Models built empty, on the meta device: filled from a stage's first rank, or by a load after they were sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from accel.comm import Call, Comm, agreed, all_reduce_flat
from accel.context import DistContext
from accel.errors import PrepareError
from accel.tensors import is_dtensor, local_part
from accel.topology import dimension_of

_WHERE = "prepare_model, strategy fsdp"


def check_empty(ctx: DistContext, model: nn.Module) -> None:
    """Raise for an empty model on a mesh with parts of models. No communication.

    Raises:
        PrepareError: a parameter on the meta device, and an axis of more than one rank for parts of models.
    """
    apart = {name: axis.size for name, axis in ctx.position.axes if dimension_of(name) in ("tensor", "expert")}
    listed = ", ".join(f"{name}={size}" for name, size in apart.items() if size > 1)
    first = next((name for name, each in model.named_parameters() if each.is_meta), "")
    if listed and first:
        raise PrepareError(
            "an empty model cannot be spread along this mesh",
            expected="axes for replicas, shards and sequences alone",
            got=listed,
            where=f"{_WHERE}, {first}",
            fix="Build the model on the CPU.",
        )


def stays_empty(ctx: DistContext, stage: Comm, model: nn.Module) -> bool:
    """Return whether no rank of a stage has values of its model, so that a load has to follow. A collective.

    Args:
        ctx: the context.
        stage: handle of the ranks of this rank's pipeline stage.
        model: not sharded.

    Raises:
        PrepareError: the stage's first rank has no values where others have; or nobody has those of a buffer that no
            checkpoint holds.
    """
    held_here = [not each.is_meta for each in model.parameters()]
    missing_first = held_here.count(False) if stage.rank == 0 else 0
    counts = torch.tensor([missing_first, held_here.count(True)], device=ctx.device)
    missing, held = cast("list[int]", cast(Any, all_reduce_flat(stage, counts, "sum")).tolist())
    if not missing:
        return False
    if held:
        raise PrepareError(
            "the rank that others take their values from has none",
            expected="values on the first rank, or on none",
            got=f"{missing} parameters on the meta device there, and values of others elsewhere",
            where=_WHERE,
            fix="Load the weights on rank 0 and build the model on the meta device elsewhere, or on all ranks.",
        )
    if lost := list(_unsaved_buffers(model)):
        raise PrepareError(
            "a buffer that no checkpoint holds has no values",
            got=f"{', '.join(lost)} on the meta device",
            where=_WHERE,
            fix="Set it before prepare to a tensor on the CPU, computed as the model's __init__ does.",
        )
    return True


def make_room(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give tensors on the meta device memory, whatever it holds, to receive values. Mutates them."""
    for each in tensors:
        if each.is_meta:
            there: torch.Tensor = torch.empty_like(each, device=device)
            if isinstance(each, nn.Parameter):
                there = nn.Parameter(there, each.requires_grad)
            vars(there).update(vars(each))
            cast(Any, torch.utils).swap_tensors(each, there)


def allocate_shards(model: nn.Module, device: torch.device) -> None:
    """Give the shards of an empty model memory, and fill them with NaN until a load. Mutates the model.

    Args:
        model: sharded by `fully_shard`.
        device: of the shards.
    """
    made: dict[int, nn.Parameter] = {}  # by the empty one's id: tied parameters stay one
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                fresh = nn.Parameter(_unknown(parameter, device), parameter.requires_grad)
                setattr(module, name, made.setdefault(id(parameter), fresh))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, _unknown(buffer, device))


def expect_values(stage: Comm, model: nn.Module) -> None:
    """Raise at the first forward of an empty model unless its values have come. Mutates it by a hook."""

    def look(module: nn.Module, _inputs: Any) -> None:
        with agreed(stage, Call("forward of a sharded model", ordered=False)):
            tensors = [*module.named_parameters(), *module.named_buffers()]
            empty = [name for name, each in tensors if _is_unknown(each)]
            if empty:
                raise PrepareError(
                    "the model has no values yet",
                    expected="a load between prepare and the first forward",
                    got=f"{len(empty)} parameters and buffers that nobody has filled, such as {empty[0]}",
                    where="forward",
                    fix="Load them: accel.load_state(ctx, path, {'model': model}).",
                )
        handle.remove()

    handle = model.register_forward_pre_hook(cast(Any, torch.compiler).disable(look), prepend=True)


def _unsaved_buffers(model: nn.Module) -> Iterator[str]:
    """Yield the names of empty buffers that are not persistent."""
    saved = model.state_dict().keys()
    return (name for name, each in model.named_buffers() if each.is_meta and name not in saved)


def _unknown(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_like(tensor.detach(), device=device)
    return made.fill_(float("nan")) if made.is_floating_point() else made.zero_()


def _is_unknown(tensor: torch.Tensor) -> bool:
    part = local_part(tensor) if is_dtensor(tensor) else tensor.detach()
    return part.is_floating_point() and part.numel() > 0 and bool(part.isnan().all())
