# SPDX-License-Identifier: Apache-2.0
"""Slips of a first script with a big model: typed errors that say what to write, before anything changes."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from tables import rows
from torch import nn

import accel
from accel.errors import AccelError
from accel.estimate._sources import read_headers


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return accel.save_model(accel.single("cpu"), make(), tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"device_map": "meta"}, {"problem": "a device without memory", "got": "'meta'"}),
        (
            {"dtype": torch.int8},
            {
                "problem": "invalid dtype of weights",
                "expected": "a floating-point dtype",
                "got": r"torch\.int8",
                "where": "dtype=",
                "fix": "load_quantized",
            },
        ),
        (
            {"readers": 0},
            {"problem": "the number of readers is not valid", "expected": "an integer from 1", "got": "^0$"},
        ),
        (
            {"rename": {"old": "new"}},
            {"problem": "the recipes are not valid", "expected": "a function", "fix": r'Recipe\("rename", old, new\)'},
        ),
        (
            {"rename": accel.checkpoint.Recipe("rename", "old", "new")},
            {"problem": "the recipes are not valid", "fix": r"rename=\[recipe\]"},
        ),
        (
            {"allow_missing": True},
            {"problem": "the names are not valid", "got": "True", "where": "allow_missing=", "fix": r'"\*" allows all'},
        ),
        ({"allow_unexpected": [3]}, {"problem": "the names are not valid", "got": "^3$", "where": "allow_unexpected="}),
    ],
)
def test_arguments_of_a_load(folder: Path, options: dict[str, Any], fields: dict[str, str]) -> None:
    model = accel.init_empty_weights(make)
    with assert_raises(AccelError, **fields):
        accel.bigmodel.load_checkpoint_in_model(accel.single("cpu"), model, folder, **options)
    assert all(each.is_meta for each in model.parameters())


@pytest.mark.parametrize("path", [None, 3, b"weights"])
def test_a_path_that_is_none(path: Any) -> None:
    with assert_raises(accel.errors.ConfigError, problem="no path", expected="a path or URL"):
        accel.bigmodel.load_checkpoint_in_model(accel.single("cpu"), accel.init_empty_weights(make), path)


def test_names_that_an_iterator_gives_count_for_each_weight(folder: Path) -> None:
    model = accel.init_empty_weights(lambda: nn.Sequential(*make(), nn.Linear(4, 4)))
    names = iter(["2.weight", "2.bias"])
    accel.bigmodel.load_checkpoint_in_model(accel.single("cpu"), model, folder, allow_missing=names)
    assert model[2].bias.is_meta


def test_recipes_alone_lead_back(tmp_path: Path) -> None:
    with assert_raises(
        accel.errors.ConfigError,
        problem="the recipes are not valid",
        expected=r"a sequence of accel\.checkpoint\.Recipe, which lead",
    ):
        accel.save_model(accel.single("cpu"), make(), tmp_path, rename=str.upper)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: accel.bigmodel.describe(make),
        lambda folder: accel.bigmodel.load_checkpoint_in_model(accel.single("cpu"), make, folder),
        lambda folder: accel.dispatch_model(
            make, accel.infer_device_map(accel.bigmodel.describe(make()), {"cpu": "1MB"})
        ),
        lambda folder: accel.bigmodel.swap_models("cpu:0", make, make),
    ],
)
def test_a_function_in_place_of_its_model(call: Callable[[Path], object], folder: Path) -> None:
    with assert_raises(
        accel.errors.ConfigError,
        problem="the model is not a module",
        expected=r"a torch\.nn\.Module",
        got="make",
        fix="init_empty",
    ):
        call(folder)


def test_builders_that_return_no_model_or_name_no_device() -> None:
    with assert_raises(accel.errors.ConfigError, got="NoneType", where=r"init_empty_weights, what make\(\) returns"):
        accel.init_empty_weights(lambda: None)  # type: ignore[type-var, arg-type, return-value]
    with assert_raises(accel.errors.DeviceError, problem="no such device", got="'gpu'", where="init_on_device"):
        accel.bigmodel.init_on_device(make, "gpu")


def test_models_take_no_turns_on_a_device_without_memory() -> None:
    with assert_raises(accel.errors.DeviceError, problem="a device without memory"):
        accel.bigmodel.swap_models("meta", make(), make())


SKELETON = accel.bigmodel.describe(nn.Sequential(*(nn.Sequential(nn.Linear(256, 256)) for _ in range(3))))
MAP = accel.bigmodel.check_device_map(SKELETON, {"": 0, "1": "cpu"})
PLACES = {"": 0, "1": "cpu", "2": 1}


@rows(
    "call, fields",
    [
        (
            lambda: accel.bigmodel.explain(SKELETON),
            {
                "problem": "the device map is not valid",
                "got": "Skeleton",
                "where": "explain",
                "fix": r"infer_device_map\(",
            },
        ),
        (
            lambda: accel.bigmodel.explain(MAP, compute=0.01),
            {"problem": "seconds are given by segment", "fix": r"home, 0\.01\)"},
        ),
        (lambda: accel.bigmodel.explain(MAP, compute={"4": 1.0}), {"problem": "no such segment", "got": "'4'"}),
        (
            lambda: accel.bigmodel.explain(MAP, bandwidth="25GB"),
            {"problem": "no bandwidth", "expected": "bytes a second", "got": "'25GB'"},
        ),
        (lambda: accel.bigmodel.pass_seconds(SKELETON, {}, 1e9), {"problem": "the device map is not valid"}),
        (
            lambda: accel.bigmodel.check_device_map(SKELETON, "auto"),
            {"problem": "places are given by path", "got": "'auto'", "fix": "infer_device_map"},
        ),
        (
            lambda: accel.bigmodel.check_device_map(SKELETON, {0: "cpu"}),
            {"problem": "places are given by path", "got": r"\{0: 'cpu'\}"},
        ),
        (
            lambda: accel.bigmodel.check_device_map(SKELETON, PLACES, max_memory={0: "1MB", "cpu": "1MB"}),
            {"problem": "a place without a limit", "got": "'cuda:1'", "where": "max_memory", "fix": "Name it there"},
        ),
        (
            lambda: accel.infer_device_map(SKELETON, {"gpu": "1MB"}),
            {"problem": "the place is not valid", "got": "'gpu'", "fix": "A GPU is its number"},
        ),
        (
            lambda: accel.infer_device_map(SKELETON, {"dsk": None}),
            {"problem": "the place is not valid", "fix": r"Did you mean `disk`\?"},
        ),
        (
            lambda: accel.infer_device_map(SKELETON, {"cuda": "1MB"}),
            {"problem": "the place is not valid", "got": "'cuda'", "fix": "A GPU is its number"},
        ),
        (
            lambda: accel.infer_device_map(SKELETON, {}),
            {"problem": "no device", "fix": r"available_memory\(device, reserve='2GB'\)"},
        ),
    ],
)
def test_arguments_of_a_plan(call: Callable[[], object], fields: dict[str, str]) -> None:
    with assert_raises(accel.errors.ConfigError, **fields):
        call()


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        (
            lambda: [1, 2],
            {"problem": "the value is not a source of weights", "got": "list", "where": "dispatch_model, source="},
        ),
        (
            lambda: make(),
            {"problem": "the value is not a source of weights", "expected": "a path, a mapping", "got": "Sequential"},
        ),
        (
            lambda: {"0.weight": torch.ones(4, 4).numpy()},
            {"problem": "a source without values", "got": "ndarray", "where": r"source\['0.weight'\]"},
        ),
        (
            lambda: make().to("meta").state_dict(),
            {"problem": "a source without values", "got": "one on the meta device"},
        ),
        (
            lambda: {name: tensor.long() for name, tensor in make().state_dict().items()},
            {"problem": "4 weights", "got": "'0.weight'.*F32.*I64 in the source"},
        ),
    ],
)
def test_sources_of_a_run(source: Callable[[], Any], fields: dict[str, str]) -> None:
    model = accel.init_empty_weights(make)
    device_map = accel.infer_device_map(accel.bigmodel.describe(model), {"cpu": "1MB"})
    with assert_raises(AccelError, **fields):
        accel.dispatch_model(model, device_map, source=source())
    with accel.dispatch_model(model, device_map, source=make().double().state_dict()) as run:
        assert run.model(torch.ones(1, 4)).dtype == torch.float32


def test_an_index_without_metadata(tmp_path: Path) -> None:
    ctx = accel.single("cpu")
    trained = make()
    accel.save_model(ctx, trained, tmp_path, max_shard_size="100B")
    index = tmp_path / "model.safetensors.index.json"
    text = json.loads(index.read_text())
    for kept in ({"weight_map": text["weight_map"]}, {"metadata": None, "weight_map": text["weight_map"]}):
        index.write_text(json.dumps(kept))
        model = accel.bigmodel.load_checkpoint_in_model(ctx, accel.init_empty_weights(make), tmp_path)
        assert torch.equal(model[1].weight, trained[1].weight)
    accel.save_model(ctx, trained, tmp_path, max_shard_size="100B")
    assert json.loads(index.read_text()) == text
    index.write_text("{}")
    with assert_raises(accel.errors.CheckpointError, expected='JSON with "weight_map", the file of each tensor'):
        accel.bigmodel.load_checkpoint_in_model(ctx, accel.init_empty_weights(make), tmp_path)


def test_a_state_dict_inside_of_a_file_of_torch(tmp_path: Path) -> None:
    torch.save({"state_dict": make().state_dict(), "epoch": 3}, tmp_path / "last.pt")
    with assert_raises(accel.errors.CheckpointError, got="under 'state_dict'", fix=r"weights_only=True\)\[name\]"):
        accel.bigmodel.load_checkpoint_in_model(
            accel.single("cpu"), accel.init_empty_weights(make), tmp_path / "last.pt"
        )


def test_a_model_that_takes_turns_is_not_pickled() -> None:
    first, x = make(), torch.randn(2, 4)
    expected = first(x)
    with accel.bigmodel.swap_models("cpu:0", first, make()):
        with assert_raises(
            accel.errors.StreamError, problem="takes turns cannot be pickled", where="^Sequential$", fix=r"swap\.close"
        ):
            pickle.dumps(first)
        assert torch.equal(copy.deepcopy(first)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(first))(x), expected)


def test_an_index_that_names_tensors_which_its_file_lacks(tmp_path: Path) -> None:
    ctx = accel.single("cpu")
    accel.save_model(ctx, trained := make(), tmp_path, max_shard_size="100B")
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    file, other = whole["weight_map"]["0.weight"], whole["weight_map"]["1.weight"]
    assert file != other
    for listed in ({"0.more": file}, {"0.weight": other}):
        index.write_text(json.dumps({**whole, "weight_map": {**whole["weight_map"], **listed}}))
        [(name, named)] = listed.items()
        for path in (tmp_path, index):
            with assert_raises(
                accel.errors.CheckpointError,
                problem="the index names tensors that its files lack",
                expected=f"'{name}' in {named}",
            ):
                accel.bigmodel.load_checkpoint_in_model(ctx, accel.init_empty_weights(make), path, allow_missing="*")
        with assert_raises(accel.errors.CheckpointError, problem="the index names tensors that its files lack"):
            read_headers(tmp_path)
    index.write_text(json.dumps({**whole, "weight_map": {"0.weight": file, "1.weight": other, "1.bias": other}}))
    model = accel.bigmodel.load_checkpoint_in_model(
        ctx, accel.init_empty_weights(make), tmp_path
    )  # files may hold more
    assert torch.equal(model[0].bias, trained[0].bias)
