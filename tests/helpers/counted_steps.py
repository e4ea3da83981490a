# SPDX-License-Identifier: Apache-2.0
"""Training steps on a device type of its own, in a process of its own: prints what the host waited for, as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import counted_device
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.collectives import _packing
from accel.testing import _group, simulate_groups
from accel.testing._collectives import Buffers

DEVICE = counted_device.register()
STEPS = 3


def _inner(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.inner if isinstance(each, counted_device.CountedTensor) else each for each in tensors]


def reach_into_devices() -> None:
    """Let collectives take the device's tensors, and simulated ranks use the memory behind them."""
    is_wrapper = _packing._is_wrapper
    _packing._is_wrapper = lambda kind: kind is not counted_device.CountedTensor and is_wrapper(kind)
    join = _group.SimulatedGroup._join

    def joined(self: Any, call: Any, buffers: Buffers, *rest: Any) -> Any:
        return join(self, call, Buffers(_inner(buffers.inputs), _inner(buffers.outputs)), *rest)

    _group.SimulatedGroup._join = joined


def train(ctx: accel.DistContext, *, accumulation: int = 1, **options: Any) -> list[list[str]]:
    """Return what the host waited for in each optimizer step."""
    found = list[list[str]]()
    pinning = dataclasses.replace(ctx, streams=counted_device.PinnableStreams(DEVICE))
    fused = options.get("nonfinite") == "defer"
    with counted_device.counting() as waits:
        net = nn.Sequential(nn.Linear(8, 16, device=DEVICE), nn.ReLU(), nn.Linear(16, 4, device=DEVICE))
        model = accel.prepare_model(ctx, net)
        optimizer = accel.prepare_optimizer(ctx, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused))
        data = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
        loader = accel.prepare_loader(ctx, DataLoader(data, batch_size=4))
        state = accel.train_state(ctx, seed=0, accumulation=accumulation)
        own = list[str]()
        for batch in accel.batches(ctx, loader, state):
            waits.clear()  # those of the copy of a batch that is not pinned
            inputs, targets = batch.data
            assert inputs.device == DEVICE, inputs.device
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                loss = functional.cross_entropy(model(inputs).float(), targets, reduction="sum")
                state = accel.backward(ctx, loss, state, weight=(targets >= 0).sum())
            if state.sync:
                state = accel.optimizer_step(pinning, optimizer, state, **options)
                found.append([*own, *waits])
                own.clear()
            else:
                own += waits
            if len(found) == STEPS:
                break
    return found


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "raise": (1, {}, {}),
    "raise, clipped": (1, {}, {"max_norm": 1.0}),
    "raise, accumulated": (1, {}, {"accumulation": 3, "max_norm": 1.0}),
    "skip": (1, {}, {"nonfinite": "skip", "max_norm": 1.0}),
    "ignore": (1, {}, {"nonfinite": "ignore"}),
    "ignore, clipped": (1, {}, {"nonfinite": "ignore", "max_norm": 1.0}),
    "raise in bf16": (1, {"precision": "bf16"}, {"max_norm": 1.0}),
    "ignore in bf16": (1, {"precision": "bf16"}, {"nonfinite": "ignore"}),
    "raise in fp16": (1, {"precision": "fp16"}, {"max_norm": 1.0}),
    "defer": (1, {}, {"nonfinite": "defer"}),
    "defer, accumulated": (1, {}, {"accumulation": 3, "nonfinite": "defer", "max_norm": 1.0}),
    "defer in bf16": (1, {"precision": "bf16"}, {"nonfinite": "defer", "max_norm": 1.0}),
    "ignore in fp16": (1, {"precision": "fp16"}, {"nonfinite": "ignore"}),
    "raise on 2 replicas": (2, {}, {"max_norm": 1.0}),
    "ignore on 2 replicas": (2, {}, {"nonfinite": "ignore"}),
    "defer on 2 replicas": (2, {}, {"nonfinite": "defer", "max_norm": 1.0}),
    "defer along tp": (2, {"mesh": "tp=2"}, {"nonfinite": "defer"}),
    "raise along tp": (2, {"mesh": "tp=2"}, {"max_norm": 1.0}),
    "ignore along tp": (2, {"mesh": "tp=2"}, {"nonfinite": "ignore"}),
}


def run(case: str) -> list[list[str]]:
    """Run a case; of several ranks, return rank 0's waits."""
    size, settings, options = CASES[case]
    precision = settings.get("precision", "fp32")
    if size == 1:
        return train(accel.single(str(DEVICE), precision=precision), **options)

    def on_rank(group: Any) -> list[list[str]]:
        # on the rank's own thread, as backward on a device has a thread of the engine's
        with torch.autograd.set_multithreading_enabled(False):
            ctx = accel.from_group(group, device=str(DEVICE))
            return train(accel.replace(ctx, **settings) if settings else ctx, **options)

    return simulate_groups(on_rank, size, default_group=True)[0]


def wait_in_verbs(ctx: accel.DistContext) -> dict[str, int]:
    """Return how often the host waits in each verb."""
    pinning = dataclasses.replace(ctx, streams=counted_device.PinnableStreams(DEVICE))
    found = dict[str, int]()
    with counted_device.counting() as waits:

        def count(name: str, verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
            waits.clear()
            result = verb(*args, **options)
            found[name] = len(waits)
            return result

        net = nn.Sequential(nn.Linear(8, 16, device=DEVICE), nn.ReLU(), nn.Linear(16, 4, device=DEVICE))
        model = count("prepare_model", accel.prepare_model, ctx, net)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        optimizer = count("prepare_optimizer", accel.prepare_optimizer, ctx, adamw)
        data = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
        loader = accel.prepare_loader(ctx, DataLoader(data, batch_size=4))
        state = accel.train_state(ctx, seed=0)
        batches = iter(accel.batches(ctx, loader, state))
        metrics = accel.metrics.running_metrics(loss="mean")
        ema = count("Ema", accel.training.Ema, model, decay=0.9)
        for at, policy in enumerate(("raise", "skip", "ignore", "defer", "ignore after defer")):
            batch = count("batches", next, batches)
            inputs, targets = batch.data
            state = state.next(batch)
            loss = functional.cross_entropy(model(inputs), targets, reduction="sum")
            weight = (targets >= 0).sum() if at else float(len(targets))
            kind = "a weight on the device" if at else "a number as weight"
            state = count(f"backward, {kind}", accel.backward, ctx, loss, state, weight=weight)
            step = partial(accel.optimizer_step, max_norm=1.0, nonfinite=policy.split()[0])
            state = count(f"optimizer_step, {policy}", step, pinning, optimizer, state)
            metrics = count(f"metrics.add, {kind}", metrics.add, weight, loss=loss.detach())
            if policy != "defer":
                count("ema.update_", ema.update_, model)
        count("state.grad_norm", lambda: state.grad_norm)
        count("metrics.read", metrics.read, ctx)
        for verb in (accel.gather, accel.reduce, accel.broadcast, accel.pad_across_processes):
            count(verb.__name__, verb, ctx, {"a": inputs})
        count("gather_for_metrics", accel.gather_for_metrics, ctx, {"a": inputs}, batch)
        count("wait_for_everyone", accel.wait_for_everyone, ctx)
    return found


def verbs(size: int) -> dict[str, int]:
    """Return the waits of the verbs on so many ranks."""
    if size == 1:
        return wait_in_verbs(accel.single(str(DEVICE)))

    def on_rank(group: Any) -> dict[str, int]:
        with torch.autograd.set_multithreading_enabled(False):
            return wait_in_verbs(accel.from_group(group, device=str(DEVICE)))

    return simulate_groups(on_rank, size, default_group=True)[0]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    reach_into_devices()
    steps = {case: run(case) for case in sys.argv[1:] or CASES}
    print(json.dumps({"steps": steps, "alone": verbs(1), "together": verbs(2)}))
