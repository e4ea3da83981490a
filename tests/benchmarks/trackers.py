# SPDX-License-Identifier: Apache-2.0
"""Cost of logging 10 scalars, every step and every 50 steps, beside Accelerate's `log` and Fabric's loggers.

    python tests/benchmarks/trackers.py

Printed are the median time of a call on the thread that trains, which logs 5 tensors and 5 numbers, and the CPU time of
a record in all threads until it is written, for a log at each step and at each 50th. Blocks of all variants alternate,
and medians are taken. Libraries that are not installed are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import accel

Log = Callable[[dict[str, Any], int], object]
SCALARS = 10


@contextlib.contextmanager
def by_accel(folder: Path, tracker: accel.trackers.Tracker) -> Iterator[Log]:
    ctx = accel.single()
    with accel.tracking(ctx, "bench", to=[tracker], dir=folder) as trackers:
        yield lambda values, step: accel.log(ctx, trackers, values, step=step)


@contextlib.contextmanager
def by_accelerate(folder: Path) -> Iterator[Log]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(folder))
    accelerator.init_trackers("bench")
    yield lambda values, step: accelerator.log(values, step=step)
    accelerator.end_training()


@contextlib.contextmanager
def by_fabric(folder: Path, kind: str) -> Iterator[Log]:
    import lightning_fabric

    logger = getattr(lightning_fabric.loggers, kind)(str(folder))
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1, loggers=logger)
    yield lambda values, step: fabric.log_dict(values, step=step)
    logger.finalize("success")


def variants() -> dict[str, Callable[[Path], Any]]:
    found: dict[str, Callable[[Path], Any]] = {
        "accel, jsonl": lambda folder: by_accel(folder, accel.trackers.jsonl()),
        "accel, csv": lambda folder: by_accel(folder, accel.trackers.csv()),
    }
    if importlib.util.find_spec("tensorboard"):
        found["accel, tensorboard"] = lambda folder: by_accel(folder, accel.trackers.tensorboard())
        if importlib.util.find_spec("accelerate"):
            found["Accelerate, tensorboard"] = by_accelerate
        if importlib.util.find_spec("lightning_fabric"):
            found["Fabric, tensorboard"] = lambda folder: by_fabric(folder, "TensorBoardLogger")
    if importlib.util.find_spec("lightning_fabric"):
        found["Fabric, csv"] = lambda folder: by_fabric(folder, "CSVLogger")
    return found


def measure(make: Callable[[], Any], folder: Path, count: int) -> tuple[float, float]:
    """Log so often; return the median seconds of a call, and the CPU seconds of a record in all threads."""
    calls: list[float] = []
    with contextlib.ExitStack() as opened:
        log: Log = opened.enter_context(make(folder))
        for step in range(3):  # imports, first files
            _ = log(scalars(step), step)
        time.sleep(0.5)
        began = time.process_time()
        for step in range(3, count + 3):
            values = scalars(step)
            start = time.perf_counter()
            _ = log(values, step)
            calls.append(time.perf_counter() - start)
        opened.close()
        return statistics.median(calls), (time.process_time() - began) / count


def scalars(step: int) -> dict[str, Any]:
    """Five tensors and five numbers."""
    values: dict[str, Any] = {f"metric {number}": torch.tensor(step / (number + 1)) for number in range(SCALARS // 2)}
    return values | {f"number {number}": step / (number + 1) for number in range(SCALARS - SCALARS // 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    _ = parser.add_argument("--blocks", type=int, default=5)
    _ = parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    took: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for at in range(options.blocks):
            for number, (label, make) in enumerate(variants().items()):
                folder = Path(name, f"{at}-{number}")
                took.setdefault(label, []).append(measure(make, folder, options.count))
    print(f"{'us':26}{'call':>8}{'CPU a step, logged each':>26}{'logged every 50th':>20}")
    for label, pairs in took.items():
        call, cpu = (statistics.median(each) * 1e6 for each in zip(*pairs, strict=True))
        print(f"{label:26}{call:8.0f}{cpu:26.0f}{cpu / 50:20.1f}", flush=True)


if __name__ == "__main__":
    main()
