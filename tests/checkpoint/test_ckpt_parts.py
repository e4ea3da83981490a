# SPDX-License-Identifier: Apache-2.0
"""Models that ranks divide by names, as pipelines do: the union is saved, and any other division takes its parts."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ckpt_helpers import CPU, equal, streams
from torch import nn

import accel
from accel.errors import CheckpointError, ConfigError
from accel.testing import simulate

CUTS = {1: [0, 5], 2: [0, 2, 5], 3: [0, 1, 4, 5], 4: [0, 1, 2, 3, 5]}  # stages of the five layers
SIZES = [3, 4, 4, 5, 5, 2]


class Layer(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZES[at], SIZES[at + 1]).double()
        self.register_buffer("count", torch.zeros(()))
        self.note = at

    def get_extra_state(self) -> dict[str, int]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.note = state["note"]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(rows))


def stage(rank: int, world: int, seed: int = 1) -> dict[str, Any]:
    """The layers of a rank under their names in the whole, and an optimizer of two groups."""
    low, high = CUTS[world][rank : rank + 2]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [Layer(at) for at in range(5)]
    model = nn.ModuleDict({"layers": nn.ModuleDict({str(at): layers[at] for at in range(low, high)})})
    groups = [[each for name, each in model.named_parameters() if name.endswith(end)] for end in ("weight", "bias")]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.05)
    return {"model": model, "optimizer": optimizer}


def train(items: dict[str, Any], steps: range) -> None:
    """Steps on a loss that is a sum over layers, so that stages need no rows of each other."""
    for step in steps:
        items["optimizer"].zero_grad()
        for at, layer in items["model"]["layers"].items():
            rows = torch.linspace(-1, 1 + step, 6 * SIZES[int(at)], dtype=torch.float64).view(6, -1)
            layer(rows).square().mean().backward()
            layer.count += 1
        items["optimizer"].step()


def parts(items: dict[str, Any]) -> dict[str, Any]:
    return {name: accel.items.Part(item) for name, item in items.items()}


def state(items: dict[str, Any]) -> dict[str, Any]:
    held = {name: value for name, value in items["model"].state_dict().items() if isinstance(value, torch.Tensor)}
    for name, parameter in items["model"].named_parameters():
        held |= {f"{name}.{key}": value for key, value in items["optimizer"].state.get(parameter, {}).items()}
    return {key: value.detach().clone() for key, value in held.items()}


@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (2, 4), (4, 3), (3, 1), (1, 2)])
def test_any_division_goes_on_from_any_other(saved: int, loaded: int, tmp_path: Path) -> None:
    def save(ctx: accel.DistContext) -> Path:
        items = stage(ctx.rank, saved)
        train(items, range(2))
        return accel.save_state(ctx, tmp_path, parts(items) | {"cursor": 3}, step=0)

    def load(ctx: accel.DistContext) -> dict[str, Any]:
        items = stage(ctx.rank, loaded, seed=2)
        for layer in items["model"]["layers"].values():
            layer.note = -1
        found = accel.load_state(ctx, path, (parts(items) if loaded > 1 else items) | {"cursor": 0})
        assert found["cursor"] == 3
        assert found["model"] is items["model"]
        assert all(layer.note == int(at) for at, layer in items["model"]["layers"].items())
        train(items, range(2, 4))
        return state(items)

    path = simulate(save, saved)[0]
    whole = stage(0, 1)
    train(whole, range(4))
    expected, results = state(whole), simulate(load, loaded)
    assert {name for result in results for name in result} == set(expected)
    for result in results:
        assert equal(result, {name: expected[name] for name in result})
    if saved > 1:
        manifest = msgspec.json.decode((path / "manifest.json").read_bytes())
        pieces = {name: entry["pieces"] for name, entry in manifest["tensors"].items() if "layers" in name}
        assert {len(each) for each in pieces.values()} == {1}
        assert len({each[0]["file"] for each in pieces.values()}) == saved


def test_replicas_of_a_stage_divide_the_work(tmp_path: Path) -> None:
    def save(ctx: accel.DistContext) -> Path:
        items = stage(ctx.rank // 2, 2)
        train(items, range(2))
        for layer in items["model"]["layers"].values():
            layer.count.fill_(ctx.rank)  # buffers of replicas may differ
        return accel.save_state(ctx, tmp_path, parts(items), step=0)

    path = simulate(save, 4)[0]
    assert len(list(path.glob("*.safetensors"))) == 4
    whole = stage(0, 1, seed=2)
    accel.load_state(CPU, path, whole)
    assert [int(layer.count) for layer in whole["model"]["layers"].values()] == [0, 0, 2, 2, 2]


def outcome(call: Any) -> str:
    with pytest.raises((CheckpointError, ConfigError, accel.errors.CollectiveMismatch)) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_names_that_begin_anew_on_each_rank_are_refused_on_all(tmp_path: Path) -> None:
    def body(ctx: accel.DistContext) -> list[str]:
        same = nn.Sequential(nn.Linear(3, 3))
        nn.init.constant_(same[0].weight, ctx.rank)
        other = nn.Sequential(nn.Linear(3, 3 + ctx.rank))
        return [
            outcome(
                lambda each=each: accel.save_state(ctx, tmp_path / "run", {"model": accel.items.Part(each)}, step=0)
            )
            for each in (same, other)
        ]

    results = simulate(body, 2)
    assert results[0] == results[1]
    assert all("rank 1 holds another tensor by this name than a rank below it" in each for each in results[0])
    assert "model.0." in results[0][0]
    assert "got float32 [4" in results[0][1]
    assert list(tmp_path.iterdir()) == []


def test_what_no_rank_takes_is_an_error_and_nothing_changes(tmp_path: Path) -> None:
    whole = stage(0, 1)
    train(whole, range(1))
    path = accel.save_state(CPU, tmp_path, whole, step=0)

    def body(ctx: accel.DistContext) -> Any:
        items = stage(2 * ctx.rank, 4, seed=2)  # the layers 0 and 2
        before = state(items), streams()
        text = outcome(lambda: accel.load_state(ctx, path, parts(items)))
        assert equal((state(items), streams()), before)
        taken = accel.load_state(ctx, path, parts(items), strict=False)
        assert taken["model"] is items["model"]
        return text, state(items)

    (first, one), (second, other) = simulate(body, 2)
    assert first == second
    assert "in no rank's part" in first
    assert all(f"model.layers.{at}.linear.weight" in first for at in (1, 3, 4))
    assert "model.layers.0" not in first
    assert "optimizer: parameter model.layers.1.linear.bias" in first
    expected = state(whole)
    assert equal(one | other, {name: expected[name] for name in one | other})


def test_ranks_that_do_not_all_pass_parts_are_told(tmp_path: Path) -> None:
    def body(ctx: accel.DistContext) -> list[str]:
        items = stage(0, 2)
        mixed = items if ctx.rank else parts(items)
        few = {"model": accel.items.Part(nn.Linear(2, 2)), "x": accel.items.Part(3)}  # type: ignore[arg-type]
        return [
            outcome(lambda each=each: accel.save_state(ctx, tmp_path / "run", each, step=0)) for each in (mixed, few)
        ]

    results = simulate(body, 2)
    assert results[0] == results[1]
    assert "a part on some ranks and full on others" in results[0][0]
    assert "a Part holds a module, an optimizer or a state" in results[0][1]


def test_a_missing_part_of_a_rank_names_it(tmp_path: Path) -> None:
    whole = stage(0, 1)
    path = accel.save_state(CPU, tmp_path, {"model": whole["model"]}, step=0)

    def body(ctx: accel.DistContext) -> str:
        wrong = nn.ModuleDict({"layers": nn.ModuleDict({str(5 + ctx.rank): nn.Linear(2, 2)})})
        return outcome(lambda: accel.load_state(ctx, path, {"model": accel.items.Part(wrong)}))

    results = simulate(body, 2)
    assert results[0] == results[1]
    assert "missing in the checkpoint" in results[0]
    assert "model.layers.5.weight" in results[0]
