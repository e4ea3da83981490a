# SPDX-License-Identifier: Apache-2.0
"""Passes over blocks that stream over a link of fixed speed, against max(compute, bytes / bandwidth).

    python tests/benchmarks/big_model_run.py

The link is a source that sleeps, and a block's compute is a sleep, so that a busy processor blurs neither.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from accel.bigmodel import DeviceMap, StoredTensor, describe, dispatch_model

BLOCKS, WIDTH, BANDWIDTH, ROUNDS = 16, 1024, 400e6, 5


class Sleeps(nn.Module):
    """A layer that computes for a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH), requires_grad=False)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x + self.weight[0]


class Link:
    """Tensors behind a link."""

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


class Chain(nn.Module):
    """Layers in turn."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sleeps(seconds) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def seconds_of_a_pass(compute: float, slots: int, *, prefetch: bool) -> float:
    """Return the median seconds of a pass, after the first."""
    model = Chain(compute)
    tensors = {name: each.detach().clone() for name, each in model.state_dict().items()}
    skeleton = describe(model, blocks=Sleeps)
    home = {each.name: "disk" if each.movable else "cpu" for each in skeleton.segments}
    device_map = DeviceMap(skeleton=skeleton, home=home, runs=dict.fromkeys(home, "cpu"), slots=slots)
    x, taken = torch.rand(1, WIDTH), list[float]()
    with torch.no_grad(), dispatch_model(model, device_map, source=Link(tensors), prefetch=prefetch) as run:
        for _ in range(ROUNDS + 1):
            began = time.perf_counter()
            run.model(x)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def main() -> None:
    """Print a line for each ratio of compute to transfer."""
    transfer = WIDTH * WIDTH * 4 / BANDWIDTH
    print("compute / transfer   slots 1   slots 2   slots 3   no prefetch   (times the limit)")
    for ratio in (0.25, 1.0, 2.0):
        compute = ratio * transfer
        limit = BLOCKS * max(compute, transfer)
        found = [seconds_of_a_pass(compute, slots, prefetch=True) / limit for slots in (1, 2, 3)]
        alone = seconds_of_a_pass(compute, 2, prefetch=False) / limit
        print(f"{ratio:18.2f}   " + "   ".join(f"{each:7.2f}" for each in found) + f"   {alone:11.2f}")


if __name__ == "__main__":
    main()
