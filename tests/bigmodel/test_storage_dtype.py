# SPDX-License-Identifier: Apache-2.0
"""Layer-wise casting: matrices lie at home in a smaller dtype, and compute on their slots in the model's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from streamed import DEVICE, Net, make_net, token_ids
from torch import nn

import accel
from accel.bigmodel.run._slots import Block, Slot, StreamedWeight, narrow_part, part, widen
from accel.bigmodel.run._supply import Supply
from accel.bigmodel.run._transfer import DeviceTransfer

FP8 = torch.float8_e4m3fn


def cast_map(model: nn.Module, home: str, slots: int = 2, dtype: torch.dtype = FP8) -> accel.DeviceMap:
    """A map in which every segment that may move is away, in another dtype."""
    skeleton = accel.describe(model, storage_dtype=dtype)
    homes = {each.name: home if each.movable else DEVICE for each in skeleton.segments}
    return accel.DeviceMap(skeleton=skeleton, home=homes, runs=dict.fromkeys(homes, DEVICE), slots=slots)


def cast_names(model: nn.Module) -> set[str]:
    return {each.name for each in accel.describe(model, storage_dtype=FP8).weights() if each.is_cast}


def rounded(model: Net, dtype: torch.dtype = FP8) -> Net:
    """The model with the values that the casts leave."""
    names = cast_names(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in names:
                weight.copy_(weight.to(dtype))
    return model


def stored(model: nn.Module, dtype: torch.dtype = FP8) -> dict[str, torch.Tensor]:
    names = cast_names(model)
    state = model.state_dict()
    return {name: tensor.to(dtype) if name in names else tensor for name, tensor in state.items()}


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("home", ["cpu", "mmap", "disk"])
@pytest.mark.parametrize("slots", [1, 2])
def test_outputs_are_those_of_rounded_weights(home: str, slots: int, compute: torch.dtype, tmp_path: Path) -> None:
    net, twin = make_net().to(compute), rounded(make_net().to(compute))
    assert not torch.equal(net.blocks[0].up.weight, twin.blocks[0].up.weight)
    save_file(stored(net), tmp_path / "net.safetensors")
    source = None if home == "cpu" else tmp_path
    with accel.dispatch_model(net, cast_map(net, home, slots), source=source) as run:
        with torch.no_grad():
            for order in (range(4), [3, 0, 3, 1]):
                net.order = twin.order = order
                assert torch.equal(net(token_ids()), twin(token_ids()))
        x = torch.ones(1, 10, 16, dtype=compute)
        assert torch.equal(net.blocks[2](x), twin.blocks[2](x))  # with gradients: weights fetch themselves
        assert net.blocks[1].up.weight.dtype == compute
        values = dict(run.tensors())
        assert all(torch.equal(values[name], tensor) for name, tensor in twin.state_dict().items())


def test_closing_gives_back_rounded_weights_in_the_dtype_of_the_model() -> None:
    net, twin = make_net(), rounded(make_net())
    before = dict(net.named_parameters())
    with accel.cpu_offload(net, DEVICE, storage_dtype=FP8):
        assert before["blocks.0.up.weight"].dtype == FP8  # the memory of the model's own values is free
        assert before["blocks.0.up.bias"].dtype == torch.float32
    assert all(here is before[name] for name, here in net.named_parameters())
    assert all(torch.equal(here, there) for here, there in zip(net.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("home", ["cpu", "mmap", "disk"])
def test_an_empty_model_is_loaded_in_the_dtype_of_its_home(home: str, tmp_path: Path) -> None:
    net, twin = make_net(), rounded(make_net())
    ctx = accel.single("cpu")
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    if home != "cpu":
        whole = accel.init_empty_weights(lambda: make_net())
        accel.load_checkpoint_in_model(ctx, whole, tmp_path, cast_map(whole, "cpu"))
        tmp_path = tmp_path / "stored"
        accel.save_model(ctx, whole, tmp_path)
    loaded = accel.init_empty_weights(lambda: make_net())
    accel.load_checkpoint_in_model(ctx, loaded, tmp_path, cast_map(loaded, home))
    weight = loaded.blocks[0].up.weight
    assert weight.dtype == FP8 if home == "cpu" else weight.is_meta
    for source in (None, tmp_path):  # by the load, and by the dispatch alone
        empty = accel.init_empty_weights(lambda: make_net())
        device_map = cast_map(empty, home)
        if source is None:
            run = accel.load_checkpoint_and_dispatch(ctx, empty, tmp_path, device_map)
        else:
            run = accel.dispatch_model(empty, device_map, source=source)
        with run, torch.no_grad():
            assert torch.equal(empty(token_ids()), twin(token_ids()))
        closed = empty.blocks[0].up.weight
        assert home != "cpu" or torch.equal(closed, twin.blocks[0].up.weight)


def test_gradients_are_those_of_rounded_weights() -> None:
    net, twin = make_net(), rounded(make_net())
    twin(token_ids()).square().sum().backward()
    with accel.cpu_offload(net, DEVICE, storage_dtype=FP8) as run:
        run.model(token_ids()).square().sum().backward()
    for here, there in zip(net.parameters(), twin.parameters(), strict=True):
        assert here.grad is not None
        assert there.grad is not None
        assert here.grad.dtype == here.dtype
        torch.testing.assert_close(here.grad, there.grad)


def test_a_mapping_of_tensors_is_rounded_too() -> None:
    net, twin = make_net(), rounded(make_net())
    empty = accel.init_empty_weights(lambda: make_net())
    with accel.dispatch_model(empty, cast_map(empty, "cpu"), source=net.state_dict()), torch.no_grad():
        assert torch.equal(empty(token_ids()), twin(token_ids()))


@pytest.mark.parametrize("home", ["mmap", "disk"])
def test_files_of_another_dtype_are_refused_before_the_model_changes(home: str, tmp_path: Path) -> None:
    net = make_net()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    with pytest.raises(accel.ConfigError, match=r"another dtype.*F8_E4M3.*got F32 in") as caught:
        accel.dispatch_model(accel.init_empty_weights(lambda: make_net()), cast_map(net, home), source=tmp_path)
    assert "home 'cpu'" in caught.value.fix


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_values_beyond_the_storage_dtype_are_refused_before_the_model_changes(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    net = make_net()
    with torch.no_grad():
        net.blocks[1].up.weight[3, 2] = -60000.0
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    ctx = accel.single("cpu")
    empty = accel.init_empty_weights(lambda: make_net())
    device_map = cast_map(net, "cpu", dtype=dtype)
    for use in (
        lambda: accel.dispatch_model(net, device_map),
        lambda: accel.dispatch_model(empty, device_map, source=net.state_dict()),
        lambda: accel.dispatch_model(empty, device_map, source=tmp_path),
        lambda: accel.load_checkpoint_in_model(ctx, empty, tmp_path, device_map),
    ):
        with pytest.raises(accel.ConfigError, match=r"does not hold.*got 60000 - at 'blocks.1.up.weight'"):
            use()
    assert type(net.blocks[0].up.weight) is nn.Parameter
    assert empty.blocks[0].up.weight.is_meta


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.router = nn.Linear(8, 4)
        self.up = nn.Linear(8, 16)
        self.position = nn.Embedding(4, 8)
        self.register_buffer("table", torch.zeros(1024, 1024))
        self.register_buffer("steps", torch.zeros(2, 2, dtype=torch.int64))


def test_norms_biases_embeddings_buffers_and_named_weights_keep_their_dtype() -> None:
    model = nn.Sequential(nn.Embedding(8192, 64), nn.ModuleList([Layer(), Layer()]), nn.Linear(512, 1024))
    skeleton = accel.describe(model, dtype=torch.bfloat16, storage_dtype=FP8, storage_skip=["*.router.*"])
    assert [each.name for each in skeleton.weights() if each.is_cast] == ["1.0.up.weight", "1.1.up.weight", "2.weight"]
    assert {each.dtype for each in skeleton.weights() if each.is_cast} == {"BF16"}
    head = skeleton.segments[-1]
    assert head.moving - head.home_memory == 512 * 1024
    assert accel.describe(model, dtype=torch.bfloat16, storage_dtype=torch.bfloat16).memory == skeleton.memory
    patterns = accel.describe(model, storage_dtype=FP8, storage_skip="*.router.*")
    assert patterns.memory == accel.describe(model).memory
    assert not any(each.is_cast for each in patterns.weights() if "router" in each.name)
    with pytest.raises(accel.ConfigError, match="without storage_dtype"):
        accel.describe(model, storage_skip="*.router.*")
    with pytest.raises(accel.ConfigError, match="storage_skip") as caught:
        accel.describe(model, storage_dtype=FP8, storage_skip=["1.0.rooter.weight"])
    assert "1.0.router.weight" in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"storage_dtype": "I8"}, "not a dtype to store"),
        ({"storage_dtype": "F8_E4M3", "dtype": "I64"}, "floating-point weights that move"),
        ({"storage_dtype": "F8_E4M3", "moves": False}, "floating-point weights that move"),
    ],
)
def test_storage_dtypes_that_mean_nothing_are_refused(changes: dict[str, object], problem: str) -> None:
    plain = accel.Weight(name="a", shape=(4, 4), dtype="BF16")
    with pytest.raises(accel.ConfigError, match=problem):
        msgspec.structs.replace(plain, **changes)


def test_a_map_holds_more_blocks_in_the_host_by_casting_them() -> None:
    model = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8))
    whole = 512 * 512 * 4
    limits: dict[int | str, int | str | None] = {"cuda:0": 4 * whole, "cpu": 4 * whole}
    with pytest.raises(accel.PlacementError):
        accel.infer_device_map(accel.describe(model), limits)
    found = accel.infer_device_map(accel.describe(model, storage_dtype=FP8), limits)
    assert found.resident("cpu") == 6 * whole // 4
    assert found.used("cuda:0") == 4 * whole
    assert "262 kB" in accel.explain(found)
    away = accel.infer_device_map(accel.describe(model, storage_dtype=FP8), {"cuda:0": 2 * whole, "disk": None})
    assert accel.pass_seconds(away, {}, bandwidth=whole) == pytest.approx(8 / 4)


class Link:
    """A stream of an accelerator, on the host."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def record_event(self) -> None: ...


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float64])
def test_blocks_reach_an_accelerator_in_the_dtype_of_their_home(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"a": torch.randn(300, 40).to(dtype), "b": torch.randn(7), "c": torch.randn(3, 3).to(dtype)}
    offsets = {"a": 0, "b": 48128, "c": 48640}
    weights = [
        StreamedWeight(Supply(name, tuple(each.shape), torch.float32, each, None), offsets[name], ())
        for name, each in values.items()
    ]
    monkeypatch.setattr(torch, "Stream", lambda device: Link())
    slot = Slot(torch.zeros(49152, dtype=torch.uint8), torch.zeros(49152, dtype=torch.uint8))
    DeviceTransfer(torch.device("cuda:0")).fill(slot, Block(0, "block", nn.Module(), weights))
    for weight in weights:
        assert torch.equal(part(slot.memory, weight), values[weight.supply.name].float())


@settings(max_examples=40)
@given(
    st.one_of(st.integers(0, 40), st.integers(4000, 40000)),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from([FP8, torch.float8_e5m2, torch.bfloat16]),
)
def test_a_cast_in_place_loses_nothing(count: int, wide: torch.dtype, narrow: torch.dtype) -> None:
    values = torch.linspace(-8, 8, count).to(narrow)
    weight = StreamedWeight(Supply("w", (count,), wide, values, None), 512, ())
    memory = torch.full((1024 + 8 * count,), 7, dtype=torch.uint8)
    if wide == narrow:
        return
    narrow_part(memory, weight).copy_(values)
    widen(memory, weight)
    assert torch.equal(part(memory, weight), values.to(wide))
    end = 512 + count * wide.itemsize
    assert bool((memory[:512] == 7).all())
    assert bool((memory[end:] == 7).all())
