# SPDX-License-Identifier: Apache-2.0
"""Time of one training step against hand-written DDP, and against Accelerate when it is installed.

    accel launch --nproc-per-node 2 tests/benchmarks/step_overhead.py

Every variant trains the same small MLP on the same batches in blocks that alternate within one run, so that a machine
whose speed drifts slows all of them alike. Printed is the median time of a micro-batch, and the median over blocks of
the ratio to the hand-written loop timed in the same round; then the ratio to a hand-written loop that, as accel does by
default, looks for inf and NaN before it steps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accel

Loop = Callable[[int], None]
Make = Callable[[accel.DistContext, int, int, float | None], dict[str, Loop]]
BATCH = 32
BY_HAND, CHECKED, OPENED = "torch, by hand", "torch, by hand, looks", "the open loop"


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def make_batch(ctx: accel.DistContext) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(ctx.rank)
    inputs = torch.randn(BATCH, 64, generator=generator)
    return inputs.to(ctx.device), torch.randint(10, (BATCH,), generator=generator).to(ctx.device)


def hand_written(
    ctx: accel.DistContext, width: int, steps: int, max_norm: float | None, *, looks: bool = False
) -> Loop:
    """What an expert writes with torch alone, for the context's precision."""
    model: nn.Module = make_model(width).to(ctx.device)
    if ctx.world_size > 1:
        ids = None if ctx.device.type == "cpu" else [ctx.device]
        model = DistributedDataParallel(model, device_ids=ids, process_group=ctx.comm.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = make_batch(ctx)
    half = ctx.precision.compute == "fp16"
    scaler = torch.amp.GradScaler(ctx.device.type, enabled=half)

    def loop(count: int) -> None:
        for i in range(count):
            sync = (i + 1) % steps == 0
            held = contextlib.nullcontext() if sync or ctx.world_size == 1 else model.no_sync()
            with held:
                with torch.autocast(ctx.device.type, torch.float16) if half else contextlib.nullcontext():
                    loss = nn.functional.cross_entropy(model(inputs), targets) / steps
                scaler.scale(loss).backward() if half else loss.backward()
            if sync:
                if half and max_norm is not None:
                    scaler.unscale_(optimizer)
                look_and_clip(model, max_norm, looks=looks)
                if half:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                optimizer.zero_grad()

    return loop


def look_and_clip(model: nn.Module, max_norm: float | None, *, looks: bool) -> None:
    """Raise at inf or NaN in a gradient if asked to, and clip if there is a norm to clip to."""
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm, error_if_nonfinite=looks)
    elif looks:
        nn.utils.get_total_norm([each.grad for each in model.parameters()], error_if_nonfinite=True)


def hand_written_tokens(
    ctx: accel.DistContext, width: int, steps: int, max_norm: float | None, *, looks: bool = False
) -> Loop:
    """The same where only its rank knows how many tokens a loss is a mean of: sums, a count, one division."""
    model: nn.Module = make_model(width).to(ctx.device)
    if ctx.world_size > 1:
        ids = None if ctx.device.type == "cpu" else [ctx.device]
        model = DistributedDataParallel(model, device_ids=ids, process_group=ctx.comm.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = make_batch(ctx)

    def loop(count: int) -> None:
        tokens = torch.zeros((), dtype=torch.float64, device=ctx.device)
        for i in range(count):
            sync = (i + 1) % steps == 0
            held = contextlib.nullcontext() if sync or ctx.world_size == 1 else model.no_sync()
            with held:
                nn.functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
                tokens += BATCH
            if sync:
                if ctx.world_size > 1:
                    dist.all_reduce(tokens, group=ctx.comm.group)
                torch._foreach_mul_([each.grad for each in model.parameters()], (ctx.world_size / tokens).float())
                look_and_clip(model, max_norm, looks=looks)
                optimizer.step()
                optimizer.zero_grad()
                tokens.zero_()

    return loop


def with_accel(
    ctx: accel.DistContext,
    width: int,
    steps: int,
    max_norm: float | None,
    *,
    token_weights: bool = False,
    nonfinite: Literal["raise", "ignore"] = "raise",
) -> Loop:
    """The loop of the README, its batch made once; `ignore` looks for inf and NaN as little as the hand-written one."""
    model, optimizer, batch = prepared(ctx, width)
    inputs, targets = batch.data

    def loop(count: int) -> None:
        state = accel.train_state(ctx, accumulation=steps)
        for _ in range(count):
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                with accel.autocast(ctx):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                state = accel.backward(ctx, loss, state, weight=float(BATCH) if token_weights else None)
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state, max_norm=max_norm, nonfinite=nonfinite)

    return loop


def with_train_step(ctx: accel.DistContext, width: int, steps: int, max_norm: float | None) -> Loop:
    """The same loop by `train_step`."""
    model, optimizer, batch = prepared(ctx, width)

    def loss_sum(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")

    def loop(count: int) -> None:
        state = accel.train_state(ctx, accumulation=steps)
        for _ in range(count):
            state, _ = accel.train_step(ctx, state, batch, model, optimizer, loss_sum, max_norm=max_norm)

    return loop


def with_sums(ctx: accel.DistContext, width: int, steps: int, max_norm: float | None) -> Loop:
    """The open loop of the calls in `train_step`."""
    model, optimizer, batch = prepared(ctx, width)
    inputs, targets = batch.data

    def loss_sum(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")

    def loop(count: int) -> None:
        state = accel.train_state(ctx, accumulation=steps)
        for _ in range(count):
            state = state.next(batch)
            _, state = accel.forward_backward(ctx, model, state, inputs, loss_fn=loss_sum, targets=targets)
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state, max_norm=max_norm)

    return loop


def with_parts(ctx: accel.DistContext, width: int, steps: int, max_norm: float | None) -> Loop:
    """The same loop, its accumulation and its loss scale carried apart."""
    model, optimizer, batch = prepared(ctx, width)
    inputs, targets = batch.data

    def loop(count: int) -> None:
        accum, scaler = accel.Accumulation(steps=steps), accel.loss_scale(ctx)
        for _ in range(count):
            accum = accum.next()
            with accel.training.parts.accumulate(ctx, accum, model):
                with accel.autocast(ctx):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                accum = accel.training.parts.backward(ctx, loss, scaler, accum, weight=batch.valid)
            if accum.sync:
                step = accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum, max_norm=max_norm)
                accum, scaler = step.accum, step.scaler

    return loop


def prepared(ctx: accel.DistContext, width: int) -> tuple[nn.Module, torch.optim.Optimizer, accel.Batch]:
    """A model, its optimizer, and a batch that can be taken again and again: it ends where it begins."""
    model = make_model(width)
    model, optimizer = accel.prepare(ctx, model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    dataset = torch.utils.data.TensorDataset(*(each.cpu() for each in make_batch(ctx)))
    loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(dataset, batch_size=BATCH), global_batch=BATCH)
    batch = next(iter(accel.batches(ctx, loader)))
    start = accel.Cursor()
    return (
        model,
        optimizer,
        msgspec.structs.replace(batch, data=make_batch(ctx), start=start, next=start, is_last=False),
    )


def with_accelerate(ctx: accel.DistContext, width: int, steps: int, max_norm: float | None) -> Loop:
    """The loop of Accelerate's documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=ctx.device.type == "cpu", gradient_accumulation_steps=steps)
    model = make_model(width)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    inputs, targets = make_batch(ctx)

    def loop(count: int) -> None:
        for _ in range(count):
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if max_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()

    return loop


def compare(
    ctx: accel.DistContext, variants: dict[str, Loop], blocks: int, count: int, clock: Callable[[], float]
) -> None:
    """Time the variants in alternating blocks and print their ratios to the loops by hand."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for loop in variants.values():
        loop(count)
    names = list(variants)
    for block in range(blocks):
        first = block % len(names)  # each variant begins a round as often as the others
        for name in names[first:] + names[:first]:
            accel.wait_for_everyone(ctx)
            start = clock()
            variants[name](count)
            if ctx.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append((clock() - start) / count)
    for name, own in times.items():
        ratios = [
            statistics.median(mine / theirs for mine, theirs in zip(own, times[reference], strict=True))
            for reference in (BY_HAND, CHECKED, OPENED)
            if reference in times
        ]
        told = "".join(f"   {ratio:5.2f}x" for ratio in ratios)
        accel.print(ctx, f"  {name:<22} {statistics.median(own) * 1e6:8.0f} us{told}")


def variants_of(ctx: accel.DistContext, width: int, steps: int, max_norm: float | None) -> dict[str, Loop]:
    """Every way to train by means over equal batches."""
    arguments = (ctx, width, steps, max_norm)
    variants = {BY_HAND: hand_written(*arguments), "accel": with_accel(*arguments)}
    if ctx.precision.compute == "fp16":  # which always looks; Accelerate computes in fp32 on a CPU
        return variants
    variants["accel, ignore"] = with_accel(*arguments, nonfinite="ignore")
    variants["accel, by the parts"] = with_parts(*arguments)
    variants[CHECKED] = hand_written(*arguments, looks=True)
    if importlib.util.find_spec("accelerate") is not None:
        variants["accelerate"] = with_accelerate(*arguments)
    return variants


def token_variants_of(ctx: accel.DistContext, width: int, steps: int, max_norm: float | None) -> dict[str, Loop]:
    """Ways to train by weights that only their rank knows."""
    arguments = (ctx, width, steps, max_norm)
    return {
        BY_HAND: hand_written_tokens(*arguments),
        "accel": with_accel(*arguments, token_weights=True),
        "accel, ignore": with_accel(*arguments, token_weights=True, nonfinite="ignore"),
        CHECKED: hand_written_tokens(*arguments, looks=True),
    }


def whole_variants_of(ctx: accel.DistContext, width: int, steps: int, max_norm: float | None) -> dict[str, Loop]:
    """`train_step` beside the calls that it makes."""
    arguments = (ctx, width, steps, max_norm)
    return {OPENED: with_sums(*arguments), "train_step": with_train_step(*arguments)}


def settings() -> Iterator[tuple[str, str, int, float | None, Make]]:
    """What is compared: a heading, the precision, accumulation, clipping, and what makes the loops."""
    for kind, precision, make in (
        ("fp32", "fp32", variants_of),
        ("token weights", "fp32", token_variants_of),
        ("fp16", "fp16", variants_of),
        ("train_step beside its three calls", "fp32", whole_variants_of),
    ):
        for steps in (1, 4):
            for max_norm in (None, 1.0):
                yield f"{kind}, accumulation {steps}, clipping {max_norm}", precision, steps, max_norm, make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--width", type=int, default=64, help="hidden units")
    parser.add_argument("--blocks", type=int, default=21)
    parser.add_argument("--count", type=int, default=80, help="micro-batches in a block")
    parser.add_argument("--cpu-time", action="store_true", help="what a process computes, not how long it waits")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(1)
    with accel.session() as ctx:
        for heading, precision, steps, max_norm, make in settings():
            accel.print(ctx, f"{heading}, {ctx.world_size} ranks, {ctx.device.type}")
            chosen = accel.replace(ctx, precision=precision)
            compare(ctx, make(chosen, options.width, steps, max_norm), options.blocks, options.count, clock)


if __name__ == "__main__":
    main()
