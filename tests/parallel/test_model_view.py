# SPDX-License-Identifier: Apache-2.0
"""A model is described once: a view finds what torch finds, in one walk, and `prepare_model` walks models few times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_parts import ModelView, blocks_of, named_modules, note_module, note_prepared
from torch import nn

import accel
from accel.parallel import _spread
from accel.testing import Simulator

# Walks over all modules in `prepare_model`, also for parameters: the view's, and torch's for DDP and `fully_shard`.
# Along tp the search for a plan walks the modules that it tries; a pipeline copies the model to record its forward.
MOST_WALKS = {
    ("ddp", None): 10,
    ("fsdp", None): 10,
    ("ddp", "cp=2"): 12,
    ("ddp", "pp=2"): 12,
    ("ddp", "tp=2"): 80,
}


def blocks(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(count))


def tied() -> nn.Module:
    model = nn.ModuleDict({"words": nn.Embedding(4, 4, sparse=True), "head": nn.Linear(4, 4)})
    model["head"].weight = model["words"].weight
    return model


def shared() -> nn.Module:
    block = nn.Linear(4, 4)
    return nn.ModuleDict({"a": block, "inner": nn.ModuleDict({"again": block, "norm": nn.BatchNorm1d(4)})})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Linear(2, 2),
    "nothing": nn.Identity,
    "blocks": blocks,
    "tied": tied,
    "shared": shared,
    "wrapped": lambda: nn.DataParallel(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_view_tells_what_torch_tells(name: str) -> None:
    model = MODELS[name]()
    view = ModelView(model, example=1)
    inner = accel.unwrap_model(model)
    for seen, module in ((view, model), (view.inner, inner)):
        assert list(seen.modules.items()) == list(module.named_modules())
        assert list(seen.paths) == list(module.named_modules(remove_duplicate=False))
        assert [(key, id(each)) for key, each in seen.parameters.items()] == [
            (key, id(each)) for key, each in module.named_parameters()
        ]
        assert [(key, id(each)) for key, each in seen.buffers.items()] == [
            (key, id(each)) for key, each in module.named_buffers()
        ]
        names: dict[int, list[str]] = {}
        for key, each in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(each), []).append(key)
        assert {key: sorted(each) for key, each in seen.owners.items()} == {k: sorted(v) for k, v in names.items()}
        assert seen.blocks == blocks_of(module, nested=True)
        assert (seen.model, seen.example) == (module, 1)
    assert view.inner.inner is view.inner
    assert set(view.inner.tables) == ({"words.weight"} if name == "tied" else set())


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were walked, once for each walk; entered before ranks begin, as they are threads."""
    seen: list[nn.Module] = []
    named_modules: Any = nn.Module.named_modules

    def counted(self: nn.Module, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        if memo is None and not prefix:
            seen.append(self)
        return named_modules(self, memo, prefix, remove_duplicate)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    return seen


def test_all_facts_of_a_view_need_one_walk(walks: list[nn.Module]) -> None:
    model = nn.Sequential(blocks(), tied())
    view = ModelView(model)
    for _ in range(2):
        _ = view.paths, view.modules, view.parameters, view.buffers, view.owners, view.tables, view.packed
        _ = view.is_sharded, view.holds_dtensors
    assert sum(each is model for each in walks) == 1


@pytest.mark.parametrize(("strategy", "mesh"), MOST_WALKS)
def test_prepare_model_walks_a_model_few_times(
    ranks: Simulator, walks: list[nn.Module], strategy: str, mesh: str | None
) -> None:
    def rank(ctx: accel.DistContext) -> nn.Module:
        ctx = accel.replace(ctx, strategy=strategy, **({} if mesh is None else {"mesh": mesh}))
        model = nn.Sequential(nn.Embedding(8, 4), blocks()[0], nn.Linear(4, 8))
        if mesh is not None:
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        view = ModelView(model)
        before = view.paths
        _ = accel.prepare_model(ctx, model, **({} if mesh is None else {"example": torch.ones(2, 4)}))
        assert tuple(model.named_modules(remove_duplicate=False)) == before  # so one view serves every dimension
        return model

    model = ranks.run(rank, 2, default_group=True)[0]
    own = 2  # the walks of this test
    assert 0 < sum(each is model for each in walks) - own <= MOST_WALKS[strategy, mesh]


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wrapped = model
        note_module(self, wraps="wrapped")


def test_a_view_after_a_change_has_the_tensors_of_now_and_the_modules_of_then(walks: list[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for whole in (model, Wrapper(model)):
        view = ModelView(whole)
        before = view.inner.parameters["0.weight"]
        model[0].weight = new = nn.Parameter(torch.ones(2, 2))
        assert view.inner.parameters["0.weight"] is before
        after = view.after()
        assert after.inner.parameters["0.weight"] is new
        assert after.inner.owners[id(new)] == ("0.weight",)
        assert after.inner.paths is view.inner.paths
    wrapped = ModelView(model).after(Wrapper(model))
    assert wrapped.inner.model is model
    assert next(iter(wrapped.parameters)) == "wrapped.0.weight"
    assert sum(each is model for each in walks) == 3  # one a view


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "fp32"), ("ddp", "pure-bf16"), ("fsdp", "fp32")])
def test_prepare_describes_a_model_once(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, strategy: str, precision: str
) -> None:
    described: list[nn.Module] = []

    def counted(model: nn.Module, **options: bool) -> Any:
        described.append(model)
        return named_modules(model, **options)

    def rank(ctx: accel.DistContext) -> nn.Module:
        ctx = accel.replace(ctx, strategy=strategy, precision=precision)
        model = nn.Sequential(blocks(), nn.Linear(4, 4))
        _ = accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
        return model

    monkeypatch.setattr(_spread, "named_modules", counted)
    models = ranks.run(rank, 2, default_group=True)
    assert [sum(each is model for each in described) for model in models] == [1, 1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_stages_are_shared_by_the_ranks_of_other_samples(ranks: Simulator, strategy: Any) -> None:
    def rank(ctx: accel.DistContext) -> None:
        net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        model = accel.prepare_model(accel.replace(ctx, mesh="pp=2,dp=2", strategy=strategy), net)
        held = [type(each).__name__ for each in model.parameters()]
        assert held == ["DTensor"] * len(held) != []

    ranks.run(rank, 4, default_group=True)


class WithMethods(nn.Linear):
    """Has the methods of `fully_shard`."""

    set_requires_gradient_sync = reshard = nn.Linear.extra_repr


def test_a_pipeline_is_sharded_just_if_its_stages_are() -> None:
    for stage, is_sharded in ((nn.Linear(2, 2), False), (nn.Sequential(WithMethods(2, 2)), True)):
        model = WithMethods(2, 2)
        assert ModelView(model).is_sharded
        note_prepared(model, stages=(stage,))
        assert ModelView(model).is_sharded is is_sharded
