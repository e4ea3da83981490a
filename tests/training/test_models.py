# SPDX-License-Identifier: Apache-2.0
"""Models for others: whole tensors from any layout, and files that other libraries load."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from catching import assert_raises
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import accel
from accel.errors import CheckpointError, CollectiveMismatch, ConfigError
from accel.testing import simulate

WORLD = 4
LAYOUTS = ["ddp", "fsdp", "hsdp", "tensor", "fsdp and tensor"]


class Tied(nn.Module):
    """Tied weights, buffers, a 0-d tensor, a non-contiguous one, an odd length and another dtype."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = nn.Embedding(11, 6)
            self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
            self.scale = nn.Parameter(torch.tensor([0.5]).bfloat16())
            self.register_buffer("turned", torch.randn(3, 2).t())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def reference() -> dict[str, torch.Tensor]:
    return dict(Tied().state_dict())


def spread(ctx: accel.DistContext, layout: str) -> nn.Module:
    model: Any = Tied()
    plan = {"body.0": ColwiseParallel(), "body.2": RowwiseParallel()}
    if layout == "ddp":
        return accel.prepare_model(ctx, model)
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (WORLD,))
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "tensor":
        parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
    return model


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    equal = (found[k].dtype == expected[k].dtype and found[k].equal(expected[k]) for k in expected)
    return found.keys() == expected.keys() and all(equal)


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Load what an index lists, or the single file."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    places = json.loads(index.read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in places.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_plain_models_tensors(layout: str, tmp_path: Path) -> None:
    def rank(ctx: accel.DistContext) -> tuple[Any, Any]:
        model = spread(ctx, layout)
        one = accel.get_state_dict(ctx, model, dst=1)
        everywhere = accel.get_state_dict(ctx, model, dst=None)
        assert accel.save_model(ctx, model, tmp_path / "whole") == tmp_path / "whole"
        accel.save_model(ctx, model, tmp_path / "parts", max_shard_size=150)
        return one, everywhere

    results = simulate(rank, WORLD, default_group=True)
    expected = reference()
    assert [one is not None for one, _ in results] == [False, True, False, False]
    for found in (results[1][0], *(each for _, each in results)):
        assert list(found) == list(expected)
        assert same(found, expected)
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    written = {name: tensor for name, tensor in expected.items() if name != "head.weight"}
    assert same(load_folder(tmp_path / "whole"), written)
    assert same(load_folder(tmp_path / "parts"), written)
    assert os.listdir(tmp_path / "whole") == ["model.safetensors"]
    with safe_open(tmp_path / "whole" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    sizes = {name: os.stat(tmp_path / "parts" / name).st_size for name in os.listdir(tmp_path / "parts")}
    assert len(sizes) == 8
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())


@pytest.mark.parametrize("parts", [None, "layers"])
def test_compiled_models_keep_their_names(parts: str | None, tmp_path: Path) -> None:
    model = Tied()
    if parts is None:
        model = torch.compile(model, backend="eager")  # pyright: ignore[reportAssignmentType]
    else:
        model.body[0] = torch.compile(model.body[0], backend="eager")  # pyright: ignore[reportArgumentType]
    accel.save_model(accel.single(), model, tmp_path)
    assert same(accel.get_state_dict(accel.single(), model, dst=None), reference())
    assert load_folder(tmp_path).keys() == reference().keys() - {"head.weight"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_built_is_inside_of_every_wrapper(layout: str) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        model = spread(ctx, layout)
        inner = accel.unwrap_model(torch.compile(model, backend="eager"))  # pyright: ignore[reportArgumentType]
        return isinstance(inner, Tied) and inner is accel.unwrap_model(inner) is accel.unwrap_model(model)

    assert simulate(rank, WORLD, default_group=True) == [True] * WORLD


def test_where_ranks_differ_all_is_rank_0s_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ranks: Any
) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        for parameter in model.parameters():
            nn.init.constant_(parameter, float(ctx.rank))
        accel.save_model(ctx, model, tmp_path, max_shard_size=20)

    with caplog.at_level(logging.WARNING, logger="accel.checkpoint"):
        ranks.run(rank, 2)
    assert all(not tensor.any() for tensor in load_folder(tmp_path).values())
    assert [r.getMessage() for r in caplog.records if "rank 0's" in r.getMessage()] != []


def test_other_files_stay_and_rivals_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / name).write_text("{}")
    accel.save_model(accel.single(), Tied(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors", "pytorch_model.bin"]
    assert "pytorch_model.bin stays" in caplog.text


def test_names_of_tied_tensors_that_the_files_lack_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    cast(Any, tied[2]).weight = tied[0].weight
    _ = accel.save_model(accel.single(), tied, tmp_path / "tied")
    assert "not 2.weight (tied to 0.weight)" in caplog.text
    caplog.clear()
    _ = accel.save_model(accel.single(), nn.Linear(4, 4), tmp_path / "untied")
    assert "tied" not in caplog.text


def test_extra_state_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"scale": 3}

    accel.save_model(accel.single(), nn.Sequential(Extra(2, 2)), tmp_path)
    assert load_folder(tmp_path).keys() == {"0.weight", "0.bias"}
    assert "0._extra_state is left out" in caplog.text


@pytest.mark.parametrize(
    ("model", "options", "error", "fields"),
    [
        (
            nn.Linear(2, 2, device="meta"),
            {},
            CheckpointError,
            {"problem": "a tensor without values", "where": "weight"},
        ),
        (nn.Linear(2, 2, dtype=torch.complex128), {}, CheckpointError, {"problem": "no complex128", "where": "weight"}),
        (nn.Identity(), {}, CheckpointError, {"problem": "the model has no tensors"}),
        (
            nn.Linear(2, 2),
            {"max_shard_size": "many"},
            ConfigError,
            {"problem": "the size is not valid", "expected": "'5GB'", "got": "'many'"},
        ),
    ],
)
def test_what_cannot_be_written_is_refused_on_all_ranks(
    model: nn.Module, options: dict[str, Any], error: Any, fields: dict[str, str], tmp_path: Path, ranks: Any
) -> None:
    def rank(ctx: accel.DistContext) -> None:
        with assert_raises(error, **fields):
            accel.save_model(ctx, model, tmp_path / "out", **options)

    ranks.run(rank, 2)
    assert not (tmp_path / "out").exists()


def test_ranks_with_other_models_or_sizes_are_told_both(tmp_path: Path, ranks: Any) -> None:
    def rank(ctx: accel.DistContext) -> None:
        with assert_raises(CollectiveMismatch, expected="save_model"):
            accel.save_model(ctx, nn.Linear(2, 2 + ctx.rank), tmp_path)
        with assert_raises(CollectiveMismatch, expected="get_state_dict"):
            accel.get_state_dict(ctx, nn.Linear(2, 2), dst=ctx.rank)

    ranks.run(rank, 2)


def test_a_disk_that_fails_on_one_rank_fails_all_and_leaves_the_old_weights(tmp_path: Path, ranks: Any) -> None:
    accel.save_model(accel.single(), Tied(), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def rank(ctx: accel.DistContext) -> None:
        from accel.storage import AFTER_WRITE

        def full(path: Path) -> None:
            raise OSError(28, "No space left on device")

        token = AFTER_WRITE.set(full if ctx.rank == 1 else None)
        with assert_raises(CheckpointError, problem="No space left"):
            accel.save_model(ctx, Tied(), tmp_path, max_shard_size=100)
        AFTER_WRITE.reset(token)

    ranks.run(rank, 2)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_save_writes_rank_0s_tensors_over_what_was_there(tmp_path: Path, ranks: Any) -> None:
    path = tmp_path / "new" / "vectors.safetensors"

    def rank(ctx: accel.DistContext) -> None:
        for value in (1.0, 2.0):
            assert accel.save(ctx, {"x": torch.full((2, 3), value)} if ctx.is_main_process else None, path) == path

    ranks.run(rank, 2)
    assert load_file(path)["x"].equal(torch.full((2, 3), 2.0))
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("tensors", "fields"),
    [
        ([torch.ones(1)], {"problem": "the value does not map names to tensors", "got": "list"}),
        (None, {"problem": "the value does not map names to tensors", "got": "NoneType"}),
        ({"x": 1}, {"problem": "the value is not a tensor", "got": "int", "where": "save, x", "fix": "save_state"}),
        ({"x": torch.eye(2).to_sparse()}, {"problem": "layout", "where": "save, x"}),
    ],
)
def test_save_refuses_what_is_no_tensors(tensors: Any, fields: dict[str, str], tmp_path: Path, ranks: Any) -> None:
    def rank(ctx: accel.DistContext) -> None:
        with assert_raises(ConfigError, problem="the name of the file is not valid", got="'a b'"):
            accel.save(ctx, {"x": torch.ones(1)}, tmp_path / "a b")
        with assert_raises(CheckpointError, **fields):
            accel.save(ctx, tensors, tmp_path / "a.safetensors")

    ranks.run(rank, 2)
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", ["5GB", 20_000])
def test_transformers_loads_what_was_saved(size: int | str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    options = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, tie_word_embeddings=True, **options)
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(tmp_path)
    accel.save_model(accel.single(), model, tmp_path, max_shard_size=size)
    loaded, told = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert ("index" in "".join(os.listdir(tmp_path))) == (size != "5GB")


def test_weights_for_others_are_not_written_to_a_folder_named_as_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ctx, model = accel.single(), nn.Linear(2, 2)
    with assert_raises(
        ConfigError, problem="local folders", got="s3://bucket/out", where="save_model, folder", fix="upload it"
    ):
        accel.save_model(ctx, model, "s3://bucket/out")
    with assert_raises(ConfigError, problem="local folders", where="save, path"):
        accel.save(ctx, model.state_dict(), "s3://bucket/out.safetensors")
    with assert_raises(ConfigError, problem="no path", expected="a local path", got="Linear"):
        accel.save_model(ctx, tmp_path, model)  # pyright: ignore[reportArgumentType]
    assert os.listdir(tmp_path) == []
