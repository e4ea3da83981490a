# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward changes: small ones stay and keep the change, streamed ones refuse it; none is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from safetensors.torch import load_file, save_file
from streamed import streamed_map
from torch import nn
from torch.nn import functional

import accel
from accel.bigmodel import Dispatched
from accel.bigmodel.run import dispatch_model

MANY = 2**18  # channels of which statistics are large enough to stream

MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])


class Counting(nn.Module):
    """A layer with statistics of a batch norm and a buffer of its own that each call changes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up = nn.Linear(channels, channels, bias=False)
        self.norm = nn.BatchNorm1d(channels)
        self.register_buffer("mean", torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean = 0.5 * self.mean + x.mean(0)
        return self.norm(self.up(x)) + self.mean


class Wide(nn.Module):
    """A layer whose buffers stream, and what its calls do to them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(MANY))
        self.register_buffer("mean", torch.zeros(MANY))
        self.register_buffer("var", torch.ones(MANY))
        self.register_buffer("table", torch.zeros(2, MANY))
        self.change: Callable[[Wide, torch.Tensor], Any] = lambda layer, x: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.batch_norm(x, self.mean, self.var) * self.scale + self.table[0]
        self.change(self, x)
        return y


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        yield torch.randn(4, 8, generator=generator)


@MODES
@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_statistics_of_streamed_layers_are_those_of_the_whole_model(
    home: str, mode: Callable[[], Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[Counting(8) for _ in range(3)])
    twin = nn.Sequential(*[Counting(8) for _ in range(3)])
    _ = twin.load_state_dict(net.state_dict())
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    with mode(), dispatch_model(net, streamed_map(net, home, 1), source=tmp_path / "model.safetensors") as run:
        assert run.stats().segments
        for batch in batches():
            assert torch.equal(run.model(batch), twin(batch))
        changed = twin.state_dict()
        assert bool(changed["2.norm.num_batches_tracked"] == 3)
        assert all(torch.equal(tensor + 0, changed[name]) for name, tensor in run.model.state_dict().items())
        assert all(torch.equal(tensor, changed[name]) for name, tensor in run.tensors())
        accel.save_model(accel.single("cpu"), run.model, tmp_path / "out")
        saved = load_file(tmp_path / "out" / "model.safetensors")
        assert all(torch.equal(saved[name], tensor) for name, tensor in changed.items())
    buffers = dict(net.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in twin.named_buffers())


def wide(home: str, folder: Path) -> Dispatched[Any]:
    net = nn.Sequential(Wide(), Wide())
    save_file(net.state_dict(), folder / "model.safetensors")
    run = dispatch_model(net, streamed_map(net, home, 1), source=folder / "model.safetensors")
    assert run.stats().segments[0].name == "0"
    assert len(run.device_map.skeleton.segments[0].weights) == 4
    assert all(weight.moves for weight in run.device_map.skeleton.weights())
    return run


def update_statistics(layer: Wide, x: torch.Tensor) -> None:
    functional.batch_norm(x, layer.mean, layer.var, training=True)


def update_statistics_of_each(layer: Wide, x: torch.Tensor) -> None:
    functional.instance_norm(x.view(2, MANY, 1).expand(2, MANY, 3), layer.mean, layer.var)


def write(layer: Wide, x: torch.Tensor) -> None:
    layer.table[1] += 1


def replace_vector(layer: Wide, x: torch.Tensor) -> None:
    layer.mean = layer.mean + 1


def replace(layer: Wide, x: torch.Tensor) -> None:
    layer.table = layer.table + 1


@MODES
@pytest.mark.parametrize("change", [update_statistics, update_statistics_of_each, write])
def test_a_change_of_a_streamed_buffer_is_refused(
    change: Callable[[Wide, torch.Tensor], Any], mode: Callable[[], Any], tmp_path: Path
) -> None:
    x = torch.randn(2, MANY)
    with wide("cpu", tmp_path) as run, mode():
        before = run.model(x)
        for _ in range(2):
            run.model[0].change = change
            with assert_raises(
                accel.errors.StreamError, problem="(changed|replaced) its own weights or buffers|in place"
            ):
                run.model(x)
            run.model[0].change = lambda layer, x: None
            assert torch.equal(run.model(x), before)


def test_a_streamed_vector_that_is_replaced_is_kept(tmp_path: Path) -> None:
    x = torch.randn(2, MANY)
    with wide("disk", tmp_path) as run:
        run.model[0].change = replace_vector
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                run.model(x)
    assert bool((run.model.state_dict()["0.mean"] == 3).all())


def test_a_streamed_buffer_that_is_replaced_is_kept_or_refused(tmp_path: Path) -> None:
    x = torch.randn(2, MANY)
    with wide("disk", tmp_path) as run:
        before = run.model(x)
        run.model[0].change = replace
        with torch.no_grad(), assert_raises(accel.errors.StreamError, problem="changed its own weights or buffers"):
            run.model(x)
        run.model[0].change = lambda layer, x: None
        with torch.no_grad():
            assert torch.equal(run.model(x), before)
        run.model[0].change = replace
        run.model(x)  # with gradients, placeholders are in the model, and the new tensor takes the place of one
        assert bool((run.model.state_dict()["0.table"] == 1).all())
        with torch.no_grad(), assert_raises(accel.errors.StreamError, problem="was replaced"):
            run.model(x)
    assert bool((run.model.state_dict()["0.table"] == 1).all())
