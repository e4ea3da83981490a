# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of published runs beside the estimate: within 15 %, or a miss that is on record with its reason.

No speed is fitted to a run: they are those published for H100 by shape, for the attention that the run had, and for the
memory and the power limit of its machine, where its source names them. They were chosen by the runs of `RUNS`; those of
`HELD_OUT` were looked at once, afterwards.

Memory is held against a step of fake ranks with the settings of each run, and against the published peaks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from estimates import H100
from small_llamas import llama
from spread_steps import trained
from tables import rows
from torch import nn
from torch.nn import functional

from accel.estimate import EstimatedStep, Hosts, Transformer, rank_memory, step_time
from accel.formats import PrecisionName
from accel.topology import Axes, Plan

LLAMA_8B = Transformer(layers=32, width=4096, heads=32, kv_heads=8, head_width=128, inner=14336, vocabulary=128256)
LLAMA_70B = Transformer(layers=80, width=8192, heads=64, kv_heads=8, head_width=128, inner=28672, vocabulary=128256)
# H100 with 96 GB of HBM2e, 2.4 TB/s, and a limit of 500 W; a copy at the same share of the bandwidth as on HBM3
GRAND_TETON = Hosts(efficiencies=msgspec.structs.replace(H100, bandwidth=H100.bandwidth * 2.4 / 3.35), power_w=500)
# FlashAttention-2, section 4.1: 1.3 to 1.5 times as fast as the Triton kernel forward, and twice as fast backward;
# on A100, of which the ratio is taken to be H100's. https://arxiv.org/abs/2307.08691
TRITON = Hosts(
    efficiencies=msgspec.structs.replace(
        H100,
        attention=tuple(
            msgspec.structs.replace(each, forward=each.forward / 1.4, backward=each.backward / 2)
            for each in H100.attention
        ),
    )
)


class Run(NamedTuple):
    """A published run.

    Attributes:
        tokens_per_s: of a GPU, as published.
        model: sizes.
        axes: the mesh.
        step: settings; `compiled` and fp8 as published.
        half: whether every second product is computed again, as torchtitan's policy did: the mean of both choices here.
        off: ratio of the estimate to the published figure, less one, where it is a miss; None within 15 %.
        why: reason of a miss.
    """

    tokens_per_s: float
    model: Transformer
    axes: Axes
    step: EstimatedStep
    plan: Plan = Plan()
    hosts: Hosts = Hosts()
    half: bool = False
    off: float | None = None
    why: str = ""


def titan(
    tokens_per_s: float, axes: Axes, model: Transformer = LLAMA_8B, off: float | None = None, **names: Any
) -> Run:
    """https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"""
    half = "recompute" not in names
    step = EstimatedStep(**{"tokens": 8192, "rows": 2, "compiled": True} | names)
    plan = Plan(sequence=True, head="colwise") if axes.tp > 1 else Plan()
    why = "not known; most of the time is attention"
    return Run(tokens_per_s, model, axes, step, plan, GRAND_TETON, half, off, why)


MPT_SIZES = {
    "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40),
    "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip


def mpt(row: str, off: float | None = None, why: str = "not known", precision: PrecisionName = "bf16") -> Run:
    """A row of the table, by columns: model, sequence length, GPUs, micro-batch, accumulation, checkpointing, tokens.

    https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md
    """
    name, *numbers = row.split()
    tokens, gpus, rows, batches, again, speed = map(int, numbers)
    layers, width, heads = MPT_SIZES[name]
    model = Transformer(
        layers=layers, width=width, heads=heads, kv_heads=heads, head_width=width // heads, inner=4 * width,
        vocabulary=50368, gated=False, unbiased=True, inner_kept=2, tied=True, divided_ends=False,
    )  # fmt: skip
    step = EstimatedStep(
        tokens=tokens, rows=rows, micro_batches=batches, recompute=bool(again), held=False, precision=precision
    )
    return Run(speed, model, Axes(dp=gpus), step, hosts=TRITON, off=off, why=why)


RUNS = {
    "llama 8b, 8 GPUs": titan(5762, Axes(dp=8), compiled=False),
    "llama 8b, 8 GPUs, compiled": titan(6667, Axes(dp=8)),
    "llama 8b, 8 GPUs, fp8": titan(8532, Axes(dp=8), precision="fp8"),
    "llama 8b, 128 GPUs": titan(5605, Axes(dp=128), compiled=False),
    "llama 8b, 128 GPUs, compiled": titan(6514, Axes(dp=128)),
    "llama 8b, 128 GPUs, fp8": titan(8380, Axes(dp=128), precision="fp8"),
    "llama 8b, 32768 tokens, fp8": titan(
        3890, Axes(dp=8), off=0.19, precision="fp8", tokens=32768, rows=1, recompute=True
    ),
    "llama 8b, 65536 tokens, fp8": titan(2540, Axes(dp=4, cp=2), precision="fp8", tokens=65536, rows=1, recompute=True),
    "llama 8b, 131072 tokens, fp8": titan(
        1071, Axes(dp=2, cp=4), off=0.52, precision="fp8", tokens=131072, rows=1, recompute=True
    ),
    "llama 70b, 256 GPUs, fp8": titan(829, Axes(dp=32, tp=8), LLAMA_70B, precision="fp8", rows=16, recompute=True),
    "mpt 70b, 64 GPUs": mpt("70b 2048 64 8 4 1 1039"),
    "mpt 70b, 32 GPUs": mpt("70b 2048 32 2 16 1 882"),
    "mpt 30b, 4096 tokens": mpt("30b 4096 8 1 21 1 1802"),
    "mpt 30b, 32 GPUs": mpt("30b 2048 32 14 3 1 2308"),
    "mpt 30b, 16 GPUs": mpt("30b 2048 16 10 3 1 2263"),
    "mpt 30b, 8 GPUs": mpt("30b 2048 8 3 21 1 2002"),
    "mpt 30b, 1024 tokens": mpt("30b 1024 8 6 21 1 2084"),
    "mpt 13b, 4096 tokens": mpt("13b 4096 8 10 3 1 4717"),
    "mpt 13b, 1024 tokens": mpt("13b 1024 8 40 3 1 5502"),
    "mpt 7b, 8192 tokens": mpt("7b 8192 8 8 2 1 6935"),
    "mpt 7b, 4096 tokens": mpt("7b 4096 8 16 2 1 8611"),
    "mpt 7b, 2048 tokens": mpt("7b 2048 8 6 1 0 10643"),
    "mpt 7b, 1024 tokens": mpt("7b 1024 8 64 2 1 10203"),
    "mpt 3b, 1024 tokens": mpt("3b 1024 8 20 6 0 27046"),
    "mpt 1b, 1024 tokens": mpt("1b 1024 8 18 4 0 48910"),
    "mpt 1b, 64 GPUs": mpt("1b 2048 64 20 1 0 44402"),
    "mpt 1b, 4096 tokens": mpt("1b 4096 8 7 4 0 38535"),
    "mpt 1b, 8192 tokens": mpt("1b 8192 8 3 4 0 29157"),
    "mpt 3b, 64 GPUs": mpt("3b 2048 64 6 3 0 22525"),
    "mpt 3b, 4096 tokens": mpt("3b 4096 8 5 6 0 20964"),
    "mpt 3b, 8192 tokens": mpt("3b 8192 8 3 6 0 16578"),
    "mpt 13b, 64 GPUs": mpt("13b 2048 64 2 1 0 4800"),
    "mpt 13b, 8 GPUs": mpt("13b 2048 8 2 1 0 4792"),
    "mpt 13b, 16384 tokens": mpt("13b 16384 8 3 3 1 2985"),
    "mpt 13b, 32768 tokens": mpt("13b 32768 8 1 3 1 1976"),
    "mpt 30b, 8192 tokens": mpt("30b 8192 8 1 21 1 1384", 0.20),
    "mpt 7b, 32768 tokens": mpt("7b 32768 8 2 2 1 3318"),
    "mpt 7b, 65536 tokens": mpt("7b 65536 8 1 2 1 1956"),
}


H200 = Hosts(efficiencies=msgspec.structs.replace(H100, bandwidth=H100.bandwidth * 4.8 / 3.35))
BF16 = (
    "13b 2048 32 2 1 0 4811", "13b 2048 16 2 1 0 4767", "3b 65536 8 1 2 1 3262", "3b 32768 8 3 6 1 5873",
    "3b 16384 8 1 6 0 11152", "3b 2048 32 6 3 0 23021", "3b 2048 16 10 3 0 24142", "3b 512 8 40 6 0 27965",
    "1b 65536 8 1 2 1 5506", "1b 32768 8 1 4 0 12025", "1b 16384 8 2 4 0 19649", "1b 2048 32 20 1 0 45130",
    "1b 2048 16 20 1 0 46037", "1b 2048 8 14 1 0 45455", "1b 512 8 56 4 0 52275", "760m 32768 8 1 2 0 16291",
    "760m 16384 8 3 2 0 27815", "760m 8192 8 6 2 0 41825", "760m 4096 8 12 2 0 55459", "760m 2048 32 24 1 0 67971",
    "760m 2048 16 24 1 0 68551", "760m 2048 8 24 2 0 63147", "760m 1024 8 48 2 0 78581", "760m 512 8 96 2 0 83749",
)  # fmt: skip
FP8 = (
    "3b 32768 8 3 6 1 5856", "3b 8192 8 3 6 0 19146", "3b 2048 8 10 6 0 30586", "3b 512 8 40 6 0 36527",
    "1b 32768 8 1 4 0 12580", "1b 8192 8 2 4 0 32010", "1b 512 8 56 4 0 70315",
)  # fmt: skip
HELD_OUT = {
    **{f"mpt {row}": mpt(row) for row in BF16},
    **{f"mpt {row}, fp8": mpt(row, precision="fp8") for row in FP8},
    # https://github.com/pytorch/torchtitan/blob/main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md
    "llama 70b of 2025": titan(597.3, Axes(dp=32, tp=8), LLAMA_70B, rows=16, recompute=True),
    "llama 70b of 2025, fp8": titan(809.8, Axes(dp=32, tp=8), LLAMA_70B, rows=16, recompute=True, precision="fp8"),
    "llama 8b along tp": titan(4378, Axes(dp=8, tp=8), rows=12),
    "llama 8b along tp, fp8": titan(5078.1, Axes(dp=8, tp=8), off=0.17, rows=12, precision="fp8"),
    # https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md
    "llama 8b, 32 H200": titan(10938, Axes(dp=32), precision="fp8")._replace(hosts=H200),
    "llama 8b, 64 H200": titan(10753, Axes(dp=64), precision="fp8")._replace(hosts=H200),
}


def estimated(run: Run) -> float:
    """Tokens a second of a GPU."""

    def seconds(**changes: Any) -> float:
        step = msgspec.structs.replace(run.step, **changes)
        return step_time(run.model, run.axes, step, run.plan, run.hosts).total

    took = (seconds(recompute=True) + seconds(recompute=True, keep="products")) / 2 if run.half else seconds()
    sequences = run.step.rows * run.step.micro_batches * run.axes.dp
    return sequences * run.step.tokens / took / run.axes.world_size


@rows("name", [*RUNS, *HELD_OUT])
def test_a_published_run_is_as_fast_as_estimated(name: str) -> None:
    run = (RUNS | HELD_OUT)[name]
    off = estimated(run) / run.tokens_per_s - 1
    if run.off is None:
        assert abs(off) <= 0.15
    else:  # on record, so that a change that widens or closes it is seen
        assert off == pytest.approx(run.off, abs=0.02), run.why
        assert abs(off) > 0.15


def test_bf16_is_not_as_fast_as_published_runs_in_fp8() -> None:
    assert estimated(RUNS["llama 8b, 8 GPUs, compiled"]) < RUNS["llama 8b, 8 GPUs, fp8"].tokens_per_s
    assert estimated(RUNS["llama 8b, 128 GPUs, compiled"]) < RUNS["llama 8b, 128 GPUs, fp8"].tokens_per_s


class MptBlock(nn.Module):
    """A block of MPT, whose attention keeps no matrix of weights, as its Triton kernel."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.inner
        self.heads = sizes.heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        shapes = ((width, 3 * width), (width, width), (width, inner), (inner, width))
        self.qkv, self.out, self.up, self.down = (nn.Linear(*each, bias=False) for each in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    """MPT without its biases of attention, which its kernel makes."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.wte = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(MptBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> SimpleNamespace:
        x = self.wte(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.wte.weight).float()
        return SimpleNamespace(loss=functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def kept(run: Run) -> list[EstimatedStep]:
    """The step of a run; with all products computed again and with all kept, where it chose half of them."""
    choices = [{"recompute": True}, {"recompute": True, "keep": "products"}] if run.half else [{}]
    return [msgspec.structs.replace(run.step, **each) for each in choices]


def on_fake_ranks(monkeypatch: pytest.MonkeyPatch, run: Run, step: EstimatedStep, layers: int) -> tuple[int, int]:
    """The estimate of a run's peak with so many blocks and two micro-batches at most, and the peak of a fake rank.

    More blocks are more of the same and take minutes; gradients do not wait, so later micro-batches are as the second.
    """
    sizes = msgspec.structs.replace(run.model, layers=layers)
    step = msgspec.structs.replace(step, micro_batches=min(2, step.micro_batches))
    make = llama if run.model.gated else Mpt
    peak, _, _ = trained(monkeypatch, lambda: make(sizes), run.axes, step, run.plan, run.axes.cp - 1)
    return rank_memory(sizes, run.axes, step, run.plan).total, peak


# Each model, mesh and length, with blocks that are recomputed and not, and with one micro-batch and several.
MEASURED = (
    "llama 8b, 8 GPUs", "llama 8b, 65536 tokens, fp8", "llama 70b, 256 GPUs, fp8", "mpt 70b, 32 GPUs",
    "mpt 30b, 1024 tokens", "mpt 13b, 32768 tokens", "mpt 13b, 64 GPUs", "mpt 7b, 2048 tokens", "mpt 3b, 4096 tokens",
    "mpt 1b, 8192 tokens",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_the_memory_of_a_published_run_is_that_of_a_fake_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in kept(RUNS[name]):
        estimate, peak = on_fake_ranks(monkeypatch, RUNS[name], step, 3)
        assert estimate == pytest.approx(peak, rel=0.1)


@pytest.mark.nightly
def test_so_it_is_with_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RUNS["mpt 7b, 2048 tokens"]
    estimate, peak = on_fake_ranks(monkeypatch, run, run.step, run.model.layers)
    assert estimate == pytest.approx(peak, rel=0.1)


# Peaks of what torch's allocator reserved, in GiB, of the tables of torchtitan, and the estimate of live tensors over
# them, less one.
RESERVED = {
    "llama 8b, 8 GPUs": (82.4, -0.22), "llama 8b, 8 GPUs, compiled": (77.0, -0.16),
    "llama 8b, 8 GPUs, fp8": (76.8, -0.16), "llama 8b, 128 GPUs": (67.0, -0.19),
    "llama 8b, 128 GPUs, compiled": (62.0, -0.13), "llama 8b, 128 GPUs, fp8": (61.8, -0.12),
    "llama 8b, 32768 tokens, fp8": (83.9, -0.17), "llama 8b, 65536 tokens, fp8": (84.2, -0.17),
    "llama 8b, 131072 tokens, fp8": (84.0, -0.17), "llama 70b, 256 GPUs, fp8": (71.9, -0.36),
    "llama 8b, 32 H200": (47.96, 0.17), "llama 8b, 64 H200": (46.97, 0.17),
}  # fmt: skip


def memory(run: Run) -> float:
    """GiB of the rank that needs most; the mean of both choices, where a run chose half."""
    found = [rank_memory(run.model, run.axes, step, run.plan).total for step in kept(run)]
    return sum(found) / len(found) / 2**30


@pytest.mark.parametrize("name", RESERVED)
def test_the_allocator_reserved_as_much_more_as_recorded(name: str) -> None:
    reserved, off = RESERVED[name]
    assert memory((RUNS | HELD_OUT)[name]) / reserved - 1 == pytest.approx(off, abs=0.01)


@rows("name", [name for name in RUNS | HELD_OUT if name.startswith("mpt")])
def test_runs_on_gpus_of_80_gb_fit(name: str) -> None:
    """MPT's fused loss keeps logits in bf16 alone, in the place of three times fp32."""
    run = (RUNS | HELD_OUT)[name]
    fused = 10 * run.step.rows * run.step.tokens * run.model.vocabulary / 2**30
    assert memory(run) - fused < 79.6
