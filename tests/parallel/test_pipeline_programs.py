# SPDX-License-Identifier: Apache-2.0
"""Any forward along pp: blocks joined in drawn ways, on drawn schedules, give the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import accel
from accel.errors import StageError
from accel.parallel import Plan
from accel.testing import Simulator

WIDTH, SAMPLES = 4, 6


class Block(nn.Module):
    """A layer whose result may be scaled, and added to another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None, scale: Any = 1.0) -> Tensor:
        first, second = self.layer(self.norm(x)).chunk(2, -1)
        found = torch.tanh(first) * torch.sigmoid(second) * scale
        return found if other is None else found + other


class Halves(Block):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        first, second = self.layer(self.norm(x)).chunk(2, -1)
        return first, second


class Named(Block):
    """Passes a dictionary on, with a new value."""

    def forward(self, given: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {**given, "hidden": super().forward(given["hidden"])}


class Appending(Block):
    """Appends to a list that it is given."""

    def forward(self, items: list[Tensor]) -> None:  # type: ignore[override]
        items.append(super().forward(items[-1]))


class Place(NamedTuple):
    """What the forward knows where a block is called."""

    net: Net
    block: Any
    norm: Any
    scale: Tensor
    first: Tensor
    kept: list[Tensor]
    losses: list[Tensor]


def _aux(at: Place, x: Tensor) -> Tensor:
    found = at.block(x)
    at.losses.append(found.square().mean(-1))
    return x + found


def _keep(at: Place, x: Tensor) -> Tensor:
    at.kept.append(x)
    return at.block(x)  # type: ignore[no-any-return]


def _fixed(at: Place, x: Tensor) -> Tensor:
    with torch.no_grad():
        mean = at.block(x).mean(-1, keepdim=True)
    return at.block(x) + mean  # type: ignore[no-any-return]


def _set_item(at: Place, x: Tensor) -> Tensor:
    found = at.block(x).clone()
    found[:, 0] = found[:, 1] * 0.5
    return found  # type: ignore[no-any-return]


def _in_place(at: Place, x: Tensor) -> Tensor:
    found = at.block(x)
    found += at.scale
    return found  # type: ignore[no-any-return]


def _hooked(at: Place, x: Tensor) -> Tensor:
    found = at.block(x) * 1.0
    if found.requires_grad:
        found.register_hook(lambda grad: grad * 0.5)
    return found + 1  # type: ignore[no-any-return]


def _listed(at: Place, x: Tensor) -> Tensor:
    items = [x]
    at.block(items)
    return items[-1] + items[0]


Way = Callable[[Place, Tensor], Tensor]
WAYS: dict[str, tuple[type[nn.Module], Way]] = {
    "plain": (Block, lambda at, x: at.block(x)),
    "residual": (Block, lambda at, x: x + at.block(x)),
    "scaled": (Block, lambda at, x: x + at.scale * at.block(at.norm(x))),
    "scale passed": (Block, lambda at, x: at.block(x, scale=at.scale)),
    "first passed": (Block, lambda at, x: at.block(x, other=at.first)),
    "checkpoint": (Block, lambda at, x: x + checkpoint(at.block, x, use_reentrant=False)),
    "reentrant": (Block, lambda at, x: x + checkpoint(at.block, x, use_reentrant=True)),
    "checkpoint around": (
        Block,
        lambda at, x: checkpoint(lambda x: x + at.block(at.norm(x)), x, use_reentrant=False),  # type: ignore
    ),
    "checkpoint of two": (Halves, lambda at, x: checkpoint(lambda x: torch.mul(*at.block(x)), x, use_reentrant=False)),
    "two results": (Halves, lambda at, x: torch.mul(*at.block(x))),
    "keep": (Block, _keep),
    "add kept": (Block, lambda at, x: at.block(x + at.kept.pop() if at.kept else x)),
    "join kept": (
        Block,
        lambda at, x: at.block(torch.cat([x, at.kept.pop() if at.kept else at.first], -1)[..., ::2]),
    ),
    "detached": (Block, lambda at, x: x + at.block(x.detach())),
    "without gradient": (Block, _fixed),
    "set item": (Block, _set_item),
    "in place": (Block, _in_place),
    "loss inside": (Block, _aux),
    "hook": (Block, _hooked),
    "dictionary": (Named, lambda at, x: at.block({"hidden": x, "depth": 3})["hidden"]),
    "list": (Appending, _listed),
    "where": (Block, lambda at, x: torch.where(x > 0, at.block(x), x)),
    "first again": (Block, lambda at, x: x + (at.net.shared(x) if at.net.shared is not None else at.block(x))),
}


class Net(nn.Module):
    """Blocks that are called one after another, each in its way."""

    def __init__(self, ways: list[str]) -> None:
        super().__init__()
        self.ways = ways
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(WAYS[each][0]() for each in ways)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in ways)
        self.scales = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in ways)

    @property
    def shared(self) -> nn.Module | None:
        return self.blocks[0] if WAYS[self.ways[0]][0] is Block else None

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = first = self.first(x)
        kept: list[Tensor] = []
        losses: list[Tensor] = []
        for at, way in enumerate(self.ways):
            x = WAYS[way][1](Place(self, self.blocks[at], self.norms[at], self.scales[at], first, kept, losses), x)
        return self.last(x), losses


def _loss(output: tuple[Tensor, list[Tensor]]) -> Tensor:
    return output[0].square().sum() + sum((each.sum() for each in output[1]), torch.zeros(()))


def _gradients(ctx: accel.DistContext, ways: list[str], plan: Plan | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net, x = Net(ways).double(), torch.randn(SAMPLES, WIDTH, dtype=torch.float64)
    model = accel.prepare_model(ctx, net, example=x[:2], plan=plan)
    state = accel.train_state(ctx).next()
    loss, _ = accel.forward_backward(ctx, model, state, x, loss_fn=_loss, weight=1)
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"": loss.detach().double(), **found}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # a look at shapes
@settings(max_examples=share(0.2), deadline=None)
@given(
    ways=st.lists(st.sampled_from(sorted(WAYS)), min_size=3, max_size=6),
    layout=st.sampled_from([("1F1B", 1, 2), ("GPipe", 1, 3), ("Interleaved1F1B", 2, 2)]),
)
def test_a_forward_of_any_form_has_the_gradients_of_one_process(
    ranks: Simulator, ways: list[str], layout: tuple[Any, int, int]
) -> None:
    schedule, stages, micro_batches = layout
    plan = Plan(schedule=schedule, stages_per_rank=stages, micro_batches=micro_batches)
    alone = _gradients(accel.single(), ways, None)
    try:
        found = ranks.run(lambda ctx: _gradients(accel.replace(ctx, mesh="pp=2"), ways, plan), 2, default_group=True)
    except StageError as error:
        if "around several modules" not in error.problem or "first again" not in ways:
            raise
        return  # a block in a checkpoint, which is called in several stages
    both = found[0] | found[1]
    used = {name for name, each in alone.items() if name in both or each.abs().max() > 0}
    torch.testing.assert_close(both, {name: alone[name] for name in used}, rtol=1e-10, atol=1e-11)


class Counting(nn.Module):
    """Runs a layer on each row as often as the row says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.step, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden, found = self.first(x), torch.zeros_like(x)
        for row in range(len(x)):
            value = hidden[row : row + 1]
            for _ in range(int(x[row, 0])):
                value = torch.tanh(self.step(value))
            found = found.index_add(0, torch.tensor([row]), value)
        return self.last(found)


def test_equally_many_calls_with_other_arguments_are_another_forward(ranks: Simulator) -> None:
    """Rows of 1 and 3 steps call the layer as often as rows of 3 and 1, of which the record knows nothing."""
    rows = torch.tensor([[1.0, 3.0, 2.0, 2.0], [3.0, 1.0, 2.0, 2.0]], dtype=torch.float64)
    batches = [each[:, None].expand(4, WIDTH).contiguous() for each in rows]

    def losses(ctx: accel.DistContext, mesh: str) -> list[float]:
        ctx = accel.replace(ctx, mesh=mesh) if mesh else ctx
        torch.manual_seed(0)
        plan = Plan(micro_batches=2, schedule="1F1B") if mesh else None
        model = accel.prepare_model(ctx, Counting().double(), example=batches[0][:2], plan=plan)
        found: list[float] = []
        for each in batches:
            state = accel.train_state(ctx).next()
            loss, state = accel.forward_backward(ctx, model, state, each, loss_fn=torch.sum, weight=1)
            accel.training.discard(state, model)
            found.append(float(loss))
        return found

    alone = losses(accel.single(), "")
    try:
        found = ranks.run(lambda ctx: losses(ctx, "pp=2"), 2, default_group=True)
    except StageError as error:
        if "two micro-batches of a batch pass different tensors" not in error.problem:
            raise
        return
    assert found == [pytest.approx(alone, rel=1e-12)] * 2
