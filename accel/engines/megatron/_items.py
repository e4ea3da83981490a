# SPDX-License-Identifier: Apache-2.0
"""A Megatron program's model, optimizer and named random streams as items of `save_state` and `load_state`.

Its optimizer may be plain, of a 16-bit model, distributed, or a chain of such.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec
import torch
from torch import nn

from accel.context import DistContext, context_first
from accel.engines.megatron._context import initialized_state, megatron_core
from accel.engines.megatron._sharded import ShardNames, copy_into, filled, in_order, sharded_leaves
from accel.errors import ConfigError
from accel.items import Part

# Forms in which Megatron gives what can be loaded at any layout, and without a prefix for each optimizer of a chain.
_FORM = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_MAIN = "optimizer.state.fp32_param."
_MAIN_OF_SHARDS = "optimizer.state.param."  # as the distributed optimizer calls the same tensors


class StreamStates(msgspec.Struct, frozen=True):
    """The states of a rank's streams."""

    place: str = ""  # sizes of Megatron's layout, and the rank's place in it
    states: Mapping[str, bytes] = {}  # of the streams by name, bytes of torch's generators

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
        """Restore the streams, except streams of another layout. Mutates Megatron's tracker."""
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


class MegatronOptimizer:
    """A Megatron optimizer's state by global name, as `Part` takes it.

    Args:
        optimizer: Megatron's optimizer.
        chunks: its model's chunks on this rank, without wrappers.
        device_type: of the context.
    """

    def __init__(self, optimizer: Any, chunks: Sequence[Any], device_type: str) -> None:
        self._optimizer = optimizer
        self._chunks = chunks
        self._device_type = device_type

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and settings by global name. Of a distributed optimizer, a collective of its data group.

        An optimizer that has taken no step gets the state of step 0 first, which changes nothing of its steps.
        """
        for each in self._each():
            _begin(each)
        nested = self._sharded(is_loading=False)
        masters = self._masters()
        state: dict[str, Any] = {name: tensor for name, tensor in self._named(nested) if name not in masters}
        for at, (each, held) in enumerate(zip(self._each(), self._of_each(nested), strict=True)):
            state |= _settings(each, held, at)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Take a state up. Mutates the optimizer and, of a distributed one, the parameters of 16-bit models."""
        for each in self._each():
            _begin(each)
        nested = self._sharded(is_loading=True)
        names = [name for name, _ in self._named(nested)]
        loaded = filled(nested, in_order(names, {**self._masters(), **state_dict}))
        for at, (each, held) in enumerate(zip(self._each(), self._of_each(loaded), strict=True)):
            _put_settings(held, at, state_dict)
            _load(each, held)

    def _each(self) -> list[Any]:
        return list(getattr(self._optimizer, "chained_optimizers", [self._optimizer]))

    def _of_each(self, nested: Any) -> Iterator[Any]:
        return iter([nested] if len(self._each()) == 1 else [nested[at] for at in range(len(self._each()))])

    def _sharded(self, *, is_loading: bool) -> Any:
        # Megatron then begins the state itself, for which it has no function for SGD; `_begin` has done so
        is_loading = is_loading and all(each.init_state_fn is not None for each in self._each())
        return self._optimizer.sharded_state_dict(self._model(), is_loading, metadata=_FORM)

    def _model(self) -> dict[str, Any]:
        return {f"model{at}": chunk.sharded_state_dict() for at, chunk in enumerate(self._chunks)}

    def _named(self, nested: Any) -> list[tuple[str, torch.Tensor]]:
        found = ShardNames(self._device_type).tensors(list(sharded_leaves(nested)))
        return [(name.replace(_MAIN_OF_SHARDS, _MAIN, 1), tensor) for name, tensor in found]

    def _masters(self) -> dict[str, torch.Tensor]:
        """Return the model's 32-bit parameters, which are their own main copies, by the names of those."""
        leaves = list(sharded_leaves(self._model()))
        named = ShardNames(self._device_type).tensors(leaves)
        return {f"{_MAIN}{name}": tensor for name, tensor in named if tensor.dtype == torch.float32}


def _begin(optimizer: Any) -> None:
    """Give an optimizer the state of step 0, unless it has one. Mutates it."""
    inner = optimizer.optimizer
    if inner is None or inner.state:
        return
    if isinstance(inner, torch.optim.SGD):  # Megatron's has no dampening, so that a buffer of 0 is as none
        for group in inner.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                inner.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        return
    if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        if optimizer.init_state_fn is not None:
            optimizer.init_state_fn(inner, optimizer.config)
        return
    for group in inner.param_groups:
        for parameter in group["params"]:
            inner.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _settings(optimizer: Any, held: Any, at: int) -> dict[str, Any]:
    """Return the settings of an optimizer's groups, its step and its loss scaler, by name.

    `held` is its sharded state dict, `at` its place in its chain.
    """
    inner = held.get("optimizer", held)
    found: dict[str, Any] = {}
    for group in inner["param_groups"]:
        options = {key: value for key, value in group.items() if key not in ("params", "step")}
        found[f"group.{_identity(group)}"] = options
    found[f"step.{at}"] = _step(optimizer)
    if "grad_scaler" in held:
        found[f"grad_scaler.{at}"] = held["grad_scaler"]
    return found


def _load(optimizer: Any, held: dict[str, Any]) -> None:
    """Load a state dict. Mutates the optimizer, and takes the tensors of a distributed one out of the dict."""
    shards = held.pop("param_state", None)
    optimizer.load_state_dict(held)
    if shards is None:
        return
    states = list(optimizer.optimizer.state.values())
    steps = [state.pop("step", None) for state in states]  # Megatron looks for torch's steps among the stored tensors
    try:
        optimizer.load_parameter_state_from_fully_reshardable(shards)
    finally:
        for state, step in zip(states, steps, strict=True):
            if step is not None:
                state["step"] = step.clone()  # Megatron gives all parameters one tensor, which each would count up


def _put_settings(held: Any, at: int, state: Mapping[str, Any]) -> None:
    """Put stored settings into a state dict that an optimizer is about to load. Mutates it."""
    inner = held.get("optimizer", held)
    step = state[f"step.{at}"]
    counted = any("step" in group for group in inner["param_groups"])
    for group in inner["param_groups"]:
        group |= state[f"group.{_identity(group)}"]
        if counted:
            group["step"] = step
    if not counted and step is not None:
        inner["state"]["common_step"] = torch.tensor(float(step))
    if "grad_scaler" in held:
        held["grad_scaler"] = state[f"grad_scaler.{at}"]


def _step(optimizer: Any) -> int | None:
    """Return the number of steps that an optimizer has taken; None for one that does not count."""
    inner = optimizer.optimizer
    if inner is None:
        return None
    for state in inner.state.values():
        if "step" in state:
            return int(state["step"])
    counts = [int(group["step"]) for group in inner.param_groups if group["params"] and "step" in group]
    return max(counts, default=None)


def _identity(group: Mapping[str, Any]) -> str:
    """Return Megatron's key of a group of parameters, the same on ranks with other parameters."""
    keys = megatron_core("optimizer.optimizer").param_group_identifier_keys
    found = {key: group[key] if key in group else group.get(f"pre_{key}") for key in keys}
    return ",".join(f"{key}={value}" for key, value in found.items())
