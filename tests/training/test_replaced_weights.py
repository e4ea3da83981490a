# SPDX-License-Identifier: Apache-2.0
"""What a block replaces for a time is not saved, loaded, stepped or averaged within it; everything else goes on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from catching import assert_raises
from torch import nn
from torch.utils.data import DataLoader

import accel
from accel.comm import refuse_replaced, refuse_replaced_memory, replaced
from accel.errors import StepError
from accel.items import Part, TrainableOnly
from accel.testing import simulate
from accel.training import Ema
from accel.training._find_lr import rewound


class TwoWeights(torch.optim.SGD):
    """A schedule-free optimizer: its averaged weights are the others' negatives."""

    def train(self) -> None:
        self._switch(train=True)

    def eval(self) -> None:
        self._switch(train=False)

    def _switch(self, *, train: bool) -> None:
        group = self.param_groups[0]
        if group.get("train_mode", True) != train:
            with torch.no_grad():
                for parameter in group["params"]:
                    parameter.neg_()
        group["train_mode"] = train


class Both:
    """An object that gives a model's state as its own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return dict(self.model.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


class Run(NamedTuple):
    ctx: accel.DistContext
    net: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: Ema
    other: nn.Module
    other_optimizer: torch.optim.Optimizer


def _run(ctx: accel.DistContext) -> Run:
    torch.manual_seed(0)
    net, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), nn.Linear(4, 1)
    model, optimizer = accel.prepare(ctx, net, TwoWeights(net.parameters(), lr=0.1))
    judge, other_optimizer = accel.prepare(ctx, other, torch.optim.Adam(other.parameters()))
    ema = Ema(model, decay=0.5)
    with torch.no_grad():
        for each in net.parameters():
            each += 1
    return Run(ctx, net, model, optimizer, ema, judge, other_optimizer)


def _step(run: Run, model: nn.Module, optimizer: Any) -> accel.TrainState:
    loader = accel.prepare_loader(run.ctx, DataLoader(torch.randn(4, 4), batch_size=4), global_batch=4)
    state = accel.train_state(run.ctx)
    batch = next(iter(accel.batches(run.ctx, loader, state)))
    state = accel.backward(run.ctx, model(batch.data).square().mean(), state.next(batch))
    return accel.optimizer_step(run.ctx, optimizer, state)


BLOCKS: dict[str, Callable[[Run], Any]] = {
    "applied_to": lambda run: run.ema.applied_to(run.model),
    "evaluating": lambda run: accel.evaluating(run.model, run.optimizer),
}
HOLDERS: dict[str, Callable[[Run], object]] = {
    "model": lambda run: run.model,
    "unwrapped": lambda run: run.net,
    "submodule": lambda run: run.net[1],  # pyright: ignore[reportIndexIssue]
    "both": lambda run: nn.ModuleList([run.other, run.net]),
    "optimizer": lambda run: run.optimizer,
    "part": lambda run: Part(run.net),
    "trainable": lambda run: TrainableOnly(run.net),
    "stateful": lambda run: Both(run.net),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_call_saves_or_changes_what_a_block_has_replaced_and_each_works_after_it(block, ranks, tmp_path):
    def refused(call: Callable[[], object]) -> None:
        with assert_raises(StepError, problem=f"leave {block} first") as caught:
            call()
        assert re.search(r"End the block `with .*:` before the line that calls", caught.value.fix)

    def fn(ctx: accel.DistContext) -> None:
        run = _run(ctx)
        every = {name: holder(run) for name, holder in HOLDERS.items()}
        path = accel.save_state(ctx, tmp_path / "before", every, step=1)
        for name, item in every.items():
            items = {**dict.fromkeys(every), name: item}
            with BLOCKS[block](run):
                refused(lambda items=items: accel.save_state(ctx, tmp_path / "in", items, step=1))
                refused(lambda items=items: accel.load_state(ctx, path, items))
        start = accel.train_state(ctx)
        calls: list[Callable[[], object]] = [
            lambda: accel.save_state(ctx, tmp_path / "in", every, step=1),
            lambda: accel.load_state(ctx, path, every),
            lambda: accel.resume(ctx, tmp_path / "new", {"model": run.model}, start),  # there is nothing to load, too
            lambda: accel.save_state(ctx, tmp_path / "value", {"w": run.net[1].weight.detach()}, step=1),
            lambda: run.ema.update_(run.model),
            lambda: accel.training.discard(start, run.other, run.model),
            lambda: _step(run, run.model, run.optimizer),
        ]
        own = {name: each.clone() for name, each in run.net.state_dict().items()}
        with BLOCKS[block](run):
            for call in calls[:-1]:
                refused(call)
            if ranks == 1:  # ranks that exchange gradients have none to exchange in a step that is refused
                refused(calls[-1])
            assert not (tmp_path / "in").exists()
        for name, each in run.net.state_dict().items():
            assert torch.equal(each, own[name])  # nothing is lost
        run.optimizer.zero_grad()
        for call in calls:
            call()

    simulate(fn, ranks)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_correct_programs_run_in_a_block(block, ranks, tmp_path):
    def fn(ctx: accel.DistContext) -> None:
        run = _run(ctx)
        start = accel.train_state(ctx)
        judge = {"judge": run.other, "optimizer": run.other_optimizer, "state": start, "both": Both(run.other)}
        with BLOCKS[block](run):
            here = {name: each.clone() for name, each in run.net.state_dict().items()}
            accel.load_state(ctx, accel.save_state(ctx, tmp_path / "judge", judge, step=1), judge)
            _ = _step(run, run.other, run.other_optimizer)
            saved = accel.get_state_dict(ctx, run.model, dst=None)
            assert saved is not None
            assert all(torch.equal(saved[name], here[name]) for name in here)
            _ = accel.save_model(ctx, run.model, tmp_path / "weights")
            with accel.evaluating(run.model), Ema(run.other).applied_to(run.other):
                _ = run.model(torch.randn(2, 4))
        with accel.evaluating(run.model, run.other_optimizer):  # no optimizer with two kinds of weights
            state = accel.load_state(
                ctx, accel.save_state(ctx, tmp_path / "m", {"m": run.model}, step=1), {"m": run.model}
            )
        assert state["m"] is run.model

    simulate(fn, ranks)


def test_an_average_that_is_applied_counts_and_blocks_of_one_model_nest(tmp_path):
    ctx = accel.single()
    run = _run(ctx)
    second = Ema(run.model)
    own = run.net[0].weight.clone()  # pyright: ignore[reportIndexIssue]
    with run.ema.applied_to(run.model):
        with second.applied_to(run.model), assert_raises(StepError, problem="leave applied_to first"):
            accel.save_state(ctx, tmp_path, {"ema": second}, step=1)
        with assert_raises(StepError, problem="leave applied_to first"):
            accel.save_state(ctx, tmp_path, {"model": run.model}, step=1)
        _ = accel.save_state(ctx, tmp_path, {"ema": second}, step=2)
    assert torch.equal(run.net[0].weight, own)  # pyright: ignore[reportIndexIssue]
    _ = accel.save_state(ctx, tmp_path, {"model": run.model, "ema": run.ema}, step=3)


def test_a_range_test_steps_its_own_weights_and_neither_saves_nor_loads_them(tmp_path):
    ctx = accel.single()
    run = _run(ctx)
    with rewound(ctx, run.model, [run.optimizer]):
        _ = _step(run, run.model, run.optimizer)
        for item in (run.model, run.optimizer):
            with assert_raises(StepError, problem="leave find_lr first"):
                accel.save_state(ctx, tmp_path, {"item": item}, step=1)
        with run.ema.applied_to(run.model), assert_raises(StepError, problem="leave applied_to first"):
            run.ema.update_(run.model)
    _ = accel.save_state(ctx, tmp_path, {"model": run.model}, step=1)


def test_a_step_within_the_backward_is_refused_too():
    ctx = accel.single()
    run = _run(ctx)
    with run.ema.applied_to(run.model), assert_raises(StepError, problem="leave applied_to first"):
        accel.training.fused_step(ctx, run.model(torch.ones(1, 4)).sum(), run.optimizer)
    accel.training.fused_step(ctx, run.model(torch.ones(1, 4)).sum(), run.optimizer)


def test_one_rank_that_is_in_a_block_is_named_on_all(tmp_path):
    def fn(ctx: accel.DistContext) -> None:
        run = _run(ctx)
        inside = run.ema.applied_to(run.model) if ctx.rank else contextlib.nullcontext()
        with inside, assert_raises(StepError, problem="leave applied_to first"):
            accel.save_state(ctx, tmp_path, {"model": run.model}, step=1)
        _ = accel.save_state(ctx, tmp_path, {"model": run.model}, step=1)

    simulate(fn, 2)


def test_marks_end_with_the_block_and_cost_tensors_without_memory_nothing():
    sparse = torch.eye(2).to_sparse()
    with replaced([sparse], "block", "block()"), pytest.raises(StepError):
        refuse_replaced_memory([sparse], "save")
    refuse_replaced_memory([sparse], "save")
    refuse_replaced([sparse], "save")


@pytest.mark.parametrize("reshards", [True, False])
def test_sharded_weights_are_known_after_a_forward_in_the_block(reshards, tmp_path):
    def fn(ctx: accel.DistContext) -> None:
        plan = accel.parallel.Plan(reshard_after_forward=reshards)
        ctx = accel.replace(ctx, strategy="fsdp", plan=plan)
        run = _run(ctx)
        with run.ema.applied_to(run.model):
            _ = run.model(torch.randn(2, 4))
            for item in (run.model, run.optimizer, Both(run.net)):
                with assert_raises(StepError, problem="leave applied_to first"):
                    accel.save_state(ctx, tmp_path, {"item": item}, step=1)

    simulate(fn, 2, default_group=True)
