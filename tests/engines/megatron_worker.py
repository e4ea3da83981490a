# SPDX-License-Identifier: Apache-2.0
"""A rank of the tests with Megatron-core: `megatron_worker.py PART FOLDER LAYOUT`."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from megatron_cpu import on_cpu

import accel
from accel.engines.megatron import from_megatron

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_gpt.py"
STEPS, MICRO_BATCHES = 3, 2  # a killed run checkpoints all steps but the last
SMALL = ["--batch", "8", "--micro-batches", str(MICRO_BATCHES), "--save-every", "1", "--dropout", "0.1"]
LAYOUTS = {"tp": ["--tp", "2"], "pp": ["--pp", "2"], "dp": ["--distributed-optimizer"]}


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("megatron_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(ctx: accel.DistContext, example: ModuleType, *words: str) -> None:
    """Train in a layout, and leave it."""
    example.main(ctx, example.arguments([*SMALL, *words]))
    example.parallel_state.destroy_model_parallel()


def die_in_last_step(ctx: accel.DistContext, example: ModuleType) -> None:
    """Let rank 1 die with the gradients of the step's first half, and the checkpoints of the steps before."""
    whole, calls = example.forward, itertools.count(1)

    def forward(parts: Iterator[torch.Tensor], model: Any) -> Any:
        if ctx.rank == 1 and next(calls) == STEPS * MICRO_BATCHES:
            os._exit(9)
        return whole(parts, model)

    example.forward = forward


def run_sgd(ctx: accel.DistContext, example: ModuleType, folder: Path) -> None:
    """Train with momentum, at once and in two runs."""
    adam = example.OptimizerConfig
    example.OptimizerConfig = lambda **given: adam(**{**given, "optimizer": "sgd"})
    for out, steps in (("sgd-whole", STEPS), ("sgd", 1), ("sgd", STEPS)):
        run(ctx, example, "--out", str(folder / out), "--steps", str(steps))


def main(part: str, folder: Path, name: str) -> None:
    example = load_example()
    torch.use_deterministic_algorithms(True)
    with on_cpu(), accel.session() as ctx:
        if part == "killed":
            die_in_last_step(ctx, example)
        if part in ("killed", "resumed"):
            run(ctx, example, *LAYOUTS[name], "--out", str(folder / name), "--steps", str(STEPS))
        if part == "resumed":
            run(ctx, example, *LAYOUTS[name], "--out", str(folder / f"{name}-whole"), "--steps", str(STEPS))
        if part == "sgd":
            run_sgd(ctx, example, folder)
        for at in {"resumed": ["pp", "dp"], "one": ["one"]}.get(part, []):
            relay(ctx, example, folder, name, at)


def relay(ctx: accel.DistContext, example: ModuleType, folder: Path, name: str, at: str) -> None:
    """Load what a layout saved in another one, and save it again."""
    given = example.arguments([*SMALL, *LAYOUTS.get(at, []), "--steps", "0"])
    ctx, model, optimizer = example.main(ctx, given)
    adopted = from_megatron()
    assert (adopted.world_size, adopted.data_parallel) == (ctx.world_size, ctx.data_parallel)
    items = example.megatron_items(adopted, model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)  # nothing that a load forgets looks like a weight
    state = accel.resume(ctx, folder / name, items, accel.train_state(ctx, seed=0))
    accel.save_state(ctx, folder / f"{name}-at-{at}", {**items, "state": state}, step=STEPS)
    example.parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
