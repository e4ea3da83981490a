# SPDX-License-Identifier: Apache-2.0
"""Sharded tensors in checkpoints: who writes what, what is refused, and real processes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from ckpt_helpers import CPU, equal
from ckpt_meshes import Layout, build, plain, state, step
from processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import accel
from accel import AccelError


def outcome(call: Callable[[], object]) -> str:
    try:
        return f"returned {call()}"
    except AccelError as error:
        return f"{type(error).__name__}: {error}"


def manifest(path: Path) -> dict[str, Any]:
    return msgspec.json.decode((path / "manifest.json").read_bytes())


def test_each_element_is_written_once_and_copies_divide_the_work(ranks: Any, tmp_path: Path) -> None:
    def body(ctx: accel.DistContext) -> Path:
        model, optimizer = build(("hsdp", (2, 2)))
        return accel.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer}, step=0)

    path = ranks.run(body, 4, default_group=True)[0]
    listed = manifest(path)
    pieces = listed["tensors"]["model.0.weight"]["pieces"]
    assert [(each["offset"], each["shape"]) for each in pieces] == [([0, 0], [9, 5]), ([9, 0], [9, 5])]
    written = Counter(each["file"] for name, e in listed["tensors"].items() if name != "$rng" for each in e["pieces"])
    assert len(written) >= 3  # rank 0 writes the random streams, which outweigh this model
    assert sum(written.values()) == 2 * len(list(plain().parameters()))


def test_records_values_and_averages_hold_dtensors(ranks: Any, tmp_path: Path) -> None:
    full = torch.arange(10.0).view(5, 2)

    def items(world: int, value: torch.Tensor) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (world,))
        model, _ = build(("fsdp", (world,)))
        spread = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
        copied = distribute_tensor(value, mesh, [Replicate()], src_data_rank=None)
        return {
            "ema": accel.training.Ema(model),
            "table": {"spread": [spread], "copied": copied, "none": spread[:, :0]},
        }

    def save(ctx: accel.DistContext) -> list[torch.Tensor]:
        held = items(3, full)
        accel.save_state(ctx, tmp_path, held, step=0)
        return [each.full_tensor() for each in held["ema"].weights.parameters()]

    def load(ctx: accel.DistContext) -> tuple[list[torch.Tensor], list[Any]]:
        held = items(2, full * 0)
        loaded: Any = accel.load_state(ctx, tmp_path / "step-00000000", held)
        table = loaded["table"]
        assert isinstance(table["spread"][0], DTensor)
        assert table["spread"][0].placements == (Shard(0),)
        assert table["none"].shape == (5, 0)
        weights = [each.full_tensor() for each in held["ema"].weights.parameters()]
        return weights, [table["spread"][0].full_tensor(), table["copied"].full_tensor()]

    saved = ranks.run(save, 3, default_group=True)[0]
    for weights, tables in ranks.run(load, 2, default_group=True):
        assert equal(weights, saved)
        assert equal(tables, [full, full])


@pytest.mark.parametrize("case", ["sum", "part", "torn"])
def test_what_is_not_whole_is_refused_on_all_ranks(ranks: Any, case: str, tmp_path: Path) -> None:
    words = {"sum": "awaits a sum over ranks", "part": "do not cover its 8 once each", "torn": "fit its placements"}

    def body(ctx: accel.DistContext) -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        if case == "sum":
            tensor = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()], run_check=False)
        elif case == "part":
            mine = mesh["b"] if ctx.rank < 2 else init_device_mesh("cpu", (4,))
            tensor = DTensor.from_local(torch.ones(8 // mine.size()), mine, [Shard(0)], run_check=False)
        else:
            local = torch.ones(2 + ctx.rank)
            tensor = DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False, shape=(8,), stride=(1,))
        return outcome(lambda: accel.save_state(ctx, tmp_path / "run", {"value": {"x": tensor}}, step=0))

    results = ranks.run(body, 4, default_group=True)
    assert len(set(results)) == 1
    assert words[case] in results[0]
    assert "value.x" in results[0]
    assert os.listdir(tmp_path) == []


class Secretive(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("it is spread over ranks")


def test_an_optimizer_that_keeps_its_state_to_itself_is_refused_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    def body(ctx: accel.DistContext) -> str:
        model = plain()
        items = {"model": model, "optimizer": Secretive(model.parameters(), lr=0.1)}
        return outcome(lambda: accel.save_state(ctx, tmp_path / "run", items, step=0))

    results = ranks.run(body, 2)
    assert len(set(results)) == 1
    assert "a Secretive that does not give its state: RuntimeError: it is spread over ranks" in results[0]
    assert "Shard the model by fully_shard" in results[0]
    assert os.listdir(tmp_path) == []


def test_copies_that_differ_are_told_and_the_lowest_rank_counts(
    ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(ctx: accel.DistContext) -> Path:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
        placements = [Replicate(), Shard(0)]
        value = torch.full((3,), float(ctx.rank // 2))
        tensor = distribute_tensor(value, mesh, placements, src_data_rank=None)
        return accel.save_state(ctx, tmp_path, {"value": tensor}, step=0)

    path = ranks.run(body, 4, default_group=True)[0]
    assert "ranks hold different parameters or optimizer states (value)" in caplog.text
    assert equal(accel.load_state(CPU, path, {"value": torch.ones(3)})["value"], torch.zeros(3))


def test_a_shard_that_is_damaged_or_missing_is_named_by_all_ranks(ranks: Any, tmp_path: Path) -> None:
    def save(ctx: accel.DistContext) -> Path:
        return accel.save_state(ctx, tmp_path, {"model": build(("fsdp", (3,)))[0]}, step=0)

    path = ranks.run(save, 3, default_group=True)[0]
    file = path / "tensors-00002-of-00003.safetensors"
    data = bytearray(file.read_bytes())

    def load(ctx: accel.DistContext) -> tuple[str, bool]:
        model, _ = build(("fsdp", (2,)), seed=5)
        before = [each.to_local().clone() for each in model.parameters()]
        said = outcome(lambda: accel.load_state(ctx, path, {"model": model}))
        return said, equal([each.to_local().clone() for each in model.parameters()], before)

    data[-1] ^= 1
    for damage in (lambda: file.write_bytes(data), lambda: os.truncate(file, 50), file.unlink):
        damage()
        results = ranks.run(load, 2, default_group=True)
        assert len({said for said, _ in results}) == 1
        assert file.name in results[0][0]
        assert all(untouched for _, untouched in results)


def test_gathered_weights_are_saved_by_shards_and_loaded_anew(ranks: Any, tmp_path: Path) -> None:
    def body(ctx: accel.DistContext) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, models = torch.ones(2, 5, dtype=torch.float64), (plain(1), plain(2))
        for model in models:
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
        with torch.no_grad():
            expected = models[0](inputs)
            _ = models[1](inputs)  # its weights stay gathered
            path = accel.save_state(ctx, tmp_path, {"model": models[0]}, step=0)
            accel.load_state(ctx, path, {"model": models[1]})
            return expected, models[1](inputs)

    for expected, found in ranks.run(body, 2, default_group=True):
        assert torch.equal(found, expected)
    assert len(manifest(tmp_path / "step-00000000")["tensors"]["model.0.weight"]["pieces"]) == 2


def test_a_rank_maps_what_it_holds_and_no_more(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accel.checkpoint._read import Saved

    read: list[int] = []
    real = Saved.read_all

    def counted(self: Saved, wanted: Iterable[tuple[torch.Tensor, str, Any]]) -> None:
        listed = list(wanted)
        read.extend(target.numel() for target, name, _ in listed if name != "$rng")
        real(self, listed)

    def body(ctx: accel.DistContext, loading: bool) -> None:
        model, optimizer = build(("fsdp", (4,)))
        step(("fsdp", (4,)), ctx.rank, model, optimizer, 0)
        items = {"model": model, "optimizer": optimizer}
        if loading:
            accel.load_state(ctx, tmp_path / "step-00000000", items)
        else:
            accel.save_state(ctx, tmp_path, items, step=0)

    ranks.run(lambda ctx: body(ctx, False), 4, default_group=True)
    monkeypatch.setattr(Saved, "read_all", counted)
    ranks.run(lambda ctx: body(ctx, True), 4, default_group=True)
    parameters = list(plain().parameters())
    elements = sum(each.numel() for each in parameters)
    assert sum(read) == 3 * elements + 4 * len(parameters)  # with two moments; the count of steps goes to each rank


def _train_on(ctx: accel.DistContext, layout: Layout, out: str, first: int) -> None:
    """Two steps from the newest checkpoint, if there is one, and another checkpoint."""
    model, optimizer = build(layout, seed=first + 1)
    items = {"model": model, "optimizer": optimizer}
    if found := accel.latest_checkpoint(out):
        accel.load_state(ctx, found, items)
    for number in range(first, first + 2):
        step(layout, ctx.rank, model, optimizer, number)
    accel.save_state(ctx, out, items, step=first + 2)


def _worker(rank: int, world: int, store: str, out: str, first: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    _train_on(accel.from_group(dist.group.WORLD), ("fsdp", (world,)), out, first)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_real_processes_go_on_where_fewer_and_more_have_ended(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_ranks(_worker, 2, str(tmp_path / "two"), str(out), 0, count=2)
    _train_on(CPU, ("plain", (1,)), str(out), 2)
    run_ranks(_worker, 4, str(tmp_path / "four"), str(out), 4, count=4)
    expected, optimizer = build(("plain", (1,)))
    for number in range(6):
        step(("plain", (1,)), 0, expected, optimizer, number)
    model, other = build(("plain", (1,)), seed=3)
    accel.load_state(CPU, out / "step-00000006", {"model": model, "optimizer": other})
    torch.testing.assert_close(state(model, other), state(expected, optimizer), rtol=0, atol=1e-9)
