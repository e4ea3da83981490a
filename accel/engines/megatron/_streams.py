# SPDX-License-Identifier: Apache-2.0
"""Megatron's named random streams, from which dropout draws within tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec
import torch

from accel.engines.megatron._context import initialized_state, megatron_core


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
        """Put the streams where they stood; those of another layout stay as they are. Mutates Megatron's tracker."""
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
