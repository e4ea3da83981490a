# SPDX-License-Identifier: Apache-2.0
"""Time of one step of a Megatron-core program that accel feeds against the bare program.

    OMP_NUM_THREADS=1 accel launch --device cpu --nproc-per-node 2 tests/benchmarks/megatron_overhead.py --tp 2

Both run Megatron's own schedule, DDP and optimizer on the GPT of `examples/megatron_gpt.py`, on batches of one
size, in blocks of steps that alternate within one run. accel's way reads batches through its loader on the
adopted context, keeps the cursor and reduces the loss by its checked collective; the bare one has a DataLoader
of torch and an all-reduce. On a CPU, calls to CUDA go through the stand-in of the tests. Printed are the median
times of a step, the median over blocks of the ratio to the bare program in the same round, and the least CPU
time of a step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from fsdp import Loop, measure
from torch.utils.data import DataLoader

import accel

sys.path += [str(Path(__file__).parents[2] / "examples"), str(Path(__file__).parents[1] / "helpers")]
BATCH, BARE = 8, "bare"


class Program:
    """A model of Megatron's with its optimizer, which steps on a batch."""

    def __init__(self) -> None:
        import megatron_gpt
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        self.example = megatron_gpt
        self.model, self.optimizer = megatron_gpt.make(dropout=0.0, lr=1e-4, sharded=False)
        self.schedule = get_forward_backward_func()
        self.data = DataLoader(megatron_gpt.load_text(), BATCH, shuffle=True, drop_last=True)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the sum of this rank's losses and their number."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.schedule(
            forward_step_func=self.example.forward,
            data_iterator=self.example.micro_batches(batch, 2),
            model=[self.model],
            num_microbatches=2,
            seq_length=self.example.LENGTH,
            micro_batch_size=len(batch) // 2,
            forward_only=False,
        )
        _ = self.optimizer.step()
        return torch.tensor([sum(float(each["loss"]) for each in losses), float(len(losses))])


def bare(program: Program) -> Loop:
    """Megatron's program with torch's own loader."""

    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield from program.data

    batches = endless()

    def loop(count: int) -> None:
        for batch in itertools.islice(batches, count):
            dist.all_reduce(program.step(batch))

    return loop


def with_accel(ctx: accel.DistContext, program: Program) -> Loop:
    """The same on the adopted context."""
    loader = accel.prepare_loader(ctx, program.data, global_batch=BATCH)
    state: Any = accel.train_state(ctx, seed=0)

    def endless() -> Iterator[Any]:
        while True:
            yield from accel.batches(ctx, loader, state.cursor)

    batches = endless()

    def loop(count: int) -> None:
        nonlocal state
        for batch in itertools.islice(batches, count):
            _ = accel.reduce(ctx, program.step(batch.data))
            state = msgspec.structs.replace(state, cursor=batch.next)

    return loop


def main() -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron_cpu import on_cpu

    from accel.engines.megatron import megatron_mesh

    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, default=1, help="stages of layers")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--count", type=int, default=10, help="steps in a block")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with on_cpu(), accel.session(device="cpu") as ctx:
        parallel_state.initialize_model_parallel(given.tp, given.pp)
        adopted = accel.replace(ctx, mesh=megatron_mesh("cpu"))
        model_parallel_cuda_manual_seed(0)
        torch.manual_seed(0)
        loops = {"accel": with_accel(adopted, Program()), BARE: bare(Program())}
        times, cpu = measure(loops, given.rounds, given.count)
        for name, each in times.items():
            ratio = statistics.median(own / hand for own, hand in zip(each, times[BARE], strict=True))
            wall = f"{statistics.median(each) * 1e3:8.2f} ms  {ratio:5.2f}x"
            accel.print(ctx, f"{name:8} {wall}  CPU {cpu[name] * 1e3:8.2f} ms")
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
