# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of what trains only: small files, and a base that is compared by digest."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, Box
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import accel
from accel.context import DistContext
from accel.errors import CheckpointError, ConfigError
from accel.items._bases import Sums, _joined, _piece, digest  # pyright: ignore[reportPrivateUsage]
from accel.testing import simulate


class Adapted(nn.Module):
    """A frozen base with a low-rank adapter, and the statistics of a norm."""

    def __init__(self, base: int = 0, adapter: int = 0) -> None:
        super().__init__()
        torch.manual_seed(base)
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.norm = nn.BatchNorm1d(64).requires_grad_(False)
        torch.manual_seed(100 + adapter)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.base(inputs) + self.up(self.down(inputs)))


def run(base: int = 0, adapter: int = 0, steps: int = 2) -> dict[str, Any]:
    model = Adapted(base, adapter)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def only(items: dict[str, Any]) -> dict[str, Any]:
    return items | {"model": accel.items.TrainableOnly(items["model"])}


def equal(one: nn.Module, other: nn.Module) -> bool:
    other_state = other.state_dict()
    return all(torch.equal(value, other_state[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("wrap", [only, dict], ids=["TrainableOnly", "the model itself"])
def test_what_trains_is_loaded_onto_the_same_base(wrap: Any, tmp_path: Path) -> None:
    saved, live = run(), run(adapter=1, steps=1)
    path = accel.save_state(CPU, tmp_path, only(saved), step=1)
    loaded = accel.load_state(CPU, path, wrap(live))
    assert loaded["model"] is live["model"]
    assert equal(saved["model"], live["model"])
    whole = accel.save_state(CPU, tmp_path / "whole", saved, step=1)
    sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (path, whole)]
    assert sizes[1] - sizes[0] >= 64 * 64 * 4


def test_another_base_is_refused_by_name_before_anything_changes(tmp_path: Path) -> None:
    path = accel.save_state(CPU, tmp_path, only(run()), step=1)
    live = run(base=5, adapter=1)
    before = {name: value.clone() for name, value in live["model"].state_dict().items()}
    with assert_raises(
        CheckpointError, problem=r"model\.base\.weight: expected the base that the checkpoint was trained on"
    ):
        accel.load_state(CPU, path, only(live))
    assert all(torch.equal(value, before[name]) for name, value in live["model"].state_dict().items())


def test_a_base_that_lacks_a_parameter_is_refused_by_name(tmp_path: Path) -> None:
    path = accel.save_state(CPU, tmp_path, only(run()), step=1)
    live = run()
    live["model"].base = nn.Linear(64, 64, bias=False)
    with assert_raises(CheckpointError, problem=r"model\.base\.bias"):
        accel.load_state(CPU, path, live)


def test_a_whole_checkpoint_loads_into_it_base_included(tmp_path: Path) -> None:
    saved, live = run(), run(base=5, adapter=1)
    accel.load_state(CPU, accel.save_state(CPU, tmp_path, saved, step=1), only(live))
    assert equal(saved["model"], live["model"])


def test_ranks_save_it_and_one_rank_loads_it(tmp_path: Path) -> None:
    def body(ctx: DistContext) -> dict[str, Any]:
        items = run(steps=0)
        accel.save_state(ctx, tmp_path, only(items), step=1)
        return {name: value.clone() for name, value in items["model"].state_dict().items()}

    saved = simulate(body, 2)[0]
    live = run(adapter=1, steps=0)
    accel.load_state(CPU, tmp_path / "step-00000001", only(live))
    assert all(torch.equal(value, saved[name]) for name, value in live["model"].state_dict().items())


def test_it_refuses_what_has_nothing_that_trains(tmp_path: Path) -> None:
    with assert_raises(ConfigError, problem="no trainable parameters"):
        accel.save_state(
            CPU, tmp_path, {"model": accel.items.TrainableOnly(nn.Linear(2, 2).requires_grad_(False))}, step=1
        )
    with assert_raises(ConfigError, problem="the item is not a module"):
        accel.save_state(CPU, tmp_path, {"model": accel.items.TrainableOnly({})}, step=1)  # pyright: ignore[reportArgumentType]


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40), st.data())
def test_a_digest_differs_where_bytes_differ_or_change_places(values: list[int], data: st.DataObject) -> None:
    one = torch.tensor(values, dtype=torch.uint8)
    other = torch.tensor(data.draw(st.permutations(values)), dtype=torch.uint8)
    assert (digest("x", one) == digest("x", other)) == torch.equal(one, other)
    assert digest("x", one) != digest("x", one.view(1, -1))
    assert digest("x", one) == digest("x", torch.stack([one, one], 1)[:, 0])


def sharded(seed: int, ctx: DistContext, placements: list[Any]) -> nn.Module:
    model = Adapted(base=seed)
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    for module in (model.base, model.norm):
        for name, parameter in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter.detach(), mesh, placements[: parameter.dim()][-1:], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(spread, requires_grad=False))
    return model


@pytest.mark.parametrize("placements", [[Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Replicate()]])
@pytest.mark.parametrize("world", [2, 3])
def test_a_sharded_base_has_the_digest_of_the_whole_on_any_number_of_ranks(
    tmp_path: Path, placements: list[Any], world: int
) -> None:
    def save(ctx: DistContext) -> None:
        accel.save_state(ctx, tmp_path, {"model": accel.items.TrainableOnly(sharded(0, ctx, placements))}, step=1)

    def load(ctx: DistContext, seed: int) -> str:
        try:
            accel.load_state(ctx, tmp_path, {"model": sharded(seed, ctx, [Shard(0), Shard(0)])})
        except CheckpointError as error:
            return str(error)
        return ""

    simulate(save, world, default_group=True)
    path = accel.latest_checkpoint(tmp_path)
    assert path is not None
    accel.load_state(CPU, path, {"model": Adapted(adapter=3)})
    with assert_raises(CheckpointError, problem=r"model\.base\.weight: expected the base"):
        accel.load_state(CPU, path, {"model": Adapted(base=5)})
    whole = accel.save_state(CPU, tmp_path / "whole", {"model": accel.items.TrainableOnly(Adapted())}, step=1)
    values = [json.loads((each / "manifest.json").read_text())["items"]["model"]["value"] for each in (path, whole)]
    assert values[0] == values[1]
    assert simulate(lambda ctx: load(ctx, 0), 2, default_group=True) == ["", ""]
    refused = simulate(lambda ctx: load(ctx, 5), 2, default_group=True)
    assert refused[0] == refused[1]
    assert "model.base.weight: expected the base that the checkpoint was trained on" in refused[0]


@given(st.data(), st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.float64]))
def test_sums_of_any_pieces_give_the_digest_of_the_whole(data: st.DataObject, dtype: torch.dtype) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    whole = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    found: list[Sums] = []
    for start, stop in ((0, cut), (cut, shape[dim])):
        part = whole.narrow(dim, start, stop - start).contiguous()
        if part.numel():
            box = Box(tuple(start if at == dim else 0 for at in range(len(shape))), tuple(part.shape))
            flat = part.reshape(-1).view(torch.uint8)
            facts = str(dtype).removeprefix("torch."), shape
            found.append(Sums(facts, box, *_piece(flat, box, shape, dtype.itemsize)))
    assert _joined("x", found) == digest("x", whole)
