# SPDX-License-Identifier: Apache-2.0
"""Plain torch, accel, Accelerate and Fabric side by side, on two processes of a CPU, in one run.

    OMP_NUM_THREADS=1 accel launch --cpu --nproc-per-node 2 tests/benchmarks/comparison.py --write

Each library does the same job as its documentation shows it, in blocks that alternate within the run. Kept are the
median of plain torch's times, and medians and quartiles of each library's ratios to it, of the same round. `--write`
puts the figures into comparison.json beside this file and the table of them into docs/comparison.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from comparison_table import LIBRARIES, table, write
from lightning_fabric import Fabric
from step_overhead import BATCH, hand_written, make_batch, make_model, with_accel, with_accelerate
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accel

Work = Callable[[], object]
Tree = dict[str, torch.Tensor]
SAMPLES, SKIPPED = 20_000, 250  # of an epoch; batches of a rank before the resume
IMPORTS = {
    "torch": "import torch",
    "accel": "import accel; accel.session, accel.prepare, accel.optimizer_step",
    "Accelerate": "from accelerate import Accelerator",
    "Fabric": "from lightning_fabric import Fabric",
}


class Opened:
    """One process group, and what each library makes of it."""

    def __init__(self) -> None:
        self.fabric: Any = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        self.fabric.launch()
        self.ctx = accel.from_group(dist.group.WORLD, device="cpu")
        out = tempfile.mkdtemp() if self.ctx.is_main_process else ""
        self.out = Path(accel.broadcast_object_list(self.ctx, [out])[0])


def fabric_step(opened: Opened, steps: int, max_norm: float | None) -> Callable[[int], None]:
    """The loop of Fabric's documentation."""
    fabric, net = opened.fabric, make_model(64)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-4))
    inputs, targets = make_batch(opened.ctx)

    def loop(count: int) -> None:
        for i in range(count):
            sync = (i + 1) % steps == 0
            with fabric.no_backward_sync(model, enabled=not sync):
                fabric.backward(nn.functional.cross_entropy(model(inputs), targets) / steps)
            if sync:
                if max_norm is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=max_norm)
                optimizer.step()
                optimizer.zero_grad()

    return loop


def step(opened: Opened, steps: int, max_norm: float | None, count: int = 80) -> dict[str, Work]:
    """A micro-batch of a small MLP under DDP; the time of `count`."""
    arguments = (opened.ctx, 64, steps, max_norm)
    loops = {
        "torch": hand_written(*arguments),
        "accel": with_accel(*arguments),
        "Accelerate": with_accelerate(*arguments),
        "Fabric": fabric_step(opened, steps, max_norm),
    }
    return {name: lambda loop=loop: loop(count) for name, loop in loops.items()}


def gather(opened: Opened, count: int = 50) -> dict[str, Work]:
    """A tree of 20 tensors of 4 numbers; the time of `count`."""
    ctx, accelerator = opened.ctx, Accelerator(cpu=True)
    tree = {f"metric {i}": torch.full((4,), float(ctx.rank)) for i in range(20)}

    def packed() -> Tree:
        mine = torch.stack(list(tree.values()))
        parts = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(parts, mine)
        return dict(zip(tree, torch.cat(parts, dim=1).unbind(), strict=True))

    calls: dict[str, Work] = {
        "torch": packed,
        "accel": lambda: accel.gather(ctx, tree),
        "Accelerate": lambda: accelerator.gather(tree),
        "Fabric": lambda: opened.fabric.all_gather(tree),
    }
    return {name: lambda call=call: [call() for _ in range(count)] for name, call in calls.items()}


def samples() -> TensorDataset:
    """Samples that name themselves, so that a test of the order can see which came."""
    return TensorDataset(torch.randn(SAMPLES, 16), torch.arange(SAMPLES))


def plain_loader(opened: Opened) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(samples(), num_replicas=2, rank=opened.ctx.rank)
    return DataLoader(samples(), batch_size=BATCH, sampler=sampler)


def loader(opened: Opened) -> dict[str, Work]:
    """An epoch of a sharded loader."""
    ctx, ours = opened.ctx, DataLoader(samples(), batch_size=BATCH, shuffle=True)
    sharded, plain = accel.prepare_loader(ctx, ours), plain_loader(opened)
    theirs: Any = Accelerator(cpu=True).prepare(DataLoader(samples(), batch_size=BATCH, shuffle=True))
    fabrics = opened.fabric.setup_dataloaders(DataLoader(samples(), batch_size=BATCH, shuffle=True))
    return {
        "torch": lambda: exhaust(plain),
        "accel": lambda: exhaust(accel.batches(ctx, sharded, accel.Cursor())),
        "Accelerate": lambda: exhaust(theirs),
        "Fabric": lambda: exhaust(fabrics),
    }


def exhaust(batches: Iterable[object]) -> None:
    for _ in batches:
        pass


def checkpoint(opened: Opened) -> tuple[dict[str, Work], dict[str, Work]]:
    """Saves and loads of a model of 4.2 million parameters with AdamW, 50 MB."""
    ctx, out, fabric = opened.ctx, opened.out, opened.fabric
    made: dict[str, Any] = {name: trained() for name in LIBRARIES}
    accelerator: Any = Accelerator(cpu=True)
    prepared = accelerator.prepare(*made["Accelerate"])  # whom save_state saves
    kept = dict(zip(("model", "optimizer"), fabric.setup(*made["Fabric"]), strict=True))
    items = dict(zip(("model", "optimizer"), made["accel"], strict=True))
    model, optimizer = made["torch"]

    def save() -> None:
        if ctx.is_main_process:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out / "plain.pt")
        dist.barrier()

    def load() -> None:
        stored = torch.load(out / "plain.pt", weights_only=True)
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        dist.barrier()

    assert prepared
    saves: dict[str, Work] = {
        "torch": save,
        "accel": lambda: accel.save_state(ctx, out / "accel", items, step=1),
        "Accelerate": lambda: accelerator.save_state(str(out / "accelerate")),
        "Fabric": lambda: fabric.save(out / "fabric.ckpt", kept),
    }
    loads: dict[str, Work] = {
        "torch": load,
        "accel": lambda: accel.load_state(ctx, out / "accel" / "step-00000001", items),
        "Accelerate": lambda: accelerator.load_state(str(out / "accelerate")),
        "Fabric": lambda: fabric.load(out / "fabric.ckpt", kept),
    }
    return saves, loads


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
    adam = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    adam.step()
    adam.zero_grad()
    return net, adam


class Run:
    """A run of one library: `epoch(n, skip)` yields what follows after `skip` batches of epoch n."""

    def __init__(self, epoch: Callable[[int, int], Iterator[Any]], save: Work, load: Work) -> None:
        self.epoch, self.save, self.load = epoch, save, load


def torch_run(opened: Opened) -> Run:
    data = plain_loader(opened)

    def epoch(number: int, skip: int) -> Iterator[Any]:
        assert isinstance(data.sampler, DistributedSampler)
        data.sampler.set_epoch(number)
        return itertools.islice(data, skip, None)  # reads what it skips

    return Run(epoch, nothing, nothing)


def accel_run(opened: Opened) -> Run:
    ctx = opened.ctx
    data = accel.prepare_loader(ctx, DataLoader(samples(), batch_size=BATCH, shuffle=True))
    state = accel.train_state(ctx, seed=0)

    def epoch(number: int, skip: int) -> Iterator[Any]:
        start = accel.skip_first_batches(state.at(accel.Cursor(epoch=number)), skip, data)
        return (batch.data for batch in accel.batches(ctx, data, start))

    return Run(epoch, nothing, nothing)


def accelerate_run(opened: Opened, *, seedable: bool) -> Run:
    """The recipe of its guide to checkpoints: save_state, load_state, skip_first_batches."""
    set_seed(0)
    accelerator: Any = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    data: Any = accelerator.prepare(DataLoader(samples(), batch_size=BATCH, shuffle=True))
    folder = str(opened.out / f"accelerate-data-{seedable}")

    def epoch(number: int, skip: int) -> Iterator[Any]:
        if skip:
            data.set_epoch(number)
        return iter(accelerator.skip_first_batches(data, skip) if skip else data)

    return Run(epoch, lambda: accelerator.save_state(folder), lambda: accelerator.load_state(folder))


def fabric_run(opened: Opened) -> Run:
    opened.fabric.seed_everything(0)
    data = opened.fabric.setup_dataloaders(DataLoader(samples(), batch_size=BATCH, shuffle=True))
    return Run(lambda _, skip: itertools.islice(iter(data), skip, None), nothing, nothing)


def nothing() -> None:
    """Torch, accel and Fabric carry the position by two numbers that the script saves with the rest."""


RUNS: dict[str, Callable[[Opened], Run]] = {
    "torch": torch_run,
    "accel": accel_run,
    "Accelerate": lambda opened: accelerate_run(opened, seedable=False),
    "Accelerate, seedable sampler": lambda opened: accelerate_run(opened, seedable=True),
    "Fabric": fabric_run,
}


def follows(opened: Opened, make: Callable[[Opened], Run]) -> str:
    """Whether a run stopped in the second epoch and made anew reads what the run would have read."""
    run = make(opened)
    exhaust(run.epoch(0, 0))
    second = run.epoch(1, 0)
    exhaust(itertools.islice(second, SKIPPED))
    run.save()
    expected = numbers(second)
    again = make(opened)
    again.load()
    found = numbers(again.epoch(1, SKIPPED))
    return "the same samples" if all(accel.gather_object(opened.ctx, found == expected)) else "other samples"


def numbers(batches: Iterator[Any]) -> list[int]:
    return [int(number) for _, ids in batches for number in ids]


def resume(opened: Opened) -> dict[str, Work]:
    """Time until the first batch after SKIPPED others."""
    made = {name: RUNS[name](opened) for name in LIBRARIES}
    return {name: lambda run=run: next(run.epoch(1, SKIPPED)) for name, run in made.items()}


def rounds(opened: Opened, works: dict[str, Work], blocks: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank for each library, in blocks that take turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for block in range(blocks + 1):  # the first warms up
        first = block % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            start = time.perf_counter()
            works[name]()
            times[name].append(max(accel.gather_object(opened.ctx, time.perf_counter() - start)))
    return {name: own[1:] for name, own in times.items()}


def imports(blocks: int) -> dict[str, list[float]]:
    """Seconds of a new interpreter that imports a library and the names that a script begins with."""
    times: dict[str, list[float]] = {name: [] for name in LIBRARIES}
    for _ in range(blocks):
        for name in LIBRARIES:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", IMPORTS[name]], check=True)
            times[name].append(time.perf_counter() - start)
    return times


def summary(times: dict[str, list[float]], count: int = 1) -> dict[str, list[float]]:
    """The median of torch's times for one of `count`; quartiles of the others' ratios to it, of the same round."""
    found = {"torch": [statistics.median(times["torch"]) / count]}
    for name in LIBRARIES[1:]:
        ratios = [mine / theirs for mine, theirs in zip(times[name], times["torch"], strict=True)]
        found[name] = statistics.quantiles(ratios, n=4)
    return found


def measure(opened: Opened, blocks: int) -> dict[str, Any]:
    """All figures, on every rank."""
    rows: dict[str, Any] = {}
    for steps, max_norm in itertools.product((1, 4), (None, 1.0)):
        name = f"step, accumulation {steps}{', clipping' if max_norm else ''}"
        rows[name] = summary(rounds(opened, step(opened, steps, max_norm), blocks), 80)
    rows["gather of 20 tensors"] = summary(rounds(opened, gather(opened), blocks), 50)
    rows["a batch of a sharded loader"] = summary(rounds(opened, loader(opened), blocks), SAMPLES // BATCH // 2)
    saves, loads = checkpoint(opened)
    rows["save of 50 MB"] = summary(rounds(opened, saves, blocks))
    rows["load of 50 MB"] = summary(rounds(opened, loads, blocks))
    rows[f"first batch after {SKIPPED} others"] = summary(rounds(opened, resume(opened), blocks))
    dist.barrier()
    if opened.ctx.is_main_process:
        rows["import"] = summary(imports(blocks))
    dist.barrier()
    after = {name: follows(opened, make) for name, make in RUNS.items()}
    return {"versions": versions(), "rounds": blocks, "rows": rows, "resume": after}


def versions() -> dict[str, str]:
    packages = {"torch": "torch", "Accelerate": "accelerate", "Fabric": "lightning-fabric"}
    return {"Python": platform.python_version()} | {name: version(package) for name, package in packages.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=21)
    parser.add_argument("--write", action="store_true", help="keep the figures and write them into the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    opened = Opened()
    load = os.getloadavg()[0]
    figures = {"load": load} | measure(opened, options.blocks)
    if opened.ctx.is_main_process:
        print(table(figures))
        shutil.rmtree(opened.out, ignore_errors=True)
        if options.write:
            write(figures)
    accel.close(opened.ctx)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
