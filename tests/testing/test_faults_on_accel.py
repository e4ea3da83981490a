# SPDX-License-Identifier: Apache-2.0
"""Faults at every call of every collective of accel: each ends in its own error, names its rank, or changes nothing."""

from __future__ import annotations

import inspect
import itertools
import signal
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
import torch
from leaves import tensors_of
from torch.utils.data import DataLoader

import accel
from accel import collectives, process
from accel.testing import Deadlock, Fault, FaultNotReached, InjectedFault, SimulationError, Simulator

SIZE, LARGE = 3, 20_000  # more than fits a first message, so that others follow
ENDS = {"raise": InjectedFault, "vanish": SimulationError, "terminate": SimulationError}


def _tree(ctx: accel.DistContext, rows: int) -> dict[str, Any]:
    return {"x": torch.full((rows, 2), float(ctx.rank)), "y": [torch.tensor(ctx.rank), None]}


def gather_for_metrics(ctx: accel.DistContext) -> list[Any]:
    loader = accel.prepare_loader(ctx, DataLoader(list(range(5)), batch_size=1))
    return [
        accel.gather_for_metrics(ctx, {"ids": batch.data}, batch)["ids"].tolist()
        for batch in accel.batches(ctx, loader, accel.Cursor(seed=0))
    ]


def main_process_first(ctx: accel.DistContext) -> int:
    with accel.main_process_first(ctx):
        return ctx.rank


def local_main_process_first(ctx: accel.DistContext) -> int:
    with accel.local_main_process_first(ctx):
        return ctx.rank


CALLS: dict[str, Callable[[accel.DistContext], Any]] = {
    "gather": lambda ctx: accel.gather(ctx, _tree(ctx, ctx.rank)),
    "gather, large": lambda ctx: accel.gather(ctx, _tree(ctx, LARGE + ctx.rank)),
    "gather, dst=": lambda ctx: accel.gather(ctx, _tree(ctx, LARGE), dst=1),
    "gather, to=": lambda ctx: accel.gather(ctx, _tree(ctx, 2), to="cpu"),
    "reduce": lambda ctx: accel.reduce(ctx, _tree(ctx, 2)),
    "reduce, large": lambda ctx: accel.reduce(ctx, _tree(ctx, LARGE), "max"),
    "broadcast": lambda ctx: accel.broadcast(ctx, _tree(ctx, 2), src=2),
    "broadcast, large": lambda ctx: accel.broadcast(ctx, _tree(ctx, LARGE), src=1),
    "pad_across_processes": lambda ctx: accel.pad_across_processes(ctx, {"x": torch.ones(ctx.rank, 2)}, pad_index=7),
    "gather_object": lambda ctx: accel.gather_object(ctx, {"rank": ctx.rank}),
    "gather_object, large": lambda ctx: accel.gather_object(ctx, "x" * LARGE, dst=0),
    "broadcast_object_list": lambda ctx: accel.broadcast_object_list(ctx, [ctx.rank, {"a": (1, None)}], src=1),
    "broadcast_from_holder": lambda ctx: accel.broadcast_from_holder(
        ctx, {"x": torch.ones(3)} if ctx.rank == 1 else None
    ),
    "broadcast_object_list, large": lambda ctx: accel.broadcast_object_list(ctx, ["x" * LARGE]),
    "any_rank": lambda ctx: accel.any_rank(ctx, ctx.rank == 2),
    "wait_for_everyone": accel.wait_for_everyone,
    "gather_for_metrics": gather_for_metrics,
    "main_process_first": main_process_first,
    "local_main_process_first": local_main_process_first,
}


def test_no_collective_is_left_out():
    functions = {name: value for module in (collectives, process) for name, value in vars(module).items()}
    public = {name: value for name, value in functions.items() if name in accel.__all__ and inspect.isfunction(value)}
    together = {name for name, value in public.items() if "collective" in (value.__doc__ or "").partition("Args:")[0]}
    assert {"gather", "any_rank"} < together <= {name.partition(",")[0] for name in CALLS}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("action", get_args(get_type_hints(Fault)["action"]))
def test_a_fault_at_any_call_of_any_rank(ranks: Simulator, name: str, action: str):
    """Twice the collective, so that the second shows what a fault in the first left behind."""

    def twice(ctx: accel.DistContext) -> list[Any]:
        return [_summary(CALLS[name](ctx)) for _ in range(2)]

    straight = ranks.run(twice, SIZE)
    for rank in range(SIZE):
        for call in itertools.count():
            seed, fault = (None, 5)[call % 2], Fault(rank, call, action)
            try:
                ending = ranks.run(twice, SIZE, seed=seed, faults=[fault])
            except FaultNotReached:
                break
            except SimulationError as error:
                ending = error
            if action == "delay":
                assert ending == straight
            else:
                assert isinstance(ending, ENDS[action])
                assert f"rank {rank}" in str(ending)
        assert call >= 2
    assert ranks.run(twice, SIZE) == straight


def _summary(found: object) -> object:
    """What comparing takes little time for."""
    leaves = tensors_of(found) if isinstance(found, dict) else []
    return [(leaf.dtype, leaf.shape, leaf.sum().item()) for leaf in leaves] or found


@pytest.mark.parametrize("name", [name for name in CALLS if name != "gather_for_metrics"])
def test_a_report_names_accel_s_function_and_the_user_s_line(ranks, name):
    def skips(ctx: accel.DistContext) -> None:
        if ctx.rank != 1:
            CALLS[name](ctx)

    with pytest.raises(Deadlock) as caught:
        ranks.run(skips, SIZE)
    text = str(caught.value)
    assert "rank 1: returned" in text
    for rank in (0, 2):
        assert f"  rank {rank}: waiting in accel.{name.partition(',')[0]} at test_faults_on_accel.py:" in text


@pytest.mark.parametrize("call", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_request_within_a_broadcast_of_objects_is_agreed_on(ranks, call, number):
    def train(ctx: accel.DistContext) -> int:
        with accel.preempt.stop_requests(ctx, signals=[number]) as requests:
            for step in range(10):
                settings = accel.broadcast_object_list(ctx, [{"rate": 0.1 * step} if ctx.is_main_process else None])
                assert settings == [{"rate": 0.1 * step}]
                if accel.preempt.stop_agreed(ctx, requests):
                    return step
        return -1

    stopped = ranks.run(train, SIZE, faults=[Fault(1, call + 1, "terminate", signal=number)])
    assert len(set(stopped)) == 1
    assert stopped[0] >= 0
