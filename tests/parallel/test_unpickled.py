# SPDX-License-Identifier: Apache-2.0
"""Models on meshes are pickled and copied, or refuse it with what to call instead."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import Tensor, nn
from torch.nn.utils import parametrize

import accel
from accel.errors import PrepareError
from accel.tensors import local_part
from accel.testing import Simulator

X = torch.linspace(-1, 1, 32).view(8, 4).sin()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = x + each(x)
        return x


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    _ = file.seek(0)
    return torch.load(file, weights_only=False)


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _prepared(ctx: accel.DistContext, mesh: str, strategy: Any) -> nn.Module:
    ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
    return accel.prepare_model(ctx, Net(), example=(X,) if "tp" in mesh else None)


@pytest.mark.parametrize("write", [_saved, _pickled])
@pytest.mark.parametrize(
    ("mesh", "strategy", "size"),
    [
        ("dp=2", "fsdp", 2),
        ("pp=2", "ddp", 2),
        ("cp=2", "ddp", 2),
        pytest.param("dp=2,tp=2", "fsdp", 4, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_holds_groups_names_the_calls_that_save_it(
    ranks: Simulator, mesh: str, strategy: str, size: int, write: Callable[[nn.Module], nn.Module]
) -> None:
    def refused(ctx: accel.DistContext) -> bool:
        model = _prepared(ctx, mesh, strategy)
        with assert_raises(PrepareError, problem="cannot be pickled", got="Net", fix="save_model.*save_state"):
            _ = write(model)
        return True

    assert all(ranks.run(refused, size, default_group=True))


@pytest.mark.parametrize("write", [_saved, _pickled, copy.deepcopy])
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_a_replica_or_a_tensor_parallel_model_is_pickled(
    ranks: Simulator, mesh: str, write: Callable[[nn.Module], nn.Module]
) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model = _prepared(ctx, mesh, "ddp")
        expected = model(X)  # along tp, hooks of the first forward are not pickled
        torch.testing.assert_close(accel.unwrap_model(write(model))(X), expected)

    _ = ranks.run(rank, 2, default_group=True)


def test_a_shallow_copy_of_a_sharded_model_computes(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model = _prepared(ctx, "dp=2", "fsdp")
        twin = copy.copy(model)
        assert type(twin) is type(model)
        torch.testing.assert_close(twin(X), model(X))

    _ = ranks.run(rank, 2, default_group=True)


@pytest.mark.filterwarnings("error:backward hook")
def test_shards_are_saved_without_a_warning_about_hooks(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        torch.save(list(_prepared(ctx, "dp=2", "fsdp").parameters()), io.BytesIO())

    _ = ranks.run(rank, 2, default_group=True)


@pytest.mark.parametrize(("mesh", "strategy"), [("dp=2", "fsdp"), ("tp=2", "ddp")])
def test_shards_are_read_as_weights_alone(ranks: Simulator, mesh: str, strategy: str) -> None:
    def rank(ctx: accel.DistContext) -> None:
        parameters, file = dict(_prepared(ctx, mesh, strategy).named_parameters()), io.BytesIO()
        torch.save(parameters, file)
        _ = file.seek(0)
        for name, each in torch.load(file, weights_only=True).items():
            assert torch.equal(local_part(each), local_part(parameters[name]))

    _ = ranks.run(rank, 2, default_group=True)


def test_copies_along_cp_share_ranks_and_no_values(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model = _prepared(ctx, "cp=2", "ddp")
        twin = copy.deepcopy(model)
        with torch.no_grad():
            _ = accel.unwrap_model(twin).get_parameter("blocks.0.0.weight").zero_()
        assert type(twin) is type(model)
        torch.testing.assert_close(copy.copy(model)(X), model(X))
        assert not torch.equal(twin(X), model(X))

    _ = ranks.run(rank, 2, default_group=True)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Copied(Net):
    """A model that makes its copies."""

    def __copy__(self) -> Net:
        return Net()

    def __deepcopy__(self, memo: dict[int, Any]) -> Net:
        return Net()


class Stated(Net):
    """A model that decides what its copies have."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"name": "a copy"}


@pytest.mark.parametrize("mesh", ["pp=2", "cp=2"])
def test_copies_are_made_by_a_model_that_says_how(ranks: Simulator, mesh: str) -> None:
    def prepared(ctx: accel.DistContext, model: nn.Module) -> nn.Module:
        return accel.unwrap_model(accel.prepare_model(accel.replace(ctx, mesh=mesh), model))

    def rank(ctx: accel.DistContext) -> None:
        plain = Net()
        plain.scale = nn.Parameter(torch.ones(1))
        parametrized = prepared(ctx, parametrize.register_parametrization(plain, "scale", Doubled()))
        copied = prepared(ctx, Copied())
        stated = prepared(ctx, Stated())
        for way in (copy.copy, copy.deepcopy):
            assert type(way(parametrized)) is type(parametrized)
            assert type(way(copied)) is Net
            assert vars(way(stated))["name"] == "a copy"

    _ = ranks.run(rank, 2, default_group=True)
