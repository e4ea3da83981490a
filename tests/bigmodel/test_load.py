# SPDX-License-Identifier: Apache-2.0
"""Loading into models: values of every layout and dtype, all problems at once, and nothing half-loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from safetensors.torch import save_file
from torch import nn

import accel
from accel.bigmodel import load_checkpoint_in_model, open_weights
from accel.checkpoint import Recipe
from accel.errors import CheckpointError, ConfigError


class Model(nn.Module):
    def __init__(self, width: int = 16, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 100, bias=False)
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


def empty(**options: Any) -> Model:
    with torch.device("meta"):
        model = Model(**options)
    model.frequencies = torch.arange(4.0)
    return model


@pytest.fixture(scope="module")
def ctx() -> accel.DistContext:
    return accel.single("cpu")


@pytest.fixture(scope="module")
def trained() -> Model:
    torch.manual_seed(0)
    model = Model()
    for buffer in model.norm.buffers():
        buffer.copy_(torch.full_like(buffer, 3))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, trained: Model, ctx: accel.DistContext) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    accel.save_model(ctx, trained, folder / "one")
    accel.save_model(ctx, trained, folder / "sharded", max_shard_size="3KB")
    (folder / "bin").mkdir()
    torch.save(trained.state_dict(), folder / "bin" / "pytorch_model.bin")
    accel.save_state(ctx, folder / "run", {"model": trained, "other": 3}, step=1)
    return folder


def assert_same(one: nn.Module, other: nn.Module) -> None:
    facts = [dict(model.state_dict()) | dict(model.named_buffers()) for model in (one, other)]
    assert facts[0].keys() == facts[1].keys()
    for name, tensor in facts[0].items():
        assert torch.equal(tensor, facts[1][name]), name


@pytest.mark.parametrize(
    "path", ["one", "one/model.safetensors", "sharded", "bin", "bin/pytorch_model.bin", "run", "run/step-00000001"]
)
@pytest.mark.parametrize("is_empty", [True, False])
def test_every_layout_loads_into_models_with_and_without_values(
    ctx: accel.DistContext, folder: Path, trained: Model, path: str, is_empty: bool
) -> None:
    model = empty() if is_empty else Model()
    weight = model.embed.weight
    read: list[int] = []
    assert load_checkpoint_in_model(ctx, model, folder / path, advance=read.append) is model
    assert_same(model, trained)
    assert model.head.weight is model.embed.weight is weight
    assert model.norm.num_batches_tracked.dtype == torch.int64
    assert sum(read) == sum(each.nbytes for each in (*model.parameters(), *model.norm.buffers()))


@pytest.mark.parametrize("direct", [True, False])
def test_values_are_cast_and_integers_are_not(ctx: accel.DistContext, tmp_path: Path, direct: bool) -> None:
    weights = {"a": torch.randn(3000, 1001), "n": torch.arange(5)}
    save_file(weights, tmp_path / "model.safetensors")

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.empty(3000, 1001))
            self.register_buffer("n", torch.zeros(5, dtype=torch.int64))

    with torch.device("meta"):
        model = Two()
    load_checkpoint_in_model(ctx, model, tmp_path, "cpu", dtype=torch.bfloat16)
    assert torch.equal(model.a, weights["a"].bfloat16())
    assert torch.equal(model.n, weights["n"])
    half = Two().half()
    load_checkpoint_in_model(ctx, half, tmp_path)
    assert torch.equal(half.a, weights["a"].half())
    with assert_raises(
        ConfigError, problem="another dtype", expected=r"torch\.float16", got=r"torch\.bfloat16", where="dtype=, a"
    ):
        load_checkpoint_in_model(ctx, half, tmp_path, dtype=torch.bfloat16)


def test_all_problems_are_in_one_error_and_nothing_changes(
    ctx: accel.DistContext, tmp_path: Path, trained: Model
) -> None:
    weights = {name: tensor for name, tensor in trained.state_dict().items() if name != "head.weight"}
    weights["layers.0.biass"] = weights.pop("layers.0.bias")
    weights["layers.1.weight"] = torch.zeros(16, 17)
    weights["norm.weight"] = torch.zeros(16, dtype=torch.int32)
    save_file(weights, tmp_path / "model.safetensors")
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint_in_model(ctx, model, tmp_path)
    text = str(caught.value)
    for line in (
        "missing 'layers.0.bias' [16]; did you mean 'layers.0.biass'?",
        "'layers.1.weight': expected shape [16, 16], got [16, 17] in",
        "'norm.weight': expected F32, got I32 in",
        "unexpected 'layers.0.biass' [16] in",
        "model.safetensors",
    ):
        assert line in text
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    with assert_raises(CheckpointError, problem="missing") as caught:
        load_checkpoint_in_model(ctx, nn.Linear(3, 3), tmp_path, allow_unexpected="*")
    assert "unexpected '" not in str(caught.value)


def test_missing_and_unexpected_names_can_be_allowed(ctx: accel.DistContext, tmp_path: Path, trained: Model) -> None:
    weights = {name: tensor for name, tensor in trained.state_dict().items() if not name.startswith(("head", "norm"))}
    save_file(weights | {"extra.a": torch.zeros(2)}, tmp_path / "model.safetensors")
    model = Model()
    load_checkpoint_in_model(ctx, model, tmp_path, allow_missing=["norm.*"], allow_unexpected=["extra.*"])
    assert torch.equal(model.layers[1].weight, trained.layers[1].weight)
    assert torch.equal(model.norm.running_var, torch.ones(16))


def test_a_tied_tensor_with_two_values_is_refused(ctx: accel.DistContext, tmp_path: Path, trained: Model) -> None:
    weights = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    load_checkpoint_in_model(ctx, empty(), tmp_path)
    weights["head.weight"][3] += 1
    save_file(weights, tmp_path / "model.safetensors")
    model = empty()
    with assert_raises(
        CheckpointError, problem="two different tensors for one that the model ties", got=r"'embed\.weight'"
    ):
        load_checkpoint_in_model(ctx, model, tmp_path)
    assert model.embed.weight.is_meta
    untied = empty(tied=False)
    load_checkpoint_in_model(ctx, untied, tmp_path)
    assert torch.equal(untied.head.weight, weights["head.weight"])


def test_a_file_that_ends_early_leaves_the_model_as_it_was(
    ctx: accel.DistContext, folder: Path, trained: Model, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((folder / "one" / "model.safetensors").read_bytes())
    model = Model()
    state = model.state_dict

    def cut(*args: Any, **options: Any) -> Any:
        os.truncate(path, path.stat().st_size - 2000)
        return state(*args, **options)

    model.state_dict = cut  # type: ignore[method-assign]
    before = {name: tensor.clone() for name, tensor in state().items()}
    with assert_raises(CheckpointError, problem="too short", where=r"model\.safetensors"):
        load_checkpoint_in_model(ctx, model, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state().items())


def test_files_that_are_no_weights_tell_how_to_get_them(
    ctx: accel.DistContext, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    whole = (folder / "one" / "model.safetensors").read_bytes()
    path.write_bytes(whole[:-1])
    with assert_raises(
        CheckpointError, problem="ends before its tensors do", expected=f"{len(whole)} bytes", fix="again"
    ):
        load_checkpoint_in_model(ctx, empty(), path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000\n")
    with assert_raises(CheckpointError, problem="a Git LFS pointer", fix="git lfs pull"):
        load_checkpoint_in_model(ctx, empty(), tmp_path)
    monkeypatch.chdir(tmp_path)
    with assert_raises(ConfigError, problem="no weights", fix=r"snapshot_download\('some/model-1.5b'\)"):
        load_checkpoint_in_model(ctx, empty(), "some/model-1.5b")


def test_files_of_torch_save_run_no_code(tmp_path: Path, ctx: accel.DistContext) -> None:
    torch.save({"weight": print}, tmp_path / "a.bin")
    torch.save({"weight": 3}, tmp_path / "b.bin")
    torch.save(torch.zeros(2), tmp_path / "c.bin")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "d.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "e.bin").write_bytes(b"junk")
    for name, problem in [
        ("a", "cannot be read as weights"),
        ("b", "the value does not map names to weights"),
        ("c", "no weights by name"),
        ("d", r"before torch 1\.6"),
        ("e", "cannot be read as weights"),
    ]:
        with assert_raises(CheckpointError, problem=problem):
            open_weights(tmp_path / f"{name}.bin")
    base = torch.arange(24.0).view(4, 6)
    torch.save({"a": base.t(), "b": base[1:, 2:4], "c": base, "d": torch.tensor(True)}, tmp_path / "f.bin")
    with open_weights(tmp_path / "f.bin") as source:
        targets = {"a": torch.empty(6, 4), "b": torch.empty(3, 2), "c": torch.empty(4, 6)}
        source.read(list(targets.items()))
    assert torch.equal(targets["a"], base.t())
    assert torch.equal(targets["b"], base[1:, 2:4])
    assert torch.equal(targets["c"], base)


def test_checkpoints_of_several_modules_name_the_one_that_is_meant(ctx: accel.DistContext, tmp_path: Path) -> None:
    items = {"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)}
    accel.save_state(ctx, tmp_path, items, step=1)
    with assert_raises(ConfigError, problem="which module of the checkpoint is meant", got="first, second"):
        load_checkpoint_in_model(ctx, nn.Linear(2, 2), tmp_path)


def test_recipes_lead_from_the_file_to_the_model(ctx: accel.DistContext, tmp_path: Path) -> None:
    parts = {f"experts.{at}.{name}.weight": torch.randn(6, 4) for at in range(3) for name in ("gate", "up")}
    save_file(parts, tmp_path / "model.safetensors")
    recipes = [
        Recipe("stack", "experts.{expert}.gate.weight", "gate"),
        Recipe("stack", "experts.{expert}.up.weight", "up"),
        Recipe("concat", ("gate", "up"), "gate_up", dim=1),
        Recipe("transpose", "gate_up", "gate_up_t", dim=1, other=2),
    ]
    expected = torch.stack(
        [torch.cat([parts[f"experts.{at}.{name}.weight"] for name in ("gate", "up")]) for at in range(3)]
    )
    model = nn.Module()
    model.gate_up_t = nn.Parameter(torch.empty(3, 4, 12, device="meta"))
    load_checkpoint_in_model(ctx, model, tmp_path, rename=recipes)
    assert torch.equal(model.gate_up_t, expected.transpose(1, 2))
    with open_weights(tmp_path, rename=recipes[:-1]) as source:
        target = torch.empty(3, 12, 4)
        source.read([("gate_up", target)])
    assert torch.equal(target, expected)


@pytest.mark.parametrize("prepared", [False, True])
def test_recurrent_modules_built_empty(ctx: accel.DistContext, tmp_path: Path, prepared: bool) -> None:
    x = torch.randn(2, 3, 4)
    trained = nn.LSTM(4, 4, num_layers=2)  # it holds weak references to its weights
    accel.save_model(ctx, trained, tmp_path)
    model = accel.init_empty_weights(lambda: nn.LSTM(4, 4, num_layers=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model = accel.prepare_model(ctx, model) if prepared else model
    load_checkpoint_in_model(ctx, model, tmp_path)
    assert torch.equal(model(x)[0], trained(x)[0])
    for each in (model, trained):
        each(x)[0].sum().backward()
    optimizer.step()
    torch.optim.SGD(trained.parameters(), lr=1.0).step()
    assert torch.equal(model(x)[0], trained(x)[0])


def test_numbers_are_renamed_too_in_both_directions(ctx: accel.DistContext, tmp_path: Path) -> None:
    trained = nn.BatchNorm1d(4)  # it counts batches, in a tensor without dimensions
    trained(torch.randn(3, 4))
    recipes = [Recipe("rename", "module.{name...}", "{name...}")]
    accel.save_model(ctx, trained, tmp_path, rename=recipes)
    with open_weights(tmp_path) as source:
        assert "module.num_batches_tracked" in source.entries
    model = accel.init_empty_weights(lambda: nn.BatchNorm1d(4))
    load_checkpoint_in_model(ctx, model, tmp_path, rename=recipes)
    assert model.num_batches_tracked == 1


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (
            {"device_map": "auto"},
            {"problem": "the device map is not valid", "got": "'auto'", "fix": r"accel.infer_device_map\("},
        ),
        (
            {"device_map": {"": "cpu"}},
            {"problem": "the device map is not valid", "fix": r"accel.bigmodel.check_device_map\("},
        ),
        (
            {"device_map": "of another model"},
            {"problem": "the device map is of another model", "got": "no 'embed.weight'"},
        ),
        ({"dtype": "bfloat16"}, {"problem": "the dtype is not valid", "fix": "Pass torch.bfloat16"}),
        ({"dtype": 16}, {"problem": "the dtype is not valid", "expected": "one of torch's", "got": "^16$"}),
    ],
)
def test_maps_and_dtypes_that_are_none_are_refused(
    ctx: accel.DistContext, folder: Path, options: dict[str, Any], fields: dict[str, str]
) -> None:
    if options.get("device_map") == "of another model":
        options = {"device_map": accel.infer_device_map(accel.bigmodel.describe(nn.Linear(2, 2)), {"cpu": "1MB"})}
    model = empty()
    with assert_raises(ConfigError, **fields):
        load_checkpoint_in_model(ctx, model, folder / "one", **options)
    assert model.embed.weight.is_meta


def test_a_device_map_says_what_is_loaded(ctx: accel.DistContext, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(8192, 256), nn.ModuleList([nn.Linear(1024, 1024) for _ in range(2)]))

    trained = make()
    accel.save_model(ctx, trained, tmp_path)
    model = accel.init_empty_weights(make)
    device_map = accel.infer_device_map(accel.bigmodel.describe(model), {"cpu": "10MB", "disk": None})
    load_checkpoint_in_model(ctx, model, tmp_path, device_map)
    homes = {name: device_map.home[device_map.skeleton.segment_of(name)] for name, _ in model.named_parameters()}
    assert set(homes.values()) == {"cpu", "disk"}
    for name, weight in model.named_parameters():
        assert weight.is_meta == (homes[name] == "disk")
        assert weight.is_meta or torch.equal(weight, trained.get_parameter(name))
