# SPDX-License-Identifier: Apache-2.0
"""`summary`: counts of any model, shapes and activations of a forward, and a model that does not change."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import nn

import accel
from accel.errors import ConfigError
from accel.estimate import Input, measure, summary
from accel.testing import simulate


class Net(nn.Module):
    """A model with all that counts apart: a tied head, frozen blocks, buffers, and a forward that changes it."""

    def __init__(self, width: int, blocks: int, frozen: frozenset[int] = frozenset(), *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5)) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for at in frozen:
            self.blocks[at].requires_grad_(False)
        self.seen: list[torch.Tensor] = []
        self.cache: torch.Tensor | None = None
        self.scale = torch.full((width,), 2.0)  # a tensor that is neither parameter nor buffer

    def forward(self, ids: torch.Tensor, factor: float = 1.0) -> dict[str, Any]:
        hidden = self.embed(ids).mean(1) * self.scale * factor
        for block in self.blocks:
            hidden = hidden + block(hidden) + random.random()
        self.seen.append(hidden)
        self.cache = hidden
        hidden = self.norm(hidden)
        return {"logits": self.head(hidden), "hidden": (hidden,)}


@st.composite
def nets(draw: st.DrawFn) -> Net:
    blocks = draw(st.integers(1, 3))
    frozen = draw(st.frozensets(st.integers(0, blocks - 1)))
    device = draw(st.sampled_from(["cpu", "meta"]))
    with torch.device(device):
        return Net(draw(st.integers(1, 5)), blocks, frozen, tied=draw(st.booleans())).train(draw(st.booleans()))


def _all_of(net: Net) -> dict[str, Any]:
    """Whatever a forward may change in a model: identities, values, modes, hooks and plain attributes."""
    tensors = {name: (id(each), each._version) for name, each in net.state_dict(keep_vars=True).items()}
    values = {} if net.scale.is_meta else {name: each.tolist() for name, each in net.state_dict().items()}
    modules = {
        name: (each.training, [list(vars(each)[hooks]) for hooks in vars(each) if hooks.endswith("_hooks")])
        for name, each in net.named_modules()
    }
    grads = [(each.requires_grad, each.grad) for each in net.parameters()]
    return {"tensors": tensors, "values": values, "modules": modules, "grads": grads, "seen": net.seen, "at": net.cache}


@settings(deadline=None, max_examples=share(0.1))
@given(net=nets(), rows=st.integers(2, 4), depth=st.none() | st.integers(0, 3))
def test_it_counts_each_tensor_once_and_changes_nothing(net: Net, rows: int, depth: int | None) -> None:
    called: list[str] = []
    net.register_forward_hook(lambda *_: called.append("hook"))
    before, streams = _all_of(net), (torch.get_rng_state(), random.getstate())
    for found in (summary(net, depth=depth), summary(net, Input((rows, 7), "int64"), depth=depth)):
        total = found.total
        assert total.parameters == sum(each.numel() for each in net.parameters())
        assert total.trained == sum(each.numel() for each in net.parameters() if each.requires_grad)
        assert total.parameter_bytes == 4 * total.parameters == 4 * total.local
        assert total.buffer_bytes == sum(each.nbytes for each in net.buffers())
        assert [row.path for row in found.rows] == [
            path for path, _ in net.named_modules() if depth is None or (path.count(".") + 1 if path else 0) <= depth
        ]
        leaves = [row for row in summary(net).rows if not list(net.get_submodule(row.path).children())]
        assert sum(row.parameters for row in leaves) == total.parameters
        assert msgspec.json.decode(msgspec.json.encode(found), type=accel.estimate.ModelSummary) == found
    assert total.outputs == ((rows, 11), (rows, net.norm.num_features))
    assert str(_all_of(net)) == str(before)
    assert not called
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]


@settings(deadline=None, max_examples=share(0.1))
@given(net=nets(), rows=st.integers(2, 4))
def test_activations_are_those_of_the_estimate_and_add_up(net: Net, rows: int) -> None:
    ids = Input((rows, 7), "int64")
    found = summary(net, ids)
    known = measure(lambda: net, "net", [ids]).activations["fp32"]
    if not net.scale.is_meta:
        assert found.total.activation_bytes == known.saved + known.copies
    by_path = {row.path: row for row in found.rows}
    blocks = [row.activation_bytes for path, row in by_path.items() if path.count(".") == 1]
    assert by_path["blocks"].activation_bytes == sum(blocks)
    assert by_path["blocks"].outputs == ()
    assert {row.calls for path, row in by_path.items() if path != "blocks"} == {1}


def test_a_tied_head_counts_in_the_embedding_and_says_so() -> None:
    found = summary(Net(4, 1))
    head = found.rows[-1]
    assert (head.path, head.parameters, head.shared, head.parameter_bytes) == ("head", 0, 44, 0)
    assert found.total.shared == 0
    assert "0 (44 shared)" in str(found)


def test_inputs_come_by_position_or_by_keyword_and_need_no_values() -> None:
    net = Net(4, 2)
    ids = torch.zeros(3, 7, dtype=torch.int64)
    ways = [ids, (ids,), (ids, 2.0), {"ids": ids, "factor": 2.0}, (Input((3, 7), "int64"),)]
    assert len({str(summary(net, each)) for each in ways}) == 1


def test_the_table_folds_equal_blocks_and_shows_columns_that_matter() -> None:
    text = str(summary(Net(4, 3, frozenset({2})), Input((3, 7), "int64")))
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["MODULE", "KIND", "OUTPUT", "PARAMETERS", "FROZEN", "MEMORY", "BUFFERS", "ACTIVATIONS"]
    assert lines[4][:5] == ["blocks.0-1,", "each", "Sequential", "3x4", "20"]
    assert lines[7][:6] == ["blocks.2", "Sequential", "3x4", "20", "20", "80"]
    assert f"{44 + 8 + 60:,} parameters in 9 tensors, 20 of them frozen" in text
    assert str(summary(nn.Linear(1, 1))).splitlines()[0].split() == ["MODULE", "KIND", "PARAMETERS", "MEMORY"]


def test_lazy_modules_take_their_shapes_from_inputs_and_stay_lazy() -> None:
    net = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    with assert_raises(
        ConfigError, got="LazyLinear without a call", where="summary, 0.weight", fix=r"summary\(model, inputs\)"
    ):
        summary(net)
    found = summary(net, torch.zeros(4, 3))
    made = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))
    assert [row.parameters for row in found.rows] == [row.parameters for row in summary(made).rows]
    assert found.total.outputs == ((4, 2),)
    assert all(nn.parameter.is_lazy(each) for each in net[0].parameters())
    assert net(torch.ones(4, 5)).shape == (4, 2)  # another width: nothing was fixed


def test_hooks_of_a_reparametrization_are_no_obstacle() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.LSTM(4, 2, batch_first=True))
    assert summary(net, torch.zeros(2, 5, 3)).rows[-1].outputs == ((2, 5, 2), (1, 2, 2), (1, 2, 2))


def _prepared(ctx: accel.DistContext, strategy: str) -> tuple[Any, Any, int]:
    torch.manual_seed(0)
    ctx = accel.replace(ctx, strategy=strategy)
    model = accel.prepare_model(ctx, nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3)))
    try:
        shapes: Any = summary(model, torch.zeros(2, 6)).total.outputs
    except ConfigError as error:
        shapes = str(error)
    held = sum(getattr(each, "_local_tensor", each).numel() for each in model.parameters())
    return summary(model), shapes, held


def test_a_sharded_model_shows_what_this_rank_holds_and_a_replica_the_plain_model() -> None:
    ranks = simulate(lambda ctx: _prepared(ctx, "fsdp"), 2, default_group=True)
    assert sum(found.total.local for found, _, _ in ranks) == 73
    for found, shapes, held in ranks:
        assert (found.total.parameters, found.total.local, found.total.parameter_bytes) == (73, held, 4 * held)
        assert f"for {held} parameters on this rank" in str(found)
        assert "pass the plain model, before accel.prepare" in shapes
    for found, shapes, held in simulate(lambda ctx: _prepared(ctx, "ddp"), 2):
        assert (found.total.local, held, found.rows[1].path, shapes) == (73, 73, "0", ((2, 3),))


@pytest.mark.parametrize(
    ("model", "inputs", "fields"),
    [
        (nn.Linear, None, {"problem": "the model is not a module", "expected": "an nn.Module", "got": "type"}),
        (nn.Linear(3, 4), (2, 3), {"problem": "a shape is no input", "fix": r'Input\(\(2, 3\), "float32"\)'}),
        (
            nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2)),
            torch.zeros(2, 3),
            {"where": "summary, module 1", "fix": "Pass a tensor"},
        ),
        (nn.Linear(3, 4), (torch.zeros(2, 3), 1), {"got": "TypeError.*positional arguments"}),
        (nn.Linear(3, 4), Input((2, 3), "float3"), {"got": "no attribute 'float3'"}),
    ],
)
def test_what_cannot_be_called_is_refused_with_the_module(
    model: Any, inputs: Any, fields: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with assert_raises(ConfigError, **fields):
        summary(model, inputs)
    assert not caplog.records  # torch logs a traceback for operations that fail on fake tensors


def test_a_depth_below_the_model_is_refused() -> None:
    with assert_raises(ConfigError, problem="the depth is not valid", where=r"summary\(depth=\)"):
        summary(nn.Linear(1, 1), depth=-1)


def test_the_page_shows_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text()
    [(code, text)] = re.findall(r"```python\n([^`]*summary[^`]*)```\n\n```text\n(.*?)```", page, flags=re.S)
    exec(code, {})
    assert capsys.readouterr().out == text
