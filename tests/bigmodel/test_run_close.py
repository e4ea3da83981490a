# SPDX-License-Identifier: Apache-2.0
"""A closed model is what it was before: devices, dtypes, gradients, and whether its weights train."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from catching import assert_raises
from safetensors.torch import save_file
from streamed import DEVICE, Net, make_net, streamed_map, token_ids
from torch import nn

import accel
from accel.bigmodel.run import dispatch_model


def _wider_map(net: Net, home: str) -> accel.bigmodel.DeviceMap:
    """A map by which the host computes in float64, from a home for what may move."""
    skeleton = accel.bigmodel.describe(net, dtype=torch.float64)
    homes = {each.name: home if each.movable else "cpu" for each in skeleton.segments}
    return accel.bigmodel.DeviceMap(skeleton=skeleton, home=homes, runs=dict.fromkeys(homes, "cpu"))


def _scratch(net: Net, folder: Path) -> accel.bigmodel.Dispatched[Net]:
    return accel.dispatch_model(net, streamed_map(net, "disk"), scratch=folder)


def _streamed(net: Net, folder: Path) -> accel.bigmodel.Dispatched[Net]:
    return accel.dispatch_model(net, streamed_map(net, "cpu"))


def _resident(net: Net, folder: Path) -> accel.bigmodel.Dispatched[Net]:
    return accel.dispatch_model(net, _wider_map(net, "cpu"))


WAYS = pytest.mark.parametrize("way", [_scratch, _streamed, _resident])
Way = Callable[[Net, Path], "accel.bigmodel.Dispatched[Net]"]


@WAYS
def test_weights_train_after_a_close_in_inference_mode(way: Way, tmp_path: Path) -> None:
    net = make_net()
    run = way(net, tmp_path)
    with torch.inference_mode():
        run.model(token_ids())
        run.close()
    net(token_ids()).sum().backward()
    assert not any(each.is_inference() for each in net.parameters())
    assert all(each.grad is not None for each in net.parameters())


@torch.inference_mode()
@WAYS
def test_a_model_built_in_inference_mode_comes_back(way: Way, tmp_path: Path) -> None:
    net = make_net()
    expected = net(token_ids())
    with way(net, tmp_path) as run:
        torch.testing.assert_close(run.model(token_ids()).to(torch.float32), expected)
    assert torch.equal(net(token_ids()), expected)
    assert all(each.is_inference() for each in net.parameters())


@torch.inference_mode()
def test_models_built_in_inference_mode_are_swapped() -> None:
    first, second, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(2, 4)
    expected = [first(x), second(x)]
    with accel.bigmodel.swap_models(DEVICE, first, second) as swap:
        for _ in range(2):
            assert torch.equal(first(x), expected[0])
            assert torch.equal(second(x), expected[1])
        with swap.use(first):
            first.bias.add_(1)
    torch.testing.assert_close(first(x), expected[0] + 1)
    assert all(each.is_inference() for each in (*first.parameters(), *second.parameters()))


@WAYS
def test_dtypes_and_gradients_come_back(way: Way, tmp_path: Path) -> None:
    net, twin = make_net(), make_net()
    twin(token_ids()).square().mean().backward()
    with way(net, tmp_path) as run:
        run.model(token_ids()).square().mean().backward()
    for here, there in zip(net.parameters(), twin.parameters(), strict=True):
        assert here.dtype == torch.float32
        assert here.grad is not None
        assert here.grad.dtype == torch.float32
        torch.testing.assert_close(here, there)
        torch.testing.assert_close(here.grad, there.grad, rtol=1e-3, atol=1e-4)


@WAYS
def test_what_was_frozen_meanwhile_stays_frozen(way: Way, tmp_path: Path) -> None:
    net = make_net()
    with way(net, tmp_path) as run:
        run.model.requires_grad_(False)
    assert not any(each.requires_grad for each in net.parameters())


def test_a_value_in_place_of_a_mapped_file_has_the_dtype_of_the_map(tmp_path: Path) -> None:
    net, twin = make_net(), make_net().to(torch.float64)
    save_file(twin.state_dict(), tmp_path / "net.safetensors")
    with accel.dispatch_model(net, _wider_map(net, "mmap"), source=tmp_path), torch.no_grad():
        torch.testing.assert_close(net(token_ids()), twin(token_ids()))
    assert {each.dtype for each in net.parameters()} == {torch.float32}


def test_a_mapped_file_of_another_dtype_is_refused(tmp_path: Path) -> None:
    save_file(make_net().state_dict(), tmp_path / "net.safetensors")
    net = accel.init_empty_weights(make_net)
    with assert_raises(accel.errors.ConfigError, problem="another dtype", expected="F64", got="F32") as caught:
        accel.dispatch_model(net, _wider_map(net, "mmap"), source=tmp_path)
    assert "home 'cpu'" in str(caught.value)


def test_a_device_without_room_for_a_swapped_model_keeps_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_net(0), make_net(1)
    memory = [each.data_ptr() for each in first.parameters()]
    room, to = 3, torch.Tensor.to

    def limited(tensor: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        nonlocal room
        room -= 1
        if room < 0:
            raise torch.OutOfMemoryError
        return to(tensor, *args, **options)  # type: ignore[call-overload, no-any-return]

    with torch.no_grad(), accel.bigmodel.swap_models(DEVICE, first, second):
        expected = second(token_ids())
        monkeypatch.setattr(torch.Tensor, "to", limited)
        with pytest.raises(torch.OutOfMemoryError):
            first(token_ids())
        monkeypatch.undo()
        assert [each.data_ptr() for each in first.parameters()] == memory
        assert torch.equal(second(token_ids()), expected)
        assert torch.isfinite(first(token_ids())).all()


def test_a_model_that_an_inference_call_swapped_in_trains() -> None:
    first, second = make_net(0), make_net(1)
    with accel.bigmodel.swap_models(DEVICE, first, second):
        with torch.inference_mode():
            first(token_ids())
        first(token_ids()).sum().backward()
        assert all(each.grad is not None for each in first.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("inside", [True, False])
def test_a_weight_that_is_deleted_does_not_hide_the_errors_of_calls(
    mode: Callable[[], AbstractContextManager[None]], inside: bool
) -> None:
    net = make_net()
    up = net.blocks[0].up

    def drop(module: nn.Module, args: object) -> None:
        del module.weight

    def call() -> None:
        with dispatch_model(net, streamed_map(net, "cpu")), mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells of the hook that the call's error passes by
            if inside:
                up.register_forward_pre_hook(drop)
            else:
                del up.weight
            net(token_ids())

    of_torch = inside or mode is torch.enable_grad
    refused = pytest.raises(AttributeError, match="weight")
    with refused if of_torch else assert_raises(accel.errors.StreamError, problem="weight"):
        call()
    assert not any("Absent" in repr(each) for name, each in net.named_parameters() if "blocks.0.up" not in name)
    assert torch.equal(net.blocks[1].up.weight, make_net().blocks[1].up.weight)


def test_embeddings_that_cut_their_rows_stay_on_their_device() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20_000, 32, max_norm=1.0)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32)) for _ in range(3))
            self.blocks[1].add_module("bag", nn.EmbeddingBag(100, 32, max_norm=1.0))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            y = self.table(ids)
            return self.blocks[2](self.blocks[1].bag(ids) + self.blocks[0](y).sum(1))

    net, twin = (Cut() for _ in range(2))
    twin.load_state_dict(net.state_dict())
    ids = torch.tensor([[1, 2], [3, 1]])
    skeleton = accel.bigmodel.describe(net)
    fixed = {each.name for each in skeleton.weights() if not each.moves}
    assert {"table.weight", "blocks.1.bag.weight"} <= fixed
    away = {segment.name: "cpu" for segment in skeleton.segments}
    runs = dict.fromkeys(away, "cpu:0")
    with assert_raises(
        accel.errors.ConfigError,
        problem="a segment that cannot move",
        where=r"DeviceMap\.home\['table'\]",
        fix="max_norm=",
    ):
        accel.bigmodel.DeviceMap(skeleton=skeleton, home=away, runs=runs)
    homes = {each.name: "cpu" if each.movable else "cpu:0" for each in skeleton.segments}
    with torch.no_grad(), dispatch_model(net, accel.bigmodel.DeviceMap(skeleton=skeleton, home=homes, runs=runs)):
        for _ in range(2):
            assert torch.equal(net(ids), twin(ids))
        assert float(net.table.weight[1].norm()) <= 1.001
