# SPDX-License-Identifier: Apache-2.0
"""NCCL's rules for 64 ranks: one order of calls on each communicator, and no two of them that wait for each other.

NCCL runs the collectives of a communicator in the order of the calls, and a rank's kernels may block those behind them:
ranks that call two communicators in different orders can wait for each other forever. Messages between stages of a
pipeline, which torch batches in pairs, are left out.
"""

from __future__ import annotations

import graphlib
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from processes import patience
from steps import ByState
from torch import nn

import accel
from accel.testing import Simulator, _group

Call = tuple[tuple[int, ...], str]  # the ranks of a communicator, and what they call
RANKS = 64
PLAN = accel.parallel.Plan(tensor={"*.0": "colwise", "*.2": "rowwise"}, micro_batches=4)


def drawn_meshes(seed: int = 0, count: int = 10) -> list[str]:
    """Draw different meshes of 64 ranks."""
    draw, found = random.Random(seed), list[str]()
    while len(found) < count:
        left, sizes = RANKS, dict[str, int]()
        for name, most in (("pp", 4), ("tp", 8), ("dp_shard", 16)):
            sizes[name] = draw.choice([size for size in (1, 2, 4, 8, 16) if size <= min(most, left)])
            left //= sizes[name]
        sizes["dp_replicate"] = left
        mesh = ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        if mesh not in found:
            found.append(mesh)
    return found


def problem_of(calls: Mapping[int, Sequence[Call]]) -> str:
    """Return how ranks break the rules; nothing if they do not."""
    groups = {ranks for made in calls.values() for ranks, _ in made}
    for ranks in groups:
        orders = {rank: [name for group, name in calls[rank] if group == ranks] for rank in ranks}
        if other := next((rank for rank in ranks if orders[rank] != orders[ranks[0]]), None):
            return f"ranks {ranks[0]} and {other} call {ranks} in other orders"
    # a call ends when all its ranks have come to it, and each comes to it after its call before
    after = defaultdict[tuple[tuple[int, ...], int], set[Any]](set)
    for made in calls.values():
        number, before = defaultdict[tuple[int, ...], int](int), None
        for ranks, _ in made:
            node = (ranks, number[ranks])
            number[ranks] += 1
            if before is not None:
                after[node].add(before)
            before = node
    try:
        _ = graphlib.TopologicalSorter(after).prepare()
    except graphlib.CycleError as error:
        return f"calls wait for each other: {error.args[1]}"
    return ""


def test_the_rules_are_noticed_when_broken() -> None:
    everybody, even = (0, 1), (0, 2)
    assert problem_of({0: [(everybody, "a"), (everybody, "b")], 1: [(everybody, "a"), (everybody, "b")]}) == ""
    assert "other orders" in problem_of(
        {0: [(everybody, "a"), (everybody, "b")], 1: [(everybody, "b"), (everybody, "a")]}
    )
    third = (1, 2)
    crossed = {
        0: [(everybody, "a"), (even, "a")],
        1: [(third, "a"), (everybody, "a")],
        2: [(even, "a"), (third, "a")],
    }
    assert "wait for each other" in problem_of(crossed)


def train(ctx: accel.DistContext, mesh: str) -> None:
    """One window of a small model, spread along all axes."""
    ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp")
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(4)]
    plan = PLAN if ctx.axis("tp").size > 1 else accel.parallel.Plan(micro_batches=4)
    model = accel.prepare_model(ctx, nn.Sequential(*blocks), plan=plan)
    optimizer, run = torch.optim.SGD(model.parameters(), lr=0.1), ByState(ctx)
    run.begin()
    _ = run.forward_backward(model, torch.ones(4, 16), loss_fn=lambda out: out.square().sum())
    _ = run.step(optimizer, max_norm=1.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", drawn_meshes())
def test_no_mesh_of_64_ranks_can_hang(ranks: Simulator, monkeypatch: pytest.MonkeyPatch, mesh: str) -> None:
    calls: dict[int, list[Call]] = {rank: [] for rank in range(RANKS)}
    join = _group.SimulatedGroup._join

    def joined(self: Any, call: Any, buffers: Any, *rest: Any) -> Any:
        sizes = [each.numel() for each in buffers.inputs]
        calls[self._me].append((tuple(self._rendezvous.members.ranks), f"{call.name} {sizes}"))
        return join(self, call, buffers, *rest)

    monkeypatch.setattr(_group.SimulatedGroup, "_join", joined)
    _ = ranks.run(lambda ctx: train(ctx, mesh), RANKS, default_group=True, timeout_s=patience(300))
    assert all(calls.values())
    assert problem_of(calls) == ""
