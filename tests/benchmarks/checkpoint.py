# SPDX-License-Identifier: Apache-2.0
"""Saving and loading a model with AdamW against the same bytes by hand, torch's DCP, and Accelerate when installed.

    accel launch --nproc-per-node 2 tests/benchmarks/checkpoint.py

By hand: each rank puts its share of the same tensors into a safetensors file, hashes and flushes it; or maps and copies
them back, "checked" after hashing its own. Rounds alternate between the variants. Printed is the median
over rounds of the ratio to the same work by hand in the round, and the median time of the slowest rank. "blocked" is
how long `save_state(mode="async")` keeps the training thread, as a ratio to the whole of `save_state` in the round.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import accel

BYTES_A_PARAMETER = 12  # itself and AdamW's two moments, in fp32
WIDTH = 2048


class Job:
    """A model that has taken a step, and where its checkpoints go."""

    def __init__(self, ctx: accel.DistContext, gigabytes: float, out: Path) -> None:
        torch.manual_seed(0)
        layers = max(1, round(gigabytes * 1e9 / BYTES_A_PARAMETER / WIDTH**2))
        self.ctx, self.out = ctx, out
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]).to(ctx.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def items(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> dict[str, torch.Tensor]:
        named = dict(self.model.named_parameters())
        slots = {f"{n}.{k}": v for n, p in named.items() for k, v in self.optimizer.state[p].items()}
        return {name: tensor.detach() for name, tensor in (named | slots).items()}

    def share(self) -> dict[str, torch.Tensor]:
        return dict(list(self.tensors().items())[self.ctx.rank :: self.ctx.world_size])


def save_by_hand(job: Job) -> None:
    """Each rank's share through safetensors, hashed while it is flushed as nothing forces the one to wait."""
    file = job.out / f"hand-{job.ctx.rank}.safetensors"
    save_file({name: tensor.cpu() for name, tensor in job.share().items()}, file)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        hashlib.file_digest(opened, "sha256").hexdigest()
    accel.wait_for_everyone(job.ctx)


def load_by_hand(job: Job) -> None:
    """Every rank maps all files and copies them into its tensors."""
    live = job.tensors()
    for rank in range(job.ctx.world_size):
        with safe_open(job.out / f"hand-{rank}.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118 - this is no mapping
                live[name].copy_(file.get_tensor(name))
    accel.wait_for_everyone(job.ctx)


def load_checked_by_hand(job: Job) -> None:
    """Every rank hashes the file that it wrote, then maps all and copies them."""
    with (job.out / f"hand-{job.ctx.rank}.safetensors").open("rb") as opened:
        hashlib.file_digest(opened, "sha256").hexdigest()
    accel.wait_for_everyone(job.ctx)
    load_by_hand(job)


def save_accel(job: Job) -> None:
    accel.save_state(job.ctx, job.out / "accel", job.items(), step=1)


def load_accel(job: Job) -> None:
    accel.load_state(job.ctx, job.out / "accel" / "step-00000001", job.items(), verify=False)


def load_checked_accel(job: Job) -> None:
    accel.load_state(job.ctx, job.out / "accel" / "step-00000001", job.items())


def save_dcp(job: Job) -> None:
    model, optimizer = get_state_dict(job.model, job.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=job.out / "dcp")


def load_dcp(job: Job) -> None:
    model, optimizer = get_state_dict(job.model, job.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=job.out / "dcp")


@contextlib.contextmanager
def accelerate_pair(job: Job) -> Iterator[tuple[Callable[[Job], None], Callable[[Job], None]]]:
    """Accelerate's two calls on the same objects."""
    from accelerate import Accelerator

    accelerator: Any = Accelerator(cpu=job.ctx.device.type == "cpu")
    model, optimizer = accelerator.prepare(job.model, job.optimizer)
    folder = str(job.out / "accelerate")
    yield lambda _: accelerator.save_state(folder), lambda _: accelerator.load_state(folder)
    del model, optimizer


def timed(job: Job, work: Callable[[Job], object]) -> float:
    """Seconds that the slowest rank takes."""
    accel.wait_for_everyone(job.ctx)
    start = time.perf_counter()
    work(job)
    return max(accel.gather_object(job.ctx, time.perf_counter() - start))


def blocked(job: Job) -> float:
    """Seconds that the training thread of the slowest rank is kept by an asynchronous save."""
    handles: list[accel.checkpoint.Saving] = []

    def start(job: Job) -> None:
        handles.append(accel.save_state(job.ctx, job.out / "accel", job.items(), step=2, mode="async"))

    seconds = timed(job, start)
    handles[0].result()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="leave out DCP and Accelerate")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "accel-benchmark")
    args = parser.parse_args()
    with accel.session() as ctx, contextlib.ExitStack() as stack:
        if ctx.is_main_process:
            shutil.rmtree(args.out, ignore_errors=True)
            args.out.mkdir(parents=True)
        accel.wait_for_everyone(ctx)
        job = Job(ctx, args.gigabytes, args.out)
        works = {
            "save, by hand": save_by_hand,
            "save, accel": save_accel,
            "save, accel, blocked": None,
            "load, by hand": load_by_hand,
            "load, accel": load_accel,
            "load, checked by hand": load_checked_by_hand,
            "load, checked, accel": load_checked_accel,
        }
        if not args.alone:
            works |= {"save, DCP": save_dcp, "load, DCP": load_dcp}
            if importlib.util.find_spec("accelerate"):
                works["save, Accelerate"], works["load, Accelerate"] = stack.enter_context(accelerate_pair(job))
        seconds: dict[str, list[float]] = {}
        for _ in range(args.rounds + 1):  # the first warms up
            for name, work in works.items():
                seconds.setdefault(name, []).append(timed(job, work) if work is not None else blocked(job))
        report(ctx, {name: times[1:] for name, times in seconds.items()})
        if ctx.is_main_process:
            shutil.rmtree(args.out)


def report(ctx: accel.DistContext, seconds: dict[str, list[float]]) -> None:
    """Print the medians of times and ratios on rank 0."""
    for name, times in seconds.items():
        bases = {"save, accel, blocked": "save, accel", "load, checked, accel": "load, checked by hand"}
        base = bases.get(name, f"{name.split(',')[0]}, by hand")
        ratio = statistics.median(mine / theirs for mine, theirs in zip(times, seconds[base], strict=True))
        accel.print(ctx, f"{name:24} {statistics.median(times) * 1e3:8.0f} ms  {ratio:5.2f}x of {base}")


if __name__ == "__main__":
    main()
