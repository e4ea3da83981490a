# SPDX-License-Identifier: Apache-2.0
"""Plans of experts: the modules that patterns and models name, and everything that is refused at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from catching import assert_raises
from planned_parts import matching, named_modules
from torch import nn

import accel
from accel.errors import PrepareError
from accel.parallel import expert_plan
from accel.parallel.axes.experts._expert_plan import resolve_experts
from accel.testing import simulate


class Stacked(nn.Module):
    def __init__(self, experts: int = 4, others: int | None = None) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(experts, 3, 2))
        self.down = nn.Parameter(torch.zeros(others or experts, 2, 3))

    def forward(self, tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return tokens


def model_of(*layers: nn.Module, **named: Any) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"router": nn.Linear(2, 4), "experts": layer}) for layer in layers])
    for name, each in named.items():
        setattr(model, name, each)
    return model


BOTH = model_of(Stacked(), Stacked())


def test_a_star_stands_for_one_component():
    paths = [path for path, _ in named_modules(BOTH)]
    assert matching(paths, "layers.*.experts") == ["layers.0.experts", "layers.1.experts"]
    assert matching(paths, "layers.1.*") == ["layers.1.router", "layers.1.experts"]
    assert (
        matching(paths, "*.experts") == matching(paths, "layers.0.expert") == matching(paths, "layersX0Xexperts") == []
    )


def test_styles_are_resolved_by_path():
    plan = {"layers.0.experts": "dispatch", "layers.1.experts": "local"}
    assert resolve_experts(BOTH, plan, 2) == plan
    assert resolve_experts(BOTH, {"layers.*.experts": "dispatch"}, 4) == dict.fromkeys(plan, "dispatch")


def test_a_models_own_plan_is_read_wherever_it_stands():
    # the names are transformers'; the styles of their parameters follow from that of the module
    said = {"layers.*.experts": "ep_dispatch_experts", "layers.*.experts.up": "grouped_gemm", "other": "colwise"}
    inner = model_of(Stacked(), nn.Identity(), ep_plan=said)
    found = {"base.layers.0.experts": "dispatch", "base.layers.1.experts": "dispatch"}
    assert expert_plan(nn.ModuleDict({"base": inner})) == found
    assert expert_plan(BOTH) == {}


@pytest.mark.parametrize(
    ("model", "plan", "fields"),
    [
        (
            BOTH,
            {"layers.*.expert": "dispatch"},
            {"got": r"layers\.\*\.expert: matches no module\. Did you mean `layers\.\*\.experts`\?"},
        ),
        (BOTH, {"layers.*.experts": "tensor"}, {"got": "style 'tensor', which is none of dispatch, local"}),
        (
            BOTH,
            {"layers.*.experts": "local", "*.0.experts": "local"},
            {"got": r"0\.experts: matches layers\.\*\.experts and \*\.0\."},
        ),
        (BOTH, {"layers.*.router": "local"}, {"got": r"layers\.0\.router: has weight \[4, 2\], bias \[4\]"}),
        (model_of(Stacked(5)), {"layers.*.experts": "local"}, {"got": r"layers\.0\.experts: has 5 experts"}),
        (
            model_of(Stacked(4, 2)),
            {"layers.*.experts": "local"},
            {"got": r"layers\.0\.experts: has up \[4, 3, 2\], down \[2, 2, 3\]"},
        ),
        (
            model_of(nn.ModuleList([nn.Linear(2, 2)] * 4)),
            {"layers.*.experts": "local"},
            {"got": r"holds 0\.weight in a separate module"},
        ),
        (
            model_of(nn.ModuleList([nn.Linear(2, 2)] * 4)),
            {"layers.*.experts": "dispatch"},
            {"fix": r"as torch\.stack makes them"},
        ),
        (model_of(nn.Identity()), {"layers.*.experts": "local"}, {"got": r"layers\.0\.experts: has no parameters"}),
        (BOTH, "models", {"got": "'models'"}),
    ],
)
def test_what_cannot_be_spread_is_refused(model, plan, fields):
    with assert_raises(PrepareError, **fields):
        _ = resolve_experts(model, plan, 2)


def test_shared_parameters_are_refused():
    tied = model_of(Stacked(), Stacked())
    tied.layers[1]["experts"].up = tied.layers[0]["experts"].up
    with assert_raises(PrepareError, got=r"layers\.0\.experts: shares up with another module; layers\.1\.experts: s"):
        _ = resolve_experts(tied, {"layers.*.experts": "dispatch"}, 2)


def test_a_buffer_of_all_experts_is_refused_where_a_forward_counts_its_own():
    model = model_of(Stacked())
    model.layers[0]["experts"].register_buffer("scale", torch.ones(4))
    with assert_raises(PrepareError, got=re.escape("layers.0.experts: has all experts in the buffer scale")):
        _ = resolve_experts(model, {"layers.*.experts": "dispatch"}, 2)
    assert resolve_experts(model, {"layers.*.experts": "local"}, 2) == {"layers.0.experts": "local"}


def test_all_problems_are_told_at_once():
    plan = {"layers.*.experts": "tensor", "layers.*.router": "local", "heads": "local"}
    with pytest.raises(PrepareError) as caught:
        _ = resolve_experts(model_of(Stacked(3)), plan, 2)
    for told in ("style 'tensor'", "layers.0.experts: has 3 experts", "layers.0.router: has", "heads: matches no"):
        assert told in str(caught.value)


def test_a_model_without_named_experts_is_refused_with_the_line_to_write():
    with assert_raises(
        PrepareError, fix=re.escape('plan=accel.parallel.Plan(experts={"layers.*.experts": "dispatch"}).')
    ):
        _ = resolve_experts(BOTH, "model", 2)
    with assert_raises(PrepareError, fix="Leave ep out of the mesh"):
        _ = resolve_experts(nn.Linear(2, 2), "model", 2)
    routed = model_of(Stacked())
    for each in routed.layers:
        each["experts"].router = nn.Linear(2, 4)  # in one module with the experts
    moved = re.escape("of layers.*.experts into") + ".*" + re.escape('{"layers.*.experts.experts": "dispatch"}).')
    for plan in ("model", {"layers.*.experts": "dispatch"}):
        with assert_raises(PrepareError, fix=moved):
            _ = resolve_experts(routed, plan, 2)


def test_every_rank_refuses_before_anything_changes():
    def run(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2,ep=2")
        model = model_of(Stacked())
        before = dict(model.named_parameters())
        with assert_raises(PrepareError, got="a model that names none"):
            _ = accel.prepare_model(ctx, model)
        assert all(each is before[name] for name, each in model.named_parameters())

    _ = simulate(run, 2, default_group=True)


def test_experts_called_with_something_else_are_refused():
    class Dense(Stacked):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Dense()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.experts(tokens)

    def run(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2,ep=2")
        model = accel.prepare_model(ctx, Holder(), plan=accel.parallel.Plan(experts={"experts": "dispatch"}))
        with assert_raises(PrepareError, expected=r"forward\(tokens, indices, weights\)", got="Tensor"):
            model(torch.zeros(2, 2))

    _ = simulate(run, 2, default_group=True)
