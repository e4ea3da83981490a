# SPDX-License-Identifier: Apache-2.0
"""Training steps on a device type of its own, in a process of its own: prints what the host waited for, as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import counted_device
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.checkpoint import _live_tensors
from accel.collectives import _packing
from accel.items import _rng
from accel.parallel import _same_batches
from accel.testing import _group, simulate_groups
from accel.testing._collectives import Buffers

DEVICE = counted_device.register()
STEPS = 2
PLAN = accel.parallel.Plan(tensor={"0.0": "colwise", "1.0": "rowwise"})


def _inner(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.inner if isinstance(each, counted_device.CountedTensor) else each for each in tensors]


def reach_into_devices() -> None:
    """Let collectives and saves take the device's tensors, simulated ranks and FSDP2 use the memory behind them."""
    is_wrapper = _packing._is_wrapper
    _packing._is_wrapper = lambda kind: kind is not counted_device.CountedTensor and is_wrapper(kind)
    join = _group.SimulatedGroup._join

    def joined(self: Any, call: Any, buffers: Buffers, *rest: Any) -> Any:
        return join(self, call, Buffers(_inner(buffers.inputs), _inner(buffers.outputs)), *rest)

    _group.SimulatedGroup._join = joined
    post = _group.SimulatedGroup._post

    def posted(self: Any, kind: Any, source: int, target: int, tag: int, tensors: Sequence[Tensor]) -> Any:
        return post(self, kind, source, target, tag, _inner(tensors))

    _group.SimulatedGroup._post = posted
    # a Python device has no storage to free: what FSDP2 gathers stays
    _fsdp_param.free_storage = _fsdp_param.alloc_storage = lambda tensor: None
    dispatch, memory = _live_tensors._dispatch, _live_tensors.memory_id
    _live_tensors._dispatch = lambda kind: dispatch(Tensor if kind is counted_device.CountedTensor else kind)
    _live_tensors.memory_id = lambda tensor: memory(*_inner([tensor]))
    rehearse = _rng._rehearse
    _rng._rehearse = lambda state, device: rehearse(state, torch.device("cpu"))  # such a device has no generators
    fork = torch.random.fork_rng  # torch 2.12 asks CUDA for the generators of a stage's device
    torch.random.fork_rng = lambda devices=None, *words, **options: fork([], *words, **options)
    plain = _same_batches._is_plain
    _same_batches._is_plain = lambda leaf: type(leaf) is counted_device.CountedTensor or plain(leaf)


def make_net() -> nn.Module:
    """Two blocks, for two stages of a pipeline."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8, device=DEVICE), nn.ReLU()) for _ in range(2)))


class Experts(nn.Module):
    """Four stacked layers, of which each token takes two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        every = torch.einsum("eij,nj->nei", self.weight, tokens)
        chosen = weights.new_zeros(len(tokens), len(self.weight)).scatter_add(1, indices, weights)
        return (every * chosen[..., None]).sum(1)


class Mixture(nn.Module):
    """Experts behind a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        routing = accel.parallel.route_tokens(self.router(x.flatten(0, 1)), 2)
        return self.experts(x.flatten(0, 1), routing.indices, routing.weights).view_as(x)


class Attention(nn.Module):
    """Attention of a head whose queries, keys and values are its input."""

    def __init__(self, ctx: accel.DistContext) -> None:
        super().__init__()
        self.ctx = ctx

    def forward(self, x: Tensor) -> Tensor:
        heads = x[:, None]
        return x + accel.parallel.context_attention(self.ctx, heads, heads, heads)[:, 0]


def train(ctx: accel.DistContext, *, accumulation: int = 1, scales: bool = False, **options: Any) -> list[list[str]]:
    """Return what the host waited for in each optimizer step; along tp, pp and cp, and with replicated shards, without
    the first, which compares the ranks' batches and parameters, finds shapes and proves positions. `scales`: a loss
    scale that each step decides over, as fp16 has it."""
    staged = ctx.axis("pp").size > 1
    both = all(ctx.axis(name).size > 1 for name in ("dp_replicate", "dp_shard"))
    shared = staged or both or ctx.axis("tp").size > 1 or ctx.axis("cp").size > 1
    found = list[list[str]]()
    pinning = dataclasses.replace(ctx, streams=counted_device.PinnableStreams(DEVICE))
    fused = options.get("nonfinite") == "defer"
    with counted_device.counting() as waits:
        net, plan = make_net(), PLAN if ctx.axis("tp").size > 1 else None
        if ctx.axis("cp").size > 1:
            net = nn.Sequential(Attention(ctx), *net)
        if ctx.axis("ep").size > 1:
            net = nn.Sequential(Mixture().to(DEVICE), *net)
            plan = accel.parallel.Plan(experts={"0.experts": "dispatch"})
        model = accel.prepare_model(ctx, net, plan=plan)
        optimizer = accel.prepare_optimizer(ctx, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused))
        data = TensorDataset(torch.randn(64, 4, 8), torch.randint(8, (64, 4)))
        loader = accel.prepare_loader(ctx, DataLoader(data, batch_size=4))
        scaler = accel.LossScale(scale=8.0, dynamic=True) if scales else None
        state = accel.train_state(ctx, seed=0, accumulation=accumulation, scaler=scaler)
        own = list[str]()
        for batch in accel.batches(ctx, loader, state):
            waits.clear()  # those of the copy of a batch that is not pinned
            inputs, targets = batch.data
            assert inputs.device == DEVICE, inputs.device
            part = accel.parallel.split_sequence(ctx, {"inputs": inputs, "targets": targets})
            inputs, targets = part["inputs"], part["targets"]
            state = state.next(batch)
            weight = (targets >= 0).sum()
            if staged:
                passed = accel.forward_backward(
                    ctx, model, state, inputs, loss_fn=sum_of_losses, targets=targets, weight=weight
                )
                state = passed[1]
            else:
                with accel.accumulate(ctx, state, model):
                    state = accel.backward(ctx, sum_of_losses(model(inputs), targets), state, weight=weight)
            if state.sync:
                state = accel.optimizer_step(pinning, optimizer, state, **options)
                found.append([*own, *waits])
                own.clear()
            else:
                own += waits
            if len(found) == STEPS + shared:
                break
    return found[shared:]


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
    "raise on shards": (2, {"strategy": "fsdp"}, {"max_norm": 1.0}),
    "skip on shards, accumulated": (2, {"strategy": "fsdp"}, {"nonfinite": "skip", "accumulation": 2}),
    "ignore on shards": (2, {"strategy": "fsdp"}, {"nonfinite": "ignore"}),
    "defer on shards": (2, {"strategy": "fsdp"}, {"nonfinite": "defer"}),
    "raise along pp": (2, {"mesh": "pp=2"}, {"max_norm": 1.0}),
    "ignore along pp": (2, {"mesh": "pp=2"}, {"nonfinite": "ignore"}),
    "defer along pp": (2, {"mesh": "pp=2"}, {"nonfinite": "defer"}),
    "raise along tp": (2, {"mesh": "tp=2"}, {"max_norm": 1.0}),
    "ignore along tp": (2, {"mesh": "tp=2"}, {"nonfinite": "ignore"}),
    "raise along cp": (2, {"mesh": "cp=2"}, {"max_norm": 1.0}),
    "ignore along cp": (2, {"mesh": "cp=2"}, {"nonfinite": "ignore"}),
    "defer along cp": (2, {"mesh": "cp=2"}, {"nonfinite": "defer"}),
    "raise along ep": (2, {"mesh": "dp=2,ep=2", "strategy": "fsdp"}, {"max_norm": 1.0}),
    "ignore along ep": (2, {"mesh": "dp=2,ep=2", "strategy": "fsdp"}, {"nonfinite": "ignore"}),
    "skip along tp": (2, {"mesh": "tp=2"}, {"nonfinite": "skip"}),
    "skip along pp": (2, {"mesh": "pp=2"}, {"nonfinite": "skip"}),
    "raise on replicated shards": (4, {"mesh": "dp_replicate=2,dp_shard=2", "strategy": "fsdp"}, {}),
    "raise on shards along tp": (4, {"mesh": "dp=2,tp=2", "strategy": "fsdp"}, {"max_norm": 1.0}),
    "raise under a scale on shards": (2, {"strategy": "fsdp"}, {"scales": True, "max_norm": 1.0}),
    "raise under a scale along tp": (2, {"mesh": "tp=2"}, {"scales": True}),
    "ignore along pp under a scale": (2, {"mesh": "pp=2"}, {"scales": True, "nonfinite": "ignore"}),
}


def sum_of_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a batch."""
    return functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten(), reduction="sum")


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


class Counter:
    """Counts the waits of calls by their names.

    Attributes:
        found: waits by name.
    """

    def __init__(self, waits: list[str]) -> None:
        self.found = dict[str, int]()
        self._waits = waits

    def __call__(self, name: str, verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make a call, and count its waits."""
        self._waits.clear()
        result = verb(*args, **options)
        self.found[name] = len(self._waits)
        return result


def wait_in_verbs(ctx: accel.DistContext, out: Path) -> dict[str, int]:
    """Return how often the host waits in each verb."""
    pinning = dataclasses.replace(ctx, streams=counted_device.PinnableStreams(DEVICE))
    with counted_device.counting() as waits:
        count = Counter(waits)
        model = count("prepare_model", accel.prepare_model, ctx, make_net())
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        optimizer = count("prepare_optimizer", accel.prepare_optimizer, ctx, adamw)
        linear = torch.optim.lr_scheduler.LinearLR(adamw)
        scheduler = count("prepare_scheduler", accel.prepare_scheduler, ctx, linear)
        data = TensorDataset(torch.randn(128, 8), torch.randint(8, (128,)))
        loader = count("prepare_loader", accel.prepare_loader, ctx, DataLoader(data, batch_size=4))
        state = count("train_state", accel.train_state, ctx, seed=0)
        batches = iter(accel.batches(ctx, loader, state))
        metrics = accel.metrics.running_metrics(loss="mean")
        ema = count("Ema", accel.training.Ema, model, decay=0.9)
        for at, policy in enumerate(("raise", "skip", "ignore", "defer", "ignore after defer")):
            batch = count("batches", next, batches)
            inputs, targets = batch.data
            state = state.next(batch)
            block = count("accumulate", accel.accumulate, ctx, state, model)
            with block, count("autocast", accel.autocast, ctx):
                loss = functional.cross_entropy(model(inputs), targets, reduction="sum")
            weight = (targets >= 0).sum() if at else float(len(targets))
            kind = "a weight on the device" if at else "a number as weight"
            state = count(f"backward, {kind}", accel.backward, ctx, loss, state, weight=weight)
            step = partial(accel.optimizer_step, max_norm=1.0, nonfinite=policy.split()[0], scheduler=scheduler)
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
        items = {"model": model, "optimizer": optimizer, "state": state}
        count("save_state, sync", accel.save_state, pinning, out, items, step=1)
        saving = count("save_state, async", partial(accel.save_state, mode="async"), pinning, out, items, step=2)
        _ = saving.result()
        wait_in_more_verbs(count, pinning, model, optimizer, state, batches, out)
    return count.found


def wait_in_more_verbs(
    count: Counter,
    ctx: accel.DistContext,
    model: nn.Module,
    optimizer: Any,
    state: Any,
    batches: Any,
    out: Path,
) -> None:
    """Count further ways of a step, what gives objects, and files."""
    statistics = accel.metrics.step_statistics(loss="mean")
    batch = next(batches)
    inputs, targets = batch.data
    state = accel.backward(ctx, functional.cross_entropy(model(inputs), targets), state.next(batch))
    state = count("unscale_gradients", accel.unscale_gradients, ctx, optimizer, state)
    count("clip_grad_norm_", accel.clip_grad_norm_, ctx, model.parameters(), 1.0, state)
    count("clip_grad_value_", accel.clip_grad_value_, ctx, model.parameters(), 1.0, state)
    state = accel.optimizer_step(ctx, optimizer, state)
    for which in ("the first", "later ones"):
        statistics = count(f"step_statistics.add, {which}", statistics.add, batch, state, loss=inputs.sum())
    count("step_statistics.read", statistics.read, ctx)
    for which in ("a function's first", "later ones"):
        batch = next(batches)
        inputs, targets = batch.data
        run = partial(accel.forward_backward, loss_fn=sum_of_losses, targets=targets)
        loss, state = count(f"forward_backward, {which}", run, ctx, model, state.next(batch), inputs)
        state = accel.optimizer_step(ctx, optimizer, state)
    batch = next(batches)
    inputs, targets = batch.data
    run = partial(accel.train_step, inputs=inputs, targets=targets)
    state, loss = count("train_step, raise", run, ctx, state, batch, model, optimizer, sum_of_losses)
    count("training.forward", accel.training.forward, ctx, model, inputs)
    count("any_rank", accel.any_rank, ctx, flag=True)
    count("gather_object", accel.gather_object, ctx, [1])
    count("broadcast_object_list", accel.broadcast_object_list, ctx, [1])
    count("broadcast_from_holder", accel.broadcast_from_holder, ctx, None if ctx.rank else {"a": inputs})
    count("split_between_processes", accel.split_between_processes, ctx, {"a": inputs})
    with accel.tracking(ctx, "run", to=[accel.trackers.jsonl()], dir=out / "log") as trackers:
        count("log", accel.log, ctx, trackers, {"loss": loss}, step=1)
    count("free_memory", accel.free_memory, ctx)
    count("get_state_dict", accel.get_state_dict, ctx, model)
    count("save_model", accel.save_model, ctx, model, out / "model")
    count("save", accel.save, ctx, {"a": inputs}, out / "tensors.safetensors")
    items = {"model": model, "optimizer": optimizer, "state": state}
    found = accel.save_state(ctx, out, items, step=3)
    count("load_state", accel.load_state, ctx, found, items)
    count("resume", accel.resume, ctx, out, {"model": model, "optimizer": optimizer}, accel.train_state(ctx))


def verbs(size: int, out: Path, **settings: Any) -> dict[str, int]:
    """Return the waits of the verbs on so many ranks, of the rank that waits most."""
    if size == 1:
        return wait_in_verbs(accel.single(str(DEVICE)), out)

    def on_rank(group: Any) -> dict[str, int]:
        with torch.autograd.set_multithreading_enabled(False):
            return wait_in_verbs(accel.from_group(group, device=str(DEVICE), **settings), out)

    ranks = simulate_groups(on_rank, size, default_group=True)
    return {verb: max(each[verb] for each in ranks) for verb in ranks[0]}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    reach_into_devices()
    steps = {case: run(case) for case in sys.argv[1:] or CASES}
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "alone": verbs(1, Path(folder, "alone")),
            "together": verbs(2, Path(folder, "together")),
            "sharded": verbs(2, Path(folder, "sharded"), strategy="fsdp"),
        }
    print(json.dumps({"steps": steps} | found))
