# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What public functions return, as a type checker sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, Dataset

import accel

Sample = tuple[torch.Tensor, torch.Tensor]


def prepared(ctx: accel.DistContext, dataset: Dataset[Sample], net: nn.Sequential, warmup: LRScheduler | None) -> None:
    adam, data = AdamW(net.parameters()), DataLoader(dataset)
    cosine = CosineAnnealingLR(adam, T_max=10)
    assert_type(accel.prepare(ctx, net, adam, cosine), tuple[nn.Module, AdamW, CosineAnnealingLR])
    assert_type(accel.prepare(ctx, net, adam, data, cosine), tuple[nn.Module, AdamW, accel.Loader, CosineAnnealingLR])
    assert_type(accel.prepare(ctx, net, adam, warmup), tuple[nn.Module, AdamW, LRScheduler | None])
    assert_type(accel.prepare(ctx, adam, net), Any)  # models come first where types count
    assert_type(accel.prepare(ctx, net, adam, adam, adam, adam, adam), Any)
    assert_type(accel.prepare_model(ctx, net), nn.Module)
    assert_type(accel.prepare_optimizer(ctx, adam), AdamW)
    assert_type(accel.prepare_scheduler(ctx, cosine), CosineAnnealingLR)
    assert_type(accel.prepare_loader(ctx, data), accel.Loader)
    assert_type(accel.prepare_loader(ctx, data, stream="shards"), accel.data.StreamLoader)
    assert_type(accel.compile_model(net), nn.Sequential)
    assert_type(accel.checkpoint_activations(net, nn.Linear), nn.Sequential)


def refused(ctx: accel.DistContext, net: nn.Module) -> None:
    accel.prepare(ctx, net, "adam")  # pyright: ignore[reportCallIssue, reportArgumentType]
    accel.prepare(net)  # pyright: ignore[reportArgumentType]
    accel.backward(ctx, 1.0, accel.train_state(ctx))  # pyright: ignore[reportArgumentType]
    accel.optimizer_step(ctx, net, accel.train_state(ctx))  # pyright: ignore[reportArgumentType]
    accel.backward(ctx, torch.ones(()), accel.loss_scale(ctx))  # pyright: ignore[reportArgumentType]


def looped(ctx: accel.DistContext, loader: accel.Loader, loss: torch.Tensor, optimizer: Optimizer) -> None:
    scaler, accum = accel.loss_scale(ctx), accel.Accumulation(steps=2).next()
    for batch in accel.batches(ctx, loader, accel.Cursor()):
        assert_type(batch, accel.Batch)
        assert_type(batch.next, accel.Cursor)
    with accel.training.parts.accumulate(ctx, accum):
        assert_type(accel.training.parts.backward(ctx, loss, scaler), accel.Accumulation)
        assert_type(accel.training.parts.backward(ctx, loss, scaler, accum, weight=2), accel.Accumulation)
    assert_type(accel.training.parts.optimizer_step(ctx, optimizer, scaler), accel.training.parts.StepResult)
    assert_type(
        accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum),
        accel.training.parts.StepResult,
    )
    assert_type(accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum).scaler, accel.LossScale)


def carried(ctx: accel.DistContext, loader: accel.Loader, loss: torch.Tensor, optimizer: Optimizer) -> None:
    state = accel.resume(ctx, "run", {}, accel.train_state(ctx, seed=0, accumulation=2))
    assert_type(state, accel.TrainState)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        with accel.accumulate(ctx, state):
            assert_type(accel.backward(ctx, loss, state), accel.TrainState)
        assert_type(accel.optimizer_step(ctx, optimizer, state), accel.TrainState)
    assert_type((state.epoch, state.updates, state.sync, state.stepped), tuple[int, int, bool, bool | None])
    assert_type(accel.training.discard(state), accel.TrainState)
    assert_type(accel.total_steps(loader, accumulation=2, epochs=3), int)
    for batch in accel.batches(ctx, loader):  # evaluation
        assert_type(batch, accel.Batch)


def trained(ctx: accel.DistContext, loader: accel.Loader, net: nn.Module, optimizer: Optimizer) -> None:
    state = accel.train_state(ctx)
    for batch in accel.batches(ctx, loader, state):
        stepped = accel.train_step(ctx, state, batch, net, optimizer, nn.MSELoss(reduction="sum"))
        assert_type(stepped, tuple[accel.TrainState, torch.Tensor])
    raw: DataLoader[torch.Tensor] = DataLoader(loader.dataset)
    assert_type(accel.total_steps(raw, ctx=ctx, global_batch=8, epochs=3), int)


def stored(ctx: accel.DistContext, net: nn.Module) -> None:
    assert_type(accel.save_state(ctx, Path("run"), {"net": net}, step=1), Path)
    assert_type(accel.save_state(ctx, "run", {"net": net}, step=1), Path | accel.checkpoint.RemotePath)
    assert_type(accel.save_state(ctx, "run", {"net": net}, step=1, mode="async"), accel.checkpoint.Saving)
    assert_type(accel.latest_checkpoint(Path("run")), Path | None)
    assert_type(accel.load_state(ctx, "run", {"net": net})["cursor"], Any)


def communicated(ctx: accel.DistContext, values: dict[str, torch.Tensor], batch: accel.Batch) -> None:
    assert_type(accel.gather(ctx, values), dict[str, torch.Tensor])
    assert_type(accel.reduce(ctx, values), dict[str, torch.Tensor])
    assert_type(accel.gather_for_metrics(ctx, values, batch), dict[str, torch.Tensor])
    assert_type(accel.gather_for_metrics(ctx, ["a"], batch, use_gather_object=True), list[str])
    assert_type(accel.gather_object(ctx, 1.5), list[float])
    assert_type(accel.split_between_processes(ctx, ["a", "b"]), list[str])
    assert_type(accel.any_rank(ctx, True), bool)
    with accel.session() as opened:
        assert_type(opened, accel.DistContext)


def decorated(ctx: accel.DistContext) -> None:
    def report(epoch: int) -> str:
        return str(epoch)

    assert_type(accel.on_main_process(ctx, report)(3), str | None)
    assert_type(accel.find_executable_batch_size(ctx, lambda size: size * 1.5, starting_batch_size=64), float)


def configured(ctx: accel.DistContext, group: dist.ProcessGroup) -> None:
    assert_type((ctx.device, ctx.backend, ctx.precision), tuple[torch.device, str, accel.precision.Precision])
    assert_type((ctx.accumulation, ctx.timeout_s), tuple[int, float])
    assert_type(accel.from_env({}, device="cpu", backend="gloo", mesh="dp=2", timeout_s=5), accel.DistContext)
    assert_type(
        accel.replace(ctx, precision=accel.precision.Precision(compute="bf16"), strategy="fsdp"), accel.DistContext
    )
    assert_type(accel.single(torch.device("cpu"), accumulation=4), accel.DistContext)
    accel.single(precision="fp4")  # pyright: ignore[reportArgumentType]
    accel.from_group(group, backend="gloo")  # pyright: ignore[reportCallIssue]
    accel.session(precison="bf16")  # pyright: ignore[reportCallIssue]
