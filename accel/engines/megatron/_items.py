# SPDX-License-Identifier: Apache-2.0
"""A Megatron program's model, optimizer and named random streams as items of `save_state` and `load_state`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec
import torch
from torch import nn

from accel.context import DistContext, context_first
from accel.engines.megatron._context import initialized_state, megatron_core
from accel.engines.megatron._optimizer import MegatronOptimizer
from accel.engines.megatron._sharded import ShardNames, copy_into, in_order, sharded_leaves
from accel.errors import ConfigError
from accel.items import Part


class StreamStates(msgspec.Struct, frozen=True):
    """The states of a rank's streams.

    Attributes:
        place: sizes of Megatron's layout, and the rank's place in it.
        states: of the streams by name, bytes of torch's generators.
    """

    place: str = ""
    states: Mapping[str, bytes] = {}

    def rank_part(self) -> object:
        """Return this rank's states."""
        return {"place": self.place, "states": dict(self.states)}

    def with_rank_part(self, part: object) -> Self:
        """Return the record with a rank's states."""
        return msgspec.convert(part, type(self))


class MegatronStreams:
    """Megatron's random streams, with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the streams. No communication."""
        states: dict[str, bytes] = {}
        for name, state in _tracker().get_states().items():
            held = state if isinstance(state, torch.Tensor) else state.get_state()
            states[name] = held.cpu().numpy().tobytes()
        return {"streams": StreamStates(_place(), states)}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Restore the streams, but for those of another layout. Mutates Megatron's tracker."""
        loaded: StreamStates = state_dict["streams"]
        if loaded.place != _place() or not loaded.states:
            return
        tracker = _tracker()
        live = tracker.get_states()
        states: dict[str, Any] = {}
        for name, raw in loaded.states.items():
            state = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            if isinstance(live.get(name), torch.Generator):
                generator = torch.Generator(live[name].device)
                generator.set_state(state)
                states[name] = generator
            else:
                states[name] = state
        tracker.set_states(states)


def _tracker() -> Any:
    return megatron_core("tensor_parallel.random").get_cuda_rng_tracker()


def _place() -> str:
    """Return the sizes of Megatron's layout, and this rank's place in it."""
    state = initialized_state()
    found = {
        "tp": (state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        "cp": (state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
        "dp": (state.get_data_parallel_rank(), state.get_data_parallel_world_size()),
        "pp": (state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()),
        "ep": (state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
    }
    return ", ".join(f"{name} {rank} of {size}" for name, (rank, size) in found.items())


@context_first
def megatron_items(
    ctx: DistContext, model: nn.Module | Sequence[nn.Module], optimizer: object | None = None
) -> dict[str, object]:
    """Return Megatron's model, optimizer and random streams as items of a checkpoint. No communication.

    Tensors are stored by global name and offset, so that a checkpoint loads at another layout of tensor, pipeline and
    data parallelism, with or without the distributed optimizer. The state of random streams is adopted by the same
    layout alone. To gather a distributed optimizer's state for a save is a collective of its data group.

    Args:
        ctx: a context on Megatron's parallel state.
        model: Megatron's model on this rank, or the list of its chunks; plain, or in its wrappers.
        optimizer: Megatron's optimizer; None for none.

    Returns:
        Items "model", "streams" and, of an optimizer, "optimizer".

    Raises:
        MissingExtraError: Megatron-core does not import.
        ConfigError: its parallel state is not initialized, or the context has another one.

    Examples:
        >>> items = megatron_items(ctx, model, optimizer)  # doctest: +SKIP
        >>> accel.save_state(ctx, "runs/gpt", items | {"cursor": cursor}, step=3)  # doctest: +SKIP
    """
    _check_context(ctx)
    chunks = [_bare(each) for each in (model if isinstance(model, Sequence) else [model])]
    items: dict[str, object] = {
        "model": Part(MegatronModel(chunks, ctx.device.type)),
        "streams": MegatronStreams(),
    }
    if optimizer is not None:
        items["optimizer"] = Part(MegatronOptimizer(optimizer, chunks, ctx.device.type))
    return items


class MegatronModel:
    """The parameters and buffers of this rank's chunks of a Megatron model, as `Part` takes them."""

    def __init__(self, chunks: Sequence[Any], device_type: str) -> None:
        self._chunks = chunks
        self._device_type = device_type

    def state_dict(self) -> dict[str, Any]:
        """Return the live tensors by global name. No communication."""
        return dict(self._named(self._sharded()))

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Copy tensors into the live ones. Mutates them."""
        nested = self._sharded()
        names = [name for name, _ in self._named(nested)]
        copy_into(nested, in_order(names, state_dict))

    def _sharded(self) -> list[Any]:
        return [chunk.sharded_state_dict() for chunk in self._chunks]

    def _named(self, nested: object) -> list[tuple[str, Any]]:
        return ShardNames(self._device_type).tensors(list(sharded_leaves(nested)))


def _bare(model: Any) -> Any:
    """Return a model without Megatron's wrappers, each of which holds it as `module`."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


def _check_context(ctx: DistContext) -> None:
    """Raise `ConfigError` unless the context's mesh is of Megatron's sizes; each other size is named."""
    state = initialized_state()
    sizes = {
        "tp": state.get_tensor_model_parallel_world_size(),
        "cp": state.get_context_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "data": state.get_data_parallel_world_size(),
    }
    held = {name: ctx.axis(name).size for name in ("tp", "cp", "pp")} | {"data": ctx.data_parallel[1]}
    if held != sizes:
        wrong = [name for name in sizes if held[name] != sizes[name]]
        raise ConfigError(
            "the context has other sizes than Megatron's parallel state",
            expected=", ".join(f"{name}={sizes[name]}" for name in wrong),
            got=", ".join(f"{name}={held[name]}" for name in wrong),
            where="megatron_items",
            fix="Pass the context of from_megatron(), or accel.replace(ctx, mesh=megatron_mesh(ctx.device.type)).",
        )
