# SPDX-License-Identifier: Apache-2.0
"""Compiled models in two real processes, one of each kind: losses, norms and parameters beside those of an eager run,
and the graphs of each rank.

    torchrun --nproc-per-node 2 tests/benchmarks/compiled.py [--backend aot_eager] [NAME ...]

The default backend is Inductor, whose first compilation of a case takes a minute or two on two cores. A difference of
1e-10 or more, or a graph break, ends it with an error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from compiled_models import Case, traced, train
from pipelines import differences

import accel
from accel.parallel import Plan

CASES: Mapping[str, Case] = {
    "replicas": Case("dp=2", Plan(), 0),
    "shards, recomputed": Case("dp=2", Plan(), 0, "fsdp", "repeated", again=True, keep="products"),
    "tp, shared tokens and words": Case("tp=2", Plan(sequence=True, head="colwise"), 0, regions="repeated"),
    "blocks of stages": Case("pp=2", Plan(micro_batches=2), 0, regions="repeated"),
    "traced stages, recomputed": Case("pp=2", traced(), 0, again=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    given = parser.parse_args()
    counters: Any = torch._dynamo.utils.counters
    with accel.session() as ctx:
        for name in given.names or CASES:
            began = time.perf_counter()
            torch.compiler.reset()
            counters.clear()
            eager = train(ctx, CASES[name])
            off = max(differences([train(ctx, CASES[name], backend=given.backend)], eager))
            graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
            line = f"{name}: off by {off:.1e}, {graphs} graphs a rank, {breaks} breaks"
            accel.print(ctx, f"{line}, {time.perf_counter() - began:.0f} s")
            if off >= 1e-10 or breaks or not graphs:
                raise SystemExit(line)


if __name__ == "__main__":
    main()
