# SPDX-License-Identifier: Apache-2.0
"""`rewound`: a block of steps after which a model, its optimizers and the random streams are as before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accel.context import DistContext
from accel.items._module import reshard
from accel.optim import parameters_of
from accel.parallel._later_batches import later_batches
from accel.parallel._leftovers import clear_gradients, clear_parameters
from accel.random import isolated_rng

Restore = Callable[[], Any]  # puts the old content into an object, and returns the object


@contextlib.contextmanager
def rewound(ctx: DistContext, model: nn.Module, optimizers: Sequence[Optimizer]) -> Generator[None]:
    """Restore parameters, gradients, buffers, modes, optimizers and random streams after a block, or an error in it.

    Everything keeps its identity and gets its bits back. Takes the memory of a copy. No communication.
    """
    reshard(model)
    every = list(_all_optimizers(optimizers))
    with torch.no_grad():
        restores = [*map(_module, model.modules()), *map(_optimizer, every)]
        restores += [_kept(each) for each in _stepped(model, every)]
        # Gradients that no optimizer clears; DDP's are views on memory that each backward writes.
        grads = [(each, _kept(each.grad)) for each in model.parameters() if each.grad is not None]
    clear_gradients(model)
    try:
        with isolated_rng(ctx.device):
            yield
    finally:
        # An error may have left shards gathered, gradients of half a window, and figures of its batches.
        reshard(model)
        clear_gradients(model)
        clear_parameters(parameters_of(every))
        if (later := later_batches(ctx)) is not None:
            later.clear()
        with torch.no_grad():
            for restore in restores:
                _ = restore()
            for parameter, restore in grads:
                parameter.grad = restore()
        torch.clear_autocast_cache()  # an autocast around goes on with copies of what the tensors were


def _all_optimizers(optimizers: Sequence[Optimizer]) -> Iterator[Optimizer]:
    """Yield optimizers and those inside, as wrappers and ZeroRedundancyOptimizer have them."""
    known: set[int] = set()
    waiting = list(optimizers)
    while waiting:
        each = waiting.pop(0)
        if id(each) not in known:
            known.add(id(each))
            yield each
            waiting += [value for value in vars(each).values() if isinstance(value, Optimizer)]


def _stepped(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[torch.Tensor]:
    """Yield what steps change, each tensor once: trained parameters, those of the optimizers, and buffers."""
    trained = (each for each in model.parameters() if each.requires_grad)
    found = {id(each): each for each in (*trained, *parameters_of(optimizers), *model.buffers())}
    yield from found.values()


def _module(module: Any) -> Restore:
    """Keep a module's mode, and which tensors are its parameters and buffers: a forward may replace some."""
    tables = [cast("dict[str, Any]", table) for table in (module._parameters, module._buffers)]
    before = [dict(table) for table in tables]
    training = module.training

    def restore() -> Any:
        module.training = training
        for table, entries in zip(tables, before, strict=True):
            if list(table) != list(entries) or any(table[name] is not each for name, each in entries.items()):
                table.clear()
                table.update(entries)
        return module

    return restore


def _optimizer(optimizer: Optimizer) -> Restore:
    """Keep an optimizer's attributes, its groups and its state."""
    attributes = dict(vars(optimizer))
    inner = [_kept(optimizer.state), _kept(optimizer.param_groups)]

    def restore() -> Optimizer:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for each in inner:
            _ = each()
        return optimizer

    return restore


def _kept(value: Any) -> Restore:
    """Keep the content of a tensor, or of a container and all in it; the parameters of a group apart."""
    if isinstance(value, torch.Tensor):
        return _kept_tensor(value)
    if isinstance(value, dict):
        return _kept_dict(cast("dict[Any, Any]", value))
    if isinstance(value, list):
        return _kept_list(cast("list[Any]", value))
    if isinstance(value, tuple):
        return _kept_tuple(cast("tuple[Any, ...]", value))
    return _same(value)


def _same(value: Any) -> Restore:
    return lambda: value


def _kept_tuple(value: tuple[Any, ...]) -> Restore:
    parts = [_kept(each) for each in value]

    def restore() -> tuple[Any, ...]:
        for part in parts:
            _ = part()
        return value

    return restore


def _kept_tensor(tensor: torch.Tensor) -> Restore:
    copy = tensor.detach().clone()

    def restore() -> torch.Tensor:
        return tensor.copy_(copy)

    return restore


def _kept_dict(value: dict[Any, Any]) -> Restore:
    parts = {key: _same(each) if key == "params" else _kept(each) for key, each in value.items()}

    def restore() -> dict[Any, Any]:
        value.clear()
        value.update({key: part() for key, part in parts.items()})
        return value

    return restore


def _kept_list(value: list[Any]) -> Restore:
    parts = [_kept(each) for each in value]

    def restore() -> list[Any]:
        value[:] = [part() for part in parts]
        return value

    return restore
