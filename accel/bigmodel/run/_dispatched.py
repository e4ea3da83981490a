# SPDX-License-Identifier: Apache-2.0
"""`Dispatched`: a model whose weights lie where a map says, for the time of a `with` block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Generic, TypeVar

import torch
from torch import nn

from accel.bigmodel.plan import DeviceMap
from accel.bigmodel.run._origins import Fetches
from accel.bigmodel.run._slots import Block
from accel.bigmodel.run._stats import RunStats, SegmentStats
from accel.tensors import is_absent, state_tensors, stored_values

M = TypeVar("M", bound=nn.Module)


class Dispatched(Generic[M]):
    """A model whose weights lie where a device map says. Made by `dispatch_model`; use it in a `with` block.

    Attributes:
        model: the model that was given; call it, generate with it, or take it apart as ever.
        device_map: the map.
    """

    def __init__(
        self,
        model: M,
        device_map: DeviceMap,
        blocks: Mapping[str, Block],
        fetches: Mapping[str, Fetches],
        opened: ExitStack,
    ) -> None:
        """Take over what `dispatch_model` opened.

        Args:
            model: the model, as dispatched.
            device_map: the map.
            blocks: streamed blocks by segment.
            fetches: counts of fetches outside of calls, by segment.
            opened: gives the model back when it is closed.
        """
        self.model = model
        self.device_map = device_map
        self._blocks = blocks
        self._fetches = fetches
        self._opened = opened
        self._began = time.perf_counter()

    def stats(self) -> RunStats:
        """Return the counts so far. `print(run.stats())` shows a table of them."""
        found: list[SegmentStats] = []
        for name, fetches in self._fetches.items():
            block = self._blocks.get(name)
            counts = (block.hits, block.waits, block.waited_s, block.moved_bytes) if block else (0, 0, 0.0, 0)
            found.append(
                SegmentStats(
                    name,
                    self.device_map.home[name],
                    *counts,
                    fetches.fetches,
                    fetches.fetched_bytes,
                    fetches.rows,
                    fetches.rows_bytes,
                )
            )
        return RunStats(tuple(found), self.device_map.slots, time.perf_counter() - self._began)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and values of `model.state_dict()`, one CPU tensor at a time.

        Values of weights in host memory are the tensors themselves; others are read for the moment.

        Raises:
            CheckpointError: a file cannot be read.
            StreamError: the model is closed.
        """
        for name, tensor in state_tensors(self.model).items():
            if isinstance(tensor, torch.Tensor) and is_absent(tensor):
                yield name, stored_values(tensor)
            elif isinstance(tensor, torch.Tensor):
                yield name, tensor.detach().cpu()

    def call_last(self, close: Callable[[], object]) -> None:
        """Call a function at the end of `close`, such as that which closes the source.

        Args:
            close: called once, without arguments.
        """
        inner = self._opened.pop_all()
        self._opened.callback(close)
        self._opened.push(inner)

    def close(self) -> None:
        """Give the model back: hooks are removed, threads ended, files closed.

        Weights with a home in host memory are the model's again. Others stay absent, and raise where they are used.
        Idempotent.
        """
        with torch.inference_mode(False):  # or weights that move now could never train
            self._opened.close()

    def __enter__(self) -> Dispatched[M]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
