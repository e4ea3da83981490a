# SPDX-License-Identifier: Apache-2.0
"""Quantized models: loaded weight by weight, counted, streamed, saved, and refused where they cannot be."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import HealthCheck, given, settings, strategies as st
from msgspec.structs import replace
from profiles import share
from quantized_nets import WIDTH, CountingSource, Net, TensorSource, make_net, token_ids
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

import accel

CONFIGS = [
    accel.engines.quantized.Bitsandbytes(skip="head"),
    accel.engines.quantized.Bitsandbytes(kind="fp4", double=True, compute_dtype="fp32", skip="head"),
    accel.engines.quantized.Bitsandbytes(bits=8, skip="head"),
    accel.engines.quantized.Bitsandbytes(bits=8, threshold=3.0, skip="head"),
    accel.engines.quantized.Torchao(kind="int8", skip="head"),
    accel.engines.quantized.Torchao(kind="int8_dynamic", keep_float32="head"),
    accel.engines.quantized.Torchao(kind="float8", skip="head"),
    accel.engines.quantized.Torchao(kind="int4_grouped", group_size=64, skip="head"),
]


@pytest.fixture
def packages() -> None:
    """Skip where the packages are not installed."""
    for name in ("bitsandbytes", "torchao"):
        _ = pytest.importorskip(name)


def empty() -> Net:
    """A net without values."""
    return accel.init_empty_weights(Net).eval()


def outputs(model: nn.Module) -> torch.Tensor:
    """What a model gives for the ids."""
    with torch.no_grad():
        return model(token_ids())


def gradient(model: nn.Module, *, between: bool = False) -> torch.Tensor:
    """Gradient of a hidden state, through all blocks; with another call between forward and backward."""
    x = model.embed(token_ids()).detach().requires_grad_()
    y = x
    for block in model.blocks:
        y = block(y)
    if between:
        _ = outputs(model)
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad


def elsewhere(skeleton: accel.bigmodel.Skeleton, home: str, runs: str) -> accel.bigmodel.DeviceMap:
    """A map in which all that may move is elsewhere."""
    homes = {segment.name: home if segment.movable else runs for segment in skeleton.segments}
    return accel.bigmodel.DeviceMap(skeleton=skeleton, home=homes, runs=dict.fromkeys(homes, runs))


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (
            lambda: accel.engines.quantized.Bitsandbytes(bits=3),
            {"problem": "no such number of bits", "expected": "4 or 8", "got": "^3$"},
        ),
        (
            lambda: accel.engines.quantized.Bitsandbytes(kind="nf5"),
            {"problem": "no such format of 4 bits", "expected": "nf4"},
        ),  # type: ignore[arg-type]
        (
            lambda: accel.engines.quantized.Bitsandbytes(threshold=6.0),
            {"problem": "threshold= has no effect with 4 bits", "fix": "bits=8"},
        ),
        (
            lambda: accel.engines.quantized.Bitsandbytes(bits=8, double=True),
            {"problem": "double= without effect with 8 bits"},
        ),
        (
            lambda: accel.engines.quantized.Bitsandbytes(bits=8, threshold=-1.0),
            {"problem": "the threshold is not valid", "expected": "0 or more", "got": "-1.0"},
        ),
        (
            lambda: accel.engines.quantized.Bitsandbytes(compute_dtype="int8"),
            {"problem": "no such dtype", "expected": "bf16"},
        ),  # type: ignore[arg-type]
        (
            lambda: accel.engines.quantized.Torchao(kind="int3"),
            {"problem": "no such kind of quantization", "expected": "int4"},
        ),  # type: ignore[arg-type]
        (lambda: accel.engines.quantized.Torchao(group_size=32), {"problem": "group_size= has no effect with 'int8'"}),
        (
            lambda: accel.engines.quantized.Torchao(kind="int4", group_size=48),
            {"problem": "the group size is not valid", "expected": "a power of 2", "got": "^48$"},
        ),
    ],
)
def test_records_refuse_what_means_nothing(make: Any, fields: dict[str, str]) -> None:
    with assert_raises(accel.errors.ConfigError, **fields):
        make()


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for config, name in (
        (accel.engines.quantized.Bitsandbytes(), "bitsandbytes"),
        (accel.engines.quantized.Torchao(), "torchao.quantization"),
    ):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
        with assert_raises(
            accel.errors.MissingExtraError, fix=rf"pip install 'accel-torch\[{name.partition('.')[0]}\]'"
        ):
            accel.engines.quantized.describe_quantized(empty(), config)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("packages")
@pytest.mark.filterwarnings("default")  # of the packages' own imports
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: repr(config)[:60])
def test_counted_saved_and_streamed_exactly(
    tmp_path: Path,
    config: accel.engines.quantized.Bitsandbytes | accel.engines.quantized.Torchao,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctx, net = accel.single("cpu"), make_net()
    accel.save_model(ctx, net, tmp_path / "full")
    before = empty()
    skeleton = accel.engines.quantized.describe_quantized(before, config)
    assert type(before.blocks[0].up) is nn.Linear
    model = accel.engines.quantized.load_quantized(ctx, empty(), tmp_path / "full", config=config)
    assert accel.bigmodel.describe(model) == skeleton
    assert skeleton.nbytes < 0.5 * accel.bigmodel.describe(net).nbytes
    expected = outputs(model)
    assert functional.cosine_similarity(expected.flatten(), outputs(net).flatten(), 0) > 0.98
    trains = "dynamic" not in repr(config)
    slope = torch.empty(0)
    if trains:
        slope = gradient(model)
        assert functional.cosine_similarity(slope.flatten(), gradient(net).flatten(), 0) > 0.98
    else:
        with assert_raises(accel.errors.ConfigError, problem="no backward pass", fix="kind='int8'"):
            gradient(model)

    saved = accel.save_model(ctx, model, tmp_path / "packed")
    again = accel.engines.quantized.load_quantized(ctx, empty(), saved, config=config)
    assert torch.equal(outputs(again), expected)
    for small in (None, 0):  # with scales that stay, and with scales that stream
        if small is not None:
            monkeypatch.setattr("accel.bigmodel._describe.SMALL_BYTES", small)
            skeleton = accel.engines.quantized.describe_quantized(empty(), config)
        for home, runs in (("cpu", "cpu:0"), ("mmap", "cpu"), ("disk", "cpu")):
            places = elsewhere(skeleton, home, runs)
            away = accel.engines.quantized.load_quantized(ctx, empty(), saved, config=config, device_map=places)
            with accel.dispatch_model(away, places, source=None if home == "cpu" else saved) as run:
                assert all(torch.equal(outputs(away), expected) for _ in range(3))
                assert not trains or torch.equal(gradient(away, between=True), slope)
                assert sum(each.moved_bytes for each in run.stats().segments) > 0 or home == "mmap"
                accel.save_model(ctx, away, tmp_path / "copy")
                stored = load_file(saved / "model.safetensors")
                copied = load_file(tmp_path / "copy" / "model.safetensors")
                assert stored.keys() == copied.keys()
                assert all(torch.equal(stored[name], copied[name]) for name in stored)
            if home == "cpu":
                assert torch.equal(outputs(away), expected)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("packages")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("config", [CONFIGS[1], CONFIGS[2], CONFIGS[4]], ids=lambda config: repr(config)[:24])
def test_threads_share_a_streamed_model(
    tmp_path: Path, config: accel.engines.quantized.Bitsandbytes | accel.engines.quantized.Torchao
) -> None:
    ctx = accel.single("cpu")
    full = accel.save_model(ctx, make_net(), tmp_path / "full")
    model = accel.engines.quantized.load_quantized(ctx, empty(), full, config=config)
    expected, slope = outputs(model), gradient(model)
    saved = accel.save_model(ctx, model, tmp_path / "packed")
    places = elsewhere(accel.bigmodel.describe(model), "disk", "cpu:0")
    away = accel.engines.quantized.load_quantized(ctx, empty(), saved, config=config, device_map=places)
    with accel.dispatch_model(away, places, source=saved) as run, ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(gradient if at % 3 else outputs, run.model) for at in range(30)]
        for at, call in enumerate(calls):
            assert torch.equal(call.result(), slope if at % 3 else expected)
        x = torch.ones(3, WIDTH)
        with torch.no_grad():
            assert torch.equal(away.blocks[2].up(x), model.blocks[2].up(x))  # outside of its block's call
    with assert_raises(accel.errors.StreamError, problem="closed"):
        outputs(away)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("packages")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "config",
    [
        accel.engines.quantized.Bitsandbytes(dtype="fp32"),
        accel.engines.quantized.Bitsandbytes(bits=8),
        accel.engines.quantized.Torchao(),
    ],
)
def test_memory_holds_one_weight_as_it_was(
    config: accel.engines.quantized.Bitsandbytes | accel.engines.quantized.Torchao,
) -> None:
    width = 256
    weight = 2 * width * width * 4
    model = accel.init_empty_weights(lambda: Net(blocks=4, width=width))
    source = CountingSource(model, large=weight)
    accel.engines.quantized.load_quantized(accel.single("cpu"), model, source, config=config)
    assert weight <= source.most <= 2 * weight  # eight of them in all
    assert all(not each.is_meta for each in model.parameters())


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("packages")
@pytest.mark.filterwarnings("default")
@given(
    rows=st.integers(1, 40),
    columns=st.integers(2, 40),
    config=st.sampled_from(CONFIGS[:3] + CONFIGS[4:7]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9),
)
@settings(max_examples=share(0.6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_matrix_is_counted_before_and_comes_back(
    rows: int, columns: int, config: Any, dtype: torch.dtype, seed: int
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(columns, rows, bias=False)).to(dtype)

    config = replace(config, skip=(), keep_float32=())
    ctx = accel.single("cpu")
    skeleton = accel.engines.quantized.describe_quantized(accel.init_empty_weights(make), config)
    source = {"0.weight": weight}
    model = accel.engines.quantized.load_quantized(
        ctx, accel.init_empty_weights(make), TensorSource(source), config=config
    )
    assert accel.bigmodel.describe(model) == skeleton
    packed = accel.get_state_dict(ctx, model, dst=None)
    again = accel.engines.quantized.load_quantized(
        ctx, accel.init_empty_weights(make), TensorSource(packed), config=config
    )
    found = accel.get_state_dict(ctx, again, dst=None)
    assert found.keys() == packed.keys()
    for name, each in packed.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), each.view(-1).view(torch.uint8)), name


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("packages")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("bits", [4, 8])
def test_checkpoints_of_bitsandbytes_own_layers_load(tmp_path: Path, bits: int) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    ctx, net = accel.single("cpu"), make_net()
    full = accel.save_model(ctx, net, tmp_path / "full")
    config = accel.engines.quantized.Bitsandbytes(bits=bits, double=bits == 4, skip="head")
    expected = accel.engines.quantized.load_quantized(ctx, empty(), full, config=config)
    for block in net.blocks:
        for name in ("up", "down"):
            old = block.get_submodule(name)
            options = {"bias": old.bias is not None}
            if bits == 4:
                kind = bitsandbytes.nn.Linear4bit
                options |= {"quant_type": "nf4", "compute_dtype": torch.bfloat16}
            else:
                kind = bitsandbytes.nn.Linear8bitLt
                options |= {"has_fp16_weights": False}
            new = kind(old.in_features, old.out_features, **options)
            new.load_state_dict(old.state_dict())
            setattr(block, name, new.to("cpu"))
    own = {name: each.contiguous() for name, each in net.state_dict().items()}
    save_file(own, tmp_path / "own.safetensors")
    loaded = accel.engines.quantized.load_quantized(ctx, empty(), tmp_path / "own.safetensors", config=config)
    assert torch.equal(outputs(loaded), outputs(expected))
    with assert_raises(accel.errors.ConfigError, problem="quantized already"):
        accel.engines.quantized.load_quantized(ctx, net, full, config=config)
    skeleton = accel.bigmodel.describe(net)
    with assert_raises(accel.errors.ConfigError, problem="a special class"):
        accel.dispatch_model(net, elsewhere(skeleton, "cpu", "cpu:0"))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("packages")
@pytest.mark.filterwarnings("default")
def test_a_limit_holds_for_quantized_bytes(tmp_path: Path) -> None:
    ctx, config = accel.single("cpu"), accel.engines.quantized.Bitsandbytes(double=True, skip="head")

    def wide() -> Net:
        return accel.init_empty_weights(lambda: Net(blocks=6, width=256)).eval()

    full = accel.save_model(ctx, make_net(blocks=6, width=256), tmp_path / "full")
    whole = accel.engines.quantized.load_quantized(ctx, wide(), full, config=config)
    skeleton = accel.engines.quantized.describe_quantized(wide(), config)
    limit = skeleton.memory * 3 // 4
    homes = accel.infer_device_map(skeleton, {"cuda:0": limit, "cpu": "1GB"}, slots=1).home
    assert {"cpu", "cuda:0"} <= set(homes.values())
    places = {name: "cpu:0" if home == "cuda:0" else home for name, home in homes.items()}  # the same on the host
    device_map = accel.bigmodel.DeviceMap(
        skeleton=skeleton, home=places, runs=dict.fromkeys(places, "cpu:0"), slots=1, limits={"cpu:0": limit}
    )
    assert device_map.resident("cpu:0") + device_map.window("cpu:0") <= limit
    model = accel.engines.quantized.load_quantized(ctx, wide(), full, config=config, device_map=device_map)
    with accel.dispatch_model(model, device_map) as run:
        assert torch.equal(outputs(run.model), outputs(whole))
        moved = {each.name: each.moved_bytes for each in run.stats().segments}
    assert set(moved) == set(device_map.order)
    assert all(moved.values())


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("packages")
@pytest.mark.filterwarnings("default")
def test_what_is_quantized_and_what_is_not(tmp_path: Path) -> None:
    ctx, net = accel.single("cpu"), make_net()
    net.head.weight = net.embed.weight
    accel.save_model(ctx, net, tmp_path)

    def tied() -> Net:
        model = empty()
        model.head.weight = model.embed.weight
        return model

    config = accel.engines.quantized.Bitsandbytes(skip="blocks.0.up", keep_float32="*.norm", dtype="bf16")
    model = accel.engines.quantized.load_quantized(ctx, tied(), tmp_path, config=config)
    assert accel.bigmodel.describe(model) == accel.engines.quantized.describe_quantized(tied(), config)
    assert model.head.weight is model.embed.weight
    assert type(model.blocks[0].up) is nn.Linear
    assert type(model.blocks[1].up) is not nn.Linear
    assert model.blocks[0].up.weight.dtype == model.embed.weight.dtype == torch.bfloat16
    assert model.blocks[1].up.bias.dtype == torch.bfloat16
    assert model.blocks[0].norm.weight.dtype == torch.float32
    assert torch.equal(model.blocks[0].up.weight, net.blocks[0].up.weight.bfloat16())
    assert torch.equal(model.positions, net.positions)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("packages")
@pytest.mark.filterwarnings("default")
def test_wrong_inputs_are_refused_and_change_nothing(tmp_path: Path) -> None:
    ctx, four, eight = accel.single("cpu"), accel.engines.quantized.Bitsandbytes(), accel.engines.quantized.Torchao()
    full = accel.save_model(ctx, make_net(), tmp_path / "full")

    def refused(
        error: type[Exception], fields: dict[str, str], model: nn.Module, weights: Any, config: Any, **more: Any
    ) -> None:
        before = {name: (type(each), each.shape) for name, each in model.named_parameters()}
        with assert_raises(error, **fields):
            accel.engines.quantized.load_quantized(ctx, model, weights, config=config, **more)
        assert before == {name: (type(each), each.shape) for name, each in model.named_parameters()}

    typo = accel.engines.quantized.Torchao(skip="haed")
    refused(
        accel.errors.ConfigError,
        {"problem": "no module of the model matches", "got": "'haed'", "fix": "head"},
        empty(),
        full,
        typo,
    )
    refused(
        accel.errors.ConfigError,
        {"problem": "no layer of the model"},
        empty(),
        full,
        accel.engines.quantized.Torchao(skip=("blocks", "head")),
    )
    refused(
        accel.errors.ConfigError,
        {"problem": "the way to quantize is unknown", "fix": "Bitsandbytes"},
        empty(),
        full,
        "int8",
    )
    odd = accel.engines.quantized.Torchao(kind="int4_grouped", group_size=128)
    refused(
        accel.errors.ConfigError,
        {"problem": "do not divide into groups of 128", "got": r"blocks\.0\.up"},
        empty(),
        full,
        odd,
    )
    thin = accel.init_empty_weights(lambda: nn.Sequential(nn.Linear(1, 4)))
    refused(
        accel.errors.ConfigError,
        {"problem": "no layers with one input", "fix": r"skip=\('0',\)"},
        thin,
        full,
        accel.engines.quantized.Torchao(),
    )
    with_mslk = accel.engines.quantized.Torchao(kind="int4")
    refused(accel.AccelError, {"where": r"Torchao\.kind"}, empty(), full, with_mslk)
    if not torch.cuda.is_available():
        refused(
            accel.errors.DeviceError,
            {"problem": "float8_dynamic.*on this device"},
            empty(),
            full,
            accel.engines.quantized.Torchao(kind="float8_dynamic"),
        )
    wide = accel.init_empty_weights(lambda: Net(blocks=4))
    refused(accel.errors.CheckpointError, {"problem": r"missing 'blocks\.3\.\w+\.weight'"}, wide, full, four)

    done = accel.engines.quantized.load_quantized(ctx, empty(), full, config=four)
    refused(
        accel.errors.ConfigError, {"problem": "quantized already", "got": r"blocks\.0\.up\.weight"}, done, full, four
    )
    with assert_raises(accel.errors.ConfigError, fix="load_quantized"):
        accel.bigmodel.load_checkpoint_in_model(ctx, done, full)
    packed = accel.save_model(ctx, done, tmp_path / "packed")
    refused(
        accel.errors.CheckpointError,
        {"problem": "not quantized by"},
        empty(),
        packed,
        accel.engines.quantized.Bitsandbytes(double=True),
    )
    refused(
        accel.errors.CheckpointError,
        {"problem": "not quantized by"},
        empty(),
        packed,
        accel.engines.quantized.Bitsandbytes(kind="fp4"),
    )
    refused(accel.errors.CheckpointError, {"problem": "fit the model"}, empty(), packed, eight)
    rows = accel.save_model(
        ctx, accel.engines.quantized.load_quantized(ctx, empty(), full, config=eight), tmp_path / "rows"
    )
    refused(
        accel.errors.CheckpointError,
        {"problem": "not quantized by"},
        empty(),
        rows,
        accel.engines.quantized.Torchao(kind="int8_dynamic"),
    )

    places = elsewhere(accel.engines.quantized.describe_quantized(empty(), four), "disk", "cpu")
    refused(
        accel.errors.ConfigError,
        {"problem": "homed in files", "fix": "save_model"},
        empty(),
        full,
        four,
        device_map=places,
    )
    plain = elsewhere(accel.bigmodel.describe(empty()), "cpu", "cpu:0")
    refused(
        accel.errors.ConfigError,
        {"problem": "before it is quantized", "fix": "describe_quantized"},
        empty(),
        full,
        four,
        device_map=plain,
    )
