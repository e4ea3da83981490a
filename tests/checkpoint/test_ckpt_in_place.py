# SPDX-License-Identifier: Apache-2.0
"""Live objects that are hard to load into: tensors that share memory, wrapped optimizers, objects that refuse."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, Wrapper, decode_manifest, encode_manifest, equal
from hypothesis import given, strategies as st
from torch import nn

import accel
from accel.errors import CheckpointError
from accel.items._module import overlaps


def with_buffers(value: float, mask: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", mask)
    model.register_buffer("window", torch.full((5,), value).as_strided((3, 3), (1, 1)))
    nn.init.constant_(model.weight, value)
    return model


def test_a_buffer_whose_elements_share_memory_is_loaded(tmp_path: Path) -> None:
    row = torch.tensor([[1.0, -torch.inf, 0.0]])
    saved = with_buffers(1.0, row.expand(4, 3))
    live = with_buffers(2.0, torch.zeros(1, 3).expand(4, 3))
    accel.load_state(CPU, accel.save_state(CPU, tmp_path, {"model": saved}, step=1), {"model": live})
    assert torch.equal(live.weight, saved.weight)
    assert torch.equal(live.window, torch.ones(3, 3))
    assert torch.equal(live.mask, saved.mask)
    assert live.mask.stride() == (0, 1)


def test_values_that_shared_memory_cannot_hold_are_refused_before_anything_changes(tmp_path: Path) -> None:
    saved = with_buffers(1.0, torch.arange(12.0).view(4, 3))
    live = with_buffers(2.0, torch.zeros(1, 3).expand(4, 3))
    path = accel.save_state(CPU, tmp_path, {"model": saved}, step=1)
    with assert_raises(CheckpointError, problem=r"model\.mask: expected one value for elements that share memory"):
        accel.load_state(CPU, path, {"model": live})
    assert torch.equal(live.weight, torch.full((2, 2), 2.0))
    assert torch.equal(live.mask, torch.zeros(4, 3))


def test_tensors_of_inference_mode_are_refused_by_name_and_load_within_it(tmp_path: Path) -> None:
    path = accel.save_state(CPU, tmp_path, {"model": nn.Linear(2, 2)}, step=1)
    with torch.inference_mode():
        live = nn.Linear(2, 2)
    with assert_raises(CheckpointError, problem=r"model\.weight: expected a tensor that can be written to"):
        accel.load_state(CPU, path, {"model": live})
    with torch.inference_mode():
        accel.load_state(CPU, path, {"model": live})


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3))
def test_memory_that_is_not_said_to_be_shared_is_not(layout: list[tuple[int, int]]) -> None:
    shape, stride = [size for size, _ in layout], [step for _, step in layout]
    tensor = torch.arange(100.0).as_strided(shape, stride)
    distinct = tensor.reshape(-1).unique().numel() == tensor.numel()
    assert overlaps(tensor) or distinct
    assert not overlaps(torch.empty(shape).T if len(shape) == 2 else torch.empty(shape))


class Imitation(torch.optim.AdamW):
    """An optimizer that holds what another one holds, as attributes of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__.update(optimizer.__dict__)
        self.optimizer = optimizer


def trained(wrap: Any, steps: int) -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": wrap(optimizer)}


def slots(items: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(items["optimizer"].state[parameter]) for parameter in items["model"].parameters()]


def as_older_versions_named_it(path: Path, name: str) -> None:
    file = path / "manifest.json"
    manifest, _ = decode_manifest(file.read_bytes(), "")
    item = msgspec.structs.replace(manifest.items["optimizer"], type=name)
    file.write_bytes(encode_manifest(msgspec.structs.replace(manifest, items={**manifest.items, "optimizer": item})))


@pytest.mark.parametrize("saved_as", [lambda o: o, Wrapper, Imitation])
@pytest.mark.parametrize("loaded_as", [lambda o: o, Wrapper, Imitation])
@pytest.mark.parametrize("name", ["", "AcceleratedOptimizer", "FabricAdamW"])
def test_wrappers_of_optimizers_leave_no_trace(saved_as: Any, loaded_as: Any, name: str, tmp_path: Path) -> None:
    saved, live = trained(saved_as, 3), trained(loaded_as, 1)
    path = accel.save_state(CPU, tmp_path, saved, step=1)
    if name:
        as_older_versions_named_it(Path(str(path)), name)
    loaded = accel.load_state(CPU, path, live)
    assert loaded["optimizer"] is live["optimizer"]
    assert equal(slots(live), slots(saved))
    assert live["optimizer"].param_groups is getattr(live["optimizer"], "optimizer", live["optimizer"]).param_groups


class Refusing:
    """An object that refuses its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError(state_dict["at"])


@pytest.mark.parametrize("wrap", [lambda o: o, Wrapper, Imitation])
def test_an_object_that_refuses_its_state_is_named_and_wrapped_optimizers_are_as_before(
    wrap: Any, tmp_path: Path
) -> None:
    saved, live = trained(wrap, 3), trained(wrap, 1)
    path = accel.save_state(CPU, tmp_path, saved | {"sampler": Refusing()}, step=1)
    before = [{key: value.clone() for key, value in held.items()} for held in slots(live)]
    with assert_raises(CheckpointError, problem="refused its state: KeyError") as caught:
        accel.load_state(CPU, path, live | {"sampler": Refusing()})
    assert caught.value.where == "item sampler"
    assert equal(slots(live), before)
