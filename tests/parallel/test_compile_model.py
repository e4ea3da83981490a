# SPDX-License-Identifier: Apache-2.0
"""torch.compile in place, whole and by region: the same numbers and names, before and after preparing."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import Block, Stack
from catching import assert_raises
from steps import begin_batch
from torch import nn

import accel
from accel.errors import ConfigError
from accel.testing import Simulator


class Graphs:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """What `backend="aot_eager"` stands for in a test; torch lets nobody take a name back."""
    counting = Graphs()
    compile_ = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda module, **options: compile_(module, **options | {"backend": counting})
    )
    torch.compiler.reset()
    yield counting
    torch.compiler.reset()


def gradients(model: nn.Module, rows: int = 4) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, rows * 8, dtype=torch.float64).view(rows, 8)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("regions", "recomputed"),
    [
        (None, False),
        ("repeated", False),
        (None, True),
        (Block, True),
        (lambda name, _: name.startswith("blocks."), True),
    ],
)
def test_gradients_and_names_are_the_same(graphs: Graphs, regions: Any, recomputed: bool) -> None:
    plain = Stack(3)
    model = copy.deepcopy(plain)
    if recomputed:
        accel.checkpoint_activations(model)
    assert accel.compile_model(model, regions, backend="aot_eager") is model
    for mine, expected in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert accel.unwrap_model(model) is model
    assert (
        1 <= graphs.count <= (1 if regions is None else 2)
    )  # a first block, whose input needs no gradient, and others


@pytest.mark.parametrize("regions", [None, "repeated"])
def test_torchs_own_containers_are_compiled_too(graphs: Graphs, regions: Any) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]).double()
    expected = gradients(model)
    accel.compile_model(model, regions, backend="aot_eager")
    assert type(model).__name__ == "Sequential"
    for mine, plain in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=1e-12)
    assert graphs.count >= 1


def test_with_data_parallel_the_graph_is_cut_at_buckets(graphs: Graphs, tmp_path: Path) -> None:
    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(*[nn.Linear(400, 400, dtype=torch.float64) for _ in range(3)])  # 1.2 MiB each

    def rank(ctx: accel.DistContext, compiled: str) -> list[torch.Tensor]:
        model = make()
        if compiled == "before":
            accel.compile_model(model, backend="aot_eager")
        prepared = accel.prepare_model(ctx, model, bucket_cap_mb=1)
        if compiled == "after":
            assert accel.compile_model(prepared, backend="aot_eager") is prepared
        assert accel.unwrap_model(prepared) is model
        prepared(torch.full((2, 400), ctx.rank + 1.0, dtype=torch.float64)).square().mean().backward()
        found = accel.save_state(ctx, tmp_path / compiled, {"model": prepared}, step=0)
        accel.load_state(ctx, found, {"model": accel.prepare_model(ctx, make())})
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    with Simulator() as simulator:
        expected = simulator.run(lambda ctx: rank(ctx, "never"), 2)
        assert graphs.count == 0
        for when in ("before", "after"):
            torch.compiler.reset()
            graphs.count = 0
            got = simulator.run(lambda ctx, when=when: rank(ctx, when), 2)
            assert graphs.count == 2 * 3
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


STYLES: dict[str, Any] = {"*.mlp.0": "colwise", "*.mlp.3": "rowwise"}
SPREAD: dict[str, tuple[dict[str, Any], accel.parallel.Plan]] = {
    "shards in bf16": ({"strategy": "fsdp", "precision": "bf16"}, accel.parallel.Plan()),
    "parts by a plan": ({"mesh": "tp=2"}, accel.parallel.Plan(tensor=STYLES)),
    "parts that are found": ({"mesh": "tp=2"}, accel.parallel.Plan()),
}


@pytest.mark.parametrize("how", SPREAD)
def test_blocks_of_one_class_stay_of_one_class(how: str) -> None:
    """torch compiles once for a class, and "repeated" finds the blocks after `prepare` too."""
    options, plan = SPREAD[how]

    def rank(ctx: accel.DistContext) -> list[set[type]]:
        blocks = nn.Sequential(*[Paired() for _ in range(3)])
        model = accel.prepare_model(accel.replace(ctx, **options), blocks, plan=plan)
        accel.checkpoint_activations(model)
        return [{type(each) for each in alike} for alike in zip(*(block.modules() for block in blocks), strict=True)]

    with Simulator() as simulator:
        for classes in simulator.run(rank, 2, default_group=True):
            assert [len(each) for each in classes] == [1] * 7


class Other(Block):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs - self.out(torch.tanh(self.linear(inputs)))


class Third(Block):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.out(torch.tanh(self.linear(inputs)))


SIZES = (8, 9, 10, 11, 8)


@pytest.mark.parametrize(
    ("make", "regions", "kinds"),
    [
        (lambda: nn.Sequential(*[nn.Linear(*each) for each in itertools.pairwise(SIZES)]), nn.Linear, 4),
        (
            lambda: accel.checkpoint_activations(
                nn.Sequential(*[kind(0.0) for kind in (Block, Block, Other, Other, Third, Third)])
            ),
            "repeated",
            4,  # the first block's input needs no gradient
        ),
    ],
    ids=["modules of torch", "recomputed classes"],
)
def test_regions_share_no_limit_of_graphs(graphs: Graphs, make: Any, regions: Any, kinds: int) -> None:
    """torch counts graphs by code, of which a class before others has one for each class, and takes no more than 8."""
    model = make().double()
    plain = copy.deepcopy(model)
    accel.compile_model(model, regions, backend="aot_eager", fullgraph=True)
    for rows in (4, 3, 1, 5):
        torch.testing.assert_close(gradients(model, rows), gradients(plain, rows), rtol=0, atol=1e-12)
    assert graphs.count == 3 * kinds  # the first number of rows, one row, and any other


def test_one_region_has_a_graph_for_each_kind_of_batch(graphs: Graphs) -> None:
    """More than the 8 of torch: rows, a first block whose input needs no gradient, evaluation."""
    model = accel.compile_model(
        nn.Sequential(Block(0.1), Block(0.1)).double(), "repeated", backend="aot_eager", fullgraph=True
    )
    counts: list[int] = []
    for _ in range(2):
        for rows in (4, 3, 1):
            gradients(model, rows)
            with torch.no_grad(), accel.evaluating(model):
                model(torch.ones(rows, 8, dtype=torch.float64))
        counts.append(graphs.count)
    assert counts == [9, 9]


class Breaking(Block):
    """A block whose graph breaks."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.tanh(self.linear(inputs)))
        torch._dynamo.graph_break()
        return inputs + self.drop(torch.sin(self.out(hidden)))


@pytest.mark.parametrize("first", ["recompute", "compile"])
def test_a_recomputed_block_whose_graph_breaks_is_compiled_in_parts(first: str) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    plain = nn.Sequential(nn.Linear(8, 8), Breaking(0.5), Breaking(0.5)).double()
    model = copy.deepcopy(plain)
    for how in ("recompute", "compile") if first == "recompute" else ("compile", "recompute"):
        if how == "recompute":
            accel.checkpoint_activations(model)
        else:
            accel.compile_model(model, "repeated", backend="aot_eager")
    model = copy.deepcopy(model)
    counts: list[int] = []
    for rows in (4, 3, 5):
        found = []
        for each in (model, plain):
            torch.manual_seed(rows)
            found.append(gradients(each, rows))
        torch.testing.assert_close(*found, rtol=0, atol=1e-12)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 2 <= counts[0] < counts[1] == counts[2]
    torch.compiler.reset()


@pytest.mark.parametrize("breaks", [False, True])
def test_kept_outputs_are_part_of_the_graph_or_noted(caplog: pytest.LogCaptureFixture, breaks: bool) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    kind = Breaking if breaks else Block
    plain = nn.Sequential(nn.Linear(8, 8), kind(0.0), kind(0.0)).double()
    model = accel.checkpoint_activations(copy.deepcopy(plain), keep="products")
    accel.compile_model(model, "repeated", backend="aot_eager", fullgraph=not breaks)
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=0, atol=1e-12)
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) is not breaks
    noted = [each.getMessage() for each in caplog.records if each.name == "accel.parallel"]
    assert [each.partition(":")[0] for each in noted] == ["Breaking"] * breaks
    torch.compiler.reset()


def test_a_real_backend_trains() -> None:
    torch.manual_seed(0)
    ctx, losses = accel.single(), []
    model = accel.prepare_model(
        ctx, accel.compile_model(Stack(2, 0.1), "repeated", backend="aot_eager", fullgraph=True)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        loss = model(torch.ones(2, 8, dtype=torch.float64)).square().mean()
        state = accel.backward(ctx, loss, begin_batch(ctx))
        accel.optimizer_step(ctx, optimizer, state)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (lambda model: accel.compile_model(model, backend="inducter"), {"fix": "Did you mean `inductor`"}),
        (
            lambda model: accel.compile_model(model, mode="default", options={}),
            {"problem": "a mode is a set of options"},
        ),
        (lambda model: accel.compile_model(model, nn.Conv2d), {"problem": "no part of the model is chosen"}),
        (
            lambda model: accel.compile_model(accel.checkpoint_activations(model), backend="eager"),
            {"problem": "other random numbers", "fix": "use aot_eager"},
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(call: Callable[[nn.Module], object], fields: dict[str, str]) -> None:
    with assert_raises(ConfigError, **fields):
        call(Stack(2))


@pytest.mark.parametrize(
    "call",
    [
        lambda ctx, model: accel.compile_model(ctx, model),
        lambda ctx, model: accel.checkpoint_activations(ctx, model),
        lambda ctx, model: accel.offload_activations(ctx, model),
        lambda ctx, model: accel.defer_logits(ctx, model),
        lambda ctx, model: accel.chunk_sequence(ctx, model, parts=2),
        lambda ctx, model: accel.training.clear_gradients(ctx, model),
        lambda ctx, model: accel.unwrap_model(ctx),
    ],
)
def test_functions_of_a_model_alone_take_no_context(call):
    with assert_raises(ConfigError, problem="not a module", got="DistContext", fix="this function takes no context"):
        call(accel.single(), nn.Linear(2, 1))
