# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of published runs beside the estimate: within 15 %, or a miss that is on record with its reason.

No speed is fitted to these runs: they are those published for H100 by shape, and the memory's of the machine, where its
source names it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest

from accel.estimate import EstimatedStep, Hosts, Transformer, step_time
from accel.estimate._efficiencies import H100
from accel.topology import Axes, Plan

LLAMA_8B = Transformer(layers=32, width=4096, heads=32, kv_heads=8, head_width=128, inner=14336, vocabulary=128256)
LLAMA_70B = Transformer(layers=80, width=8192, heads=64, kv_heads=8, head_width=128, inner=28672, vocabulary=128256)
# H100 of 96 GB of HBM2e with 2.4 TB/s and a limit of 500 W; the table is for HBM3 and 700 W.
GRAND_TETON = Hosts(efficiencies=msgspec.structs.replace(H100, bandwidth=2.4e12))


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
    plan = Plan(sequence=axes.tp > 1)
    why = "a limit of 500 W, which slows fp8 most" if axes.cp == 1 else "a ring of 2024, slower than its attention"
    return Run(tokens_per_s, model, axes, step, plan, GRAND_TETON, half, off, why)


MPT_SIZES = {
    "1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}  # fmt: skip
LONG = "Triton attention of 2023 without a speed by shape that is published"
SMALL = "small micro-batches of FSDP1, whose messages are not all hidden"


def mpt(row: str, off: float | None = None, why: str = LONG) -> Run:
    """A row of the table, by columns: model, sequence length, GPUs, micro-batch, accumulation, checkpointing, tokens.

    https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md
    """
    name, *numbers = row.split()
    tokens, gpus, rows, batches, again, speed = map(int, numbers)
    layers, width, heads = MPT_SIZES[name]
    model = Transformer(
        layers=layers, width=width, heads=heads, kv_heads=heads, head_width=width // heads, inner=4 * width,
        vocabulary=50368, gated=False, tied=True, divided_ends=False,
    )  # fmt: skip
    step = EstimatedStep(tokens=tokens, rows=rows, micro_batches=batches, recompute=bool(again), held=False)
    return Run(speed, model, Axes(dp=gpus), step, off=off, why=why)


RUNS = {
    "llama 8b, 8 GPUs": titan(5762, Axes(dp=8), compiled=False),
    "llama 8b, 8 GPUs, compiled": titan(6667, Axes(dp=8)),
    "llama 8b, 8 GPUs, fp8": titan(8532, Axes(dp=8), off=0.21, precision="fp8"),
    "llama 8b, 128 GPUs": titan(5605, Axes(dp=128), compiled=False),
    "llama 8b, 128 GPUs, compiled": titan(6514, Axes(dp=128), off=0.17),
    "llama 8b, 128 GPUs, fp8": titan(8380, Axes(dp=128), off=0.25, precision="fp8"),
    "llama 8b, 32768 tokens, fp8": titan(
        3890, Axes(dp=8), off=0.34, precision="fp8", tokens=32768, rows=1, recompute=True
    ),
    "llama 8b, 65536 tokens, fp8": titan(
        2540, Axes(dp=4, cp=2), off=0.27, precision="fp8", tokens=65536, rows=1, recompute=True
    ),
    "llama 8b, 131072 tokens, fp8": titan(
        1071, Axes(dp=2, cp=4), off=0.70, precision="fp8", tokens=131072, rows=1, recompute=True
    ),
    "llama 70b, 256 GPUs, fp8": titan(
        829, Axes(dp=32, tp=8), LLAMA_70B, off=0.20, precision="fp8", rows=16, recompute=True
    ),
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
    "mpt 1b, 64 GPUs": mpt("1b 2048 64 20 1 0 44402", 0.17),
    "mpt 1b, 4096 tokens": mpt("1b 4096 8 7 4 0 38535", 0.23),
    "mpt 1b, 8192 tokens": mpt("1b 8192 8 3 4 0 29157", 0.35),
    "mpt 3b, 64 GPUs": mpt("3b 2048 64 6 3 0 22525", 0.23),
    "mpt 3b, 4096 tokens": mpt("3b 4096 8 5 6 0 20964", 0.21),
    "mpt 3b, 8192 tokens": mpt("3b 8192 8 3 6 0 16578", 0.30),
    "mpt 13b, 64 GPUs": mpt("13b 2048 64 2 1 0 4800", 0.23, SMALL),
    "mpt 13b, 8 GPUs": mpt("13b 2048 8 2 1 0 4792", 0.19, SMALL),
    "mpt 13b, 16384 tokens": mpt("13b 16384 8 3 3 1 2985", 0.16),
    "mpt 13b, 32768 tokens": mpt("13b 32768 8 1 3 1 1976", 0.33),
    "mpt 30b, 8192 tokens": mpt("30b 8192 8 1 21 1 1384", 0.33),
    "mpt 7b, 32768 tokens": mpt("7b 32768 8 2 2 1 3318", 0.36),
    "mpt 7b, 65536 tokens": mpt("7b 65536 8 1 2 1 1956", 0.50),
}


def estimated(run: Run) -> float:
    """Tokens a second of a GPU."""

    def seconds(**changes: Any) -> float:
        step = msgspec.structs.replace(run.step, **changes)
        return step_time(run.model, run.axes, step, run.plan, run.hosts).total

    took = (seconds(recompute=True) + seconds(recompute=True, keep="products")) / 2 if run.half else seconds()
    sequences = run.step.rows * run.step.micro_batches * run.axes.dp
    return sequences * run.step.tokens / took / run.axes.world_size


@pytest.mark.parametrize("name", RUNS)
def test_a_published_run_is_as_fast_as_estimated(name: str) -> None:
    run = RUNS[name]
    off = estimated(run) / run.tokens_per_s - 1
    if run.off is None:
        assert abs(off) <= 0.15
    else:  # on record, so that a change that widens or closes it is seen
        assert off == pytest.approx(run.off, abs=0.02), run.why
        assert abs(off) > 0.15


def test_bf16_is_not_as_fast_as_published_runs_in_fp8() -> None:
    assert estimated(RUNS["llama 8b, 8 GPUs, compiled"]) < RUNS["llama 8b, 8 GPUs, fp8"].tokens_per_s
    assert estimated(RUNS["llama 8b, 128 GPUs, compiled"]) < RUNS["llama 8b, 128 GPUs, fp8"].tokens_per_s
