# SPDX-License-Identifier: Apache-2.0
"""Megatron-core on CPUs, for tests alone: its calls to CUDA reach the CPU, and a small GPT to train there.

Megatron asks CUDA for the current device, a generator for each stream, and dtypes by CUDA's names. Nothing of it
computes anything that a CPU cannot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class StreamsOnCpu:
    """Megatron's tracker of random streams, whose states are of the CPU's generator."""

    def __init__(self) -> None:
        self.states: dict[str, torch.Tensor] = {}

    def is_initialized(self) -> bool:
        return True

    def reset(self) -> None:
        self.states = {}

    def add(self, name: str, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.states[name] = torch.get_rng_state()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Generator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.states[name])
            try:
                yield
            finally:
                self.states[name] = torch.get_rng_state()


class CudaToCpu(TorchFunctionMode):
    """Calls that name CUDA get the CPU, and types of the CPU bear CUDA's names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            is_cuda = [isinstance(each, str | torch.device) and "cuda" in str(each) for each in args]
            args = tuple("cpu" if cuda else each for cuda, each in zip(is_cuda, args, strict=True))
        if func is torch.Tensor.type and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], args[1].replace("torch.cuda.", "torch."))
        found = func(*args, **kwargs)
        is_name = func is torch.Tensor.type and isinstance(found, str)
        return found.replace("torch.", "torch.cuda.") if is_name else found


@contextlib.contextmanager
def on_cpu() -> Generator[None]:
    """Let Megatron-core run on CPUs during the block; for processes of their own."""
    import megatron.core.tensor_parallel.random as streams

    changes: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "FloatTensor", torch.FloatTensor),
        (streams, "_CUDA_RNG_STATE_TRACKER", StreamsOnCpu()),
        (streams, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    for place, name, value in changes:
        setattr(place, name, value)
    try:
        with CudaToCpu():
            yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
