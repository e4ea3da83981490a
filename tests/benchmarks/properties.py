# SPDX-License-Identifier: Apache-2.0
"""Time of property tests on simulated ranks: finding and shrinking a planted bug, and a thousand examples that pass.

    python tests/benchmarks/properties.py

The bug is "a rank skips the collective when its tensor is empty", searched for from twenty random starts; the examples
are ragged gathers on 1 to 8 ranks, of single tensors and of trees, each under a schedule of its own.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, find, given, settings, strategies as st

import accel
from accel.testing import Deadlock, Simulator, strategies as sim

EXAMPLES, STARTS = 1000, 20
ROWS = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def planted(ctx: accel.DistContext, mine: torch.Tensor) -> torch.Tensor:
    return accel.gather(ctx, mine) if len(mine) else mine


def search(simulator: Simulator, start: int) -> tuple[float, object]:
    """Return the seconds that Hypothesis takes from a random start, and the failing example that it shows."""

    def hangs(case: tuple[list[int], int | None]) -> bool:
        rows, seed = case
        try:
            _ = simulator.run(lambda ctx: planted(ctx, torch.ones(rows[ctx.rank])), len(rows), seed=seed)
        except Deadlock:
            return True
        return False

    options = settings(max_examples=EXAMPLES, deadline=None, database=None, phases=(Phase.generate, Phase.shrink))
    began = time.perf_counter()
    found = find(st.tuples(ROWS, sim.schedules()), hangs, settings=options, random=random.Random(start))
    return time.perf_counter() - began, found


def passing(simulator: Simulator, values: st.SearchStrategy[list[Any]]) -> float:
    """Return the seconds that a thousand passing examples take."""

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,), verbosity=Verbosity.quiet, derandomize=True,
    )  # fmt: skip
    @given(values=values, seed=sim.schedules())
    def gathers(values: list[Any], seed: int | None) -> None:
        nonlocal count
        count += 1
        _ = simulator.run(lambda ctx: accel.gather(ctx, values[ctx.rank]), len(values), seed=seed)

    count, began = 0, time.perf_counter()
    gathers()
    assert count >= EXAMPLES, count
    return time.perf_counter() - began


def report(name: str, measure: Callable[[], float]) -> None:
    seconds = [measure() for _ in range(3)]
    print(f"{name}: {min(seconds):.2f} to {max(seconds):.2f} s")


def main() -> None:
    with Simulator() as simulator:
        _ = search(simulator, 0)  # the first simulation of a process imports and starts things
        searches = [search(simulator, start) for start in range(STARTS)]
        seconds = [taken for taken, _ in searches]
        print(f"planted bug found and shrunk: median {statistics.median(seconds):.3f} s, most {max(seconds):.3f} s")
        print(f"shown as (rows of each rank, seed): {', '.join(sorted({str(found) for _, found in searches}))}")
        tensors = ROWS.map(lambda rows: [torch.ones(count) for count in rows])
        report(f"{EXAMPLES} ragged gathers of a tensor, 1 to 8 ranks", lambda: passing(simulator, tensors))
        report(f"{EXAMPLES} ragged gathers of a tree, 1 to 8 ranks", lambda: passing(simulator, sim.rank_trees()))


if __name__ == "__main__":
    main()
