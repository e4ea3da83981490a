# SPDX-License-Identifier: Apache-2.0
"""Gradients that a compiled backward leaves in one memory: any accumulation sums them as an eager model's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from profiles import share
from steps import begin_batch
from torch import nn

import accel
from accel.parallel._leftovers import has_compiled
from accel.parallel._shared_memory import compiled_leaves, separate_gradients
from accel.training import _backward

ROWS, LIMIT, RATE = 1, 0.5, 0.1  # with one row the gradients of `cls` and `pos` are views of one tensor
LAYOUTS = ["alone", "ddp", "fsdp"]

# of an eager cat on DDP too, whose gradient for one row has other strides
pytestmark = pytest.mark.filterwarnings("ignore:Grad strides do not match:UserWarning")


class Tokens(nn.Module):
    """The first layer of a ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.linspace(-1, 1, 4).view(1, 1, 4))
        self.pos = nn.Parameter(torch.linspace(1, 3, 12).view(1, 3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.pos


class Net(nn.Module):
    """Parameters whose gradients share memory in several ways; `late` takes part from the second micro-batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()
        self.first, self.second = nn.Parameter(torch.ones(6)), nn.Parameter(torch.full((6,), 0.5))
        self.both, self.late, self.other = (nn.Parameter(torch.ones(*shape)) for shape in ((4, 3), (12,), (12,)))
        self.double()

    def forward(self, x: torch.Tensor, late: bool = True) -> torch.Tensor:
        return self.mix(self.tokens(x), late)

    def mix(self, x: torch.Tensor, late: bool = True) -> torch.Tensor:
        joined = torch.cat((self.first, self.second)).view(4, 3) + self.both
        x = (x * joined.t()).square()
        if late:
            x = x * (self.late.view(3, 4) + self.other.view(3, 4))
        return x


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _method(net: Net, **options: Any) -> None:
    vars(net)["mix"] = torch.compile(net.mix, **options)


def _submodule(net: Net, **options: Any) -> None:
    net.tokens = torch.compile(net.tokens, **options)


WAYS: dict[str, Callable[..., object]] = {
    "compile_model": accel.compile_model,
    "regions": lambda net, **options: accel.compile_model(net, Tokens, **options),
    "model.compile": lambda net, **options: net.compile(**options),
    "submodule.compile": lambda net, **options: net.tokens.compile(**options),
    "torch.compile of a submodule": _submodule,
    "torch.compile of a method": _method,
    "torch.compile": lambda net, **options: torch.compile(net, **options),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def batch_of(ctx: accel.DistContext, micro: int, rows: int = ROWS) -> torch.Tensor:
    return torch.linspace(-1, 2 + micro + ctx.rank, rows * 8, dtype=torch.float64).view(rows, 2, 4)


def train(
    ctx: accel.DistContext,
    layout: str,
    way: str,
    micros: int,
    *,
    late: bool = True,
    rows: int = ROWS,
    accumulates: bool = True,
    backend: str = "aot_eager",
) -> dict[str, torch.Tensor]:
    """The parameters after a window with clipping."""
    ctx = ctx if layout == "alone" else accel.replace(ctx, strategy=layout)
    net: Any = Net()
    model = net
    if way == "torch.compile":
        model = WAYS[way](net, backend=backend)
    elif way != "a loss function":
        WAYS[way](net, backend=backend)
    loss = torch.compile(loss_of, backend=backend) if way == "a loss function" else loss_of
    model, optimizer = accel.prepare(ctx, model, torch.optim.SGD(net.parameters(), lr=RATE))
    state = accel.train_state(ctx, accumulation=micros)
    for micro in range(micros):
        state = begin_batch(ctx, state)
        block = accel.accumulate(ctx, state, model) if accumulates else torch.enable_grad()
        with block:
            output = model(batch_of(ctx, micro, rows), late or micro > 0)
            state = accel.backward(ctx, loss(output), state)
    _ = accel.optimizer_step(ctx, optimizer, state, max_norm=LIMIT)
    return {
        name.replace("_orig_mod.", "").removeprefix("module."): (
            each.full_tensor() if hasattr(each, "full_tensor") else each
        ).detach()
        for name, each in model.named_parameters()
    }


def expected(
    ctx: accel.DistContext, world: int, micros: int, *, late: bool = True, rows: int = ROWS
) -> dict[str, torch.Tensor]:
    """The same by torch.autograd.grad of an eager model, in one process."""
    net = Net()
    named = dict(net.named_parameters())
    sums = [torch.zeros_like(each) for each in named.values()]
    for rank, micro in itertools.product(range(world), range(micros)):
        inputs = torch.linspace(-1, 2 + micro + rank, rows * 8, dtype=torch.float64).view(rows, 2, 4)
        grads = torch.autograd.grad(
            loss_of(net(inputs, late or micro > 0)), list(named.values()), allow_unused=True, materialize_grads=True
        )
        sums = [total + grad / (world * micros) for total, grad in zip(sums, grads, strict=True)]
    norm = torch.cat([each.flatten() for each in sums]).norm()
    shrink = float((LIMIT / (norm + 1e-6)).clamp(max=1.0))
    return {
        name: (each - RATE * shrink * grad).detach() for (name, each), grad in zip(named.items(), sums, strict=True)
    }


def assert_law(ranks: Any, layout: str, way: str, micros: int, **options: Any) -> None:
    world = 1 if layout == "alone" else 2
    found = ranks.run(lambda ctx: train(ctx, layout, way, micros, **options), world, default_group=True)
    kept = {name: each for name, each in options.items() if name in ("late", "rows")}
    wanted = ranks.run(lambda ctx: expected(ctx, world, micros, **kept), 1)[0]
    for each in found:
        torch.testing.assert_close(each, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", [*WAYS, "a loss function"])
def test_windows_on_one_rank_sum_as_an_eager_model_does(ranks, way):
    assert_law(ranks, "alone", way, 3)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("way", ["compile_model", "torch.compile of a method"])
def test_windows_of_several_ranks_sum_as_an_eager_model_does(ranks, layout, way):
    assert_law(ranks, layout, way, 2)


def test_a_single_backward_is_divided_and_clipped_once(ranks):
    assert_law(ranks, "alone", "compile_model", 1)


def test_a_parameter_that_joins_later_has_memory_of_its_own_too(ranks):
    assert_law(ranks, "alone", "model.compile", 3, late=False)


def test_windows_without_accumulate_are_summed_too(ranks):
    assert_law(ranks, "alone", "compile_model", 3, accumulates=False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", [*WAYS, "a loss function"])
def test_every_way_to_compile_on_every_layout(ranks, layout, way):
    assert_law(ranks, layout, way, 2)
    assert_law(ranks, layout, way, 3, rows=2)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which Inductor imports
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inductor_on_every_layout(ranks, layout):
    assert_law(ranks, layout, "compile_model", 2, backend="inductor")


def test_further_backward_passes_of_a_batch_and_micro_batches_of_a_plan(ranks):
    def rank(ctx):
        net = Net()
        accel.compile_model(net, backend="aot_eager")
        plan = accel.parallel.Plan(micro_batches=3)
        model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=RATE), plan=plan)
        inputs = torch.cat([batch_of(ctx, micro) for micro in range(3)])

        def loss_sum(output: torch.Tensor) -> torch.Tensor:
            return output.square().mean((1, 2)).sum()

        _, state = accel.forward_backward(ctx, model, begin_batch(ctx), inputs, loss_fn=loss_sum, weight=3)
        _ = accel.optimizer_step(ctx, optimizer, state, max_norm=LIMIT)
        split = {name: each.detach() for name, each in net.named_parameters()}

        net = Net()
        accel.compile_model(net, backend="aot_eager")
        model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=RATE))
        state = begin_batch(ctx)
        for micro in range(3):  # three losses of one batch
            loss = loss_of(model(batch_of(ctx, micro))) / 3
            state = accel.backward(ctx, loss, state, weight=1.0, same_units=micro > 0)
        _ = accel.optimizer_step(ctx, optimizer, state, max_norm=LIMIT)
        return split, {name: each.detach() for name, each in net.named_parameters()}

    split, added = ranks.run(rank, 1)[0]
    wanted = ranks.run(lambda ctx: expected(ctx, 1, 3), 1)[0]
    torch.testing.assert_close(split, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(added, wanted, rtol=0, atol=1e-12)


def test_no_graph_is_walked_before_torch_has_compiled_something(monkeypatch):
    def refuse(_roots: object) -> None:
        raise AssertionError("the graph was walked")

    monkeypatch.setattr(_backward, "compiled_leaves", refuse)
    net = Net()
    ctx = accel.single()
    model = accel.prepare_model(ctx, net)
    torch.compiler.reset()
    assert not has_compiled()
    accel.backward(ctx, loss_of(model(batch_of(ctx, 0))), begin_batch(ctx))
    accel.compile_model(net, backend="aot_eager")
    loss = loss_of(model(batch_of(ctx, 0)))
    assert has_compiled()
    with pytest.raises(AssertionError, match="the graph was walked"):
        accel.backward(ctx, loss, begin_batch(ctx))


def test_the_graph_of_a_compiled_function_is_recognized():
    net = Net()
    compiled = torch.compile(net, backend="aot_eager")
    inputs = torch.ones(1, 2, 4, dtype=torch.float64)
    assert {id(each) for each in compiled_leaves([compiled(inputs).sum()])} == {id(each) for each in net.parameters()}
    assert compiled_leaves([net(inputs).sum()]) == []  # eager, in a process that has compiled something
    assert compiled_leaves([torch.ones(())]) == []


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Two views of one storage, and whether they have a common element, by numbers of elements."""
    memory = torch.arange(60.0)
    found: list[torch.Tensor] = []
    for _ in range(2):
        sizes = draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
        strides = draw(st.lists(st.integers(1, 6), min_size=len(sizes), max_size=len(sizes)))
        last = sum(max(size - 1, 0) * stride for size, stride in zip(sizes, strides, strict=True))
        found.append(memory.as_strided(sizes, strides, draw(st.integers(0, 59 - last))))
    first, second = found
    common = set(first.flatten().tolist()) & set(second.flatten().tolist())
    return first, second, bool(common)


@given(drawn=views())
@settings(max_examples=share(4))
def test_gradients_get_memory_of_their_own_where_elements_are_common_and_only_there(drawn):
    first, second, common = drawn
    parameters = [nn.Parameter(torch.zeros(each.shape)) for each in (first, second)]
    for parameter, grad in zip(parameters, (first, second), strict=True):
        parameter.grad = grad
    values = [first.clone(), second.clone()]
    separate_gradients(parameters)
    kept = [each.grad is grad for each, grad in zip(parameters, (first, second), strict=True)]
    assert sum(kept) == 2 - common
    assert all(each.grad.is_contiguous() for each, own in zip(parameters, kept, strict=True) if not own)
    for parameter, value in zip(parameters, values, strict=True):
        assert torch.equal(parameter.grad, value)


def test_buckets_of_many_gradients_stay():
    memory = torch.zeros(3000)
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(1000)]
    for at, each in enumerate(parameters):
        each.grad = memory[3 * at : 3 * at + 3]
    kept = [each.grad for each in parameters]
    separate_gradients(parameters)
    assert all(each.grad is grad for each, grad in zip(parameters, kept, strict=True))
