# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks that ranks along tp divide, with a graph break between their layers or around them."""

from __future__ import annotations

import copy
import logging
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from catching import assert_raises
from torch import Tensor, nn

import accel
from accel.errors import ConfigError
from accel.parallel import Plan
from accel.testing import Simulator

pytestmark = [
    pytest.mark.usefixtures("own_graphs"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # torch's, of a trace
]
DIVIDED = Plan(tensor={"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"})


class Mlp(nn.Module):
    def __init__(self, *, prints: bool, softmax: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.prints, self.softmax = prints, softmax

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.prints:
            print(end="")
        return self.down(hidden.softmax(-1) if self.softmax else hidden / hidden.shape[-1])


class Block(nn.Module):
    def __init__(self, *, prints: bool = False, softmax: bool = False) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), Mlp(prints=prints, softmax=softmax)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(**options) for _ in range(2)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def check(ranks: Simulator, net: Net, plan: Plan | None, *, fullgraph: bool = False) -> None:
    """Compare outputs and a gradient of two passes of compiled blocks with those of one process."""
    net = net.double()
    expected = copy.deepcopy(net)
    whole = expected(X)
    whole.square().sum().backward()

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="tp=2")
        model = accel.prepare_model(ctx, copy.deepcopy(net), plan=plan, example=[X] if plan is None else None)
        accel.compile_model(model, "repeated", backend="aot_eager", fullgraph=fullgraph)
        for _ in range(2):
            model.zero_grad()
            out = model(X)
            torch.testing.assert_close(out, whole, rtol=0, atol=1e-12)
            out.square().sum().backward()
            gradient = model.get_parameter("blocks.0.norm.weight").grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(
                gradient, expected.get_parameter("blocks.0.norm.weight").grad, rtol=0, atol=1e-12
            )

    ranks.run(rank, 2, default_group=True, timeout_s=300)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "stays uncompiled" in each.getMessage()]


@pytest.mark.parametrize("softmax", [False, True])
def test_a_graph_break_between_divided_layers_leaves_the_block_uncompiled(
    ranks: Simulator, caplog: pytest.LogCaptureFixture, softmax: bool
) -> None:
    """A softmax of features keeps them full, so that a plan that is found divides the features between blocks."""
    with caplog.at_level(logging.WARNING, "accel.parallel"):
        check(ranks, Net(prints=True, softmax=softmax), None if softmax else DIVIDED)
    assert said(caplog) == 4 * [
        "Block: a module that computes with parts of tensors stays uncompiled: Failed to trace builtin operator"
    ]
    assert not graphs()


def test_blocks_with_parts_at_their_borders_are_compiled(ranks: Simulator) -> None:
    check(ranks, Net(softmax=True), None, fullgraph=True)
    assert 0 < graphs() <= 4


class Printing(Net):
    """A model that prints between its blocks, where tensors are full."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            print(end="")
        return self.head(x)


@pytest.mark.parametrize("prints", [True, False])
def test_a_model_that_is_compiled_whole_may_break_its_graph_around_blocks(ranks: Simulator, prints: bool) -> None:
    """Before a block that breaks a graph, torch would have computed others, so that the model cannot begin again."""

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="tp=2")
        net = Printing().double()
        net.blocks[1].mlp.prints = prints
        expected = net(X).detach()
        model = accel.prepare_model(ctx, copy.deepcopy(net), plan=DIVIDED)
        accel.compile_model(model, backend="aot_eager")
        if prints:
            with assert_raises(ConfigError, problem="torch has compiled a first part of the module") as caught:
                model(X)
            line = re.search(r"accel\.compile_model\(.*?\)", caught.value.fix)
            assert line
            model = accel.prepare_model(ctx, net, plan=DIVIDED)
            compiles = SimpleNamespace(compile_model=partial(accel.compile_model, backend="aot_eager"))
            exec(line[0], {"accel": compiles, "model": model})
        torch.testing.assert_close(model(X).detach(), expected, rtol=0, atol=1e-12)

    ranks.run(rank, 2, default_group=True, timeout_s=300)
    assert graphs()


def test_a_model_with_a_graph_break_in_a_block_runs_uncompiled(
    ranks: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="tp=2")
        net = Net(prints=True).double()
        expected = net(X).detach()
        model = accel.prepare_model(ctx, net, plan=DIVIDED)
        accel.compile_model(model, backend="aot_eager")
        torch.testing.assert_close(model(X).detach(), expected, rtol=0, atol=1e-12)

    with caplog.at_level(logging.WARNING, "accel.parallel"):
        ranks.run(rank, 2, default_group=True, timeout_s=300)
    assert len(said(caplog)) == 2
    assert not graphs()
