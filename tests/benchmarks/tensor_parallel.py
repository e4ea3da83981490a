# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of eight blocks that two ranks share: accel's layers against torch's styles, and transformers'.

    accel launch --nproc-per-node 2 --mesh tp=2 tests/benchmarks/tensor_parallel.py

Every variant runs the same blocks on the same input, in rounds that alternate within one run, so that a machine whose
speed drifts slows all of them alike. Printed is the median time of a pass, and the median over rounds of the ratio to
torch's own `ColwiseParallel` and `RowwiseParallel`; of accel also with messages beside products, and with tokens shared
between layers. Then a Llama of as many blocks by transformers, and by accel. On GPUs, where messages can travel while
products compute, take sizes that fill them:

    accel launch --nproc-per-node 2 --mesh tp=2 --precision bf16 tests/benchmarks/tensor_parallel.py --widths 4096
        --tokens 4096
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import accel

BLOCKS, HEADS = 8, 4
Pass = Callable[[], None]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head_dim = width // HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and a gated MLP, as in a Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


COLWISE = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
ROWWISE = ("attention.o", "mlp.down")


def blocks(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS)))


def timed_passes(ctx: accel.DistContext, model: nn.Module, x: torch.Tensor) -> Pass:
    def run() -> None:
        with accel.autocast(ctx):
            loss = model(x).sum()
        loss.backward()

    return run


def by_torch(ctx: accel.DistContext, width: int, x: torch.Tensor) -> Pass:
    model = blocks(width).to(ctx.device)
    styles = {name: ColwiseParallel() for name in COLWISE} | {name: RowwiseParallel() for name in ROWWISE}
    assert ctx.mesh is not None
    for block in model:
        parallelize_module(block, ctx.mesh["tp"], styles)
    return timed_passes(ctx, model, x)


def by_accel(
    ctx: accel.DistContext, width: int, x: torch.Tensor, *, sequence: bool = False, overlap: bool = False
) -> Pass:
    """As `tensor_plan` has it for a Llama."""
    styles: dict[str, Any] = {f"*.{name}": "colwise" for name in COLWISE}
    styles |= {f"*.{name}": "rowwise" for name in ROWWISE}
    styles |= {f"*.{name}": "copy_input" for name in ("attention", "mlp")}
    plan = accel.parallel.Plan(tensor=styles, sequence=sequence, overlap=overlap)
    return timed_passes(ctx, accel.prepare_model(ctx, blocks(width), plan=plan), x)


def llama(width: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "vocab_size": 64, "num_hidden_layers": BLOCKS}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=HEADS, use_cache=False))


def by_transformers(ctx: accel.DistContext, width: int, ids: torch.Tensor) -> Pass:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    with tempfile.TemporaryDirectory() as own:
        folder = accel.broadcast_object_list(ctx, [own])[0]
        if ctx.is_main_process:
            llama(width).save_pretrained(folder)
        accel.wait_for_everyone(ctx)
        model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=ctx.world_size))
        accel.wait_for_everyone(ctx)
    return language_passes(model.train(), ids)


def llama_by_accel(ctx: accel.DistContext, width: int, ids: torch.Tensor) -> Pass:
    return language_passes(accel.prepare_model(ctx, llama(width)), ids)


def language_passes(model: nn.Module, ids: torch.Tensor) -> Pass:
    def run() -> None:
        logits = model(input_ids=ids).logits
        functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()

    return run


def compare(ctx: accel.DistContext, variants: dict[str, Pass], rounds: int, passes: int) -> None:
    """Print median times and their ratios to the first variant, and the least CPU time."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    for at in range(rounds + 1):
        for name, run in variants.items():
            dist.barrier()
            started, busy = time.perf_counter(), time.process_time()
            for _ in range(passes):
                run()
            if ctx.device.type != "cpu":
                torch.accelerator.synchronize()
            if at:  # the first round warms up
                times[name].append((time.perf_counter() - started) / passes)
                cpu[name].append((time.process_time() - busy) / passes)
    first = next(iter(variants))
    for name, own in times.items():
        ratio = statistics.median(mine / its for mine, its in zip(own, times[first], strict=True))
        if ctx.is_main_process:
            wall = f"{statistics.median(own) * 1e3:8.2f} ms   {ratio:5.2f}x"
            print(f"  {name:24s} {wall}   CPU {min(cpu[name]) * 1e3:8.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--passes", type=int, default=4)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with accel.session() as ctx:
        for width in options.widths:
            x = torch.ones(2, options.tokens, width, device=ctx.device, requires_grad=True)
            ids = torch.arange(2 * options.tokens, device=ctx.device).view(2, -1) % 64
            if ctx.is_main_process:
                print(f"width {width}, {2 * options.tokens} tokens, {BLOCKS} blocks")
            variants = {
                "torch's styles": by_torch(ctx, width, x),
                "accel": by_accel(ctx, width, x),
                "accel, overlap": by_accel(ctx, width, x, overlap=True),
                "accel, sequence": by_accel(ctx, width, x, sequence=True),
                "accel, both": by_accel(ctx, width, x, sequence=True, overlap=True),
            }
            compare(ctx, variants, options.rounds, options.passes)
            if all(map(importlib.util.find_spec, ("transformers", "accelerate"))):  # its loading needs the latter
                variants = {
                    "Llama by transformers": by_transformers(ctx, width, ids),
                    "Llama by accel": llama_by_accel(ctx, width, ids),
                }
                compare(ctx, variants, options.rounds, options.passes)


if __name__ == "__main__":
    main()
