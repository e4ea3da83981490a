# SPDX-License-Identifier: Apache-2.0
"""Layer-wise casting: matrices lie at home in a smaller dtype, and compute on their slots in the model's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from safetensors.torch import load_file, save_file
from slots import DeviceTransfer, Slot, block_of, part
from streamed import DEVICE, Net, make_net, token_ids
from torch import nn

import accel
from accel.bigmodel.run._slots import narrow_part, widen

FP8 = torch.float8_e4m3fn
RESIDENT = "resident"


def cast_map(model: nn.Module, home: str, slots: int = 2, dtype: torch.dtype = FP8) -> accel.bigmodel.DeviceMap:
    """A map in which every segment that may move is away, or "resident", in another dtype."""
    skeleton = accel.bigmodel.describe(model, storage_dtype=dtype)
    home = DEVICE if home == RESIDENT else home
    homes = {each.name: home if each.movable else DEVICE for each in skeleton.segments}
    return accel.bigmodel.DeviceMap(skeleton=skeleton, home=homes, runs=dict.fromkeys(homes, DEVICE), slots=slots)


def cast_names(model: nn.Module) -> set[str]:
    return {each.name for each in accel.bigmodel.describe(model, storage_dtype=FP8).weights() if each.is_cast}


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
@pytest.mark.parametrize(
    ("home", "slots"), [*((home, slots) for home in ("cpu", "mmap", "disk") for slots in (1, 2)), (RESIDENT, 2)]
)
def test_outputs_are_those_of_rounded_weights(home: str, slots: int, compute: torch.dtype, tmp_path: Path) -> None:
    net, twin = make_net().to(compute), rounded(make_net().to(compute))
    assert not torch.equal(net.blocks[0].up.weight, twin.blocks[0].up.weight)
    save_file(stored(net), tmp_path / "net.safetensors")
    source = None if home in ("cpu", RESIDENT) else tmp_path
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


@pytest.mark.parametrize("home", ["cpu", RESIDENT])
def test_closing_gives_back_rounded_weights_in_the_dtype_of_the_model(home: str) -> None:
    net, twin = make_net(), rounded(make_net())
    before = dict(net.named_parameters())
    with accel.dispatch_model(net, cast_map(net, home)):
        assert before["blocks.0.up.weight"].dtype == FP8  # the memory of the model's own values is free
        assert before["blocks.0.up.bias"].dtype == torch.float32
    assert all(here is before[name] for name, here in net.named_parameters())
    assert all(torch.equal(here, there) for here, there in zip(net.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("home", ["cpu", "mmap", "disk", RESIDENT])
def test_an_empty_model_is_loaded_in_the_dtype_of_its_home(home: str, tmp_path: Path) -> None:
    net, twin = make_net(), rounded(make_net())
    ctx = accel.single("cpu")
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    in_memory = home in ("cpu", RESIDENT)
    if not in_memory:
        whole = accel.init_empty_weights(lambda: make_net())
        accel.bigmodel.load_checkpoint_in_model(ctx, whole, tmp_path, cast_map(whole, "cpu"))
        tmp_path = tmp_path / "stored"
        accel.save_model(ctx, whole, tmp_path)
    loaded = accel.init_empty_weights(lambda: make_net())
    accel.bigmodel.load_checkpoint_in_model(ctx, loaded, tmp_path, cast_map(loaded, home))
    weight = loaded.blocks[0].up.weight
    assert weight.dtype == FP8 if in_memory else weight.is_meta
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
        assert not in_memory or torch.equal(closed, twin.blocks[0].up.weight)


@pytest.mark.parametrize("home", ["cpu", RESIDENT])
def test_gradients_are_those_of_rounded_weights(home: str) -> None:
    net, twin = make_net(), rounded(make_net())
    twin(token_ids()).square().sum().backward()
    with accel.dispatch_model(net, cast_map(net, home)) as run:
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
    with assert_raises(accel.errors.ConfigError, problem="another dtype", expected="F8_E4M3", got="F32 in") as caught:
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
        lambda: accel.dispatch_model(net, cast_map(net, RESIDENT, dtype=dtype)),
        lambda: accel.dispatch_model(empty, device_map, source=net.state_dict()),
        lambda: accel.dispatch_model(empty, device_map, source=tmp_path),
        lambda: accel.bigmodel.load_checkpoint_in_model(ctx, empty, tmp_path, device_map),
    ):
        with assert_raises(
            accel.errors.ConfigError, problem="does not hold", got="60000", where="'blocks.1.up.weight'"
        ):
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
    skeleton = accel.bigmodel.describe(model, dtype=torch.bfloat16, storage_dtype=FP8, storage_skip=["*.router.*"])
    assert [each.name for each in skeleton.weights() if each.is_cast] == ["1.0.up.weight", "1.1.up.weight", "2.weight"]
    assert {each.dtype for each in skeleton.weights() if each.is_cast} == {"BF16"}
    head = skeleton.segments[-1]
    assert head.moving - head.home_memory == 512 * 1024
    assert skeleton.segments[-1].casting == 2 * 512 * 1024
    plain = accel.bigmodel.describe(model, dtype=torch.bfloat16)
    assert accel.bigmodel.describe(model, dtype=torch.bfloat16, storage_dtype=torch.bfloat16).memory == plain.memory
    saved = sum(each.moving - each.home_memory for each in skeleton.segments)
    assert skeleton.memory == plain.memory - saved + 2 * 512 * 1024
    patterns = accel.bigmodel.describe(model, storage_dtype=FP8, storage_skip="*.router.*")
    assert patterns.memory == accel.bigmodel.describe(model, storage_dtype=FP8, storage_skip=["*.router.weight"]).memory
    assert not any(each.is_cast for each in patterns.weights() if "router" in each.name)
    with assert_raises(accel.errors.ConfigError, problem="without storage_dtype"):
        accel.bigmodel.describe(model, storage_skip="*.router.*")
    with assert_raises(accel.errors.ConfigError, where="storage_skip") as caught:
        accel.bigmodel.describe(model, storage_dtype=FP8, storage_skip=["1.0.rooter.weight"])
    assert "1.0.router.weight" in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"storage_dtype": "I8"}, "cannot be stored in this dtype"),
        ({"storage_dtype": "F8_E4M3", "dtype": "I64"}, "floating-point weights that move"),
        ({"storage_dtype": "F8_E4M3", "moves": False}, "floating-point weights that move"),
    ],
)
def test_storage_dtypes_that_mean_nothing_are_refused(changes: dict[str, object], problem: str) -> None:
    plain = accel.bigmodel.Weight(name="a", shape=(4, 4), dtype="BF16")
    with assert_raises(accel.errors.ConfigError, problem=problem):
        msgspec.structs.replace(plain, **changes)


def test_a_map_holds_more_blocks_by_casting_them() -> None:
    model = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8))
    whole = 512 * 512 * 4
    limits: dict[int | str, int | str | None] = {"cuda:0": 4 * whole, "cpu": 4 * whole}
    with pytest.raises(accel.errors.PlacementError):
        accel.infer_device_map(accel.bigmodel.describe(model), limits)
    stored = accel.bigmodel.describe(model, storage_dtype=FP8)
    found = accel.infer_device_map(stored, limits)
    assert (found.order, found.resident("cpu")) == ((), 0)
    assert found.resident("cuda:0") == 8 * whole // 4
    assert found.used("cuda:0") == stored.memory == 3 * whole
    assert (found.window("cuda:0"), found.cast_bytes("cuda:0"), found.slot_bytes("cuda:0")) == (whole, whole, 0)
    text = accel.bigmodel.explain(found)
    assert "262 kB" in text
    assert "1.0 MB to cast" in text
    with assert_raises(accel.errors.PlacementError, expected=f"at least {2 * whole} bytes"):
        accel.infer_device_map(stored, {"cuda:0": whole, "disk": None}, slots=2)
    away = accel.infer_device_map(stored, {"cuda:0": 2 * whole, "disk": None}, slots=2)
    assert len(away.order) == 8
    assert away.cast_bytes("cuda:0") == 0
    assert accel.bigmodel.pass_seconds(away, {}, bandwidth=whole) == pytest.approx(8 / 4)


def test_a_resident_block_is_cast_for_its_calls_and_plain_while_it_runs(tmp_path: Path) -> None:
    net, twin = make_net().to(torch.bfloat16), rounded(make_net().to(torch.bfloat16))
    hooks = [len(each._forward_pre_hooks) for each in net.modules()]
    seen: list[tuple[type, torch.dtype, int]] = []

    def look(module: nn.Module, _: object) -> None:
        seen.append((type(module.weight), module.weight.dtype, module.weight.data_ptr()))

    for block in net.blocks:
        block.up.register_forward_pre_hook(look)
    with accel.dispatch_model(net, cast_map(net, RESIDENT)) as run:
        with torch.inference_mode():
            assert torch.equal(net(token_ids()), twin(token_ids()))
        assert {each[:2] for each in seen} == {(nn.Parameter, torch.bfloat16)}
        assert len({each[2] for each in seen}) == 1  # one memory for all calls
        weight = net.blocks[2].up.weight
        assert (weight.dtype, weight.device) == (torch.bfloat16, torch.device("cpu"))
        assert torch.equal(weight + 0, twin.blocks[2].up.weight)
        assert torch.equal(nn.functional.embedding(torch.tensor([1]), weight), twin.blocks[2].up.weight[1:2])
        assert all(torch.equal(net.state_dict()[name] + 0, value) for name, value in twin.state_dict().items())
        accel.save_model(accel.single("cpu"), net, tmp_path)
        assert run.stats().segments == ()
        net.blocks[1].error = ValueError("in forward")
        with pytest.raises(ValueError, match="in forward"), torch.no_grad():
            net(token_ids())
        net.blocks[1].error = None
        with torch.no_grad(), ThreadPoolExecutor(3) as pool:  # one call at a time has the memory
            each = [pool.submit(_without_gradients, net) for _ in range(12)]
            assert all(torch.equal(call.result(), twin(token_ids())) for call in each)
    handles = [len(each._forward_pre_hooks) for each in net.modules()]
    assert sum(handles) == sum(hooks) + len(net.blocks)  # those of this test
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in net.state_dict().items())
    again = accel.bigmodel.load_checkpoint_in_model(accel.single("cpu"), make_net().to(torch.bfloat16), tmp_path)
    assert torch.equal(again.blocks[0].up.weight, twin.blocks[0].up.weight)


def _without_gradients(net: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return net(token_ids())


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float64])
def test_blocks_reach_an_accelerator_in_the_dtype_of_their_home(dtype: torch.dtype) -> None:
    values = {"a": torch.randn(300, 40).to(dtype), "b": torch.randn(7), "c": torch.randn(3, 3).to(dtype)}
    block = block_of(0, values, [0, 48128, 48640])
    slot = Slot(torch.zeros(49152, dtype=torch.uint8), torch.zeros(49152, dtype=torch.uint8))
    DeviceTransfer(accel.single("cpu").streams).fill(slot, block)
    for weight in block.weights:
        assert torch.equal(part(slot.memory, weight), values[weight.supply.name].float())


@settings(max_examples=share(0.8))
@given(
    st.one_of(st.integers(0, 40), st.integers(4000, 40000)),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from([FP8, torch.float8_e5m2, torch.bfloat16]),
)
def test_a_cast_in_place_loses_nothing(count: int, wide: torch.dtype, narrow: torch.dtype) -> None:
    values = torch.linspace(-8, 8, count).to(narrow)
    [weight] = block_of(0, {"w": values}, [512], dtype=wide).weights
    memory = torch.full((1024 + 8 * count,), 7, dtype=torch.uint8)
    if wide == narrow:
        return
    narrow_part(memory, weight).copy_(values)
    widen(memory, weight)
    assert torch.equal(part(memory, weight), values.to(wide))
    end = 512 + count * wide.itemsize
    assert bool((memory[:512] == 7).all())
    assert bool((memory[end:] == 7).all())
