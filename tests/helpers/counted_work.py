# SPDX-License-Identifier: Apache-2.0
"""Operators and messages of training steps on a device type of its own: accel's, and those of loops written by hand.

Run in a process of its own, as `counted_work.py [--all] [LAYOUT ...]`; prints JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import counted_device
import torch
import torch.distributed as dist
from counted_steps import DEVICE, reach_into_devices
from steps import one_sample_each
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import accel
from accel.testing import _group, simulate_groups

BLOCKS, WIDTH, ROWS = 4, 8, 12
MAX_NORM = 1.0
Step = Callable[[], None]
PLAN = accel.parallel.Plan(tensor={"*.1": "colwise", "*.3": "rowwise"})


SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "tp": {"mesh": "tp=2"},
    "pp": {"mesh": "pp=2"},
}


class Work(NamedTuple):
    """What a rank did in one step, in order; messages stand between operators."""

    operators: list[str]
    messages: list[str]


_DONE: dict[int, Work] = {}  # by thread: ranks are threads


def watch_messages() -> None:
    """Note each collective and message of a rank."""
    reach_into_devices()
    kind = _group.SimulatedGroup
    join, post, share = kind._join, kind._post, kind.share

    def note(name: str, group: Any) -> None:
        if (work := _DONE.get(threading.get_ident())) is not None:
            work.messages.append(name)
            work.operators.append(f"message: {name}")

    def joined(self: Any, call: Any, buffers: Any, *rest: Any) -> Any:
        note(f"{call.name} {sum(each.numel() for each in buffers.inputs)}", self)
        return join(self, call, buffers, *rest)

    def posted(self: Any, way: str, source: Any, target: Any, tag: int, tensors: Sequence[Tensor]) -> Any:
        note(f"{way} {tensors[0].numel()}", self)
        return post(self, way, source, target, tag, tensors)

    def shared(self: Any, mine: Any, combine: Any, /) -> Any:
        note("control", self)
        return share(self, mine, combine)

    kind._join, kind._post, kind.share = joined, posted, shared


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
    ).to(DEVICE)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and the number of units, which this rank alone knows."""
    inputs, targets = torch.randn(2, ROWS, WIDTH)
    return inputs.to(DEVICE), targets.to(DEVICE), torch.tensor(ROWS).to(DEVICE)


def sum_of(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, targets, reduction="sum")


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, targets)


class Options(NamedTuple):
    """Kind of loop: micro-batches, clipping, whether it looks for inf and NaN, counts units, or scales the loss."""

    steps: int = 1
    clips: bool = False
    looks: bool = False
    counts: bool = False
    scales: bool = False
    bucket_cap_mb: float | None = None


class Watch:
    """What accel's step guarantees, by hand: units counted over ranks and looked at, losses and norm, one read."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.losses: Tensor | None = None
        self.units: Tensor | None = None

    def add(self, loss: Tensor, units: Tensor) -> Tensor:
        """Note a micro-batch; return what backward begins from."""
        if self.options.looks:
            seen = loss.detach()
            self.losses = seen if self.losses is None else torch.add(self.losses, seen, alpha=0)
        if not self.options.counts:
            return loss if self.options.steps == 1 else loss / self.options.steps
        units = torch.threshold(units.to(torch.float64), -1e-30, torch.nan)  # a negative one reaches all ranks
        self.units = units if self.units is None else self.units + units
        return loss * units.to(loss.dtype)

    def divide(self, grads: Sequence[Tensor], ctx: accel.DistContext) -> None:
        """Divide by the units of all ranks."""
        if self.units is not None:  # a copy: the first may be the batch's own
            self.units = self.units.clone()
            dist.all_reduce(self.units, group=ctx.comm.group)
            factor = torch.where(self.units > 0, ctx.world_size / self.units, 0.0)
            with torch.no_grad():
                torch._foreach_mul_([local(each) for each in grads], factor.to(torch.float32))

    def is_fine(self, norm: Tensor) -> bool:
        """Whether to step, by one read."""
        if self.units is None:
            return bool(norm.cpu().isfinite())
        norm, units = torch.stack([norm.to(torch.float64), self.units]).cpu()
        return bool(norm.isfinite()) and bool(units > 0)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norm_by_hand(parameters: Sequence[Tensor], pipe: Any, *, wide: bool) -> Tensor:
    """The norm of sharded and of whole gradients together, over all stages; `wide`: in float64, which squares
    of large norms need."""
    grads = [each.grad for each in parameters if each.grad is not None]
    kinds = [[each for each in grads if isinstance(each, DTensor) is sharded] for sharded in (True, False)]
    norms = [nn.utils.get_total_norm(kind) for kind in kinds if kind]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if pipe is None:
        return norm
    power = (norm.to(torch.float64) if wide else norm).square()
    dist.all_reduce(power, group=pipe)
    return power.sqrt()


def end_by_hand(
    ctx: accel.DistContext,
    parameters: Sequence[Tensor],
    optimizers: Sequence[Any],
    scaler: Any,
    watch: Watch,
    pipe: Any = None,
) -> None:
    """Divide, look, clip, step and clear, as far as the options ask for it."""
    options = watch.options
    grads = [each.grad for each in parameters if each.grad is not None]
    watch.divide(grads, ctx)
    if options.scales and (options.clips or pipe is not None):
        for each in optimizers:
            scaler.unscale_(each)
            if pipe is not None:  # else stages would decide apart
                for found in scaler._per_optimizer_states[id(each)]["found_inf_per_device"].values():
                    dist.all_reduce(found, group=pipe)
    steps = True
    if options.clips or options.looks:
        norm = norm_by_hand(parameters, pipe, wide=options.looks)
        steps = not options.looks or watch.is_fine(norm)
        if options.clips and steps:
            for sharded in (True, False):
                kind = [each for each in parameters if isinstance(each.grad, DTensor) is sharded]
                if kind:
                    nn.utils.clip_grads_with_norm_(kind, MAX_NORM, norm)
    for each in optimizers:
        if options.scales:
            scaler.step(each)
        elif steps:
            each.step()
    if options.scales:
        scaler.update()
    for each in optimizers:
        each.zero_grad()


def spread_by_hand(layout: str, ctx: accel.DistContext) -> nn.Module:
    """Return the model of a loop by hand."""
    model = make_model()
    if layout == "ddp":
        return DistributedDataParallel(model, process_group=ctx.comm.group)
    mesh = DeviceMesh.from_group(ctx.comm.group, counted_device.NAME)
    if layout == "fsdp":
        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    styles = {}
    for at in range(BLOCKS):
        styles |= {f"{at}.1": ColwiseParallel(), f"{at}.3": RowwiseParallel()}
    return parallelize_module(model, mesh, styles)


@contextlib.contextmanager
def held(model: Any, *, syncs: bool) -> Iterator[None]:
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if syncs else model.no_sync():
            yield
        return
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(syncs)
    yield


def grouped(parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Groups of sharded and of whole parameters, which torch's lists do not mix."""
    kinds = [[each for each in parameters if isinstance(each, DTensor) is sharded] for sharded in (True, False)]
    return [{"params": kind} for kind in kinds if kind]


def by_hand(layout: str, ctx: accel.DistContext, options: Options) -> Step:
    if layout == "pp":
        return stages_by_hand(ctx, options)
    model = spread_by_hand(layout, ctx)
    held_by = list(model.parameters())
    groups = grouped(held_by)
    # a GradScaler's list has DTensors or tensors, not both
    parts = [[each] for each in groups] if options.scales else [groups]
    optimizers = [torch.optim.AdamW(each, lr=1e-3) for each in parts]
    inputs, targets, units = make_batch()
    scaler = torch.amp.GradScaler(counted_device.NAME, enabled=options.scales)

    def step() -> None:
        watch = Watch(options)
        for micro in range(options.steps):
            with held(model, syncs=micro + 1 == options.steps):
                loss = watch.add(loss_of(model(inputs), targets), units)
                scaler.scale(loss).backward() if options.scales else loss.backward()
        end_by_hand(ctx, held_by, optimizers, scaler, watch)

    return step


def stages_by_hand(ctx: accel.DistContext, options: Options) -> Step:
    """A loop over torch's schedule, with twice as many micro-batches as `options.steps`."""
    half = BLOCKS // 2
    own = make_model()[half * ctx.rank : half * (ctx.rank + 1)]
    held_by = list(own.parameters())
    optimizer = torch.optim.AdamW(held_by, lr=1e-3)
    inputs, targets, _ = make_batch()
    stage = PipelineStage(own, ctx.rank, 2, DEVICE, group=ctx.comm.group)

    scaler = torch.amp.GradScaler(counted_device.NAME, enabled=options.scales)
    _ = scaler.scale(torch.zeros((), device=DEVICE))  # a stage without a loss begins with it too

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        return scaler.scale(sum_of(output, targets))  # of one sample

    schedule = Schedule1F1B(stage, n_microbatches=2 * options.steps, loss_fn=loss_fn, scale_grads=False)

    def step() -> None:
        watch = Watch(options)
        losses: list[Tensor] = []
        schedule.step(*([] if ctx.rank else [inputs]), **({"target": targets, "losses": losses} if ctx.rank else {}))
        if options.looks:  # all ranks are to know the loss
            mean = torch.stack(losses).sum() if ctx.rank else torch.zeros((), device=DEVICE)
            dist.all_reduce(mean, group=ctx.comm.group)
        end_by_hand(ctx, held_by, [optimizer], scaler, watch, ctx.comm.group)

    return step


def by_accel(layout: str, ctx: accel.DistContext, options: Options) -> Step:
    ctx = accel.replace(ctx, **SETTINGS[layout])
    plans = {
        "tp": PLAN,
        "fsdp": accel.parallel.Plan(units=["*"]),
        "pp": accel.parallel.Plan(micro_batches=2 * options.steps),
    }
    given = {"bucket_cap_mb": options.bucket_cap_mb} if options.bucket_cap_mb else {}
    model = accel.prepare_model(ctx, make_model(), plan=plans.get(layout), **given)
    optimizer = accel.prepare_optimizer(ctx, torch.optim.AdamW(grouped(list(model.parameters())), lr=1e-3))
    inputs, targets, units = make_batch()
    scaler = accel.LossScale(scale=8.0, dynamic=True) if options.scales else None
    accumulation = 1 if layout == "pp" else options.steps
    carried = [accel.train_state(ctx, accumulation=accumulation, scaler=scaler)]
    weight = units if options.counts else None

    def step() -> None:
        state = carried[0]
        for _ in range(accumulation):
            state = state.next(one_sample_each(ctx, state.cursor))
            if layout == "pp":
                state = accel.forward_backward(ctx, model, state, inputs, loss_fn=sum_of, targets=targets)[1]
                continue
            with accel.accumulate(ctx, state, model):
                state = accel.backward(ctx, loss_of(model(inputs), targets), state, weight=weight)
        policy = "raise" if options.looks else "ignore"
        limit = MAX_NORM if options.clips else None
        carried[0] = accel.optimizer_step(ctx, optimizer, state, max_norm=limit, nonfinite=policy)

    return step


def work_of(make: Callable[[], Step]) -> Work:
    """Return the work of the third step."""
    work = Work([], [])
    with torch.autograd.set_multithreading_enabled(False), counted_device.counting(work.operators):
        step = make()
        for _ in range(2):
            step()
        _DONE[threading.get_ident()] = work
        work.operators.clear()
        try:
            step()
        finally:
            del _DONE[threading.get_ident()]
        return Work(list(work.operators), work.messages)


def ranks_work(make: Callable[..., Step], layout: str, options: Options) -> list[Work]:
    """Return the work of each of two ranks, by hand or by accel."""

    def rank(group: Any) -> Work:
        return work_of(lambda: make(layout, accel.from_group(group, device=str(DEVICE)), options))

    return simulate_groups(rank, 2, default_group=True)


def kernels(work: Work) -> int:
    """Number of operators that compute, and do not only look at the same memory in another way."""
    return sum(not name.startswith("message") and not is_view(name) for name in work.operators)


def counted(work: Work) -> dict[str, int]:
    """Number of each kind of work."""
    operators = sum(not name.startswith("message") for name in work.operators)
    messages = len(work.messages)
    return {"kernels": kernels(work), "operators": operators, "messages": messages}


def is_view(name: str) -> bool:
    space, packet, overload = name.split(".")
    if space == "_c10d_functional":
        return packet != "all_reduce"
    found = getattr(getattr(getattr(torch.ops, space), packet), overload)
    return any(each.alias_info is not None and not each.alias_info.is_write for each in found._schema.returns)


BLOCK_MB = 4 * 296 / 2**20  # the parameters of one block
MARKS = {"aten.native_layer_norm.default": "forward", "aten.native_layer_norm_backward.default": "backward"}


def order(layout: str, steps: int) -> list[str]:
    """Return the order of blocks and messages in a step of accel: a block begins its forward with a norm, and ends
    its backward with it."""
    cap = BLOCK_MB if layout == "ddp" else None
    work = ranks_work(by_accel, layout, Options(steps, looks=True, bucket_cap_mb=cap))[0]
    return [MARKS.get(name, name) for name in work.operators if name in MARKS or name.startswith("message")]


KINDS: dict[str, dict[str, bool]] = {
    "ignores": {},
    "looks": {"looks": True},
    "counts": {"looks": True, "counts": True},
    "scales": {"scales": True},
}
LEFT_OUT = {("pp", "counts")}  # the count of units along pp is the batch's
WAYS = ((False, 1), (True, 3))  # whether it clips, and micro-batches; with --all their product

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    watch_messages()
    found: dict[str, Any] = {}
    words = sys.argv[1:]
    ways = [*itertools.product(*zip(*WAYS, strict=True))] if "--all" in words else WAYS
    layouts = [layout for layout in SETTINGS if layout in words] or [*SETTINGS]
    for layout, kind, (clips, steps) in itertools.product(layouts, KINDS, ways):
        if (layout, kind) in LEFT_OUT:
            continue
        options = Options(steps, clips, **KINDS[kind])
        both = {make.__name__: ranks_work(make, layout, options) for make in (by_hand, by_accel)}
        # the stages of a pipeline differ, and the last one has the loss
        for rank, name in enumerate(("pp", "pp last") if layout == "pp" else (layout,)):
            found[f"{name}, {kind}, {'clipped' if clips else 'whole'}, {steps}"] = {
                who: counted(works[rank]) for who, works in both.items()
            }
    orders = {f"{layout}, {steps}": order(layout, steps) for layout in SETTINGS for steps in (1, 2)}
    print(json.dumps({"work": found, "orders": orders}))
