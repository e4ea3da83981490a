# SPDX-License-Identifier: Apache-2.0
"""A model's parts get the formats that the context's record names, and keep names, identity and values."""

from __future__ import annotations

import copy

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import nn

import accel
from accel.errors import ConfigError, PrepareError
from accel.precision import Precision


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.router = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 2)
        self.register_buffer("steps", torch.arange(3))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x) * scale
        routed = self.router(hidden)
        self.seen = {"hidden": hidden.dtype, "routed": routed.dtype}
        return {"logits": self.head(routed), "ids": self.steps}


def _run(ctx: accel.DistContext, model: nn.Module) -> dict[str, torch.Tensor]:
    with accel.autocast(ctx):
        return model(torch.ones(3, 4), scale=torch.ones(()))


def test_submodules_by_name_compute_in_fp32_under_autocast():
    ctx = accel.single(precision=Precision(compute="bf16", fp32_modules=("rout*",)))
    model = accel.precision.apply_precision(ctx, Blocks())
    out = _run(ctx, model)
    assert model.seen == {"hidden": torch.bfloat16, "routed": torch.float32}
    assert out["logits"].dtype == torch.bfloat16
    assert type(model.router).__name__ == "Sequential"
    assert isinstance(model.router, nn.Sequential)
    assert len(model.router) == 2


def test_submodules_compute_in_fp32_where_the_one_that_holds_them_is_not_called():
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.experts = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.router = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: torch.Tensor) -> list[torch.dtype]:
            x = self.up(x)
            return [x.dtype, *(each(x).dtype for each in (*self.experts, *self.router))]

    ctx = accel.single(precision=Precision(compute="bf16", params="bf16", fp32_modules=("experts", "router")))
    model = accel.precision.apply_precision(ctx, Layers())
    with accel.autocast(ctx):
        assert model(torch.ones(1, 4)) == [torch.bfloat16, *[torch.float32] * 4]


def test_a_shared_submodule_is_known_by_each_of_its_names():
    model = nn.ModuleDict({"embed": nn.Linear(4, 4), "decoder": nn.ModuleDict()})
    model["decoder"]["embed"] = model["embed"]
    ctx = accel.single(precision=Precision(compute="bf16", params="bf16", fp32_modules=("decoder.embed",)))
    assert accel.precision.apply_precision(ctx, model)["embed"].weight.dtype == torch.float32


@pytest.mark.parametrize("outputs", ["fp32", "fp16", None])
def test_outputs_have_the_format_that_was_asked_for(outputs):
    ctx = accel.single(precision=Precision(compute="bf16", outputs=outputs))
    out = _run(ctx, accel.precision.apply_precision(ctx, Blocks()))
    assert out["logits"].dtype == {"fp32": torch.float32, "fp16": torch.float16, None: torch.bfloat16}[outputs]
    assert out["ids"].dtype == torch.int64


def test_bf16_parameters_stay_the_optimizers_and_statistics_stay_fp32():
    ctx = accel.single(precision=Precision(compute="bf16", params="bf16", fp32_modules=("head",)))
    model = Blocks()
    names, values = list(model.state_dict()), copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accel.prepare(ctx, model, optimizer)
    assert list(model.state_dict()) == names
    full = {name for name, each in model.state_dict().items() if each.dtype == torch.float32}
    assert full == {name for name in names if name.startswith(("body.1", "head")) and "num_batches" not in name}
    for name, each in model.state_dict().items():
        assert torch.equal(each, values[name].to(each.dtype))
    state = accel.backward(ctx, _run(ctx, model)["logits"].float().sum(), begin_batch(ctx))
    assert accel.optimizer_step(ctx, optimizer, state).stepped
    assert optimizer.state[model.body[0].weight]["exp_avg"].dtype == torch.bfloat16
    assert not torch.equal(model.head.weight, values["head.weight"])


def test_a_second_call_changes_nothing_and_copies_compute_alike():
    ctx = accel.single(precision=Precision(compute="bf16", params="bf16", outputs="fp32", fp32_modules=("head",)))
    model = accel.precision.apply_precision(ctx, Blocks())
    kinds = [type(module) for module in model.modules()]
    accel.precision.apply_precision(ctx, model)
    assert [type(module) for module in model.modules()] == kinds
    twin = copy.deepcopy(model)
    assert torch.equal(_run(ctx, twin.eval())["logits"], _run(ctx, model.eval())["logits"])


def test_a_shared_parameter_is_what_the_strictest_of_its_modules_wants():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 8, bias=False)
            self.embed = nn.Embedding(8, 4)
            self.embed.weight = self.head.weight

    for patterns in (("head",), ("embed",)):
        ctx = accel.single(precision=Precision(compute="bf16", params="bf16", fp32_modules=patterns))
        model = accel.precision.apply_precision(ctx, Tied())
        assert model.embed.weight is model.head.weight
        assert model.head.weight.dtype == torch.float32


def test_parameters_of_16_bits_become_fp32_where_that_is_asked_for():
    model = nn.Linear(2, 2).bfloat16()
    for params, dtype in ((None, torch.bfloat16), ("fp32", torch.float32)):
        ctx = accel.single(precision=Precision(compute="bf16", params=params))
        assert accel.precision.apply_precision(ctx, model).weight.dtype == dtype


def test_ranks_train_a_converted_model_alike(ranks):
    def rank(ctx):
        ctx = accel.replace(ctx, precision=Precision(compute="bf16", outputs="fp32", fp32_modules=("router",)))
        torch.manual_seed(0)
        model = accel.prepare(ctx, Blocks())
        out = _run(ctx, model)["logits"]
        accel.backward(ctx, out.square().mean(), begin_batch(ctx))
        return out.dtype, [each.grad.clone() for each in model.parameters()]

    (dtype, first), (_, second) = ranks.run(rank, 2)
    assert dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_submodules_keep_their_names_whatever_those_are():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outputs, self.device_type = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.device_type(self.outputs(x))

    ctx = accel.single(precision=Precision(compute="bf16", outputs="fp32", fp32_modules=("outputs",)))
    with accel.autocast(ctx):
        assert accel.precision.apply_precision(ctx, Named())(torch.ones(1, 4)).dtype == torch.float32


@pytest.mark.parametrize("pattern", ["haed", "body.7"])
def test_a_name_that_matches_nothing_is_refused_with_the_nearest(pattern):
    ctx = accel.single(precision=Precision(compute="bf16", fp32_modules=(pattern,)))
    with assert_raises(
        ConfigError, problem="no submodule has such a name", expected="a name in Blocks", fix="Did you mean"
    ):
        accel.precision.apply_precision(ctx, Blocks())


def test_parameters_with_gradients_are_not_converted():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    with assert_raises(PrepareError, problem="gradient", where="apply_precision, weight"):
        accel.precision.apply_precision(accel.single(precision="pure-bf16"), model)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
