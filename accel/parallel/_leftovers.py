# SPDX-License-Identifier: Apache-2.0
"""Gradients at a window's edges: left from before, or none for unused parameters."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel.comm import all_reduce_flat
from accel.context import DistContext
from accel.errors import StepError
from accel.parallel._modules import (
    check_module,
    forget,
    held_by,
    is_pipelined,
    note_tensor,
    stage_modules,
    tensor_notes,
)
from accel.parallel._spread import stage_comm
from accel.parallel._torch_fsdp import drop_unsharded, shards_of
from accel.tensors import integers, local_part, mesh_of


def has_compiled() -> bool:
    """Return whether torch has compiled a function in this process since its compiler was reset: a compiled backward
    may leave two gradients in one memory."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0) > 0


def clear_gradients(*models: nn.Module) -> None:
    """Drop all gradients of models, such as in a window that is given up. No communication.

    It reaches what `optimizer.zero_grad()` leaves: parameters that no optimizer has, and under `fsdp` the gradients of
    micro-batches that are not exchanged yet. Of an engine's model it reaches what the engine holds.

    Args:
        models: plain or from `prepare_model`. The `.grad` of their parameters becomes None.

    Raises:
        ConfigError: an argument is no module.
    """
    for each in models:
        check_module(each)
        if (held := held_by(each)) is not None:
            held.clear()
    parameters, sharded = _tables(models)
    for module in sharded:
        parameters += drop_unsharded(module)
    clear_parameters(each for each in parameters if each is not None)


def clear_parameters(parameters: Iterable[torch.Tensor]) -> None:
    """Drop the gradients of parameters, but for what `fully_shard` holds. No communication."""
    for each in parameters:
        each.grad = None
        _forget(each)


def note_gradients(models: Iterable[nn.Module]) -> None:
    """Note on each parameter of models whether it holds a gradient now, until the gradient is cleared. Waits for the
    device where one does."""
    models = tuple(models)
    for each in models:
        if (held := held_by(each)) is not None:
            held.note()
    parameters, sharded = _tables(models)
    noted = [
        each for each in parameters if each is not None and (each.grad is not None or "found" in tensor_notes(each))
    ]
    shards = [each for module in sharded for each in shards_of(module)]
    if not noted and not shards:
        return
    for each in noted:
        _forget(each)
    sharded_ids = {id(each) for parameter, whole, _ in shards for each in (parameter, whole)}
    found = [
        _FoundGradient(each, each, each.grad) for each in noted if each.grad is not None and id(each) not in sharded_ids
    ]
    for parameter, whole, held in shards:
        _forget(parameter)
        found += [_FoundGradient(parameter, None, grad) for grad in held]
        if parameter.grad is not None:
            found.append(_FoundGradient(parameter, whole, parameter.grad))
    if found:
        _note(found)


def check_kept(models: Iterable[nn.Module]) -> None:
    """Raise `StepError` where a window's second micro-batch finds no gradient of the first; pipelines and `fully_shard`
    keep theirs elsewhere."""
    models = tuple(models)
    if any(map(is_pipelined, models)):
        return
    for module in _modules(models):
        for each in module._parameters.values():
            if each is not None and each.grad is not None and each.requires_grad:
                return  # as a rule the first one: most modules are not looked at
    parameters, sharded = _tables(models)
    trained = [each for each in parameters if each is not None and each.requires_grad]
    if trained and not sharded and all(each.grad is None for each in trained):
        raise StepError(
            "the gradients of this window's first micro-batch are gone",
            expected="gradients that add up until the optimizer step, which clears them",
            got="no gradient in any parameter of the block's models",
            where="accel.accumulate",
            fix="Leave optimizer.zero_grad() out of the loop. "
            "To drop a window: state = accel.training.discard(state, model).",
        )


def found_gradient(parameter: torch.Tensor) -> bool | None:
    """Return whether a parameter's gradient held more than zeros when the window began; None if there was none."""
    return tensor_notes(parameter).get("found")


class _FoundGradient(NamedTuple):
    """A gradient that a window found."""

    parameter: torch.Tensor  # as an optimizer has it
    # The tensor that gets a gradient in a backward before this one does; None if `zero_grad` cannot clear
    # it.
    reached: torch.Tensor | None
    grad: torch.Tensor  # the gradient


def _note(found: list[_FoundGradient]) -> None:
    counts = [_nonzero(each.grad) for each in found]
    read = integers(torch.stack([count.to(counts[0].device) for count in counts]))
    for (parameter, reached, _), count in zip(found, read, strict=True):
        note_tensor(parameter, found=bool(found_gradient(parameter)) or count > 0)
        if count and reached is not None and reached.requires_grad:
            _watch(parameter, reached)


def _forget(parameter: torch.Tensor) -> None:
    if "found" in tensor_notes(parameter):
        forget(parameter, "found")


def _watch(parameter: torch.Tensor, reached: torch.Tensor) -> None:
    """Take the note back if the gradient is gone when another one comes. One hook, which lasts as long as the note."""
    if tensor_notes(parameter).get("watched") == id(reached):
        return
    known = weakref.ref(parameter)

    def look(_grad: torch.Tensor) -> None:
        live = known()
        if live is not None and live.grad is not None and found_gradient(live):
            return
        handle.remove()
        if live is not None:
            _forget(live)
            note_tensor(live, watched=None)

    handle = cast(Any, reached).register_hook(look)
    note_tensor(parameter, watched=id(reached))


def _nonzero(grad: torch.Tensor) -> torch.Tensor:
    """Count this rank's elements that are not zero."""
    grad = local_part(grad)
    return (grad.coalesce().values() if grad.is_sparse else grad).count_nonzero()


def _tables(models: Iterable[nn.Module]) -> tuple[list[torch.Tensor | None], list[nn.Module]]:
    """Return the parameters of models, some perhaps twice or None, and the modules that `fully_shard` was called on."""
    parameters: list[torch.Tensor | None] = []
    sharded: list[nn.Module] = []
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded_kind = getattr(fsdp, "FSDPModule", None)  # another thread may be importing the module
    for module in _modules(models):
        if module._parameters:
            parameters += module._parameters.values()
        if sharded_kind is not None and isinstance(module, sharded_kind):
            sharded.append(module)
    return parameters, sharded


def _modules(models: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the modules of models that this rank runs, some perhaps twice."""
    # by tables without a public name in torch: `modules()` takes ten times as long; a test compares both
    waiting: list[Any] = [part for model in models for part in stage_modules(model)]
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        yield module
        if module._modules:
            waiting += module._modules.values()


def watch_used(units: Sequence[nn.Module]) -> None:
    """Note from now on which parameters a backward reaches, by hooks of modules of `fully_shard`, the outermost one
    last."""
    for unit in units:
        _forget_cleared(unit)
        _ = unit.register_forward_pre_hook(cast(Any, torch.compiler).disable(_report))

    def begin(_module: nn.Module, _inputs: Any) -> None:
        for unit in units:
            _forget_cleared(unit)

    _ = units[-1].register_forward_pre_hook(cast(Any, torch.compiler).disable(begin))


def await_mean(parameter: torch.Tensor, placements: Sequence[object]) -> None:
    """Note with which placements the gradients of a replicated parameter await their mean over ranks."""
    note_tensor(parameter, awaited=tuple(placements))


def awaited_of(parameter: torch.Tensor) -> Sequence[object]:
    """Return the placements of a replicated parameter's gradients; none of another."""
    return tensor_notes(parameter).get("awaited", ())


def watch_whole(parameter: torch.Tensor, *, again: bool = False) -> None:
    """Note from now on whether a backward reaches a replicated parameter; `again` for one that is watched already, at
    each forward."""
    if again and not is_watched(parameter):
        return
    if parameter.grad is None:
        note_tensor(parameter, used=False)
    if again and tensor_notes(parameter).get("reports") != id(parameter):
        known = weakref.ref(parameter)

        def reached(_grad: torch.Tensor) -> None:
            if (live := known()) is not None:
                note_used(live)

        _ = cast(Any, parameter).register_hook(reached)
        note_tensor(parameter, reports=id(parameter))


def is_watched(parameter: torch.Tensor) -> bool:
    """Return whether it is noted for a parameter if a backward reaches it."""
    return "used" in tensor_notes(parameter)


def is_used(parameter: torch.Tensor) -> bool:
    """Return whether a backward of this rank has reached a parameter; if it has a gradient where nobody watches it."""
    return tensor_notes(parameter).get("used", parameter.grad is not None)


def note_used(parameter: torch.Tensor) -> None:
    """Note that a backward has reached a parameter, if it is watched."""
    if not tensor_notes(parameter).get("used", True):
        note_tensor(parameter, used=True)


def drop_unused(ctx: DistContext, parameters: Iterable[torch.Tensor]) -> None:
    """Drop the gradients of a step's watched parameters that no rank of the stage has used. A collective where there
    are watched ones."""
    parameters = list(parameters)
    for each in parameters:
        if each.grad is None and is_watched(each) and awaited_of(each):  # others may have one, and await this rank's
            each.grad = _awaited_zeros(each)
    asked = [
        each
        for each in parameters
        if is_watched(each) and each.grad is not None and "settled" not in tensor_notes(each.grad)
    ]
    if not asked:
        return
    comm = stage_comm(ctx)
    used = torch.tensor([is_used(each) for each in asked], dtype=torch.uint8, device=comm.control)
    if comm.size > 1:
        _ = all_reduce_flat(comm, used, "max")
    for each, any_rank in zip(asked, integers(used), strict=True):
        note_tensor(each, used=False)
        if any_rank:
            note_tensor(cast(torch.Tensor, each.grad), settled=True)
        else:
            each.grad = None


def _awaited_zeros(parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    mesh = mesh_of(parameter)
    zeros = torch.zeros_like(local_part(parameter))
    return DTensor.from_local(zeros, mesh, cast(Any, awaited_of(parameter)), run_check=False)


def _report(unit: nn.Module, _inputs: Any) -> None:
    """Let the whole parameters of a unit report gradients. They are made by the unit's first forward, and stay."""
    for parameter, whole, _ in shards_of(unit):
        if whole is None or not whole.requires_grad or tensor_notes(whole).get("reports") == id(parameter):
            continue

        def reached(_grad: torch.Tensor, parameter: torch.Tensor = parameter) -> None:
            note_used(parameter)

        _ = cast(Any, whole).register_hook(reached)
        note_tensor(whole, reports=id(parameter))


def _forget_cleared(unit: nn.Module) -> None:
    """Take back the notes for gradients that somebody has cleared, as `zero_grad` does."""
    for parameter, _, held in shards_of(unit):
        if parameter.grad is None and not held:
            note_tensor(parameter, used=False)
