# SPDX-License-Identifier: Apache-2.0
"""Device maps: seconds to infer one of 10,000 segments, and to build and describe an empty model of 70 billion weights.

    python tests/benchmarks/device_maps.py [rounds]

Rounds alternate; medians of CPU seconds, which other processes change little.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import accel

SEGMENTS = 10_000


def model_of(sizes: list[int]) -> accel.bigmodel.Skeleton:
    """A model of blocks of that many units of 512 bytes."""
    return accel.bigmodel.Skeleton(
        segments=tuple(
            accel.bigmodel.Segment(
                name=f"layers.{at}",
                weights=(accel.bigmodel.Weight(name=f"layers.{at}.weight", shape=(128 * size,), dtype="F32"),),
            )
            for at, size in enumerate(sizes)
        )
    )


def maps() -> dict[str, Callable[[], object]]:
    """Inferences by name: blocks of one, seven and thousands of sizes, on one GPU and on eight."""
    draw = random.Random(0)
    models = {
        "1 size": model_of([4096] * SEGMENTS),
        "7 sizes": model_of([1000 + at % 7 for at in range(SEGMENTS)]),
        "any size": model_of([draw.randint(1, 100_000) for _ in range(SEGMENTS)]),
    }
    found: dict[str, Callable[[], object]] = {}
    for name, skeleton in models.items():
        for count in (1, 8):
            limits: dict[int | str, int | None] = dict.fromkeys(range(count), skeleton.memory // (2 * count))
            limits |= {"cpu": skeleton.memory // 4, "disk": None}
            found[f"{SEGMENTS} segments of {name}, {count} GPU"] = lambda skeleton=skeleton, limits=limits: (
                accel.infer_device_map(skeleton, limits)
            )
    return found


def builds() -> dict[str, Callable[[], object]]:
    """Ways to a model of 70 billion parameters without values."""
    import transformers

    config: Any = transformers.LlamaConfig(
        num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip

    def on_meta() -> object:
        with torch.device("meta"):
            return transformers.LlamaForCausalLM(config)

    empty = accel.init_empty_weights(lambda: transformers.LlamaForCausalLM(config))
    skeleton = accel.bigmodel.describe(empty)
    return {
        "70B under torch.device('meta')": on_meta,
        "70B by init_empty_weights": lambda: accel.init_empty_weights(lambda: transformers.LlamaForCausalLM(config)),
        "70B described": lambda: accel.bigmodel.describe(empty),
        "70B inferred": lambda: accel.infer_device_map(skeleton, {0: "80GB", "cpu": "100GB", "disk": None}),
    }


def main(rounds: int) -> None:
    """Print medians."""
    work = {**maps(), **builds()}
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, run in work.items():
            began = time.process_time()
            _ = run()
            seconds[name].append(time.process_time() - began)
    for name, times in seconds.items():
        print(f"{name:44} {statistics.median(times):8.3f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
