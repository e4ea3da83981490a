# SPDX-License-Identifier: Apache-2.0
"""The most bytes of a step, beside a loop by hand: on simulated ranks, of all tensors that an operator makes.

Those along cp are in `test_context_memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_ranks import Loop, peak
from steps import one_sample_each
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import accel
from accel.tensors import is_dtensor
from accel.testing import simulate_groups

BLOCKS, WIDTH, ROWS = 4, 256, 96
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "tp": {"mesh": "tp=2"},
    "pp": {"mesh": "pp=2"},
}
MOST = 1.02


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
    )


def sum_of(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, targets, reduction="sum")


@contextmanager
def held(model: Any, *, syncs: bool) -> Iterator[None]:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(syncs)
    with model.no_sync() if isinstance(model, DistributedDataParallel) and not syncs else nullcontext():
        yield


def by_hand(layout: str, ctx: accel.DistContext, micro_batches: int) -> Loop:
    group, model = ctx.comm.group, make_model()
    if layout == "pp":
        return stages_by_hand(ctx, model, micro_batches)
    mesh = DeviceMesh.from_group(group, "cpu") if layout != "ddp" else None
    spread: nn.Module = model
    if layout == "ddp":
        spread = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    elif layout == "fsdp":
        for block in model:
            _ = fully_shard(block, mesh=mesh)
        spread = fully_shard(model, mesh=mesh)
    else:
        styles = {
            f"{at}.{of}": style() for at in range(BLOCKS) for of, style in ((1, ColwiseParallel), (3, RowwiseParallel))
        }
        spread = parallelize_module(model, mesh, styles)
    parameters = [*spread.parameters()]
    # torch's lists have DTensors or tensors, not both
    kinds = [[each for each in parameters if is_dtensor(each) is sharded] for sharded in (True, False)]
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], foreach=True)
    inputs, targets = torch.randn(2, ROWS, WIDTH)

    def step() -> None:
        for micro in range(micro_batches):
            with held(spread, syncs=micro + 1 == micro_batches):
                (nn.functional.mse_loss(spread(inputs), targets) / micro_batches).backward()
        grads = [[each.grad for each in kind if each.grad is not None] for kind in kinds if kind]
        norms = [nn.utils.get_total_norm(kind, foreach=True) for kind in grads]
        whole = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]
        norm = nn.utils.get_total_norm(whole)
        for kind in kinds:
            nn.utils.clip_grads_with_norm_(kind, 1.0, norm, foreach=True)
        del grads
        optimizer.step()
        optimizer.zero_grad()

    return parameters, step


def stages_by_hand(ctx: accel.DistContext, model: nn.Sequential, micro_batches: int) -> Loop:
    half = BLOCKS // 2
    own = model[half * ctx.rank : half * (ctx.rank + 1)]
    optimizer = torch.optim.AdamW(own.parameters(), foreach=True)
    inputs, targets = torch.randn(2, ROWS, WIDTH)
    stage = PipelineStage(own, ctx.rank, 2, torch.device("cpu"), group=ctx.comm.group)
    schedule = Schedule1F1B(stage, n_microbatches=2 * micro_batches, loss_fn=sum_of, scale_grads=False)

    def step() -> None:
        losses: list[Tensor] = []
        _ = schedule.step(
            *([] if ctx.rank else [inputs]), **({"target": targets, "losses": losses} if ctx.rank else {})
        )
        _ = nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return own.parameters(), step


def by_accel(layout: str, ctx: accel.DistContext, micro_batches: int) -> Loop:
    ctx = accel.replace(ctx, **SETTINGS[layout])
    plans = {
        "tp": accel.parallel.Plan(tensor={"*.1": "colwise", "*.3": "rowwise"}),
        "fsdp": accel.parallel.Plan(units=["*"]),
        "pp": accel.parallel.Plan(micro_batches=2 * micro_batches),
    }
    model = accel.prepare_model(ctx, make_model(), plan=plans.get(layout))
    optimizer = accel.prepare_optimizer(ctx, torch.optim.AdamW(model.parameters(), foreach=True))
    inputs, targets = torch.randn(2, ROWS, WIDTH)
    accumulation = 1 if layout == "pp" else micro_batches
    carried = [accel.train_state(ctx, accumulation=accumulation)]

    def step() -> None:
        state = carried[0]
        for _ in range(accumulation):
            state = state.next(one_sample_each(ctx, state.cursor))
            if layout == "pp":
                state = accel.forward_backward(ctx, model, state, inputs, loss_fn=sum_of, targets=targets)[1]
                continue
            with accel.accumulate(ctx, state, model):
                state = accel.backward(ctx, nn.functional.mse_loss(model(inputs), targets), state)
        carried[0] = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0)

    return model.parameters(), step


CASES = [(layout, micro_batches) for layout in SETTINGS for micro_batches in (1, 3)]
QUICK = [("fsdp", 1), ("tp", 1)]


@pytest.mark.parametrize(
    ("layout", "micro_batches"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_step_holds_no_more_than_the_loop_by_hand(layout: str, micro_batches: int) -> None:
    def on_rank(make: Callable[..., Loop]) -> Callable[[Any], int]:
        return lambda group: peak(make(layout, accel.from_group(group), micro_batches))

    ours, hand = (simulate_groups(on_rank(make), 2, default_group=True) for make in (by_accel, by_hand))
    for own, least in zip(ours, hand, strict=True):
        assert own <= MOST * least, f"{own / least:.3f} of {least} bytes"


EXPERTS, CHOSEN, INNER = 4, 2, 512


class Experts(nn.Module):
    """Experts stacked along the first dimension; of these, ranks may hold parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / INNER**0.5)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        outputs = torch.zeros_like(tokens)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            row, choice = torch.where(indices == expert)
            hidden = nn.functional.silu(tokens[row] @ up.T) @ down.T
            outputs = outputs.index_add(0, row, hidden * weights[row, choice, None])
        return outputs


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(tokens)
        routing = accel.parallel.route_tokens(self.router(hidden), CHOSEN)
        return tokens + self.experts(hidden, routing.indices, routing.weights)


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows, whose backward is the one back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: list[int], back: list[int], group: Any) -> Tensor:
        ctx.given = back, to, group
        found = rows.new_empty(sum(back), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), back, to, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        to, back, group = ctx.given
        return _Exchange.apply(grads[0], to, back, group), None, None, None


class DividedByHand(Experts):
    """Experts of this rank, to whom ranks send their tokens."""

    def __init__(self, whole: Experts, group: Any) -> None:
        super().__init__()
        rank, own = group.rank(), EXPERTS // group.size()
        self.group = group
        self.up = nn.Parameter(whole.up.detach()[rank * own : (rank + 1) * own].clone())
        self.down = nn.Parameter(whole.down.detach()[rank * own : (rank + 1) * own].clone())

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        order = indices.flatten().argsort(stable=True)
        counts = indices.flatten().bincount(minlength=EXPERTS).view(self.group.size(), -1)
        here = torch.empty_like(counts)
        dist.all_to_all_single(here, counts, group=self.group)
        to, back = counts.sum(1).tolist(), here.sum(1).tolist()
        own = torch.arange(here.shape[1]).repeat(len(here)).repeat_interleave(here.flatten())
        by_expert = own.argsort(stable=True)  # rows of an expert side by side, as a grouped product takes them
        rows = _Exchange.apply(tokens[order // CHOSEN], to, back, self.group)[by_expert]
        rows = super().forward(rows, own[by_expert].unsqueeze(1), torch.ones(len(rows), 1))
        rows = _Exchange.apply(rows[by_expert.argsort()], back, to, self.group)[order.argsort()]
        return (rows.view(len(tokens), CHOSEN, -1) * weights.unsqueeze(-1)).sum(1)


def tokens_of(ctx: accel.DistContext) -> Tensor:
    """Inputs and targets, alike for both loops: routing decides how many tokens a rank gets."""
    return torch.randn(2, 4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(ctx.rank))


def experts_by_hand(ctx: accel.DistContext) -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(*(Mixture() for _ in range(BLOCKS)))
    every = DeviceMesh.from_group(ctx.comm.group, "cpu")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    for each in model:
        each.experts = fully_shard(DividedByHand(each.experts, mesh.get_group("ep")), mesh=mesh["efsdp"])
        _ = fully_shard(each, mesh=every)
    _ = fully_shard(model, mesh=every)
    parameters = [*model.parameters()]
    kinds = [
        [each for each in parameters if each.device_mesh.ndim == 1 and each.device_mesh.size() == size]
        for size in (4, 2)
    ]
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds], foreach=True)
    inputs, targets = tokens_of(ctx)

    def step() -> None:
        nn.functional.mse_loss(model(inputs), targets).backward()
        for each in kinds[1]:  # a mean over four ranks, of which two hold each expert
            assert each.grad is not None
            _ = each.grad.div_(2.0)
        for kind in kinds:
            _ = nn.utils.clip_grad_norm_(kind, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return parameters, step


def experts_by_accel(ctx: accel.DistContext) -> Loop:
    torch.manual_seed(0)
    ctx = accel.replace(ctx, mesh="dp=4,ep=2", strategy="fsdp")
    plan = accel.parallel.Plan(experts={"*.experts": "dispatch"}, units=["*"])
    model = accel.prepare_model(ctx, nn.Sequential(*(Mixture() for _ in range(BLOCKS))), plan=plan)
    optimizer = accel.prepare_optimizer(ctx, torch.optim.AdamW(model.parameters(), foreach=True))
    inputs, targets = tokens_of(ctx)
    carried = [accel.train_state(ctx)]

    def step() -> None:
        state = carried[0].next(one_sample_each(ctx, carried[0].cursor))
        state = accel.backward(ctx, nn.functional.mse_loss(model(inputs), targets), state)
        carried[0] = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0)

    return model.parameters(), step


@pytest.mark.slow
def test_a_step_of_experts_holds_no_more_than_the_loop_by_hand() -> None:
    def on_rank(make: Callable[[accel.DistContext], Loop]) -> Callable[[Any], int]:
        return lambda group: peak(make(accel.from_group(group)))

    ours, hand = (simulate_groups(on_rank(make), 4, default_group=True) for make in (experts_by_accel, experts_by_hand))
    for own, least in zip(ours, hand, strict=True):
        assert own <= MOST * least, f"{own / least:.3f} of {least} bytes"
