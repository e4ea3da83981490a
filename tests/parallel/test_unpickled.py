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

import accel
from accel.errors import PrepareError
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
