# SPDX-License-Identifier: Apache-2.0
"""NCCL's rules for 64 ranks: what each communicator must see, and no calls that wait for each other.

- Collectives of a communicator are called in one order by all its ranks, with the same facts.
- Messages from a rank to another are received in the order in which they are sent, whatever their tags, with the same
  dtype and size.
- The first call on a communicator opens it, and takes all its ranks: a message between two of them does not suffice.
- A call may block those behind it, on any communicator, until all its ranks have come. Messages begin together only in
  one `batch_isend_irecv`.

Ranks run alone, one after another; on small meshes they call the same beside others.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from language_models import LENGTH, WIDTH, Mixture
from recorded_ranks import Collective, Communicator, Message, Step, Steps, recorded, run_alone
from steps import ByState
from torch import nn

import accel
from accel.parallel.axes.context import _spread
from accel.testing import Simulator
from accel.topology import Axes, mesh_sizes

RANKS, ROWS, HEADS = 64, 4, 4
SCHEDULES = ("1F1B", "Interleaved1F1B", "GPipe", "InterleavedZeroBubble")
STYLES: Any = {"*.qkv": "packed_colwise_3", "*.join": "rowwise", "*.up": "colwise", "*.down": "rowwise"}


class Block(nn.Module):
    """Attention, and two layers or experts, with as few parameters as that takes."""

    def __init__(self, ctx: accel.DistContext, experts: int) -> None:
        super().__init__()
        self.ctx = ctx
        self.qkv, self.join = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        if experts:
            self.mixture = Mixture(experts)
        else:
            self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(2, (3, -1, WIDTH // HEADS))
        mixed = accel.parallel.context_attention(self.ctx, *heads.transpose(1, 3).unbind(2))
        x = x + self.join(mixed.transpose(1, 2).flatten(2))
        return x + (self.mixture(x) if hasattr(self, "mixture") else self.down(self.up(x)))


class Case(NamedTuple):
    """A mesh, and how a model is spread on it."""

    mesh: str
    context: Any
    schedule: Any

    def __str__(self) -> str:
        return f"{self.mesh},{self.context},{self.schedule}"


def drawn_cases(seed: int = 0, count: int = 10) -> list[Case]:
    """Draw different meshes of 64 ranks."""
    draw, found = random.Random(seed), dict[str, Case]()
    while len(found) < count:
        left, sizes = RANKS, dict[str, int]()
        for name, most in (("pp", 4), ("cp", 4), ("tp", 4), ("dp_shard", 16)):
            sizes[name] = draw.choice([size for size in (1, 2, 4, 8, 16) if size <= min(most, left)])
            left //= sizes[name]
        sizes["dp_replicate"] = left
        sizes["ep"] = draw.choice([1, 2, 4])
        mesh = ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        shares = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
        if sizes["dp_shard"] > 1 and not shares % sizes["ep"]:
            methods = ["ring", "gather", "heads"][: 3 if sizes["cp"] * sizes["tp"] <= HEADS else 2]
            _ = found.setdefault(mesh, Case(mesh, draw.choice(methods), draw.choice(SCHEDULES)))
    return [*found.values()]


def train(ctx: accel.DistContext, case: Case) -> None:
    """One window of a small model, spread along all axes."""
    ctx = accel.replace(ctx, mesh=case.mesh, strategy="fsdp")
    pp = ctx.axis("pp").size
    each = 2 if pp > 1 and case.schedule.startswith("Interleaved") else 1
    experts = 4 * ("ep=" in case.mesh)
    plan = accel.parallel.Plan(
        tensor=STYLES if ctx.axis("tp").size > 1 else {},
        experts={"*.mixture.experts": "dispatch"} if experts else "model",
        context=case.context,
        schedule=case.schedule if pp > 1 else "1F1B",
        stages_per_rank=each,
        micro_batches=ROWS if pp > 1 else 1,
    )
    with accel.seeding.seeded(ctx, 0):
        # one more than all stages can have equally many of
        blocks = [Block(ctx, experts * (at % 2)) for at in range(max(2, pp * each) + (pp > 1))]
    model = accel.prepare_model(ctx, nn.Sequential(*blocks), plan=plan)
    run = ByState(ctx)
    run.begin()
    inputs = accel.parallel.split_sequence(ctx, {"x": torch.ones(ROWS, LENGTH, WIDTH)})["x"]
    _ = run.forward_backward(model, inputs, loss_fn=lambda out: out.square().sum())
    _ = run.step(Descent(model.parameters()), max_norm=1.0)


class Descent(torch.optim.Optimizer):
    """Steps of local parts, which call no rank: DTensor's operators take longer than all else of a window."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            if each.grad is not None:
                value, grad = (one.to_local() if hasattr(one, "to_local") else one for one in (each, each.grad))
                _ = value.sub_(grad, alpha=0.1)


@pytest.fixture(autouse=True)
def own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models compute with own positions as they are, which calls the same attention: ranks that run alone have no
    values of others for the proof of parts, and do not learn which parts other stages pass on."""
    monkeypatch.setattr(_spread, "_begin", lambda *_: None)


def problem_of(steps: Steps) -> str:
    """Return how ranks break the rules; nothing if they do not."""
    return _order_problem(steps) or _message_problem(steps) or _wait_problem(steps)


def _order_problem(steps: Steps) -> str:
    made = defaultdict[Communicator, dict[int, list[str]]](dict)
    for rank, each in steps.items():
        for call in (call for step in each for call in step):
            orders = made[call.on].setdefault(rank, [])
            if isinstance(call, Collective):
                orders.append(call.what)
    for on, orders in made.items():
        if missing := set(on.ranks) - set(orders):
            return f"ranks {sorted(missing)} never open {on}"
        first = orders[on.ranks[0]]
        if other := next((rank for rank in on.ranks if orders[rank] != first), None):
            return f"ranks {on.ranks[0]} and {other} call {on} in other orders"
    return ""


def _message_problem(steps: Steps) -> str:
    sides = defaultdict[tuple[Communicator, int, int], dict[bool, list[str]]](lambda: {True: [], False: []})
    for rank, each in steps.items():
        for call in (call for step in each for call in step if isinstance(call, Message)):
            sides[call.on, call.source, call.target][rank == call.source].append(call.what)
    for (_, source, target), both in sides.items():
        if both[True] != both[False]:
            return f"rank {target} does not receive what rank {source} sends, in its order"
    return ""


def _wait_problem(steps: Steps) -> str:
    waits = {rank: _waits(rank, each) for rank, each in steps.items()}
    at = dict.fromkeys(waits, 0)
    come = defaultdict[Hashable, set[int]](set)
    moved = True
    while moved:
        moved = False
        for rank, each in waits.items():
            while at[rank] < len(each):
                for event, _ in each[at[rank]]:
                    come[event].add(rank)
                if any(come[event] < needed for event, needed in each[at[rank]]):
                    break
                at[rank] += 1
                moved = True
    stuck = [rank for rank, each in waits.items() if at[rank] < len(each)]
    lines = [
        f"rank {rank} for {sorted(needed - come[event])} in {event}"
        for rank in stuck
        for event, needed in waits[rank][at[rank]]
        if come[event] < needed
    ]
    return f"calls wait for each other: {'; '.join(lines)}" if stuck else ""


def _waits(rank: int, steps: Sequence[Step]) -> list[list[tuple[Hashable, frozenset[int]]]]:
    """Return what each step of a rank waits for, and the ranks that must come to it; communicators open first."""
    number, opened = Counter[Hashable](), set[Communicator]()
    found = list[list[tuple[Hashable, frozenset[int]]]]()
    for step in steps:
        events = list[tuple[Hashable, frozenset[int]]]()
        for call in step:
            if call.on not in opened:
                opened.add(call.on)
                found.append([((call.on, "opens"), frozenset(call.on.ranks))])
            is_message = isinstance(call, Message)
            needed = frozenset({call.source, call.target} if is_message else call.on.ranks)
            event = (call.on, call.source, call.target) if is_message else (call.on,)
            events.append(((*event, number[event]), needed))
            number[event] += 1
        found.append(events)
    return found


EVERYBODY, EVEN, THIRD = Communicator("0", (0, 1)), Communicator("1", (0, 2)), Communicator("2", (1, 2))


def call(on: Communicator, what: str = "sum") -> Step:
    return (Collective(on, what),)


def message(source: int, target: int, what: str = "float32, 4", on: Communicator = EVERYBODY) -> Message:
    return Message(on, source, target, what)


OPEN = call(EVERYBODY)
RING = (message(0, 1), message(1, 0))


@pytest.mark.parametrize(
    "steps",
    [
        {0: [OPEN, call(EVEN)], 1: [OPEN, call(THIRD)], 2: [call(EVEN), call(THIRD)]},
        {0: [OPEN, RING], 1: [OPEN, RING[::-1]]},
        {0: [(message(0, 1),), (message(1, 0),)], 1: [(message(0, 1),), (message(1, 0),)]},
        {0: [(message(0, 1, "a"), message(0, 1, "b"))], 1: [(message(0, 1, "a"),), (message(0, 1, "b"),)]},
    ],
    ids=["collectives", "a ring in one batch", "there and back", "two in a batch"],
)
def test_right_calls_pass(steps: Steps) -> None:
    assert problem_of(steps) == ""


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ({0: [OPEN, call(EVERYBODY, "max")], 1: [call(EVERYBODY, "max"), OPEN]}, "other orders"),
        ({0: [OPEN, OPEN], 1: [OPEN]}, "other orders"),
        ({0: [OPEN, call(EVEN)], 1: [call(THIRD), OPEN], 2: [call(EVEN), call(THIRD)]}, "wait for each other"),
        ({0: [OPEN, *((each,) for each in RING)], 1: [OPEN, *((each,) for each in RING[::-1])]}, "wait for each other"),
        ({0: [OPEN, (message(0, 1),)], 1: [OPEN]}, "does not receive"),
        ({0: [OPEN], 1: [OPEN, (message(0, 1),)]}, "does not receive"),
        ({0: [(message(0, 1, "a"),), (message(0, 1, "b"),)], 1: [(message(0, 1, "b"), message(0, 1, "a"))]}, "order"),
        ({0: [(message(0, 1, on=EVEN),)], 1: [(message(0, 1, on=EVEN),)], 2: []}, "never open"),
        ({0: [OPEN, (message(0, 1),)], 1: [(message(0, 1),), OPEN]}, "wait for each other"),
        (
            {0: [OPEN, (message(0, 2, on=EVEN),), OPEN], 1: [OPEN, OPEN, call(THIRD)],
             2: [call(THIRD), (message(0, 2, on=EVEN),)]},
            "wait for each other",
        ),
    ],
    ids=[
        "order", "one more", "crossed", "all send first", "not received", "not sent", "other order of messages",
        "opened by some", "a message before a collective", "a message across a collective",
    ],
)  # fmt: skip
def test_broken_rules_are_found(steps: Steps, problem: str) -> None:
    assert problem in problem_of(steps)


SMALL = (
    Case("pp=2,cp=2", "ring", "1F1B"),
    pytest.param(Case("pp=2,dp=2,cp=2", "ring", "Interleaved1F1B"), marks=pytest.mark.slow),
    pytest.param(Case("dp=2,cp=2,tp=2,ep=2", "ring", "1F1B"), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_rank_alone_calls_what_it_calls_beside_others(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    size = Axes(**mesh_sizes(case.mesh, where="")).world_size
    with recorded(monkeypatch) as alone:
        run_alone(lambda ctx: train(ctx, case), size)
    with recorded(monkeypatch) as together:
        _ = ranks.run(lambda ctx: train(ctx, case), size, default_group=True)
    assert alone == together
    assert problem_of(alone) == ""
    for at, step in enumerate(alone[3]):
        without = [*alone[3][:at], *alone[3][at + 1 :]]
        assert problem_of({**alone, 3: without}) != "", f"{step} can be left out"


def test_a_ring_whose_ranks_all_send_first_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(operations: list[dist.P2POp]) -> list[Any]:
        return [each.op(each.tensor, each.peer, each.group) for each in operations]

    with recorded(monkeypatch) as steps:
        monkeypatch.setattr(dist, "batch_isend_irecv", one_by_one)
        run_alone(lambda ctx: train(ctx, Case("cp=4", "ring", "1F1B")), 4)
    assert "calls wait for each other" in problem_of(steps)


ALL_AXES = Case("pp=2,cp=2,dp_shard=2,dp_replicate=2,ep=2", "gather", "InterleavedZeroBubble")  # 16 ranks, for CI


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [ALL_AXES, *(pytest.param(each, marks=pytest.mark.nightly) for each in drawn_cases())], ids=str
)
def test_no_mesh_of_many_ranks_can_hang(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    size = Axes(**mesh_sizes(case.mesh, where="")).world_size
    with recorded(monkeypatch) as steps:
        run_alone(lambda ctx: train(ctx, case), size)
    assert len(steps) == size
    assert problem_of(steps) == ""
