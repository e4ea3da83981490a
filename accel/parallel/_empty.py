# SPDX-License-Identifier: Apache-2.0
"""Models on their way to a device: moved, or built empty and filled from the first rank or by a load."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, cast

import torch
from torch import nn

from accel.comm import Call, Comm, agreed, call_site, reduce_ints
from accel.comm._streams import DeviceStreams
from accel.errors import PrepareError
from accel.parallel._labels import replace_parameter
from accel.parallel._modules import (
    forget,
    memory_of,
    named_modules,
    note_prepared,
    note_tensor,
    prepared_of,
    stage_modules,
    unwrap_model,
)
from accel.parallel._spread import ModelView
from accel.tensors import become, is_dtensor, local_part

_WHERE = "prepare_model"
_BUILT = (
    "Build the model by accel.init_empty_weights(make), which computes such buffers as torch.device('meta') does not."
)
_STACKS = (
    "Experts of a checkpoint of the hub: accel.bigmodel.load_checkpoint_in_model(ctx, model, folder, "
    "rename=accel.bigmodel.expert_recipes(...))."
)


def stays_empty(comm: Comm, view: ModelView) -> bool:
    """Return whether no rank has values of a model that is not spread, so that they come later. A collective.

    If only the first rank lacks values, or a buffer that no checkpoint holds does, every rank raises `PrepareError`.
    """
    held_here = [not each.is_meta for each in view.parameters.values()]
    missing_first = held_here.count(False) if comm.rank == 0 else 0
    empty = [name for name, each in view.buffers.items() if each.is_meta]
    lost = [name for name in empty if name in _unsaved_buffers(view.model)] if empty else []
    numbers = [missing_first, held_here.count(True), len(lost)]
    missing, held, most_lost = reduce_ints(comm, Call("prepare_model", "empty parameters", call_site()), numbers, "max")
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
    if most_lost:
        raise PrepareError(
            "a buffer that no checkpoint holds has no values",
            got=f"{', '.join(lost) or 'buffers of another rank'} on the meta device",
            where=_WHERE,
            fix=f"{_BUILT} Or set it before prepare to a tensor on the CPU, computed as the model's __init__ does.",
        )
    return True


def make_room(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give tensors on the meta device memory, whatever it holds, to receive values. Mutates them."""
    for each in tensors:
        if each.is_meta:
            _become(each, torch.empty_like(each, device=device))


def _become(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Let a tensor have values, a plain tensor; a parameter stays one. Mutates the tensor."""
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, tensor.requires_grad)
        values.grad_dtype = tensor.grad_dtype
    become(tensor, values)
    if is_dtensor(tensor):
        note_tensor(tensor, memory=memory_of(tensor))


def values_or_room(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor's values on a device; of one on the meta device room for them."""
    if tensor.is_meta:
        return torch.empty_like(tensor.detach(), device=device)
    return tensor.detach().to(device)


def allocate_empty(model: nn.Module, device: torch.device, only: Container[int] | None = None) -> None:
    """Give empty tensors of a model memory, filled with NaN until their values come; plain parameters stay the same
    objects. `only`: the parameters to give it to, by id; None for all, and buffers."""
    made: dict[int, nn.Parameter] = {}  # by the empty one's id: tied parameters stay one
    for path, module in named_modules(model):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta or (only is not None and id(parameter) not in only):
                continue
            if not is_dtensor(parameter):
                make_room([parameter], device)
                _ = parameter.data.copy_(_unknown(parameter, device))
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(_unknown(parameter, device), parameter.requires_grad)
                replace_parameter(f"{path}.{name}" if path else name, parameter, made[id(parameter)])
            setattr(module, name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta and only is None:
                setattr(module, name, _unknown(buffer, device))


def expect_values(comm: Comm, model: nn.Module) -> None:
    """Raise at the first forward of an empty model unless its values have come. Mutates it by a hook."""
    first = stage_modules(model)[0]
    for module in model.modules():
        note_prepared(module, expects_values=True)

    def look(_module: nn.Module, _inputs: Any) -> None:
        with agreed(comm, Call("forward of an empty model", ordered=False)):
            check_filled(model, where="forward")
        handle.remove()
        for module in model.modules():
            forget(module, "expects_values")

    handle = first.register_forward_pre_hook(cast(Any, torch.compiler).disable(look), prepend=True)


def check_filled(model: nn.Module, *, where: str) -> None:
    """Raise `PrepareError` for a model that was spread empty and has no values by its first forward; later it is not
    checked."""
    model = unwrap_model(model)
    empty = names_of_empty(model) if "expects_values" in prepared_of(model) else []
    if empty:
        unsaved = [name for name in empty if name in _unsaved_buffers(model)]
        stacks = [name for name, each in model.named_parameters() if each.ndim == 3 and "experts" in name.split(".")]
        raise PrepareError(
            "the model has no values yet",
            expected="a load or initialisation after prepare",
            got=f"{len(empty)} parameters and buffers that nobody has filled, such as {empty[0]}",
            where=where,
            fix="Load them: accel.load_state(ctx, path, {'model': model}); or call accel.bigmodel.initialize_weights."
            + (f" {_STACKS}" if stacks else "")
            + (f" No checkpoint holds {unsaved[0]}. {_BUILT}" if unsaved else ""),
        )


def names_of_empty(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers without values yet. Waits for the device."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, each in tensors if is_unknown(each)]


def is_unknown(tensor: torch.Tensor) -> bool:
    """Return whether this rank's part of a tensor holds what `allocate_empty` fills in. Waits for the device."""
    part = local_part(tensor)
    return part.is_floating_point() and part.numel() > 0 and bool(part.isnan().all())


def _unsaved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are not persistent, by name."""
    saved = model.state_dict().keys()
    return {name: each for name, each in model.named_buffers() if name not in saved}


def _unknown(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_like(tensor.detach(), device=device)
    return made.fill_(float("nan")) if made.is_floating_point() else made.zero_()


def move_model(view: ModelView, streams: DeviceStreams) -> None:
    """Move a model's parameters and buffers in place; those on the meta device stay there."""
    device, tensors = streams.device, [*view.parameters.values(), *view.buffers.values()]
    if all(each.is_meta or streams.holds(each) for each in tensors):
        return
    if not any(each.is_meta for each in tensors) and _keeps_parameters(device):
        streams.take(view.model)
        return
    for tensor in tensors:
        if tensor.device == device or tensor.is_meta:
            continue
        _become(tensor, tensor.detach().to(device))


# To XLA and to devices that packages register, `Module.to` would put new parameters into the model, and leave the
# optimizer with those on the CPU. DTensors would lose their attributes by it, even where they do not move.
def _keeps_parameters(device: torch.device) -> bool:
    """Return whether `Module.to` leaves parameters the objects that they are on the way from the CPU to a device."""
    probe = nn.Module()
    probe.parameter = parameter = nn.Parameter(torch.empty(0, device="cpu"))
    return probe.to(device).parameter is parameter
