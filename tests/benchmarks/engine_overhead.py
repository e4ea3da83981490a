# SPDX-License-Identifier: Apache-2.0
"""Time of one optimizer step under DeepSpeed against its engine used by hand.

    OMP_NUM_THREADS=1 accel launch --device cpu --nproc-per-node 2 tests/benchmarks/engine_overhead.py

Both train the same transformer blocks on the same batches with the same optimizer, clipping and stage, in blocks of
steps that alternate within one run. Printed for each stage are the median times of a step, the median over blocks of
the ratio to the engine by hand in the same round, and the least CPU time of a step, which other work on the machine
disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from typing import Any

import torch
from fsdp import TOKENS, Loop, make_batch, make_model, measure
from torch import nn

import accel

BY_HAND = "by hand"


def by_hand(ctx: accel.DistContext, stage: int, shape: tuple[int, int], steps: int) -> Loop:
    """The loop of DeepSpeed's documentation."""
    import deepspeed

    model = make_model(*shape)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": TOKENS,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 1.0,
        "steps_per_print": 2**62,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": ctx.precision.compute == "bf16"},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    inputs, targets = make_batch(ctx, shape[0])
    inputs = inputs.to(next(engine.module.parameters()).dtype)

    def loop(count: int) -> None:
        for _ in range(count * steps):
            engine.backward(nn.functional.cross_entropy(engine(inputs), targets))
            engine.step()

    return loop


def with_accel(ctx: accel.DistContext, stage: int, shape: tuple[int, int], steps: int) -> Loop:
    """The loop of the README, its batch made once."""
    under = accel.replace(ctx, deepspeed=accel.engines.deepspeed.DeepSpeed(stage=stage))
    model = make_model(*shape)
    model, optimizer = accel.prepare(under, model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    inputs, targets = make_batch(ctx, shape[0])
    inputs = inputs.to(next(model.parameters()).dtype)

    def loop(count: int) -> None:
        accum, scaler = accel.Accumulation(steps=steps), accel.loss_scale(under)
        for _ in range(count * steps):
            accum = accum.next()
            with accel.training.parts.accumulate(under, accum, model):
                with accel.autocast(under):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                accum = accel.training.parts.backward(under, loss, scaler, accum)
            if accum.sync:
                step = accel.training.parts.optimizer_step(under, optimizer, scaler, accum, max_norm=1.0)
                accum, scaler = step.accum, step.scaler

    return loop


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4], help="micro-batches of an optimizer step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--count", type=int, default=10, help="optimizer steps in a block")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, for minutes
    with accel.session(strategy="deepspeed") as ctx:
        for stage, steps in ((stage, steps) for stage in given.stages for steps in given.steps):
            arguments = (ctx, stage, (given.width, given.depth), steps)
            loops = {"accel": with_accel(*arguments), BY_HAND: by_hand(*arguments)}
            times, cpu = measure(loops, given.rounds, given.count)
            accel.print(ctx, f"ZeRO {stage}, {steps} micro-batches, {ctx.precision.name}, {ctx.world_size} ranks")
            for name, each in times.items():
                ratio = statistics.median(own / hand for own, hand in zip(each, times[BY_HAND], strict=True))
                wall = f"{statistics.median(each) * 1e3:8.2f} ms  {ratio:5.2f}x"
                accel.print(ctx, f"  {name:8} {wall}  CPU {cpu[name] * 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
