# SPDX-License-Identifier: Apache-2.0
"""Bytes and CPU time of a head and its loss, with logits and without.

    PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 python tests/benchmarks/head_loss.py

For each way: the peak of bytes that forward and backward allocate, the bytes held between them, and the process time of
both. `--words 128000 --rows 2048 --width 512` by default; `--no-torch` leaves torch's own function out, which is slow
on CPUs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from live_bytes import LiveBytes
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions, functional

import accel

ONE = accel.single("cpu")
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy((hidden @ weight.t()).float(), target)


def without_logits(chunk: int | None, recompute: bool) -> Loss:
    options = {"chunk_size": chunk, "recompute": recompute}
    return lambda *tensors: accel.parallel.linear_cross_entropy(ONE, *tensors, **options)


WAYS: dict[str, Loss] = {
    "logits": plain,
    "gradients in the forward": without_logits(None, recompute=False),
    "gradients in the forward, chunks of 128": without_logits(128, recompute=False),
    "logits again in the backward": without_logits(None, recompute=True),
    "torch": lambda *tensors: functional.linear_cross_entropy(*tensors, options=LinearCrossEntropyOptions()),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("words", 128_000), ("rows", 2048), ("width", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    hidden, weight = torch.randn(options.rows, options.width), torch.randn(options.words, options.width) / 22
    target = torch.randint(options.words, (options.rows,))
    for dtype in (torch.float32, torch.bfloat16):
        for name, loss_of in WAYS.items():
            if name == "torch" and options.no_torch:
                continue
            leaves = [each.detach().to(dtype).requires_grad_() for each in (hidden, weight)]
            begin = time.process_time()
            with LiveBytes() as live:
                loss = loss_of(*leaves, target)
                between = live.now
                loss.backward()
            seconds = time.process_time() - begin
            figures = f"peak {live.peak / 2**20:.0f} MiB, held {between / 2**20:.0f} MiB, {seconds:.1f} s"
            print(f"{str(dtype)[6:]} {name}: {figures}", flush=True)


if __name__ == "__main__":
    main()
