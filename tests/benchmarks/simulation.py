# SPDX-License-Identifier: Apache-2.0
"""How many simulated runs and collectives a second, and the time of a training step on simulated ranks.

    python tests/benchmarks/simulation.py
    python tests/benchmarks/simulation.py --ratios  # nothing but the ratios to a bare simulator

First ratios of least times, of runs of each kind in turn, to the start of bare ranks and one raw all-gather
(`bare_ranks.py`): by CPU time, which other work on the machine disturbs least, and by the clock. Beside them what
starting and joining so many threads takes that do nothing, as single `simulate` calls must.

Then rates: the median of blocks of runs, and the best one. "gather" is `torch.distributed.all_gather_single` of four
numbers, beside it is `accel.gather`. Fresh runs are `simulate_groups`; the others are those of one `Simulator`, which
keeps its threads.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from bare_ranks import BareRanks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import accel
from accel.testing import Simulator, simulate, simulate_groups

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


def ratios(budget_s: float) -> None:
    """Runs of one gather in ratio to the same of bare ranks, in an order drawn anew for each round."""
    order = random.Random(0)
    with Simulator() as simulator:
        for size in (4, 64, 256):
            bare = BareRanks(size)
            kinds: dict[str, Callable[[], object]] = {
                "bare ranks, raw all-gather": lambda bare=bare: bare.run(raw_gather),
                "Simulator, accel.gather": lambda size=size: simulator.run(checked_gather, size),
                "Simulator, raw all-gather": lambda size=size: simulator.run_groups(raw_gather, size),
                "simulate, accel.gather": lambda size=size: simulate(checked_gather, size),
                "threads alone": lambda size=size: idle_threads(size),
            }
            least = least_times(kinds, order, budget_s)
            cpu, wall = least["bare ranks, raw all-gather"]
            for name, (own_cpu, own_wall) in least.items():
                shown = f"CPU {own_cpu * 1e3:7.2f} ms {own_cpu / cpu:5.2f}x, wall {own_wall * 1e3:7.2f} ms"
                print(f"  {name:<26} {size:>3} ranks: {shown} {own_wall / wall:5.2f}x", flush=True)


def least_times(
    kinds: dict[str, Callable[[], object]], order: random.Random, budget_s: float
) -> dict[str, tuple[float, float]]:
    """Return the least CPU time and the least time by the clock of each kind of run, in seconds."""
    least = dict.fromkeys(kinds, (float("inf"), float("inf")))
    for run in kinds.values():
        run()
    ends = time.perf_counter() + budget_s
    while time.perf_counter() < ends:
        for name in order.sample(list(kinds), len(kinds)):
            cpu, wall = time.process_time(), time.perf_counter()
            kinds[name]()
            took = time.process_time() - cpu, time.perf_counter() - wall
            least[name] = min(least[name][0], took[0]), min(least[name][1], took[1])
    return least


def raw_gather(group: dist.ProcessGroup) -> float:
    """One all-gather of torch's."""
    out = torch.empty(4 * group.size())
    ALL_GATHER_SINGLE(out, torch.arange(4.0), group=group)
    return float(out[-1])


def checked_gather(ctx: accel.DistContext) -> torch.Tensor:
    """One gather of ours."""
    return accel.gather(ctx, torch.arange(4.0))


def idle_threads(count: int) -> None:
    """Start threads that wait until all have started, and end."""
    gate = threading.Lock()
    _ = gate.acquire()
    threads = [threading.Thread(target=lambda: gate.acquire() and gate.release(), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    gate.release()
    for thread in threads:
        thread.join()


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
    parser.add_argument("--ratios", action="store_true", help="leave the rates out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ratios(arguments.budget_s)
    if arguments.ratios:
        return
    starts(arguments.blocks, arguments.budget_s)
    default_groups(arguments.blocks, arguments.budget_s)
    steady(arguments.blocks, arguments.budget_s)
    training()


if __name__ == "__main__":
    main()
