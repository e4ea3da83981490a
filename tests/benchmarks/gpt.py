# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a GPT on synthetic tokens in bf16, against hand-written DDP and Accelerate.

    accel launch --nproc-per-node 8 tests/benchmarks/gpt.py
    python tests/benchmarks/gpt.py --layers 2 --width 64 --heads 2 --vocabulary 500 --length 64 --batch 2

By default the model has the 124 million parameters of the smallest GPT-2 (Radford et al. 2019). All variants train the
same model on the same tokens in blocks that alternate within one run; printed is the median over blocks of the tokens
that all ranks took in a second, and of the ratio of its time to the hand-written loop's in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import accel

Loop = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of the model and of the run."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    length: int = 1024
    batch: int = 8
    accumulation: int = 4
    blocks: int = 7
    windows: int = 5


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a LayerNorm and added to its input."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.heads = plan.heads
        self.before, self.between = nn.LayerNorm(plan.width), nn.LayerNorm(plan.width)
        self.mix, self.join = nn.Linear(plan.width, 3 * plan.width), nn.Linear(plan.width, plan.width)
        self.feed = nn.Sequential(
            nn.Linear(plan.width, 4 * plan.width), nn.GELU(approximate="tanh"), nn.Linear(4 * plan.width, plan.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        mixed = self.mix(self.before(x)).view(rows, length, 3, self.heads, width // self.heads)
        queries, keys, values = mixed.permute(2, 0, 3, 1, 4)
        heard = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.join(heard.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed(self.between(x))


class Gpt(nn.Module):
    """A decoder whose output layer shares the weights of its embedding."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(n, plan.width) for n in (plan.vocabulary, plan.length))
        self.blocks = nn.Sequential(*(Block(plan) for _ in range(plan.layers)))
        self.norm, self.head = nn.LayerNorm(plan.width), nn.Linear(plan.width, plan.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


def make(ctx: accel.DistContext, plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Gpt(plan).to(ctx.device)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=ctx.device.type == "cuda")


def make_batch(ctx: accel.DistContext, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(ctx.rank)
    tokens = torch.randint(plan.vocabulary, (plan.batch, plan.length + 1), generator=generator).to(ctx.device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def hand_written(ctx: accel.DistContext, plan: Plan) -> Loop:
    """What an expert writes with torch alone."""
    model, optimizer = make(ctx, plan)
    if ctx.world_size > 1:
        ids = None if ctx.device.type == "cpu" else [ctx.device]
        model = DistributedDataParallel(
            model, device_ids=ids, process_group=ctx.comm.group, gradient_as_bucket_view=True
        )
    inputs, targets = make_batch(ctx, plan)

    def loop(windows: int) -> None:
        for i in range(windows * plan.accumulation):
            sync = (i + 1) % plan.accumulation == 0
            with contextlib.nullcontext() if sync or ctx.world_size == 1 else model.no_sync():
                with torch.autocast(ctx.device.type, torch.bfloat16):
                    loss = loss_of(model, inputs, targets) / plan.accumulation
                loss.backward()
            if sync:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return loop


def with_accel(ctx: accel.DistContext, plan: Plan, *, token_weights: bool = False) -> Loop:
    """The loop of the README."""
    model, optimizer = accel.prepare(ctx, *make(ctx, plan))
    inputs, targets = make_batch(ctx, plan)

    def loop(windows: int) -> None:
        accum, scaler = accel.Accumulation(steps=plan.accumulation), accel.loss_scale(ctx)
        for _ in range(windows * plan.accumulation):
            accum = accum.next()
            with accel.accumulate(ctx, accum, model):
                with accel.autocast(ctx):
                    loss = loss_of(model, inputs, targets)
                weight = (targets >= 0).sum() if token_weights else None
                accum = accel.backward(ctx, loss, scaler, accum, weight=weight)
            if accum.sync:
                step = accel.optimizer_step(ctx, optimizer, scaler, accum, max_norm=1.0)
                accum, scaler = step.accum, step.scaler

    return loop


def with_accelerate(ctx: accel.DistContext, plan: Plan) -> Loop:
    """The loop of Accelerate's documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=ctx.device.type == "cpu", mixed_precision="bf16", gradient_accumulation_steps=plan.accumulation
    )
    model, optimizer = accelerator.prepare(*make(ctx, plan))
    inputs, targets = make_batch(ctx, plan)

    def loop(windows: int) -> None:
        for _ in range(windows * plan.accumulation):
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = loss_of(model, inputs, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return loop


def seconds(ctx: accel.DistContext, loop: Loop, windows: int) -> float:
    """Time a block on all ranks together."""
    accel.wait_for_everyone(ctx)
    start = time.perf_counter()
    loop(windows)
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
    accel.wait_for_everyone(ctx)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for field in dataclasses.fields(Plan):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    plan = Plan(**vars(parser.parse_args()))
    with accel.session(precision="bf16") as ctx:
        if ctx.device.type == "cpu":
            torch.set_num_threads(1)
        variants = {"torch, by hand": hand_written(ctx, plan), "accel": with_accel(ctx, plan)}
        variants["accel, token weights"] = with_accel(ctx, plan, token_weights=True)
        if importlib.util.find_spec("accelerate") is not None:
            variants["accelerate"] = with_accelerate(ctx, plan)
        tokens = plan.windows * plan.accumulation * plan.batch * plan.length * ctx.world_size
        size = sum(parameter.numel() for parameter in Gpt(plan).parameters()) / 1e6
        accel.print(ctx, f"{size:.1f} M parameters, {tokens:,} tokens a block, {ctx.world_size} ranks, {ctx.device}")
        times: dict[str, list[float]] = {name: [] for name in variants}
        for loop in variants.values():
            loop(1)
        for block in range(plan.blocks):
            for name in list(variants) if block % 2 else list(reversed(variants)):
                times[name].append(seconds(ctx, variants[name], plan.windows))
        reference = times["torch, by hand"]
        for name, own in times.items():
            ratio = statistics.median(mine / theirs for mine, theirs in zip(own, reference, strict=True))
            accel.print(ctx, f"  {name:<22} {tokens / statistics.median(own):12,.0f} tokens/s   {ratio:5.2f}x time")


if __name__ == "__main__":
    main()
