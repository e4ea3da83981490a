# SPDX-License-Identifier: Apache-2.0
"""What only a CUDA device shows: `pytest -m gpu`."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PRECISIONS = ["fp32", "bf16", "fp16"]


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(301, 64, generator=generator)
    return TensorDataset(inputs, inputs[:, :10].argmax(1))


def train(ctx: accel.DistContext, out: str, epochs: int) -> tuple[list[torch.Tensor], float]:
    """Train with dropout, so that the device's random stream matters; return parameters and the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_data(), batch_size=32, shuffle=True, pin_memory=True)
    model, optimizer, loader = accel.prepare(ctx, model, optimizer, loader)
    cursor, accum, scaler = accel.Cursor(seed=0), accel.Accumulation(steps=2), accel.loss_scale(ctx)
    loss = torch.zeros(())

    def items() -> dict[str, object]:
        return {"model": model, "optimizer": optimizer, "cursor": cursor, "accum": accum, "scaler": scaler}

    if found := accel.latest_checkpoint(out):
        loaded = accel.load_state(ctx, found, items())
        cursor, accum, scaler = loaded["cursor"], loaded["accum"], loaded["scaler"]
    while cursor.epoch < epochs:
        for batch in accel.batches(ctx, loader, cursor):
            inputs, targets = batch.data
            assert inputs.device == ctx.device
            accum = accum.next(last=batch.is_last)
            with accel.training.parts.accumulate(ctx, accum, model):
                with accel.autocast(ctx):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                accum = accel.training.parts.backward(ctx, loss, scaler, accum, weight=batch.valid)
            if accum.sync:
                step = accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum, max_norm=1.0)
                accum, scaler = step.accum, step.scaler
            cursor = batch.next
        _ = accel.save_state(ctx, out, items(), step=cursor.epoch, keep=2)
    return [parameter.detach().clone() for parameter in model.parameters()], loss.item()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_learns_and_resumes_to_the_same_bits(tmp_path: Path, precision: str) -> None:
    ctx = accel.single("cuda", precision=precision)  # type: ignore[arg-type]
    assert ctx.device == torch.device("cuda", 0)
    straight, loss = train(ctx, str(tmp_path / "straight"), 6)
    assert loss < math.log(10) / 2
    _ = train(ctx, str(tmp_path / "stopped"), 3)
    resumed, _ = train(ctx, str(tmp_path / "stopped"), 6)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_a_session_takes_the_gpu_and_says_when_it_is_not_there() -> None:
    with accel.session({}) as ctx:
        assert ctx.device == torch.device("cuda", 0)
    with accel.session({"ACCEL_DEVICE": "cpu"}) as ctx:
        assert ctx.device == torch.device("cpu")
    beyond = torch.cuda.device_count()
    with assert_raises(accel.errors.DeviceError, expected="visible GPUs"):
        accel.single(f"cuda:{beyond}")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_without_a_policy_does_not_wait_for_the_device() -> None:
    ctx = accel.single("cuda")
    model = accel.prepare_model(ctx, nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs, scaler = torch.randn(4, 8, device=ctx.device), accel.loss_scale(ctx)

    def step(tokens: torch.Tensor) -> None:
        accum = accel.Accumulation().next()
        accum = accel.training.parts.backward(ctx, model(inputs).square().mean(), scaler, accum, weight=tokens)
        _ = accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum, max_norm=1.0, nonfinite="ignore")

    tokens = torch.tensor(3, device=ctx.device)
    step(tokens)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step(tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_micro_batch_is_captured_and_replayed() -> None:
    """A replay writes gradients where the capture did; a step clears `.grad`, so they are put back."""
    ctx = accel.single("cuda")
    torch.manual_seed(0)
    model = accel.prepare_model(ctx, nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.zeros(16, 64, device="cuda")

    def micro_batch() -> None:
        accel.training.parts.backward(ctx, model(inputs).square().mean(), accel.LossScale())

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # torch captures after a few passes on another stream
        for _ in range(3):
            micro_batch()
    torch.cuda.current_stream().wait_stream(side)
    accel.training.clear_gradients(model)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # which raises where the host waits
        micro_batch()
    captured = [parameter.grad for parameter in model.parameters()]
    for _ in range(3):
        inputs.copy_(torch.randn(16, 64, device="cuda"))
        for parameter, grad in zip(model.parameters(), captured, strict=True):
            parameter.grad = grad
        expected = torch.autograd.grad(model(inputs).square().mean(), list(model.parameters()))
        graph.replay()
        torch.testing.assert_close(captured, list(expected))
        assert accel.training.parts.optimizer_step(ctx, optimizer, accel.LossScale(), max_norm=1.0).stepped


def test_an_adopted_nccl_group_is_used_and_left_open(nccl: accel.DistContext) -> None:
    assert (nccl.backend, nccl.device.type, nccl.world_size) == ("nccl", "cuda", 1)
    tree = {"here": torch.ones(2, device="cuda"), "there": torch.tensor(1.0)}
    gathered = accel.gather(nccl, tree)
    assert gathered["here"].device.type == "cuda"
    assert gathered["there"].device.type == "cpu"
    accel.close(nccl)
    assert dist.is_initialized()


TWO_RANKS = """
import sys, torch, accel
from torch import nn
with accel.session() as ctx:
    assert ctx.world_size == 2 and ctx.device == torch.device("cuda", 0), ctx
    accel.wait_for_everyone(ctx)
    rank = ctx.rank
    tree = {"gpu": torch.full((rank + 1, 3), rank, device=ctx.device), "cpu": torch.arange(rank + 1)}
    tree["scalar"] = torch.tensor(2.0 * rank, device=ctx.device)
    got = accel.gather(ctx, tree)
    assert got["gpu"].tolist() == [[0] * 3, [1] * 3, [1] * 3] and got["gpu"].device == ctx.device, got
    assert got["cpu"].tolist() == [0, 0, 1] and got["cpu"].device.type == "cpu", got
    assert got["scalar"].tolist() == [0.0, 2.0], got
    for op, expected in (("sum", 1.0), ("mean", 0.5), ("max", 1.0), ("min", 0.0)):
        assert accel.reduce(ctx, torch.tensor([float(rank)], device=ctx.device), op).item() == expected, op
    try:
        accel.gather(ctx, torch.zeros(2, 3 + rank, device=ctx.device))
    except accel.errors.CollectiveMismatch as error:
        assert "[*, 3]" in str(error) and "[*, 4]" in str(error), error
    else:
        raise AssertionError("no mismatch")
    torch.manual_seed(0)
    model = accel.prepare_model(ctx, nn.Linear(4, 1, bias=False).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = accel.unwrap_model(model).weight.detach().clone()
    accum, scaler = accel.Accumulation(steps=2), accel.loss_scale(ctx)
    for micro in range(2):
        accum = accum.next()
        inputs = torch.full((1, 4), float(2 * rank + micro), dtype=torch.float64, device=ctx.device)
        with accel.training.parts.accumulate(ctx, accum, model):
            accum = accel.training.parts.backward(ctx, model(inputs).mean(), scaler, accum, weight=1 + 2 * rank + micro)
    step = accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum)
    moved = (before - accel.unwrap_model(model).weight).mean().item()
    assert abs(moved - (0 * 1 + 1 * 2 + 2 * 3 + 3 * 4) / 10) < 1e-12, moved
    items = {"model": model, "optimizer": optimizer, "accum": step.accum}
    accel.save_state(ctx, sys.argv[1], items, step=1)
    accel.load_state(ctx, accel.latest_checkpoint(sys.argv[1]), items)
"""


def test_two_ranks_share_one_gpu_over_gloo(tmp_path: Path) -> None:
    """nccl refuses two ranks on one GPU; gloo carries CUDA tensors too, so the device paths run."""
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    command = [sys.executable, "-m", "accel.cli", "launch", "--nproc-per-node", "2", str(script), str(tmp_path / "out")]
    environment = {"ACCEL_DEVICE": "cuda:0", "ACCEL_BACKEND": "gloo"}
    subprocess.run(command, check=True, timeout=180, env={**os.environ, **environment})


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_logging_does_not_wait_for_the_device() -> None:
    rows: list[float] = []
    gate = threading.Event()
    tracker = accel.trackers.Tracker(
        "late",
        lambda run, config: gate.wait(),  # the thread that reads the values starts once waiting is allowed again
        lambda live, values, step: rows.append(values["loss"]),
        lambda live, ending: None,
    )
    ctx = accel.single("cuda")
    loss = torch.full((), 0.5, device="cuda")
    with accel.tracking(ctx, "demo", to=[tracker]) as trackers:
        try:
            torch.cuda.set_sync_debug_mode("error")
            accel.log(ctx, trackers, {"loss": loss}, step=1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        _ = loss.zero_()  # what was logged is a copy
        gate.set()
    assert rows == [0.5]
