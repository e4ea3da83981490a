# SPDX-License-Identifier: Apache-2.0
"""FSDP units that return other objects than tensors: each trains as one process does, or is named."""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from planned_parts import notes_of
from steps import two_steps
from tables import in_turn, rows
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import accel
from accel.parallel import Plan
from accel.parallel._torch_fsdp import shards_of
from accel.testing import Simulator


class Pair(NamedTuple):
    hidden: torch.Tensor
    number: int


@dataclasses.dataclass
class Record:
    hidden: torch.Tensor
    more: Any = None


class Subclass(dict[str, torch.Tensor]):
    """A dict that holds a tensor as an attribute."""


class Slotted:
    __slots__ = ("hidden",)


class Struct(msgspec.Struct):
    hidden: torch.Tensor


class Tree:
    """Tensors in lists of an object in an object."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.layers = [SimpleNamespace(keys=[None, hidden])]
        self.owner = self


def _slotted(hidden: torch.Tensor) -> Slotted:
    made = Slotted()
    made.hidden = hidden
    return made


def _with_attribute(hidden: torch.Tensor) -> Subclass:
    made = Subclass()
    made.hidden = hidden  # type: ignore[attr-defined]
    return made


class Kind(NamedTuple):
    """An output: made of a block's result, and read by the caller."""

    make: Callable[[torch.Tensor], Any]
    read: Callable[[Any], torch.Tensor]


def _later(hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    yield hidden


KINDS = {
    "tensor": Kind(lambda hidden: hidden, lambda out: out),
    "tuple": Kind(lambda hidden: (hidden, 1), lambda out: out[0]),
    "list": Kind(lambda hidden: [[hidden], None], lambda out: out[0][0]),
    "namedtuple": Kind(lambda hidden: Pair(hidden, 1), lambda out: out.hidden),
    "dict subclass": Kind(lambda hidden: collections.OrderedDict(a=hidden), lambda out: out["a"]),
    "dataclass": Kind(lambda hidden: Record(hidden), lambda out: out.hidden),
    "object": Kind(lambda hidden: SimpleNamespace(hidden=hidden), lambda out: out.hidden),
    "slots": Kind(_slotted, lambda out: out.hidden),
    "msgspec": Kind(Struct, lambda out: out.hidden),
    "nested object": Kind(Tree, lambda out: out.layers[0].keys[1]),
    "object in a dataclass": Kind(
        lambda hidden: Record(hidden.sum(), Tree(hidden)), lambda out: out.more.owner.layers[0].keys[1]
    ),
    "beside a tensor": Kind(lambda hidden: (hidden.sum(), Tree(hidden)), lambda out: out[1].layers[0].keys[1]),
    "attribute of a dict": Kind(_with_attribute, lambda out: out.hidden),
    "mapping": Kind(lambda hidden: collections.UserDict(a=hidden), lambda out: out["a"]),
    "deque": Kind(lambda hidden: collections.deque([hidden]), lambda out: out[0]),
    "generator": Kind(_later, next),
    "map": Kind(lambda hidden: map(torch.tanh, [hidden]), next),
    "function": Kind(lambda hidden: lambda: hidden * 2, lambda out: out()),
}
NEVER_KEPT = KINDS.keys() - {"generator", "map", "function"}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.make = KINDS[kind].make

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.make(inputs + self.down(torch.tanh(self.up(inputs))))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(4, 2)
        self.kind = kind

    def forward(self, inputs: torch.Tensor) -> Any:
        for block in self.blocks:
            inputs = KINDS[self.kind].read(block(inputs))
        return KINDS[self.kind].make(self.head(inputs))


class Lazy(Net):
    """A block whose forward is a generator: it computes when it is read."""

    def __init__(self, kind: str) -> None:
        super().__init__("tensor")
        for block in self.blocks:
            block.forward = lambda inputs, run=block.forward: (run(each) for each in [inputs])

    def forward(self, inputs: torch.Tensor) -> Any:
        for block in self.blocks:
            inputs = next(block(inputs))
        return self.head(inputs)


def _train(
    ctx: accel.DistContext, kind: str, plan: Plan | None = None, *, recompute: bool = False, lazy: bool = False
) -> tuple[Any, list[str]]:
    torch.manual_seed(0)
    net = (Lazy if lazy else Net)(kind).double()
    if recompute:
        net = accel.checkpoint_activations(net, Block)
    model, sgd = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1), plan=plan)
    state = accel.train_state(ctx, accumulation=2)
    read = KINDS[kind].read if not lazy else lambda out: out
    data = torch.randn(16, 4, dtype=torch.float64)
    loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(data, batch_size=4), global_batch=4)
    with torch.no_grad():
        read(model(data[:2]))
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        with accel.accumulate(ctx, state, model):
            state = accel.backward(ctx, read(model(batch.data)).square().mean(), state)
        if state.sync:
            state = accel.optimizer_step(ctx, sgd, state)
    kept = [
        name
        for name, each in model.named_modules()
        if isinstance(each, FSDPModule) and "kept_gathered" in notes_of(each)
    ]
    return accel.get_state_dict(ctx, model, dst=None), kept


WAYS: dict[str, dict[str, Any]] = {
    "units": {},
    "recomputed": {"recompute": True},
    "kept": {"plan": Plan(reshard_after_forward=False)},
    "resharded, the model too": {"plan": Plan(reshard_after_forward=True)},
    "one unit": {"plan": Plan(units=())},
    "nested units": {"plan": Plan(units=("blocks.*", "Linear"), reshard_after_forward=True)},
}
QUICK = (
    ("object", "units"),
    ("generator", "units"),
    ("nested object", "resharded, the model too"),
    ("object", "recomputed"),
)


# each kind two ways
SOME = [*in_turn([*KINDS], *WAYS), *in_turn([*KINDS], *WAYS, begin=2)]


@pytest.mark.parametrize(
    ("kind", "way"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SOME if each not in QUICK)]
)
def test_any_output_of_a_unit_trains_as_one_process_does(ranks: Simulator, kind: str, way: str) -> None:
    how = WAYS[way]
    alone, _ = _train(accel.single(), kind, **how)
    fsdp = ranks.run(lambda ctx: _train(accel.replace(ctx, strategy="fsdp"), kind, **how), 2, default_group=True)
    for found, kept in fsdp:
        torch.testing.assert_close(found, alone, rtol=1e-15, atol=1e-12)
        assert not kept or kind not in NEVER_KEPT


def test_a_forward_that_computes_later_keeps_its_unit_and_says_so(
    ranks: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    alone, _ = _train(accel.single(), "tensor", lazy=True)
    with caplog.at_level(logging.WARNING, logger="accel.parallel"):
        fsdp = ranks.run(
            lambda ctx: _train(accel.replace(ctx, strategy="fsdp"), "tensor", lazy=True), 2, default_group=True
        )
    torch.testing.assert_close(fsdp[0][0], alone, rtol=0, atol=1e-12)
    assert fsdp[0][1] == ["blocks.0", "blocks.1"]
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == 4  # once for each unit on each rank
    assert told[0].startswith("blocks.0 returns an object with tensors that cannot be found")


VIEWS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "reshaped": lambda _, hidden: (hidden.view(2, 2, 4).flatten(0, 1),),
    "slice": lambda _, hidden: (hidden[:, :],),
    "beside the input": lambda inputs, hidden: (hidden.view(4, 4), inputs.view(4, 4)),
    "of the input alone": lambda inputs, hidden: (hidden, inputs.view(4, 4)),
    "of one tensor twice": lambda _, hidden: (hidden.view(4, 4), hidden.view(4, 4)),
}


class ViewBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(4, 8), nn.Linear(8, 4), kind

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return VIEWS[self.kind](inputs, self.down(torch.tanh(self.up(inputs))))


class ChangesViews(nn.Module):
    """Changes what its blocks return in place, as residual streams are written."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(ViewBlock(kind) for _ in range(3))
        _ = self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            found, *rest = block(inputs)
            found += 0.5
            inputs = found.mul(2.0) + sum(each.sin() for each in rest)
        return inputs.square().sum()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # of what this test shows to be right
@rows("kind", VIEWS)
def test_views_that_units_return_are_changed_in_place(ranks: Simulator, kind: str) -> None:
    inputs = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)

    def rank(ctx: accel.DistContext) -> tuple[Any, bool]:
        model = ChangesViews(kind)
        model, optimizer = accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.01))
        losses = two_steps(ctx, model, optimizer, lambda: model(inputs))
        units = [each for each in model.modules() if isinstance(each, FSDPModule) and each is not model]
        whole = [part.whole for unit in units for part in shards_of(unit)]
        resharded = all(each is None or each.untyped_storage().size() == 0 for each in whole)
        return (losses, accel.get_state_dict(ctx, model, dst=None)), resharded

    want, _ = rank(accel.single())
    for got, resharded in ranks.run(lambda ctx: rank(accel.replace(ctx, strategy="fsdp")), 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert resharded


class CallsForward(nn.Module):
    """A model that calls the forward of its blocks itself: directly, in a checkpoint, or in both ways by turns."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for at, block in enumerate(self.blocks):
            if self.how == "checkpoint":
                x = x + checkpoint(block.forward, x, use_reentrant=False)
            else:
                x = x + (block(x) if self.how == "turns" and at % 2 else block.forward(x))
        return x.square().sum()


_HYBRID = "dp_replicate=2,dp_shard=2"
_QUICK = [("turns", "dp=2")]
_WAYS = [(how, mesh) for how in ("directly", "checkpoint", "turns") for mesh in ("dp=2", "dp=2,tp=2", _HYBRID)]


@pytest.mark.parametrize(
    ("how", "mesh"), [pytest.param(*each, marks=() if each in _QUICK else pytest.mark.slow) for each in _WAYS]
)
def test_a_unit_whose_forward_the_model_calls_itself_is_gathered(ranks: Simulator, how: str, mesh: str) -> None:
    torch.manual_seed(0)
    initial = CallsForward(how).double()
    inputs = torch.randn(8, 4, dtype=torch.float64)
    styles = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"} if "tp" in mesh else "model"
    plan = Plan(tensor=styles, reshard_after_forward=how != "turns")  # gathered units need their hooks, too

    def rank(ctx: accel.DistContext) -> Any:
        model = copy.deepcopy(initial)
        model = accel.prepare_model(ctx, model, plan=plan if ctx.world_size > 1 else None)
        optimizer = accel.prepare_optimizer(ctx, torch.optim.SGD(model.parameters(), lr=0.01))
        losses = two_steps(ctx, model, optimizer, lambda: model(inputs))
        model.eval()
        with torch.no_grad():
            after = accel.reduce(ctx, model(inputs), op="mean")
        return losses, after, accel.get_state_dict(ctx, model, dst=None)

    want = rank(accel.single())
    size = 2 if mesh == "dp=2" else 4
    for got in ranks.run(lambda ctx: rank(accel.replace(ctx, strategy="fsdp", mesh=mesh)), size, default_group=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
