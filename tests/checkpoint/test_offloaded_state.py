# SPDX-License-Identifier: Apache-2.0
"""Shards on the host of a mesh of GPUs, as an offloaded model has them: no step of a checkpoint moves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import accel
from accel.tensors import dtensor_like, local_part
from accel.testing import Simulator


def mesh_of_gpus() -> DeviceMesh:
    """Return the mesh of a lone rank whose device would be a GPU."""
    return DeviceMesh.from_group(cast(Any, dist.group.WORLD), "cuda", mesh_dim_names=("dp",))


def offloaded(mesh: DeviceMesh, *shape: int) -> DTensor:
    """Return ones on the host: torch has no devices of the mesh's type here, so a move to them would raise."""
    there = DTensor.from_local(torch.empty(shape, device="meta"), mesh, [Shard(0)], run_check=False)
    return cast(DTensor, torch.ones_like(there, device="cpu"))


@pytest.mark.parametrize("shape", [torch.Size((4, 2)), None])
def test_what_is_spread_like_an_offloaded_tensor_is_on_the_host(ranks: Simulator, shape: torch.Size | None) -> None:
    def rank(_: accel.DistContext) -> None:
        mesh = mesh_of_gpus()
        template = offloaded(mesh, 4, 2)
        part = torch.arange(8.0).view(4, 2)
        made = dtensor_like(part, template, shape)
        assert (made.device.type, made.device_mesh, made.shape) == ("cpu", mesh, (4, 2))
        assert all(each.is_replicate() for each in made.placements) == (shape is None)
        assert local_part(made).equal(part)

    ranks.run(rank, 1, default_group=True)


def test_a_resumed_offloaded_model_has_its_state_on_the_host(ranks: Simulator, tmp_path: Path) -> None:
    def make(mesh: DeviceMesh) -> dict[str, Any]:
        model = nn.Linear(4, 3, bias=False)
        model.weight = nn.Parameter(offloaded(mesh, 3, 4))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}

    def rank(_: accel.DistContext) -> None:
        mesh = mesh_of_gpus()
        ctx, items = accel.single("cpu"), make(mesh)
        items["model"].weight.grad = offloaded(mesh, 3, 4)
        items["optimizer"].step()
        path = accel.save_state(ctx, tmp_path, items, step=1)
        again = make(mesh)
        _ = accel.load_state(ctx, path, again)
        before, after = (each["optimizer"].state[each["model"].weight]["exp_avg"] for each in (items, again))
        assert after.device.type == "cpu"
        assert local_part(after).equal(local_part(before))
        assert local_part(again["model"].weight).equal(local_part(items["model"].weight))
        again["model"].weight.grad = offloaded(mesh, 3, 4)
        again["optimizer"].step()

    ranks.run(rank, 1, default_group=True)
