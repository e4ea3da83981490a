# SPDX-License-Identifier: Apache-2.0
"""Methods and submodules that are called beside a model's forward train as one process does, or raise with a line."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.errors import ConfigError, PrepareError
from accel.parallel import Plan
from accel.testing import Simulator

IDS = torch.randint(11, (16, 3), generator=torch.Generator().manual_seed(2))
METHODS = ("encode", "decode", "score", "body", "head", "body.pool")
MESHES = {"ddp": ("ddp", "dp=2"), "fsdp": ("fsdp", "dp=2"), "hsdp": ("fsdp", "dp_replicate=2,dp_shard=2")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(hidden).tanh())


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)

    def pool(self, ids: torch.Tensor) -> torch.Tensor:
        return self(ids).mean(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = Body()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.body.embed.weight  # shared
        self.scale = nn.Parameter(torch.tensor(1.5))  # without a dimension
        self.shift = nn.Parameter(torch.full((8,), 0.1))
        self.register_buffer("offset", torch.zeros(8))

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(ids) * self.scale + self.shift + self.offset

    def decode(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(ids))

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        """Call the model itself, and go on with what the call has gathered."""
        first = self(ids).square().mean()
        return first + self.encode(ids).square().mean() + self.decode(self.shift).mean()

    def words(self, ids: torch.Tensor) -> Any:
        yield self.encode(ids)


# model: what prepare returned; net: the module inside of it
PROGRAMS: dict[str, Callable[[Any, Any, torch.Tensor], torch.Tensor]] = {
    "methods": lambda model, net, ids: model.decode(model.encode(ids)).square().mean(),
    "of the module inside": lambda model, net, ids: net.decode(net.encode(ids)).square().mean(),
    "twice": lambda model, net, ids: (
        (model.decode(model.encode(ids)) + model.decode(model.encode(ids.flip(1)) / 2)).square().mean()
    ),
    "method, then forward": lambda model, net, ids: net.encode(ids).square().mean() + model(ids).square().mean(),
    "forward, then method": lambda model, net, ids: model(ids).square().mean() + net.encode(ids).square().mean(),
    "the call in a method": lambda model, net, ids: net.score(ids),
    "submodules": lambda model, net, ids: net.head(net.body(ids)).square().mean() + model(ids).mean(),
    "a submodule's method": lambda model, net, ids: net.body.pool(ids).square().mean() + model(ids).mean(),
    "one block, then forward": lambda model, net, ids: (
        net.body.blocks[0](torch.ones(len(ids), 8)).mean() + model(ids).square().mean()
    ),
}


def _train(
    ctx: accel.DistContext,
    program: str,
    strategy: str,
    mesh: str,
    *,
    recompute: bool = False,
    compiles: bool = False,
    plan: dict[str, Any] | None = None,
) -> Any:
    ctx = accel.replace(ctx, strategy=strategy, mesh=mesh) if ctx.world_size > 1 else ctx
    net = Net()
    if recompute:
        accel.checkpoint_activations(net, (Net, Block))
    loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(IDS), batch_size=4), global_batch=4)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model, sgd = accel.prepare(ctx, net, sgd, plan=Plan(methods=METHODS, **(plan or {})))
    if compiles:
        accel.compile_model(model, backend="aot_eager")
    state = accel.train_state(ctx, accumulation=2)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        with accel.accumulate(ctx, state, model):
            loss = PROGRAMS[program](model, accel.unwrap_model(model), batch.data[0])
            state = accel.backward(ctx, loss, state)
        if state.sync:
            state = accel.optimizer_step(ctx, sgd, state)
    return accel.get_state_dict(ctx, model)


@functools.cache
def _alone(program: str) -> Any:
    return _train(accel.single(), program, "ddp", "")


_CELLS = [(program, kind) for program in PROGRAMS for kind in ("ddp", "fsdp")]
_SLOW = [(program, "hsdp") for program in PROGRAMS]


@pytest.mark.parametrize(
    ("program", "kind"),
    [*_CELLS, ("methods", "hsdp"), *(pytest.param(*each, marks=pytest.mark.slow) for each in _SLOW)],
)
def test_entries_train_as_one_process(ranks: Simulator, program: str, kind: str) -> None:
    strategy, mesh = MESHES[kind]
    world = 4 if kind == "hsdp" else 2
    found = ranks.run(lambda ctx: _train(ctx, program, strategy, mesh), world, default_group=True)[0]
    for name, value in _alone(program).items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


_TENSOR = {"tensor": {"body.blocks.*.up": "colwise", "body.blocks.*.down": "rowwise"}}


@pytest.mark.parametrize(
    ("strategy", "mesh", "options"),
    [
        ("fsdp", "dp=2", {"recompute": True}),
        ("ddp", "dp=2", {"recompute": True}),
        pytest.param("fsdp", "dp=2", {"compiles": True}, marks=pytest.mark.slow),
        pytest.param("ddp", "dp=2", {"compiles": True}, marks=pytest.mark.slow),
        ("fsdp", "dp=2", {"plan": {"reshard_after_forward": True}}),
        ("ddp", "tp=2", {"plan": _TENSOR}),
        ("fsdp", "dp=2,tp=2", {"plan": _TENSOR}),
    ],
    ids=str,
)
@pytest.mark.parametrize("program", ["the call in a method", pytest.param("submodules", marks=pytest.mark.slow)])
def test_entries_go_with_other_ways_to_run(
    ranks: Simulator, program: str, strategy: str, mesh: str, options: dict[str, Any]
) -> None:
    world = 4 if "," in mesh else 2
    found = ranks.run(lambda ctx: _train(ctx, program, strategy, mesh, **options), world, default_group=True)[0]
    for name, value in _alone(program).items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


def _first_step(strategy: str, call: Callable[[Any], torch.Tensor], plan: Plan) -> Callable[[accel.DistContext], Any]:
    def run(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, strategy=strategy)
        model = accel.prepare_model(ctx, Net(), plan=plan)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        state = accel.train_state(ctx)
        loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(IDS), batch_size=4), global_batch=4)
        batch = next(accel.batches(ctx, loader, state))
        state = state.next(batch)
        with accel.accumulate(ctx, state, model):
            state = accel.backward(ctx, call(accel.unwrap_model(model)).square().mean(), state)
        return accel.optimizer_step(ctx, sgd, state)

    return run


CALLS: dict[str, tuple[Callable[[Any], torch.Tensor], tuple[str, ...]]] = {
    "a method": (lambda net: net.encode(IDS[:2]), ("encode",)),
    "a submodule": (lambda net: net.body(IDS[:2]), ("body",)),
    "a submodule's method": (lambda net: net.body.pool(IDS[:2]), ("body.pool",)),
    "a layer": (lambda net: net.body.embed(IDS[:2]), ("body.embed",)),
    "two": (lambda net: net.head(net.body(IDS[:2])), ("body", "head")),
}


def _encode(net: Any) -> torch.Tensor:
    return net.encode(IDS[:2])  # a function of the script with the model first is no method


@pytest.mark.parametrize(("call", "named"), [*CALLS.values(), (_encode, ("encode",))], ids=[*CALLS, "in a function"])
def test_a_part_called_alone_names_the_line_that_makes_it_work(
    ranks: Simulator, call: Callable[[Any], torch.Tensor], named: tuple[str, ...]
) -> None:
    plan = Plan()
    for at in range(len(named)):
        with assert_raises(PrepareError, problem="called outside the model") as raised:
            ranks.run(partial(_evaluated, call=call, plan=plan), 2, default_group=True)
        line = raised.value.fix.partition(": ")[2]
        found: dict[str, Plan] = {}
        eval(line, {"ctx": 0, "model": 0, "accel": _Recorder(found)})
        plan = found["plan"]
        assert plan.methods == named[: at + 1]
    expected = _evaluated(accel.single(), call, Plan())
    for value in ranks.run(partial(_evaluated, call=call, plan=plan), 2, default_group=True):
        torch.testing.assert_close(value, expected)


class _Recorder:
    """Takes the place of accel in the line of an error."""

    parallel = accel.parallel

    def __init__(self, found: dict[str, Plan]) -> None:
        self._found = found

    def prepare_model(self, _ctx: Any, _model: Any, plan: Plan) -> None:
        self._found["plan"] = plan


def _evaluated(ctx: accel.DistContext, call: Callable[[Any], torch.Tensor], plan: Plan) -> torch.Tensor:
    if ctx.world_size > 1:
        ctx = accel.replace(ctx, strategy="fsdp")
    model = accel.prepare_model(ctx, Net(), plan=plan)
    with torch.no_grad():
        return call(accel.unwrap_model(model))


def test_a_replica_names_the_option_where_its_forward_was_left_out(ranks: Simulator) -> None:
    def call(net: Any) -> torch.Tensor:
        return net.decode(net.encode(IDS[:2]))

    with assert_raises(accel.errors.StepError, fix=r"Plan\(methods=\(\"encode\",\)\)"):
        ranks.run(_first_step("ddp", call, Plan()), 2, default_group=True)
    ranks.run(_first_step("ddp", call, Plan(methods=("encode", "decode"))), 2, default_group=True)


def test_forward_called_by_hand_names_the_call(ranks: Simulator) -> None:
    with assert_raises(PrepareError, fix="Call the model itself"):
        ranks.run(lambda ctx: _evaluated(ctx, lambda net: net.forward(IDS[:2]), Plan()), 2, default_group=True)


def test_calls_that_gather_by_themselves_are_accepted(ranks: Simulator) -> None:
    def run(ctx: accel.DistContext) -> Any:
        model: Any = accel.prepare_model(accel.replace(ctx, strategy="fsdp"), Net())
        first = model.body.blocks[1](torch.ones(2, 8))  # a unit, before the model
        whole = model(IDS[:2])
        model.unshard()  # torch's own way
        by_hand = model.head(model.body(IDS[:2]) * 1.5 + 0.1)
        model.reshard()
        return first, whole, by_hand

    net = Net()
    first, whole, by_hand = ranks.run(run, 2, default_group=True)[0]
    torch.testing.assert_close(first, net.body.blocks[1](torch.ones(2, 8)))
    torch.testing.assert_close(whole, net(IDS[:2]))
    torch.testing.assert_close(by_hand, net(IDS[:2]))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "name", ["encoed", "body.nothing", "forward", "body.forward", "shift", "train", "gather", "body.blocks", "words"]
)
def test_what_is_no_entry_is_refused(ranks: Simulator, name: str, world: int, strategy: str) -> None:
    def run(ctx: accel.DistContext) -> None:
        _ = accel.prepare_model(accel.replace(ctx, strategy=strategy), Net(), plan=Plan(methods=(name,)))

    with assert_raises(PrepareError, where=r"Plan\.methods") as raised:
        ranks.run(run, world, default_group=True)
    assert name in raised.value.got
    if name == "encoed":
        assert "`encode`" in raised.value.fix


def test_a_text_is_no_tuple_of_methods() -> None:
    with assert_raises(ConfigError, where=r"plan\.methods"):
        Plan(methods="encode")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mesh", ["pp=2", "cp=2"])
def test_axes_that_divide_forwards_refuse_methods(ranks: Simulator, mesh: str) -> None:
    def run(ctx: accel.DistContext) -> None:
        _ = accel.prepare_model(accel.replace(ctx, mesh=mesh), Net(), plan=Plan(methods=("encode",)))

    with assert_raises(PrepareError, where=r"Plan\.methods"):
        ranks.run(run, 2, default_group=True)


def test_names_copies_and_signatures_are_as_before(ranks: Simulator) -> None:
    def run(ctx: accel.DistContext) -> None:
        plan = Plan(methods=METHODS)
        net = Net()
        model = accel.prepare_model(accel.replace(ctx, strategy="ddp"), net, plan=plan)
        assert isinstance(net, Net)
        assert type(net).__name__ == "Net"
        assert list(net.state_dict()) == list(Net().state_dict())
        for name in ("encode", "decode", "forward"):
            assert inspect.signature(getattr(net, name)) == inspect.signature(getattr(Net(), name))
        copied = copy.deepcopy(net)
        with torch.no_grad():
            net.shift += 1
        expected = Net().encode(IDS[:2])
        # copies lead into themselves, and not into the model that they were copied from
        torch.testing.assert_close(copied.encode(IDS[:2]), expected)
        torch.testing.assert_close(copy.deepcopy(copied.body)(IDS[:2]), Net().body(IDS[:2]))
        assert model(IDS[:2]).shape == (2, 3, 11)

    ranks.run(run, 2, default_group=True)


def test_one_rank_evaluates_alone_on_a_replica(ranks: Simulator) -> None:
    def run(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(accel.replace(ctx, strategy="ddp"), Net(), plan=Plan(methods=METHODS))
        if ctx.rank == 0:
            with torch.no_grad():
                _ = accel.unwrap_model(model).encode(IDS[:2])

    ranks.run(run, 2, default_group=True)


def test_a_model_with_entries_is_pickled_without_its_ranks(ranks: Simulator) -> None:
    def run(ctx: accel.DistContext) -> bytes:
        model = accel.prepare_model(accel.replace(ctx, strategy="ddp"), Net(), plan=Plan(methods=METHODS))
        return pickle.dumps(accel.unwrap_model(model))

    read = pickle.loads(ranks.run(run, 2, default_group=True)[0])
    torch.testing.assert_close(read.encode(IDS[:2]), Net().encode(IDS[:2]))


class Positions(nn.Module):
    """An embedding of a buffer, which its backward needs as it was."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4)
        self.register_buffer("numbers", torch.arange(6))

    def encode(self, scale: torch.Tensor) -> torch.Tensor:
        return self.table(self.numbers).square().mean() * scale

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return self.encode(scale)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("drops", [False, True])
def test_calls_that_share_a_backward_keep_the_buffers_it_needs(ranks: Simulator, strategy: str, drops: bool) -> None:
    def run(ctx: accel.DistContext) -> Any:
        model: Any = accel.prepare_model(accel.replace(ctx, strategy=strategy), Positions())
        net: Any = accel.unwrap_model(model)
        one = torch.ones(())
        if drops:  # an output without a backward holds nothing up
            model(one)
        else:
            (model(one) + model(one * 2)).backward()
        if ctx.rank == 0:
            net.numbers += 0 if ctx.world_size == 1 else 1
            net.numbers %= 6
        _ = model(one)
        return net.numbers.tolist()

    assert ranks.run(run, 2, default_group=True)[1] == [1, 2, 3, 4, 5, 0]
