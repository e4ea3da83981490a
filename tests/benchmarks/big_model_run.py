# SPDX-License-Identifier: Apache-2.0
"""Passes over blocks that stream, against max(compute, bytes / bandwidth), beside Accelerate if it is installed.

    OMP_NUM_THREADS=1 python tests/benchmarks/big_model_run.py --rounds 5 --folder DIRECTORY

Over a link of fixed speed: a source that sleeps, so that a busy processor blurs nothing. From a cold disk: safetensors
that the page cache is freed of before each pass; for Accelerate its own offloaded files. In both a block's compute is a
sleep and a touch of each page of its weights. All blocks stream, or every second one, which accel spreads evenly and
Accelerate leaves at the end. Ways take turns, pass by pass; printed are medians over the limit: of a link
max(compute, bytes / bandwidth), of a disk max(compute, the time to read the same bytes by O_DIRECT in that round).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from accel.bigmodel import DeviceMap, StoredTensor, describe
from accel.bigmodel.run import dispatch_model

BLOCKS, WIDTH, BANDWIDTH = 16, 1024, 400e6
MATRICES = 4  # of a block on the disk: 16 MiB
CHUNK, READERS = 8 << 20, 4
CPU = torch.device("cpu")

Way = Callable[[torch.Tensor], torch.Tensor]


class Sleeps(nn.Module):
    """A layer that computes for a while, and reads each page of its weights."""

    def __init__(self, seconds: float, matrices: int) -> None:
        super().__init__()
        for at in range(matrices):  # not a ParameterList, whose parameters Accelerate leaves on the meta device
            self.register_parameter(f"weight{at}", nn.Parameter(torch.rand(WIDTH, WIDTH), requires_grad=False))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        for weight in self.parameters(recurse=False):
            x = x + weight[:, 0]
        return x


class Chain(nn.Module):
    """Layers in turn."""

    def __init__(self, seconds: float, matrices: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sleeps(seconds, matrices) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Link:
    """Tensors behind a link, as a source."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.entries = {
            name: StoredTensor(shape=tuple(each.shape), dtype="F32", nbytes=each.nbytes)
            for name, each in tensors.items()
        }

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        began = time.perf_counter()
        for name, target in targets:
            target.copy_(self.tensors[name])
        nbytes = sum(target.nbytes for _, target in targets)
        time.sleep(max(0.0, nbytes / BANDWIDTH - (time.perf_counter() - began)))

    def close(self) -> None:
        """Nothing is open."""


class Linked(Mapping[str, torch.Tensor]):
    """Tensors behind a link, as Accelerate's hooks take them."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def __getitem__(self, name: str) -> torch.Tensor:
        target = torch.empty_like(self.link.tensors[name])
        self.link.read([(name, target)])
        return target

    def __iter__(self) -> Iterator[str]:
        return iter(self.link.tensors)

    def __len__(self) -> int:
        return len(self.link.tensors)


def by_accel(model: Chain, away: set[int], source: Any, opened: ExitStack, *, slots: int, prefetch: bool = True) -> Way:
    """Stream layers by accel."""
    skeleton = describe(model, blocks=Sleeps)
    names = {f"layers.{at}" for at in away}
    home = {each.name: "disk" if each.name in names else "cpu" for each in skeleton.segments}
    device_map = DeviceMap(skeleton=skeleton, home=home, runs=dict.fromkeys(home, "cpu"), slots=slots)
    return opened.enter_context(dispatch_model(model, device_map, source=source, prefetch=prefetch)).model


def by_accelerate(model: Chain, away: set[int], weights: Mapping[str, torch.Tensor]) -> Way:
    """Stream layers by the hooks of Accelerate's `cpu_offload` and `disk_offload`."""
    hooks: Any = importlib.import_module("accelerate.hooks")
    for at in away:
        hooks.attach_align_device_hook(
            model.layers[at], execution_device=CPU, offload=True, weights_map=weights, module_name=f"layers.{at}"
        )
    return model


def drop_cache(folder: Path) -> None:
    """Free the page cache of the files of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def read_alone(path: Path, nbytes: int) -> float:
    """Return the seconds to read bytes by O_DIRECT, into a buffer for each thread."""
    buffers = threading.local()
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(at: int) -> None:
        if not hasattr(buffers, "memory"):
            buffers.memory = mmap.mmap(-1, CHUNK)
        _ = os.preadv(file, [buffers.memory], at)

    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        _ = list(pool.map(read, range(0, nbytes, CHUNK)))
    os.close(file)
    return time.perf_counter() - began


def make_ways(compute: float, streamed: int, folder: Path | None, opened: ExitStack) -> dict[str, Way]:
    """Return the ways: over a link, or from a folder with the file of the weights."""
    matrices = 1 if folder is None else MATRICES
    tensors = {} if folder is not None else dict(Chain(compute, matrices).state_dict())
    source: Any = Link(tensors) if folder is None else folder / "model.safetensors"
    spread = {at * BLOCKS // streamed for at in range(streamed)}
    ways: dict[str, Way] = {
        f"accel, {slots} slots": by_accel(Chain(compute, matrices), spread, source, opened, slots=slots)
        for slots in (1, 2, 3)
    }
    ways["accel, 2 slots, no prefetch"] = by_accel(
        Chain(compute, matrices), spread, source, opened, slots=2, prefetch=False
    )
    if importlib.util.find_spec("accelerate") is not None:
        last = set(range(BLOCKS - streamed, BLOCKS))
        if folder is None:
            weights = Linked(source)
        else:
            offload: Any = importlib.import_module("accelerate.utils")
            weights = offload.OffloadedWeightsLoader(save_folder=str(folder / "offloaded"))
        ways["Accelerate"] = by_accelerate(Chain(compute, matrices), last, weights)
    return ways


def measure(
    ways: Mapping[str, Way], limit: Callable[[], float], drop: Callable[[], object], rounds: int
) -> dict[str, float]:
    """Return the median of each way's seconds over the limit. `drop` is called before a pass.

    A pass that is not timed comes first, as blocks that were fetched while others had their turn would count as free.
    """
    x, found = torch.rand(1, WIDTH), {name: list[float]() for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            least = limit()
            for _ in range(2):
                drop()
                began = time.perf_counter()
                _ = way(x)
                taken = time.perf_counter() - began
            found[name].append(taken / least)
    return {name: statistics.median(each) for name, each in found.items()}


def print_case(case: str, found: Mapping[str, float]) -> None:
    """Print a line."""
    print(f"{case:38s}" + "   ".join(f"{name} {ratio:.2f}" for name, ratio in found.items()), flush=True)


def over_a_link(rounds: int) -> None:
    """Print a line for each ratio of compute to transfer."""
    transfer = WIDTH * WIDTH * 4 / BANDWIDTH
    for streamed in (BLOCKS, BLOCKS // 2):
        for ratio in (0.25, 0.5, 1.0, 2.0):
            compute = ratio * transfer
            limit = max(BLOCKS * compute, streamed * transfer)
            with ExitStack() as opened, torch.no_grad():
                ways = make_ways(compute, streamed, None, opened)
                found = measure(ways, lambda limit=limit: limit, lambda: None, rounds)
            print_case(f"link, {streamed} of {BLOCKS}, compute {ratio:.2f}:", found)


def from_a_disk(folder: Path, rounds: int) -> None:
    """Print a line for each ratio of compute to the reading of a block, cold."""
    state = dict(Chain(0.0, MATRICES).state_dict())
    save_file(state, folder / "model.safetensors")
    if importlib.util.find_spec("accelerate") is not None:
        offload: Any = importlib.import_module("accelerate.utils")
        offload.offload_state_dict(str(folder / "offloaded"), state)
    nbytes = sum(each.nbytes for each in state.values())
    del state
    drop_cache(folder)
    alone = min(read_alone(folder / "model.safetensors", nbytes) for _ in range(3)) / BLOCKS
    for streamed in (BLOCKS, BLOCKS // 2):
        for ratio in (0.0, 1.0):
            compute = ratio * alone

            def limit(compute: float = compute, streamed: int = streamed) -> float:
                drop_cache(folder)
                return max(BLOCKS * compute, read_alone(folder / "model.safetensors", nbytes * streamed // BLOCKS))

            with ExitStack() as opened, torch.no_grad():
                found = measure(make_ways(compute, streamed, folder, opened), limit, lambda: drop_cache(folder), rounds)
            print_case(f"cold disk, {streamed} of {BLOCKS}, compute {ratio:.2f}:", found)


def main() -> None:
    """Print a line for each case: the ways' medians over the limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="a directory on the disk to measure; a temporary one if not given")
    parser.add_argument("--only", choices=["link", "disk"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only != "disk":
        over_a_link(args.rounds)
    if args.only != "link":
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            from_a_disk(Path(folder), args.rounds)


if __name__ == "__main__":
    main()
