# SPDX-License-Identifier: Apache-2.0
"""The checks, run one by one and agreed on; each computes with all ranks first and judges afterwards."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import msgspec
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from accel.collectives import broadcast, gather, gather_object, pad_across_processes, reduce
from accel.context import DistContext, replace
from accel.data import order
from accel.data._batches import batches
from accel.data._loader import prepare_loader
from accel.data._progress import gather_for_metrics
from accel.devices import name_of_device, wait_for_device
from accel.items._loading import load_state
from accel.items._saving import save_state
from accel.loop_state import Cursor
from accel.precision._amp import autocast
from accel.process import any_rank, wait_for_everyone
from accel.terminal import show_seconds, show_size
from accel.training._backward import accumulate, backward
from accel.training._prepare import prepare
from accel.training._step import optimizer_step
from accel.training._train_state import train_state

_CAUSES = (
    (r"out of memory|OutOfMemory", "another program holds the memory of the GPU; `nvidia-smi` names it."),
    (r"No space left|Disk quota", "the disk of the folder is full; name another one with --folder."),
    (
        r"Permission denied|Read-only|No such file|a file is in the place",
        "the folder may not be written, or hosts do not share it; name another with --folder.",
    ),
    (r"no such backend|backend", "this build of torch lacks the backend; `accel env` lists those that it has."),
    (r"does not compute in", "the device is too old for the precision; choose another with --precision."),
    (
        r"no GPU|GPU \d+ for local rank",
        "there are fewer GPUs than ranks; start fewer, or take the CPU with --cpu.",
    ),
    (r"NCCL|nccl", "the GPUs do not reach each other; NCCL_DEBUG=INFO shows where, NCCL_P2P_DISABLE=1 avoids the bus."),
    (
        r"no kernel image|driver|CUDA error",
        "torch was built for another GPU or driver; `accel env` shows both versions.",
    ),
    (r"did not|time-out|timed out|left:", "a rank ended or hangs; the report of the launcher above names it."),
)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a check, the same on all ranks."""

    name: str  # of the check
    # "running" until it has ended; "skipped" if it could not be made.
    state: Literal["ok", "failed", "skipped", "running"]
    detail: str = ""  # observation, fault, or missing part
    cause: str = ""  # likely reason; empty unless it failed
    seconds: float = 0.0  # duration

    def __str__(self) -> str:
        if self.state == "skipped":
            return f"{'skip':6}  {self.name:11}  {self.detail}"
        if self.state != "failed":
            return f"{self.state:6}  {self.name:11}  {self.detail} ({show_seconds(self.seconds)})"
        lines = [*self.detail.splitlines(), f"likely: {self.cause}"]
        return "\n".join([f"FAILED  {self.name}", *(f"        {line}" for line in lines)])


def likely_cause(detail: str, default: str) -> str:
    """Return what is likely behind a failure: by its text, else the usual cause of such a check's failure."""
    return next((cause for pattern, cause in _CAUSES if re.search(pattern, detail)), default)


Judged = tuple[str, list[str]]  # observations, and problems of this rank

_SAMPLES, _BATCH, _SEED = 101, 4, 7  # 101 divides by nothing: the last batch is ragged, or a rank's is empty
_WIDTH = 8
_LARGE, _ROUNDS = 32_000_000, 5
_TOLERANCE = 1e-4


class Check(NamedTuple):
    """A check: its name, function and usual cause of failure, and whether it takes a folder that hosts share."""

    name: str
    run: Callable[[DistContext, Path], Judged]
    cause: str
    in_folder: bool = False


def devices(ctx: DistContext, _folder: Path) -> Judged:
    """Every rank has a separate device, and it computes in the context's precision. A collective."""
    whole = torch.arange(64 * 64).reshape(64, 64).remainder(7).sub(3)  # sums of their products are exact in any dtype
    with autocast(ctx):
        product = whole.to(ctx.device, torch.float32) @ whole.T.to(ctx.device, torch.float32)
    error = (product.cpu().double() - whole.double() @ whole.T.double()).abs().max() / (64 * 9)
    places = gather_object(ctx, (ctx.node_rank, _identity(ctx.device), name_of_device(ctx.device)))
    problems = [] if error < 0.01 else [f"a matmul is off by {float(error):.2g} on {ctx.device}"]
    twins = [at for at, place in enumerate(places) if place[:2] == places[ctx.rank][:2] and at != ctx.rank]
    if twins and ctx.device.type != "cpu":
        problems.append(f"{ctx.device} is the device of rank {twins[0]} as well")
    names = [name for _, _, name in places]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)), problems


def collectives(ctx: DistContext, _folder: Path) -> Judged:
    """Every operation gives the result of plain arithmetic on every rank. A collective."""
    rank, size = ctx.rank, ctx.world_size
    floats = (torch.float32, torch.bfloat16, torch.float16)
    mine = {str(dtype): torch.full((3,), rank + 1, dtype=dtype, device=ctx.device) for dtype in (*floats, torch.int64)}
    total = size * (size + 1) // 2
    sums = reduce(ctx, mine)
    rows = gather(ctx, torch.full((rank + 1, 2), rank, device=ctx.device))
    last = broadcast(ctx, torch.tensor([rank], device=ctx.device), src=size - 1)
    padded = pad_across_processes(ctx, torch.ones(rank + 1, device=ctx.device))
    objects = gather_object(ctx, {"rank": rank})
    found = any_rank(ctx, rank == size - 1)
    wait_for_everyone(ctx)
    right = {
        "reduce": all(_list(tensor) == [total] * 3 for tensor in sums.values()),
        "gather": _list(rows[:, 0]) == [other for other in range(size) for _ in range(other + 1)],
        "broadcast": _list(last) == [size - 1],
        "pad_across_processes": _list(padded) == [1.0] * (rank + 1) + [0.0] * (size - 1 - rank),
        "gather_object": objects == [{"rank": other} for other in range(size)],
        "any_rank": found,
    }
    return ", ".join(right), [f"{name} gives a wrong result" for name, good in right.items() if not good]


def data_order(ctx: DistContext, _folder: Path) -> Judged:
    """Each sample comes once, in the computed order, also after a stop within the epoch. A collective."""
    dataset = TensorDataset(torch.arange(_SAMPLES))
    loader = prepare_loader(ctx, DataLoader(dataset, batch_size=_BATCH, shuffle=True))
    expected = [order(_SEED, 0, _SAMPLES)[at] for at in range(_SAMPLES)]
    step = _BATCH * ctx.world_size
    whole, cursors = _steps(ctx, loader, Cursor(seed=_SEED))
    cut = len(whole) // 2
    rest, _ = _steps(ctx, loader, cursors[cut])
    problems: list[str] = []
    for at, got in enumerate(whole):
        if sorted(got) != sorted(expected[at * step : (at + 1) * step]):
            problems.append(f"step {at} has other samples than it should")
            break
    if rest != whole[cut + 1 :]:
        problems.append("after a stop within the epoch other samples follow")
    return f"{_SAMPLES} samples once each in {len(whole)} steps, resumed at step {cut + 1}", problems


def gradients(ctx: DistContext, _folder: Path) -> Judged:
    """Training on all ranks gives the parameters that one process gives on the same samples. A collective."""
    ctx = replace(ctx, precision="fp32")
    run = _Run(ctx, dropout=0.0)
    run.train(2 * run.epoch_steps)
    alone = _train_alone(ctx.device, _BATCH * ctx.world_size, epochs=2)
    mine = _flat(run.model)
    error = float((mine - alone).abs().max() / alone.abs().max())
    everyone = gather(ctx, mine.unsqueeze(0))
    problems = [] if error < _TOLERANCE else [f"parameters differ from one process's by {error:.2g}"]
    if not bool((everyone == everyone[0]).all()):
        problems.append("ranks have different parameters after the same steps")
    return f"{2 * run.epoch_steps} steps, within {error:.0e} of one process", problems


def checkpoint(ctx: DistContext, folder: Path) -> Judged:
    """A run that was saved and loaded in the middle ends with the bits of one that was not. A collective."""
    out = folder / f"accel-test-{broadcast(ctx, torch.randint(2**62, (1,), device=ctx.device)).item()}"
    try:
        straight = _Run(ctx)
        straight.train(2)
        began = time.perf_counter()
        path = save_state(ctx, out, straight.items(), step=2)
        seconds = time.perf_counter() - began
        straight.train(straight.epoch_steps)
        resumed = _Run(ctx)
        resumed.load(path)
        resumed.train(resumed.epoch_steps)
        wait_for_everyone(ctx)
    finally:
        if ctx.is_local_main_process:
            shutil.rmtree(out, ignore_errors=True)
    same = torch.equal(_flat(straight.model), _flat(resumed.model))
    problems = [] if same else ["the resumed run ends with other parameters"]
    return f"resumed with the same bits, saved in {show_seconds(seconds)} to {folder}", problems


def bandwidth(ctx: DistContext, _folder: Path) -> Judged:
    """Measure how fast the ranks sum up and answer each other. A collective."""
    large = torch.ones(_LARGE // 4, device=ctx.device)
    small = torch.ones(1, device=ctx.device)
    large_s = _seconds(ctx, large, _ROUNDS)
    small_s = _seconds(ctx, small, 20 * _ROUNDS)
    seen = f"reduce: {show_size(_LARGE / large_s)}/s of {show_size(_LARGE)}, {show_seconds(small_s)} of 4 B"
    return seen, [] if large_s > 0 else ["the clock does not move"]


CHECKS = (
    Check("devices", devices, "two ranks share a device; check CUDA_VISIBLE_DEVICES and --gpu-ids."),
    Check("collectives", collectives, "the network between the ranks damages or mixes messages; try --backend gloo."),
    Check("data order", data_order, "hosts have different versions of accel or torch; compare their `accel env`."),
    Check("gradients", gradients, "a device computes wrongly, or the hosts have different versions of torch."),
    Check("checkpoint", checkpoint, "hosts do not share the folder; name one that they do with --folder.", True),
    Check("bandwidth", bandwidth, "the ranks lose each other under load; check the network."),
)


class _Run:
    """A small training, which continues from its position."""

    def __init__(self, ctx: DistContext, dropout: float = 0.1) -> None:
        self.ctx = ctx
        model = _model(dropout).to(ctx.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.rows = DataLoader(_dataset(), batch_size=_BATCH, shuffle=True)
        self.epoch_steps = len(prepare_loader(ctx, self.rows))
        self.model, self.optimizer = prepare(ctx, model, optimizer)
        self.state = train_state(ctx, seed=_SEED, accumulation=1)

    def items(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "state": self.state}

    def load(self, path: Any) -> None:
        self.state = load_state(self.ctx, path, self.items())["state"]

    def train(self, steps: int) -> None:
        loader = prepare_loader(self.ctx, self.rows)  # a new one each time, as in a run that resumes
        while steps > 0:
            for batch in batches(self.ctx, loader, self.state):
                inputs, targets = batch.data
                state = self.state.next(batch)
                with accumulate(self.ctx, state, self.model):
                    with autocast(self.ctx):
                        loss = mse_loss(self.model(inputs).float(), targets)
                    state = backward(self.ctx, loss, state)
                self.state = optimizer_step(self.ctx, self.optimizer, state)
                steps -= 1
                if steps == 0:
                    return


def _steps(ctx: DistContext, loader: Any, cursor: Cursor) -> tuple[list[list[int]], list[Cursor]]:
    samples: list[list[int]] = []
    cursors: list[Cursor] = []
    for batch in batches(ctx, loader, cursor):
        samples.append(_list(gather_for_metrics(ctx, batch.data[0], batch)))
        cursors.append(batch.next)
    return samples, cursors


def _train_alone(device: torch.device, step: int, *, epochs: int) -> torch.Tensor:
    model = _model(0.0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = (tensor.to(device) for tensor in _dataset().tensors)
    for epoch in range(epochs):
        permutation = order(_SEED, epoch, _SAMPLES)
        for start in range(0, _SAMPLES, step):
            chosen = [permutation[at] for at in range(start, min(start + step, _SAMPLES))]
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(mse_loss(model(inputs[chosen]), targets[chosen]), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            _ = cast(Any, optimizer).step()
    return _flat(model)


def _model(dropout: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(2 * _WIDTH, 2))
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            _ = parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def _dataset() -> TensorDataset:
    inputs = torch.randn(_SAMPLES, _WIDTH, generator=torch.Generator().manual_seed(_SEED))
    return TensorDataset(inputs, inputs[:, :2].sin())


def _flat(model: nn.Module) -> torch.Tensor:
    """All parameters in one row; a collective of a model that ranks share out."""
    whole = [cast(Any, each).full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole])


def _seconds(ctx: DistContext, tensor: torch.Tensor, rounds: int) -> float:
    _ = reduce(ctx, tensor)
    wait_for_device(ctx.device)
    began = time.perf_counter()
    for _ in range(rounds):
        _ = reduce(ctx, tensor)
    wait_for_device(ctx.device)
    return (time.perf_counter() - began) / rounds


def _identity(device: torch.device) -> str:
    return str(cast(Any, torch.cuda).get_device_properties(device).uuid) if device.type == "cuda" else str(device)


def _list(tensor: torch.Tensor) -> list[Any]:
    return cast(Any, tensor).tolist()


_MOST_PROBLEMS = 4
_NO_FOLDER = "takes a folder that all hosts share; name it with --folder"


def run_checks(
    ctx: DistContext,
    folder: Path | None,
    note: Callable[[list[Outcome]], None],
    checks: Sequence[Check] = CHECKS,
) -> list[Outcome]:
    """Run checks, each to its end on all ranks; return their outcomes, the same on every rank. A collective.

    `folder` is shared by all hosts, None leaves out checks of files; `note` gets the outcomes before and after each.
    """
    outcomes: list[Outcome] = []
    for check in checks:
        if check.in_folder and folder is None:
            outcomes.append(Outcome(name=check.name, state="skipped", detail=_NO_FOLDER))
            note(outcomes)
            continue
        note([*outcomes, Outcome(name=check.name, state="running", cause=check.cause)])
        outcomes.append(_outcome(ctx, check, folder or Path()))
        note(outcomes)
    return outcomes


def _outcome(ctx: DistContext, check: Check, folder: Path) -> Outcome:
    began = time.perf_counter()
    try:
        seen, problems = check.run(ctx, folder)
        raised = None
    except Exception as error:
        seen, problems, raised = "", [f"{type(error).__name__}: {error}"], error
    try:
        found = gather_object(ctx, (seen, problems))
    except Exception as error:
        raise raised or error from error
    wrong = _by_rank([problems for _, problems in found])
    seconds = time.perf_counter() - began
    if not wrong:
        return Outcome(name=check.name, state="ok", detail=found[0][0], seconds=seconds)
    detail = "\n".join(wrong)
    return Outcome(
        name=check.name, state="failed", detail=detail, cause=likely_cause(detail, check.cause), seconds=seconds
    )


def _by_rank(found: Sequence[Sequence[str]]) -> list[str]:
    """Return each problem once, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, problems in enumerate(found):
        for problem in problems:
            ranks.setdefault(problem, []).append(rank)
    lines = [
        f"rank{'s' if len(having) > 1 else ''} {', '.join(map(str, having))}: {problem}"
        for problem, having in ranks.items()
    ]
    more = [f"and {len(lines) - _MOST_PROBLEMS} more"] if len(lines) > _MOST_PROBLEMS else []
    return lines[:_MOST_PROBLEMS] + more
