# SPDX-License-Identifier: Apache-2.0
"""Modules under several paths stream as one: blocks, lists of blocks, and parts of a block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from streamed import DEVICE, Net, make_net, streamed_map, token_ids
from torch import nn

import accel
from accel.bigmodel.run import dispatch_model


def repeated(net: Net) -> None:
    net.blocks[2] = net.blocks[0]


def named(net: Net) -> None:
    net.first = net.blocks[0]


def listed(net: Net) -> None:
    net.others = nn.ModuleList([net.blocks[1], net.blocks[3]])


def inside(net: Net) -> None:
    net.blocks[0].again = net.blocks[0].up


def tied(net: Net) -> None:
    net.blocks[0].twin = net.blocks[0].up.weight


@pytest.mark.parametrize("share", [repeated, named, listed, inside, tied])
@pytest.mark.parametrize(("home", "slots"), [("cpu", 1), ("cpu", 2), ("disk", 1), ("mmap", 2)])
def test_a_module_under_several_paths_streams(
    tmp_path: Path, share: Callable[[Net], None], home: str, slots: int
) -> None:
    def make() -> Net:
        net = make_net()
        share(net)
        return net

    net, expected = make(), make()(token_ids())
    accel.save_model(accel.single("cpu"), net, tmp_path)
    source = None if home == "cpu" else tmp_path
    with dispatch_model(net, streamed_map(net, home, slots), source=source) as run:
        for mode in (torch.no_grad, torch.enable_grad, torch.no_grad):
            with mode():
                torch.testing.assert_close(run.model(token_ids()), expected)
        found = dict(run.tensors())
        assert all(torch.equal(found[name], each) for name, each in make().state_dict().items())
        if hasattr(net, "first"):
            with torch.no_grad():
                assert torch.equal(net.first(torch.ones(1, 16)), make_net().blocks[0](torch.ones(1, 16)))
    if home != "disk":
        assert torch.equal(net(token_ids()), expected)


def test_a_repeated_block_is_cast_and_filled_once() -> None:
    net = make_net()
    repeated(net)
    expected = net(token_ids())
    stored = accel.bigmodel.describe(net, storage_dtype=torch.bfloat16)
    names = [segment.name for segment in stored.segments]
    assert "blocks.2" not in names
    homes = {segment.name: "cpu" if segment.movable else DEVICE for segment in stored.segments}
    device_map = accel.bigmodel.DeviceMap(skeleton=stored, home=homes, runs=dict.fromkeys(homes, DEVICE), slots=4)
    with torch.no_grad(), dispatch_model(net, device_map) as run:
        for _ in range(2):
            torch.testing.assert_close(run.model(token_ids()), expected, atol=0.05, rtol=0.05)
        moved = {each.name: each.hits + each.waits for each in run.stats().segments}
        assert moved["blocks.0"] == 2 * moved["blocks.1"]
