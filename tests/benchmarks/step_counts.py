# SPDX-License-Identifier: Apache-2.0
"""Operations and host waits of one training step, counted by torch's profiler, against hand-written DDP.

    accel launch --nproc-per-node 2 tests/benchmarks/step_counts.py

The loops are those of step_overhead.py. Printed for each is, per optimizer step: operations that ATen ran (on CUDA:
kernels launched), and how often the host read a value from the device (`aten::_local_scalar_dense`; on CUDA the host
waits for it there, and in `cudaStreamSynchronize` and its kin). On a CPU such a read waits for nothing.
"""

from __future__ import annotations

import argparse

import torch
from step_overhead import Loop, settings
from torch.profiler import ProfilerActivity, profile

import accel

READS = ("aten::_local_scalar_dense",)
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def counts(loop: Loop, micro_batches: int, windows: int, device: str) -> dict[str, float]:
    """Return counts per optimizer step."""
    loop(micro_batches * 2)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as profiler:
        loop(micro_batches * windows)
    totals = {"operations": 0, "kernels": 0, "reads": 0, "waits": 0}
    for event in profiler.key_averages():
        totals["operations"] += event.count * event.key.startswith("aten::")
        totals["kernels"] += event.count * event.key.startswith("cudaLaunchKernel")
        totals["reads"] += event.count * (event.key in READS)
        totals["waits"] += event.count * (event.key in WAITS)
    shown = ("kernels", "reads", "waits") if device == "cuda" else ("operations", "reads")
    return {name: totals[name] / windows for name in shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--width", type=int, default=64, help="hidden units")
    parser.add_argument("--windows", type=int, default=10, help="optimizer steps that are counted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with accel.session() as ctx:
        for heading, precision, steps, max_norm, make in settings():
            accel.print(ctx, heading)
            loops = make(accel.replace(ctx, precision=precision), options.width, steps, max_norm)
            for name, loop in loops.items():
                found = counts(loop, steps, options.windows, ctx.device.type)
                told = "   ".join(f"{count:7.1f} {what}" for what, count in found.items())
                accel.print(ctx, f"  {name:<22} {told}")


if __name__ == "__main__":
    main()
