# SPDX-License-Identifier: Apache-2.0
"""Files that are rewritten in place while a model runs from them: told, also where their time is set back."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from catching import assert_raises
from safetensors.torch import save_file
from streamed import make_net, token_ids
from torch import nn

import accel
from accel.bigmodel import DeviceMap, describe
from accel.bigmodel.run import dispatch_model

HOMES = [("disk", "cpu:0"), ("mmap", "cpu:0"), ("mmap", "cpu")]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file(make_net().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def empty_net() -> nn.Module:
    with torch.device("meta"):
        return type(make_net())().eval()


def in_files(net: nn.Module, home: str, runs: str) -> DeviceMap:
    skeleton = describe(net)
    homes = {segment.name: home if segment.movable else runs for segment in skeleton.segments}
    return DeviceMap(skeleton=skeleton, home=homes, runs=dict.fromkeys(homes, runs), slots=1)


def rewrite(path: Path, seed: int, *, set_back: bool = True) -> None:
    """Write the weights of another net over a file, as `rsync --inplace --times` does."""
    before = path.stat()
    save_file(make_net(seed).state_dict(), other := path.with_name("other"))
    with path.open("r+b") as file:
        file.write(other.read_bytes())
    if set_back:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("set_back", [True, False])
@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize(("home", "runs"), HOMES)
def test_files_that_are_rewritten_in_place(weights: Path, home: str, runs: str, passes: int, set_back: bool) -> None:
    net = empty_net()
    with torch.no_grad(), dispatch_model(net, in_files(net, home, runs), source=weights, prefetch=False):
        for _ in range(passes):
            assert torch.equal(net(token_ids()), make_net()(token_ids()))
        rewrite(weights, 1, set_back=set_back)
        for call in (lambda: net(token_ids()), lambda: net.blocks[1](torch.ones(1, 16)), lambda: net(token_ids())):
            with assert_raises(
                accel.errors.CheckpointError, problem="changed while it was read", fix="renaming a new file"
            ):
                call()


def test_weights_used_outside_of_their_blocks_are_checked(weights: Path) -> None:
    net = empty_net()
    with torch.no_grad(), dispatch_model(net, in_files(net, "mmap", "cpu:0"), source=weights, prefetch=False) as run:
        assert torch.equal(net.blocks[0].up.weight + 0, make_net().blocks[0].up.weight)
        rewrite(weights, 1)
        for use in (lambda: net.blocks[0].up.weight + 0, lambda: dict(run.tensors())):
            with assert_raises(accel.errors.CheckpointError, problem="changed while it was read"):
                use()


def test_rows_of_a_table_are_checked(tmp_path: Path) -> None:
    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Sequential(nn.Embedding(20_000, 16), nn.Linear(16, 2))

    path, ids = tmp_path / "model.safetensors", torch.tensor([3, 19_999])
    save_file(make(0).state_dict(), path)
    before = path.stat()
    with torch.no_grad(), accel.disk_offload(net := make(0), path, "cpu"):
        assert torch.equal(net(ids), make(0)(ids))
        path.chmod(0o600)
        assert torch.equal(net(ids), make(0)(ids))
        save_file(make(1).state_dict(), other := tmp_path / "other")
        with path.open("r+b") as file:
            file.write(other.read_bytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with assert_raises(accel.errors.CheckpointError, problem="changed while it was read"):
            net(ids)


def replaced(path: Path) -> None:
    save_file(make_net(1).state_dict(), other := path.with_name("other"))
    other.rename(path)


def same_bytes(path: Path) -> None:
    before, content = path.stat(), path.read_bytes()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "touch",
    [
        replaced,
        Path.unlink,
        lambda path: path.with_name("link").hardlink_to(path),
        lambda path: path.chmod(0o600),
        lambda path: path.rename(path.with_name("moved")),
        same_bytes,
    ],
)
@pytest.mark.parametrize(("home", "runs"), HOMES)
def test_changes_that_leave_the_bytes_pass(
    weights: Path, home: str, runs: str, touch: Callable[[Path], object]
) -> None:
    net = empty_net()
    expected = make_net()(token_ids())
    with torch.no_grad(), dispatch_model(net, in_files(net, home, runs), source=weights, prefetch=False):
        touched = weights.stat().st_ctime_ns
        touch(weights)
        assert not weights.exists() or weights.stat().st_ctime_ns != touched
        for _ in range(2):
            assert torch.equal(net(token_ids()), expected)
            assert torch.equal(net.blocks[2].up.weight + 0, make_net().blocks[2].up.weight)


def test_copies_of_a_mapped_model_have_files_of_their_own(weights: Path) -> None:
    net = empty_net()
    with torch.no_grad(), dispatch_model(net, in_files(net, "mmap", "cpu"), source=weights):
        copies = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        assert torch.equal(compiled(token_ids()), make_net()(token_ids()))
        rewrite(weights, 1)
        for each in copies:
            assert torch.equal(each(token_ids()), make_net()(token_ids()))
    assert not any(module._forward_hooks for module in net.modules())
