# SPDX-License-Identifier: Apache-2.0
"""The example that pretrains a GPT: each model's losses are the same on every mesh, and it learns on real processes.

A transformer of torch's own layers trains alike, too.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processes import patience
from torch import nn

import accel
from accel.parallel import Axes
from accel.testing import Simulator

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES: dict[str, Any] = {"size": 64, "depth": 4, "vocabulary": 256, "length": 32, "batch": 8, "lr": 1e-2}
Losses = Callable[[str, Axes, str], list[float]]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example, whose text is read once, with a loss of models of transformers, too."""
    module = load("gpt")
    rows, sum_of_losses = module.load_words(SIZES["vocabulary"], SIZES["length"])[:64], module.sum_of_losses
    module.load_words = lambda *_: rows
    module.sum_of_losses = lambda output, targets: sum_of_losses(getattr(output, "logits", output), targets)
    return module


def models_of(example: ModuleType) -> dict[str, Callable[..., nn.Module]]:
    """Return functions to take the place of the example's `Gpt`: itself, torch's layers, models of transformers."""
    transformer = load("engines").Transformer

    def of_transformers(
        name: str, ctx: accel.DistContext, width: int, depth: int, vocabulary: int, length: int
    ) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": depth, "n_positions": length}
        sizes |= {"num_attention_heads": 4, "intermediate_size": 2 * width, "num_local_experts": 4, "use_cache": False}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes |= {} if name == "gpt2" else {"num_key_value_heads": 2}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))

    others = {name: partial(of_transformers, name) for name in ("llama", "gpt2", "mixtral")}
    # no layer but the head has 256 outputs
    return {"gpt": example.Gpt, "transformer": lambda *_: transformer(32), **others}


@pytest.fixture(scope="module")
def losses(ranks: Simulator, example: ModuleType) -> Iterator[Losses]:
    """A function from model, mesh and strategy to the loss of each step; in float64, so that rounding hides nothing."""
    known: dict[tuple[str, Axes, str], list[float]] = {}
    models = models_of(example)

    def train(name: str, axes: Axes, strategy: Any) -> list[float]:
        if (name, axes, strategy) not in known:
            # experts of transformers multiply in 32 bits alone
            torch.set_default_dtype(torch.float32 if name == "mixtral" else torch.float64)
            example.Gpt = models[name]
            with tempfile.TemporaryDirectory() as out:

                def rank(ctx: accel.DistContext) -> None:
                    ctx = accel.replace(ctx, mesh=str(axes) or "dp=1", strategy=strategy)
                    example.main(ctx, steps=3, out=out, **SIZES)

                ranks.run(rank, axes.world_size, default_group=True, timeout_s=300)
                rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
            known[name, axes, strategy] = [row["loss"] for row in rows]
        return known[name, axes, strategy]

    yield train
    torch.set_default_dtype(torch.float32)


def assert_law(losses: Losses, name: str, axes: Axes, strategy: str) -> None:
    if name in ("llama", "gpt2", "mixtral"):
        pytest.importorskip("transformers", reason="needs accel-torch[transformers]")
    expected = losses(name, Axes(), "ddp")
    assert len(expected) == 3
    assert losses(name, axes, strategy) == pytest.approx(expected, rel=1e-5 if name == "mixtral" else 1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "axes", "strategy"),
    [
        ("gpt", Axes(tp=2), "ddp"),
        ("gpt", Axes(cp=2), "ddp"),
        pytest.param("transformer", Axes(dp=2), "fsdp", marks=pytest.mark.slow),
        pytest.param("llama", Axes(cp=2), "ddp", marks=pytest.mark.slow),
        ("gpt2", Axes(pp=2), "ddp"),
        ("mixtral", Axes(dp=2, ep=2), "fsdp"),
    ],
    ids=str,
)
def test_a_model_trains_alike_on_one_axis(losses: Losses, name: str, axes: Axes, strategy: str) -> None:
    assert_law(losses, name, axes, strategy)


MESHES = (
    (Axes(dp=2), "ddp"),
    (Axes(dp=2), "fsdp"),
    (Axes(tp=2), "ddp"),
    (Axes(cp=2), "ddp"),
    (Axes(pp=2), "ddp"),
    (Axes(dp=2, tp=2), "fsdp"),
    (Axes(dp=2, tp=2), "ddp"),
    (Axes(dp=2, cp=2), "fsdp"),
    (Axes(cp=2, tp=2), "ddp"),
    (Axes(pp=2, dp=2), "fsdp"),
)
MODELS = ("gpt", "transformer", "llama", "gpt2", "mixtral")
# two models on each mesh: docs/families.md has every model on every mesh
ON_MESHES = [(MODELS[(at + later) % 5], *mesh) for at, mesh in enumerate(MESHES) for later in (0, 2)]
OF_EXPERTS = (("mixtral", Axes(tp=2, ep=2), "ddp"), ("mixtral", Axes(dp=2, tp=2, ep=4), "fsdp"))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "axes", "strategy"), [*ON_MESHES, *OF_EXPERTS], ids=str)
def test_models_train_alike_on_every_mesh(losses: Losses, name: str, axes: Axes, strategy: str) -> None:
    assert_law(losses, name, axes, strategy)


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_has_the_same_rows_however_many_fit(
    losses: Losses, example: ModuleType, ranks: Simulator, world: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    take_step, taken = example.take_step, list[int]()

    def full(ctx: accel.DistContext, state: accel.TrainState, batch: accel.Batch, *rest: Any) -> Any:
        taken.append(len(batch.data))
        # the last rank has less memory, and finds out in a later step
        if ctx.rank == world - 1 and state.updates == 1 and len(batch.data) * world > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return take_step(ctx, state, batch, *rest)

    expected = losses("gpt", Axes(), "ddp")
    monkeypatch.setattr(example, "take_step", full)
    monkeypatch.setattr(example, "Gpt", models_of(load("gpt"))["gpt"])
    torch.set_default_dtype(torch.float64)
    _ = ranks.run(lambda ctx: example.main(ctx, steps=3, out=str(tmp_path), **SIZES), world, default_group=True)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-12)
    assert all(row["time"]["flops_per_s"] > 0 for row in rows)
    assert set(taken) == {8 // world, 4 // world, 2 // world}


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2"])
def test_it_learns_on_real_processes(mesh: str, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("accel")), "launch", "--nproc-per-node", "2", "--cpu", "--mesh", mesh]
    sizes = "--size 64 --depth 4 --length 64 --vocabulary 512"
    words = [*sizes.split(), "--steps", "40", "--batch", "16", "--lr", "3e-3"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "gpt.py"), *words, "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=patience(120), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    assert rows[0]["loss"] > 5.8  # a word is one of 512: ln 512 = 6.24
    assert rows[-1]["loss"] < 4.5
    assert rows[-1]["time"]["flops_per_s"] > 0
