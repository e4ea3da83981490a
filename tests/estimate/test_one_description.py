# SPDX-License-Identifier: Apache-2.0
"""`accel estimate`, `--mesh`, `--device-map` and `accel plan` say the same number for the same thing."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from catching import assert_raises
from estimates import OPTIMIZERS, STRATEGIES, largest_parts, read_config
from hypothesis import given, settings, strategies as st
from profiles import share
from safetensors.torch import save_file
from torch import nn

import accel
from accel.cli import main
from accel.estimate import EstimatedStep, Input, find_source, measure, rank_memory, read_source
from accel.topology import Axes


def _read(path: Path, inputs: Sequence[Input] = ()) -> Any:
    return read_source(find_source(str(path)), inputs)


@pytest.fixture(scope="module", autouse=True)
def _by_sizes() -> Iterator[None]:
    """Stages follow from the sizes, as a record takes long."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_plan", "_estimate_tables"):
            patch.setattr(f"accel.cli.{name}.with_recorded_calls", lambda model, _: model)
        yield


def said(command: str, source: Path | str, *words: object) -> dict[str, Any]:
    """The answer of a command for programs."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([command, str(source), *map(str, words), "--json"]) == 0
    return json.loads(out.getvalue())


@contextlib.contextmanager
def config(fields: Mapping[str, Any]) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(fields))
        yield path


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Configurations of transformers of several families, with or without a class and a dtype."""
    kind, name = draw(st.sampled_from([("llama", "LlamaForCausalLM"), ("qwen3", ""), ("gpt2", "GPT2LMHeadModel")]))
    heads = draw(st.sampled_from([4, 8]))
    width = heads * draw(st.sampled_from([8, 16]))
    layers = draw(st.integers(1, 3))
    fields: dict[str, Any] = {"model_type": kind, "vocab_size": draw(st.integers(50, 200))}
    if kind == "gpt2":
        fields |= {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": draw(st.integers(100, 300))}
    else:
        fields |= {
            "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 4,
            "intermediate_size": draw(st.integers(20, 200)), "tie_word_embeddings": draw(st.booleans()),
            "head_dim": width // heads,
        }  # fmt: skip
    if name:
        fields["architectures"] = [name]
    return fields | draw(st.sampled_from([{}, {"dtype": "bfloat16"}, {"torch_dtype": "float16"}]))


formats = st.sampled_from(["fp32", "bf16", "pure-bf16"])
optimizers = st.sampled_from(list(OPTIMIZERS))


@given(configs(), formats, optimizers, st.sampled_from([1, 2, 3, 8]), st.sampled_from(["1x64", "3x100"]))
@settings(max_examples=share(0.6), deadline=None)
def test_a_row_is_the_mesh_of_one_axis(
    fields: dict[str, Any], precision: str, optimizer: str, nproc: int, called: str
) -> None:
    words = ["--precision", precision, "--optimizer", optimizer, "--input", called]
    with config(fields) as path:
        table = said("estimate", path, *words, "--nproc", nproc, "--strategy", "ddp", "--strategy", "fsdp")
        for row in table["rows"]:
            mesh = said("estimate", path, *words, "--mesh", f"dp={nproc}", "--strategy", row["strategy"])
            for name in ("memory", "largest", "total"):
                assert row[name] == mesh[name], (row["strategy"], name)
            assert mesh["parameters"] == table["parameters"]


def words_of(options: Mapping[str, Any]) -> list[str] | None:
    """The words of `accel estimate --mesh` for a choice of `accel plan`; None for one that has no words."""
    step, plan = options["step"], options["plan"]
    if not step["held"] or plan["stages_per_rank"] > 1:
        return None
    words = ["--strategy", step["strategy"], "--micro-batches", str(step["micro_batches"])]
    words += ["--context", plan["context"], "--balance", step["balance"]]
    return [
        *words,
        *["--recompute"] * step["recompute"],
        *(["--keep", step["keep"]] if step["keep"] else []),
        *["--sequence"] * plan["sequence"],
    ]


@given(configs(), formats, optimizers, st.sampled_from([1, 4, 8]), st.sampled_from([1, 2]), st.integers(2, 40))
@settings(max_examples=share(0.3), deadline=None)
def test_a_choice_is_what_the_estimate_of_its_mesh_says(
    fields: dict[str, Any], precision: str, optimizer: str, count: int, rows: int, memory: int
) -> None:
    words = ["--precision", precision, "--optimizer", optimizer]
    flags = f"--ranks {count} --memory {memory}MB --reserve 1MB --rows {rows} --tokens 64 --json"
    with config(fields) as path:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["plan", str(path), *words, *flags.split()]) in (0, 1)
        found = json.loads(out.getvalue())
        compared = 0
        for row in (*found["fitting"], *found["too_large"]):
            if (options := words_of(row["options"])) is None:
                continue
            mesh = row["mesh"] or "dp=1"
            same = said("estimate", path, *words, *options, "--mesh", mesh, "--input", f"{rows}x64")
            assert row["options"]["memory"] == same["memory"], mesh
            assert (row["memory"], found["parameters"]) == (same["total"], same["parameters"])
            compared += 1
        assert compared


def mapped(source: Path | str, *words: str) -> int:
    """What `--device-map` says that a model's weights take."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["estimate", str(source), "--device-map", "cpu=1TB", "--json", *words]) == 0
    return accel.bigmodel.DeviceMap.decode(out.getvalue()).skeleton.weight_bytes


def assert_same_weights(source: Path | str) -> None:
    """Compare the weights of a table with those of a device map: as stored, and cast."""
    table = said("estimate", source)["weights"]
    assert mapped(source) == table["stored"]
    assert mapped(source, "--dtype", "float32") == table["fp32"]
    assert mapped(source, "--dtype", "bfloat16") == table["bf16"]


SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 100,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "of a class": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, "dtype": "bfloat16"},
    "of no class": {"model_type": "qwen3", **SIZES, "head_dim": 8, "tie_word_embeddings": True},
    "without a head": {"model_type": "llama", "architectures": ["LlamaModel"], **SIZES, "torch_dtype": "float16"},
    "of parts that sizes do not tell": {"model_type": "llama", **SIZES, "mlp_bias": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_a_configuration_are_those_of_its_device_map(name: str) -> None:
    _ = pytest.importorskip("transformers")
    with config(CONFIGS[name]) as path:
        assert_same_weights(path)
        found, built = _read(path), _read(path, [Input((1, 8), "int64")] * 2)  # a mask: it is built
        assert (found.sizes is None) == (name not in ("of a class", "of no class"))
        assert built.sizes is None
        assert (built.count, built.weight_bytes()) == (found.count, found.weight_bytes())


def test_activations_of_a_configuration_are_those_of_its_code() -> None:
    _ = pytest.importorskip("transformers")
    wide = {"model_type": "llama", **SIZES, "hidden_size": 256, "num_key_value_heads": 4, "intermediate_size": 512}
    with config(wide) as path:
        made, sizes = read_config(path), _read(path)
        code = measure(made.make, "code", [Input((2, 256), "int64")], labelled=True)
    for precision in ("fp32", "bf16", "pure-bf16"):
        for name, how in STRATEGIES.items():
            step = how.of(EstimatedStep(precision=precision, rows=2, tokens=256))
            found = [largest_parts(each, Axes(dp=4), step, how.plan)["activations"] for each in (code, sizes)]
            assert found[0] == pytest.approx(found[1], rel=0.02), (precision, name)


shapes = st.lists(st.integers(0, 9), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
names = st.sampled_from(["embed.weight", "layers.0.weight", "layers.1.weight", "head.bias", "steps"])


@given(st.dictionaries(names, st.tuples(shapes, dtypes), min_size=1))
@settings(deadline=None)
def test_weights_of_headers_are_those_of_their_device_map(some: dict[str, tuple[list[int], torch.dtype]]) -> None:
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in some.items()}
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        save_file(tensors, path)
        assert_same_weights(path)
        assert said("estimate", path)["weights"]["stored"] == sum(each.nbytes for each in tensors.values())


class Net(nn.Module):
    """Shared and frozen weights, buffers that are stored and one that is not, and a block of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        kinds = (torch.float32, torch.float16, torch.float32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16, dtype=each), nn.BatchNorm1d(16)) for each in kinds)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].requires_grad_(False)
        self.register_buffer("cache", torch.zeros(7), persistent=False)
        self.register_buffer("places", torch.arange(9))


def test_weights_of_code_are_those_of_its_device_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "described_nets", sys.modules[__name__])
    assert_same_weights("described_nets:Net")
    tensors = {id(each): each for each in Net().state_dict(keep_vars=True).values()}
    assert said("estimate", "described_nets:Net")["weights"]["stored"] == sum(each.nbytes for each in tensors.values())


@settings(max_examples=share(0.1), deadline=None)
@given(st.sampled_from(list(STRATEGIES)), formats, st.sampled_from([1, 2, 8]))
def test_a_model_without_sizes_has_meshes_of_data_parallelism_alone(strategy: str, precision: Any, nproc: int) -> None:
    model = measure(Net, "Net")
    how = STRATEGIES[strategy]
    step = how.of(EstimatedStep(precision=precision))
    axis = "dp_shard" if how.name == "fsdp" else "dp_replicate"
    alone = rank_memory(model, Axes(dp=nproc), step, how.plan)
    assert rank_memory(model, Axes(**{axis: nproc}), step, how.plan) == alone
    with assert_raises(accel.errors.ConfigError, problem="the blocks of this model are not known"):
        _ = rank_memory(model, Axes(dp=nproc, tp=2), step, how.plan)
