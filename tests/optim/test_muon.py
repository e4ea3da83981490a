# SPDX-License-Identifier: Apache-2.0
"""Muon on meshes: parameters of one process, each matrix orthogonalized once, two messages a bucket, any checkpoint."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, cast

import language_models as lm
import pytest
import torch
from catching import assert_raises
from optimizer_runs import MESHES, largest, messages_of_a_step, model_of, resumed, stepped
from torch import Tensor, nn

import accel
from accel.errors import ConfigError, StepError
from accel.optim import Muon, _muon
from accel.tensors import full_tensor
from accel.testing import Simulator

EXACT: Any = partial(Muon, lr=0.02, adamw_lr=0.01, dtype=None)


@pytest.mark.parametrize("name", MESHES)
def test_parameters_on_meshes_are_those_of_one_process(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mesh, strategy, size = MESHES[name]
    options: dict[str, Any] = {"experts": 4} if "ep" in mesh.split(",")[0] else {}
    calls = Counter[int]()
    plain = _muon.newton_schulz

    def counted(settings: Any, matrix: Tensor) -> Tensor:
        calls[threading.get_ident()] += matrix.numel() * min(matrix.shape)
        return plain(settings, matrix)

    monkeypatch.setattr(_muon, "newton_schulz", counted)
    (one,) = ranks.run(lambda ctx: lm.train(ctx, "dp=1", of_model=EXACT, epochs=2, **options), 1, default_group=True)
    alone = calls.total()
    calls.clear()
    runs = ranks.run(
        lambda ctx: lm.train(ctx, mesh, strategy=strategy, of_model=EXACT, epochs=2, **options),
        size,
        default_group=True,
    )
    for run in runs:
        assert largest(run.parameters, {name: one.parameters[name] for name in run.parameters}) < 1e-10
    assert calls.total() == alone  # each matrix once on all ranks
    matrix = 6 * 2 * lm.WIDTH**3  # six steps of the largest
    assert max(calls.values()) <= alone / size + matrix * (2 if "pp" in mesh else 1)


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(256 * 2**20, 1), (16 * 16 * 8 * 4, 4)])
def test_a_step_sends_two_messages_for_each_bucket(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int, buckets: int
) -> None:
    for found in messages_of_a_step(ranks, monkeypatch, "dp=2", 2, partial(EXACT, bucket_bytes=bucket_bytes)):
        assert len(found) == 2 * buckets
        assert all("all_to_all" in each for each in found)


def test_one_process_in_bf16_steps_as_torchs_muon() -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = nn.ParameterList(torch.randn(shape, generator=generator) for shape in ((12, 8), (8, 20), (16, 16)))
    mine = copy.deepcopy(theirs)
    for options in ({}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}):
        optimizers = Muon(mine, lr=0.02, **options), torch.optim.Muon(theirs.parameters(), lr=0.02, **options)
        for _ in range(4):
            for one, other in zip(mine, theirs, strict=True):
                one.grad = torch.randn(one.shape, generator=generator)
                other.grad = one.grad.clone()
            for each in optimizers:
                each.step()
        for one, other in zip(mine, theirs, strict=True):
            assert float((one - other).detach().abs().max()) < 1e-6


class Fused(nn.Module):
    """One projection of 20 rows, or the three that it consists of."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        weight = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        parts = [weight] if fused else weight.split([12, 4, 4])
        self.parts = nn.ModuleList(nn.Linear(6, len(each), bias=False).double() for each in parts)
        with torch.no_grad():
            for part, each in zip(self.parts, parts, strict=True):
                part.weight.copy_(each)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([each(x) for each in self.parts], 1)


def fused_run(ctx: accel.DistContext, strategy: Any, fused: bool) -> Tensor:
    ctx = accel.replace(ctx, strategy=strategy)
    model: Any = Fused(fused=fused)
    muon = Muon(model, lr=0.02, dtype=None, packs={"parts.0.*": (12, 4, 4)} if fused else None)
    model, muon = accel.prepare(ctx, model, muon)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(3):
        model(x).square().sum().backward()
        muon.share_ranks(ctx, independent=False)
        muon.step()
        muon.zero_grad()
    return torch.cat([full_tensor(each) for each in accel.unwrap_model(model).parameters()])


@pytest.mark.parametrize(("size", "strategy"), [(1, "ddp"), (2, "ddp"), (2, "fsdp"), (3, "fsdp")])
def test_a_fused_projection_is_stepped_as_its_matrices(ranks: Simulator, size: int, strategy: str) -> None:
    (expected,) = ranks.run(lambda ctx: fused_run(ctx, "ddp", False), 1, default_group=True)
    for found in ranks.run(lambda ctx: fused_run(ctx, strategy, True), size, default_group=True):
        assert float((found - expected).abs().max()) < 1e-10


@pytest.mark.parametrize(("mesh", "size"), [("dp=3", 3), ("dp=1", 1)])
def test_a_checkpoint_is_resumed_on_another_mesh(ranks: Simulator, tmp_path: Path, mesh: str, size: int) -> None:
    (expected,) = ranks.run(lambda ctx: resumed(ctx, "dp=1", tmp_path / "one", 3, EXACT), 1, default_group=True)
    ranks.run(lambda ctx: resumed(ctx, "dp=2,tp=2", tmp_path / "two", 1, EXACT), 4, default_group=True)
    for found in ranks.run(lambda ctx: resumed(ctx, mesh, tmp_path / "two", 3, EXACT), size, default_group=True):
        assert largest(found, expected) < 1e-10


def test_parameters_go_where_they_belong_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "accel.optim")
    with accel.seeding.seeded(accel.single("cpu"), 0):
        model = lm.LanguageModel(accel.single("cpu"), experts=4)
    optimizer = Muon(model, adamw=("*.router.weight",), adamw_lr=1e-4)
    names = {id(each): name for name, each in model.named_parameters()}
    found = {group["kind"]: {names[id(each)] for each in group["params"]} for group in optimizer.param_groups}
    assert "blocks.1.mlp.experts.weight" in found["muon"]
    assert "blocks.0.attention.q.weight" in found["muon"]
    assert {"embed.tokens.weight", "embed.places.weight", "head.weight", "norm.bias"} <= found["adamw"]
    assert "blocks.1.mlp.router.weight" in found["adamw"]
    assert found["muon"].isdisjoint(found["adamw"])
    assert len(found["muon"] | found["adamw"]) == len(names)
    (line,) = caplog.messages
    assert "blocks.0.attention.q.weight" in line
    assert "embed.tokens.weight" in line
    moved = Muon(model, muon=("head.weight",))
    assert any(each is model.head.weight for each in moved.param_groups[0]["params"])


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_step_with_nan_changes_nothing(ranks: Simulator, nonfinite: Any) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2", strategy="fsdp")
        model, optimizer, state = model_of(ctx, EXACT)
        before = [full_tensor(each).clone() for each in model.parameters()]
        if nonfinite == "raise":
            with pytest.raises(accel.errors.NonFiniteError):
                stepped(ctx, model, optimizer, state, torch.nan, nonfinite=nonfinite)
        else:
            assert not stepped(ctx, model, optimizer, state, torch.nan, nonfinite=nonfinite).stepped
        assert all(map(torch.equal, before, [full_tensor(each) for each in model.parameters()]))

    ranks.run(rank, 2, default_group=True)


def test_master_weights_are_stepped_in_float32_under_ddp(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext, mesh: str) -> dict[str, Tensor]:
        precision = accel.precision.Precision(params="bf16", compute="bf16", master_weights="fp32")
        ctx = accel.replace(ctx, mesh=mesh, precision=precision)
        model, optimizer, state = model_of(ctx, partial(EXACT, lr=1e-3))
        _ = stepped(ctx, model, optimizer, state)
        return {name: full_tensor(each).float() for name, each in accel.unwrap_model(model).named_parameters()}

    (one,) = ranks.run(lambda ctx: rank(ctx, "dp=1"), 1, default_group=True)
    for found in ranks.run(lambda ctx: rank(ctx, "dp=2"), 2, default_group=True):
        assert largest(found, one) < 2e-2


def test_local_replicas_step_on_their_own(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Tensor:
        torch.manual_seed(0)
        model = accel.parallel.prepare_local_model(ctx, nn.Linear(4, 4, bias=False).double())
        muon = Muon(model, lr=0.02, dtype=None)
        model.weight.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(ctx.rank), dtype=torch.float64)
        muon.share_ranks(ctx, independent=True)
        muon.step()
        return model.weight.detach()

    first, second = ranks.run(rank, 2, default_group=True)
    assert not torch.equal(first, second)


def test_slips_are_refused_with_the_line_to_write(ranks: Simulator) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    slips: Any = (
        ({"lr": -1.0}, {"problem": "lr"}),
        ({"momentum": 1.0}, {"problem": "momentum"}),
        ({"adjust_lr_fn": "most"}, {"problem": "adjust_lr_fn"}),
        ({"adamw": ("none.*",)}, {"problem": "matches no parameter"}),
        ({"muon": ("0.bias",)}, {"problem": "no matrix"}),
        ({"muon": ("0.weight",), "adamw": ("0.*",)}, {"problem": "two optimizers"}),
        ({"packs": {"0.weight": (3, 2)}}, {"expected": "6 rows in all"}),
        ({"packs": {"7.weight": (3, 2)}}, {"problem": "matches no parameter"}),
    )
    for slip, fields in slips:
        with assert_raises(ConfigError, **fields):
            Muon(model, **slip)
    with assert_raises(ConfigError, problem="no parameter to train"):
        Muon(nn.ReLU())
    with assert_raises(ConfigError, got="list", fix=r"accel\.optim\.Muon\(model"):
        Muon(cast(Any, [model[0].weight]))

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2", strategy="fsdp")
        model, optimizer, state = model_of(ctx, EXACT)
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        with pytest.raises(StepError) as error:
            optimizer.step()
        optimizer.zero_grad()
        line = error.value.fix
        assert line == "state = accel.optimizer_step(ctx, optimizer, state)"
        _ = stepped(ctx, model, optimizer, state)  # which calls the line

    ranks.run(rank, 2, default_group=True)


@pytest.mark.parametrize("kind", [EXACT, lambda model: accel.optim.Adafactor(model.parameters())])
def test_a_step_in_the_backward_is_refused_on_several_ranks(ranks: Simulator, kind: Any) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2", strategy="fsdp")
        model, optimizer, _ = model_of(ctx, kind)
        loss = model(lm.rows(2), torch.arange(lm.LENGTH).expand(2, -1)).sum()
        with assert_raises(ConfigError, fix="optimizer_step"):
            accel.training.fused_step(ctx, loss, optimizer)

    ranks.run(rank, 2, default_group=True)


def test_it_is_copied_and_pickled_without_its_ranks() -> None:
    model = nn.Linear(4, 6)
    optimizer = Muon(model)
    for each in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        each.param_groups[0]["params"][0].grad = torch.ones(6, 4)
        each.step()
