# SPDX-License-Identifier: Apache-2.0
"""Loading on several ranks: each reads the bytes of its own shards, and all raise the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import make_objects, plan_of
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import accel
from accel.errors import CheckpointError
from accel.parallel import Axes
from accel.tensors import full_tensor, local_part
from accel.testing import Simulator

LAYOUTS = [
    (Axes(tp=2), "ddp"),
    (Axes(pp=2), "ddp"),
    (Axes(dp=2), "ddp"),
    (Axes(dp=2, tp=2, ep=4), "fsdp"),
]


def _model(ctx: accel.DistContext) -> nn.Module:
    model, _ = make_objects(ctx, tied=True, experts=4)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The weights of one process as files, and as tensors."""
    folder = tmp_path_factory.mktemp("saved")
    ctx = accel.single("cpu")
    model = _model(ctx)
    accel.save_model(ctx, model, folder, max_shard_size="20KB")
    return folder, {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(("axes", "strategy"), LAYOUTS, ids=str)
def test_empty_models_are_filled_shard_by_shard(
    ranks: Simulator, saved: tuple[Path, dict[str, torch.Tensor]], axes: Axes, strategy: Any
) -> None:
    folder, expected = saved

    def rank(ctx: accel.DistContext) -> tuple[dict[str, torch.Tensor], int, int]:
        ctx = accel.replace(ctx, mesh=str(axes), strategy=strategy)
        model = accel.init_empty_weights(lambda: _model(ctx))
        model = accel.prepare_model(ctx, model, plan=plan_of(4))
        read: list[int] = []
        accel.bigmodel.load_checkpoint_in_model(ctx, model, folder, advance=read.append)
        held = accel.unwrap_model(model)
        mine = sum(local_part(each).nbytes for each in [*held.parameters(), *held.buffers()])
        whole = {name: full_tensor(each).clone() for name, each in held.named_parameters(remove_duplicate=False)}
        return whole, sum(read), mine

    for whole, read, mine in (found := ranks.run(rank, axes.world_size, default_group=True)):
        assert all(torch.equal(each, expected[name]) for name, each in whole.items())
        assert read >= mine or strategy == "ddp"
    assert {name for whole, *_ in found for name in whole} == expected.keys()


def test_each_rank_reads_the_bytes_of_its_rows_alone(ranks: Simulator, tmp_path: Path) -> None:
    rows, columns = torch.randn(64, 100_000), torch.randn(8, 60_000)
    save_file({"rows": rows, "columns": columns, "both": rows[:8].clone()}, tmp_path / "model.safetensors")

    def rank(ctx: accel.DistContext) -> int:
        ctx = accel.replace(ctx, mesh="dp=2,tp=2")
        assert ctx.mesh is not None
        model = nn.Module()
        for name, tensor, placements in (
            ("rows", rows, [Shard(0), Shard(0)]),
            ("columns", columns, [Replicate(), Shard(1)]),
            ("both", rows[:8], [Shard(0), Shard(1)]),
        ):
            empty = torch.empty_like(tensor, device="meta")
            model.register_parameter(name, nn.Parameter(distribute_tensor(empty, ctx.mesh, placements)))
        read: list[int] = []
        accel.bigmodel.load_checkpoint_in_model(ctx, model, tmp_path, advance=read.append)
        for name, tensor in (("rows", rows), ("columns", columns), ("both", rows[:8])):
            assert torch.equal(full_tensor(model.get_parameter(name)), tensor), name
        return sum(read)

    wanted = rows.nbytes // 4 + columns.nbytes // 2 + rows[:8].nbytes // 4
    assert ranks.run(rank, 4, default_group=True) == [wanted] * 4


def test_all_ranks_raise_what_one_finds(ranks: Simulator, tmp_path: Path) -> None:
    for name, size in (("good", 4), ("bad", 5)):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.ones(2, size), "bias": torch.ones(2)}, tmp_path / name / "model.safetensors")

    def rank(ctx: accel.DistContext) -> tuple[str, float]:
        model = nn.Linear(4, 2)
        with torch.no_grad():
            model.weight.zero_()
        with pytest.raises(CheckpointError) as caught:
            accel.bigmodel.load_checkpoint_in_model(ctx, model, tmp_path / ("bad" if ctx.rank == 1 else "good"))
        return str(caught.value), float(model.weight.detach().sum())

    found = ranks.run(rank, 3)
    assert len({text for text, _ in found}) == 1
    assert "'weight': expected shape [2, 4], got [2, 5]" in found[0][0]
    assert "rank 1" in found[0][0]
    assert all(total == 0 for _, total in found)
