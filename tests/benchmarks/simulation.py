# SPDX-License-Identifier: Apache-2.0
"""How many simulated runs and collectives a second, and the time of a training step on simulated ranks.

    python tests/benchmarks/simulation.py

The median of blocks of runs, and the best one. "gather" is `torch.distributed.all_gather_single` of four numbers,
beside it is `accel.gather`. Fresh runs are `simulate_groups`; the others are those of one `Simulator`, which keeps
its threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import accel
from accel.testing import Simulator, simulate_groups

ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
STEPS = 20
Collective = Callable[[dist.ProcessGroup], Callable[[], None]]


def gather(group: dist.ProcessGroup) -> Callable[[], None]:
    """Return one bare collective."""

    def run() -> None:
        mine = torch.arange(4.0)
        ALL_GATHER_SINGLE(torch.empty(4 * group.size()), mine, group=group)

    return run


def accel_gather(group: dist.ProcessGroup) -> Callable[[], None]:
    """Return one checked collective, through a context."""
    ctx = accel.from_group(group, device="cpu")

    def run() -> None:
        _ = accel.gather(ctx, torch.arange(4.0))

    return run


def once(collective: Collective) -> Callable[[dist.ProcessGroup], None]:
    """What a rank does that makes one collective."""
    return lambda group: collective(group)()


def steps(group: dist.ProcessGroup, wrap: Callable[[nn.Module], nn.Module]) -> list[float]:
    """Wrap a model and train; return the seconds until the first step's end, and of each step after it."""
    started = time.perf_counter()
    model = wrap(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer, times = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        dist.barrier(group=group)
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
    return times


def shown(seconds: list[float]) -> str:
    """How often a second, in the median block and in the best."""
    return f"{1 / statistics.median(seconds):7.1f} (best {1 / min(seconds):7.1f}) a second"


def rate(run: Callable[[], object], blocks: int, budget_s: float) -> str:
    """How often a second, in the median block and in the best, over blocks that fill the budget."""
    started = time.perf_counter()
    run()
    once = time.perf_counter() - started
    count, found = max(1, int(budget_s / blocks / max(once, 1e-6))), []
    for _ in range(blocks):
        started = time.perf_counter()
        for _ in range(count):
            run()
        found.append((time.perf_counter() - started) / count)
    return shown(found)


def starts(blocks: int, budget_s: float) -> None:
    """Starting a world and one collective in it."""
    with Simulator() as simulator:
        for size in (4, 64, 256):
            for name, fn in (("gather", once(gather)), ("accel_gather", once(accel_gather))):
                fresh = rate(lambda fn=fn, size=size: simulate_groups(fn, size), blocks, budget_s)
                kept = rate(lambda fn=fn, size=size: simulator.run_groups(fn, size), blocks, budget_s)
                print(f"  start + one {name:<12} {size:>3} ranks: fresh {fresh}, kept threads {kept}")


def default_groups(blocks: int, budget_s: float) -> None:
    """Starting a world whose ranks have default groups of their own."""
    for size in (4, 64):
        own = rate(lambda size=size: simulate_groups(once(gather), size, default_group=True), blocks, budget_s)
        print(f"  start + one gather       {size:>3} ranks with default groups: {own}")


def steady(blocks: int, budget_s: float) -> None:
    """Collectives one after another in one world, its start not counted."""
    for size in (4, 64, 256):
        for each in (gather, accel_gather):
            print(f"  steady {each.__name__:<17} {size:>3} ranks: {steady_rate(each, size, blocks, budget_s)}")


def steady_rate(collective: Collective, size: int, blocks: int, budget_s: float) -> str:
    """How many collectives a second all ranks together complete; see `rate`."""

    def rank(group: dist.ProcessGroup, count: int) -> list[float]:
        run, found = collective(group), list[float]()
        for _ in range(blocks):
            started = time.perf_counter()
            for _ in range(count):
                run()
            found.append((time.perf_counter() - started) / count)
        return found

    tried = simulate_groups(lambda group: rank(group, 2), size)[0][-1]
    count = max(1, int(budget_s / blocks / max(tried, 1e-6)))
    return shown(simulate_groups(lambda group: rank(group, count), size, timeout_s=600)[0])


def training() -> None:
    """Steps of a small MLP, all ranks together."""
    size = 4
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "DDP": lambda model: DistributedDataParallel(model),
        "FSDP2": lambda model: fully_shard(model, mesh=dist.init_device_mesh("cpu", (size,))),
    }
    for name, wrap in ways.items():
        for _ in range(2):  # the first run fills torch's caches
            times = simulate_groups(lambda group, wrap=wrap: steps(group, wrap), size, default_group=True)[0]
        first, rest = times[0], statistics.median(times[1:])
        print(
            f"  {name:<5} {size} ranks: wrap + first step {first * 1e3:6.1f} ms, each further step {rest * 1e3:5.2f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=3.0, help="seconds for each figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    starts(arguments.blocks, arguments.budget_s)
    default_groups(arguments.blocks, arguments.budget_s)
    steady(arguments.blocks, arguments.budget_s)
    training()


if __name__ == "__main__":
    main()
