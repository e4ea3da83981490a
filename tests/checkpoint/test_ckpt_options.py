# SPDX-License-Identifier: Apache-2.0
"""Loading what fits, in another dtype, under other names, without digests; each only when it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, Cursor, Run, equal, network
from steps import begin_batch
from torch import nn

import accel
from accel.errors import CheckpointError, ConfigError
from accel.items import Stored


def trained(seed: int = 0) -> Run:
    run = Run(seed=seed)
    run.step(2)
    return run


def test_what_fits_is_loaded_and_what_does_not_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trained()
    path = accel.save_state(CPU, tmp_path, run.items() | {"extra": 5}, step=0)
    other = Run(seed=4)
    other.model[4] = nn.Linear(6, 3)
    other.model.append(nn.Linear(3, 3))
    sgd = torch.optim.SGD(other.model.parameters(), lr=0.3)
    items = {"model": other.model, "optimizer": sgd, "cursor": 7, "more": Cursor(3)}
    before = [each.clone() for each in other.model[4].parameters()]
    with assert_raises(CheckpointError, fix="strict=False to load what fits"):
        accel.load_state(CPU, path, items)
    with caplog.at_level(logging.WARNING, "accel.checkpoint"):
        loaded = accel.load_state(CPU, path, items, strict=False)
    assert equal(other.model[0].state_dict(), run.model[0].state_dict())
    assert equal([each.clone() for each in other.model[4].parameters()], before)
    assert loaded == items
    assert sgd.param_groups[0]["lr"] == 0.3
    expected = [
        "missing in the checkpoint: item more",
        "missing in the checkpoint: model.5.bias",
        "of another shape (expected: the live one): model.4.bias: expected [3], got [2]",
        "of another type (expected: the live one): item cursor: expected value int, got record Cursor",
        "of another type (expected: the live one): item optimizer: expected optimizer SGD, got optimizer AdamW",
        "items of the checkpoint that were not asked for: extra",
        "items of the checkpoint that were not asked for: scheduler",
    ]
    assert set(expected) <= set(loaded.skipped)
    assert all(line in caplog.text for line in expected)
    assert accel.load_state(CPU, path, run.items() | {"extra": 0}, strict=False).skipped == ()


FLAGS = ["fused", "foreach", "capturable", "differentiable"]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("strict", [True, False])
def test_flags_of_performance_stay_the_scripts(flag: str, strict: bool, tmp_path: Path, caplog: Any) -> None:
    run = trained()
    items = {"model": run.model, "optimizer": run.optimizer}
    path = accel.save_state(CPU, tmp_path, items, step=0)
    model = network(3)
    head = [] if strict else [nn.Parameter(torch.ones(2))]  # fits in part
    groups = [{"params": list(model.parameters())}, {"params": head}][: 1 + len(head)]
    optimizer = torch.optim.AdamW(groups, lr=0.7, **{flag: True})
    with caplog.at_level(logging.INFO, "accel.checkpoint"):
        accel.load_state(CPU, path, {"model": model, "optimizer": optimizer}, strict=strict)
        accel.load_state(CPU, path, items)
    own = run.optimizer.param_groups[0]
    stored = {key: value for key, value in own.items() if key != "params"}
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in stored} == stored | {flag: True}
    said = [record.getMessage() for record in caplog.records if flag in record.getMessage()]
    assert said == [f"optimizer: {flag}=True of the script stays; the checkpoint has {own[flag]}"]


def test_a_fused_optimizer_defers_after_a_load(tmp_path: Path) -> None:
    ctx = accel.single()
    net = nn.Linear(2, 1)
    plain = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    plain.step()
    path = accel.save_state(ctx, tmp_path, {"model": net, "optimizer": plain}, step=0)
    plain.zero_grad()
    model, optimizer = accel.prepare(ctx, net, torch.optim.AdamW(net.parameters(), fused=True))
    _ = accel.load_state(ctx, path, {"model": model, "optimizer": optimizer})
    state = accel.backward(ctx, model(torch.ones(1, 2)).sum(), begin_batch(ctx))
    state = accel.optimizer_step(ctx, optimizer, state, nonfinite="defer")
    assert state.stepped is None
    assert optimizer.state[net.weight]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_is_an_error_or_a_conversion(tmp_path: Path, dtype: torch.dtype) -> None:
    run = trained()
    path = accel.save_state(CPU, tmp_path, {"model": run.model, "optimizer": run.optimizer}, step=0)
    model = network(3).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    items = {"model": model, "optimizer": optimizer}
    with assert_raises(CheckpointError, fix="cast=True converts"):
        accel.load_state(CPU, path, items)
    accel.load_state(CPU, path, items, cast=True)
    for name, tensor in model.state_dict().items():
        stored = run.model.state_dict()[name]
        assert equal(tensor, stored.to(dtype) if stored.is_floating_point() else stored)
    for live, saved in zip(model.parameters(), run.model.parameters(), strict=True):
        assert equal(optimizer.state[live]["exp_avg"], run.optimizer.state[saved]["exp_avg"].to(dtype))
        assert equal(optimizer.state[live]["step"], run.optimizer.state[saved]["step"])
    model(torch.randn(8, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    model[1].num_batches_tracked = torch.zeros((), dtype=torch.float32)  # a count is no floating-point number
    with assert_raises(CheckpointError, problem="num_batches_tracked: expected float32, got int64"):
        accel.load_state(CPU, path, {"model": model, "optimizer": None}, cast=True)


class Table:
    def __init__(self, dtype: torch.dtype) -> None:
        self.rows = torch.ones(3, dtype=dtype)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


def test_objects_with_a_state_get_the_dtype_that_they_have(tmp_path: Path) -> None:
    path = accel.save_state(CPU, tmp_path, {"table": Table(torch.float32)}, step=0)
    table = Table(torch.float16)
    with assert_raises(CheckpointError, problem=r"table\.rows: expected float16, got float32"):
        accel.load_state(CPU, path, {"table": table})
    accel.load_state(CPU, path, {"table": table}, cast=True)
    assert equal(table.rows, torch.ones(3, dtype=torch.float16))


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network(8)


def test_names_change_on_load_and_optimizers_follow(tmp_path: Path) -> None:
    run = trained()
    path = accel.save_state(CPU, tmp_path, {"model": run.model, "optimizer": run.optimizer}, step=0)
    other = Renamed()
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)

    def longer(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        assert tensors["model.0.weight"] == Stored("model.0.weight", "float32", (6, 4))
        return {name.replace("model.", "model.body."): value for name, value in tensors.items()}

    accel.load_state(CPU, path, {"model": other, "optimizer": optimizer}, transform=longer)
    assert equal(dict(other.body.state_dict()), dict(run.model.state_dict()))
    mine, saved = ([dict(each) for each in o.state.values()] for o in (optimizer, run.optimizer))
    assert len(mine) == 6
    assert equal(mine, saved)


def test_names_and_dtypes_change_on_save_and_optimizers_follow(tmp_path: Path) -> None:
    run = trained()

    def shorter(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.replace("model.body.", "model."): value for name, value in tensors.items()}

    other = Renamed()
    other.body.load_state_dict(run.model.state_dict())
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    optimizer.load_state_dict(run.optimizer.state_dict())
    path = accel.save_state(CPU, tmp_path, {"model": other, "optimizer": optimizer}, step=0, transform=shorter)
    fresh = Run(seed=6)
    accel.load_state(CPU, path, {"model": fresh.model, "optimizer": fresh.optimizer})
    assert equal(fresh.state()[:3], run.state()[:3])
    half = accel.save_state(
        CPU, tmp_path, {"model": run.model}, step=1, transform=lambda t: {k: v.bfloat16() for k, v in t.items()}
    )
    entries = (half / "manifest.json").read_text()
    assert '"model.0.weight":{"dtype":"bfloat16"' in entries


def test_averaged_weights_are_loaded_as_a_model(tmp_path: Path) -> None:
    run = trained()
    ema = accel.training.Ema(run.model, decay=0.5, warmup=False)
    run.step(1)
    ema.update_(run.model)
    path = accel.save_state(CPU, tmp_path, {"model": run.model, "ema": ema}, step=0)

    def averaged(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        return {
            name: tensors.get(name.replace("model.", "ema.weights."), value)
            for name, value in tensors.items()
            if name.startswith("model.")
        }

    model = network(9)
    accel.load_state(CPU, path, {"model": model, "ema": None}, transform=averaged)
    assert equal(model[0].weight.detach(), dict(ema.weights.named_parameters())["0.weight"].detach())


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda tensors: None, "NoneType"),
        (lambda tensors: {1: tensors["model.0.bias"]}, "under 1"),
        (lambda tensors: {"model.0.bias": 3}, "int under 'model.0.bias'"),
        (lambda tensors: {"model.x": Stored("../x", "float32", (6,))}, "as 'model.x'"),
    ],
)
def test_a_transform_that_makes_things_up_is_refused(tmp_path: Path, transform: Any, words: str) -> None:
    path = accel.save_state(CPU, tmp_path, {"model": network()}, step=0)
    with assert_raises(ConfigError, got=words):
        accel.load_state(CPU, path, {"model": network()}, transform=transform)
    with assert_raises(ConfigError, got="begins with no item"):
        accel.save_state(CPU, tmp_path, {"model": network()}, step=1, transform=lambda t: {"x": t["model.0.bias"]})


def test_digests_are_compared_unless_that_is_switched_off(tmp_path: Path) -> None:
    model = network()
    path = accel.save_state(CPU, tmp_path, {"model": model}, step=0)
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    at = data.index(model[0].weight.detach().numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    other = network(2)
    with assert_raises(CheckpointError, problem="damaged"):
        accel.load_state(CPU, path, {"model": other})
    accel.load_state(CPU, path, {"model": other}, verify=False)
    assert int((other[0].weight != model[0].weight).sum()) == 1


def test_a_field_that_a_record_had_once_is_missed_only_if_it_held_something(tmp_path: Path) -> None:
    once = msgspec.defstruct("Changing", [("count", int), ("more", int | None)], module=__name__)
    now = msgspec.defstruct("Changing", [("count", int)], module=__name__)
    empty = accel.save_state(CPU, tmp_path, {"record": once(3, None)}, step=0)
    held = accel.save_state(CPU, tmp_path, {"record": once(3, 4)}, step=1)
    assert accel.load_state(CPU, empty, {"record": now(0)}) == {"record": now(3)}
    with assert_raises(CheckpointError, problem=r"record\.more"):
        accel.load_state(CPU, held, {"record": now(0)})
