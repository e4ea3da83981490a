# SPDX-License-Identifier: Apache-2.0
"""`Dispatched`: a model with weights in the places of a map, and its counts by segment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Final, Generic, TypeVar

import msgspec
import torch
from torch import nn

from accel.bigmodel.plan import DeviceMap
from accel.bigmodel.run._install import Fetches
from accel.bigmodel.run._slots import Block
from accel.tensors import is_absent, state_tensors, stored_values
from accel.terminal import show_seconds, show_size


class SegmentStats(msgspec.Struct, frozen=True):
    """Counts of one segment since the model was dispatched.

    Attributes:
        name: path of the segment.
        home: place of its bytes between uses.
        hits: calls that found the weights on a slot.
        waits: calls that did not.
        waited_s: seconds in which calls waited for the weights.
        moved_bytes: bytes that were brought to slots.
        fetches: whole weights fetched outside of calls of the segment, each alone, while computation waited.
        fetched_bytes: bytes of them.
        rows: rows of an embedding that were looked up in its home.
        rows_bytes: bytes of them.
    """

    name: str
    home: str
    hits: int = 0
    waits: int = 0
    waited_s: float = 0.0
    moved_bytes: int = 0
    fetches: int = 0
    fetched_bytes: int = 0
    rows: int = 0
    rows_bytes: int = 0


_COUNTS = SegmentStats.__struct_fields__[2:]


class RunStats(msgspec.Struct, frozen=True):
    """Counts of a dispatched model. `str` gives a table.

    Attributes:
        segments: counts of the segments that do not stay on their device, in the order of execution.
        slots: number of slots of each device.
        seconds: seconds since the model was dispatched.
    """

    segments: tuple[SegmentStats, ...]
    slots: int
    seconds: float

    @property
    def hits(self) -> int:
        """Calls of blocks that found the weights on a slot."""
        return sum(each.hits for each in self.segments)

    @property
    def waits(self) -> int:
        """Calls of blocks that did not."""
        return sum(each.waits for each in self.segments)

    @property
    def waited_s(self) -> float:
        """Seconds in which calls waited for weights."""
        return sum(each.waited_s for each in self.segments)

    @property
    def moved_bytes(self) -> int:
        """Bytes brought to slots."""
        return sum(each.moved_bytes for each in self.segments)

    @property
    def fetches(self) -> int:
        """Whole weights fetched outside of calls of their block."""
        return sum(each.fetches for each in self.segments)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of them."""
        return sum(each.fetched_bytes for each in self.segments)

    def since(self, earlier: RunStats) -> RunStats:
        """Return the counts since an earlier record of the same model."""
        before = {each.name: each for each in earlier.segments}
        segments = tuple(_less(each, before[each.name]) for each in self.segments)
        return RunStats(segments, self.slots, self.seconds - earlier.seconds)

    def __str__(self) -> str:
        header = (
            f"{'segment':32} {'home':5} {'hits':>7} {'waits':>7} {'waited':>9} {'moved':>10} {'alone':>10} {'rows':>8}"
        )
        counts = {name: sum(getattr(each, name) for each in self.segments) for name in _COUNTS}
        total = SegmentStats("all", "", **counts)
        lines = [header, *(_line(each) for each in self.segments), _line(total)]
        return "\n".join([*lines, *_advice(self)])


def _line(each: SegmentStats) -> str:
    name = each.name if len(each.name) <= 32 else f"...{each.name[-29:]}"
    moved = f"{show_size(each.moved_bytes):>10} {show_size(each.fetched_bytes):>10} {each.rows:8}"
    return f"{name:32} {each.home:5} {each.hits:7} {each.waits:7} {show_seconds(each.waited_s):>9} {moved}"


def _less(each: SegmentStats, before: SegmentStats) -> SegmentStats:
    counts = {name: getattr(each, name) - getattr(before, name) for name in _COUNTS}
    return SegmentStats(each.name, each.home, **counts)


def _advice(stats: RunStats) -> list[str]:
    """Return the sentences on what to change."""
    found = [f"waited {show_seconds(stats.waited_s)} of {show_seconds(stats.seconds)}"]
    if stats.seconds and stats.waited_s > 0.1 * stats.seconds:
        found.append(
            "Computation waits for weights: more memory keeps more of them, or a nearer home sends them faster."
        )
    if stats.fetches:
        worst = max(stats.segments, key=lambda each: each.fetched_bytes)
        found.append(
            f"Weights of {worst.name!r} are used outside of its calls, and fetched one by one: keep it on its device."
        )
    return found


M_co = TypeVar("M_co", bound=nn.Module, covariant=True)


class Dispatched(Generic[M_co]):
    """A model with weights in the places of a device map. Made by `dispatch_model`; use it in a `with` block.

    Attributes:
        model: the model that was given; call it, generate with it, or use its modules as before.
        device_map: the map.
    """

    def __init__(
        self,
        model: M_co,
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
        self.model: Final = model  # read-only, so `Dispatched[Net]` is a `Dispatched[nn.Module]`
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
        # An ExitStack runs the newest first: the others are put on top of this one, as one.
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

    def __enter__(self) -> Dispatched[M_co]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
