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
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processes import patience

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
    """The example, whose text is read once, and whose `transformer` is that of examples/engines.py."""
    module, engines = load("gpt"), load("engines")
    rows, make_model = module.load_words(SIZES["vocabulary"], SIZES["length"]), module.make_model

    def make(ctx: accel.DistContext, name: str, *sizes: int) -> torch.nn.Module:
        if name != "transformer":
            return make_model(ctx, name, *sizes)
        with accel.seeding.seeded(ctx, 0):
            return engines.Transformer(32)  # no layer but the head has 256 outputs

    module.load_words, module.make_model = lambda *_: rows, make
    return module


@pytest.fixture(scope="module")
def losses(ranks: Simulator, example: ModuleType) -> Iterator[Losses]:
    """A function from model, mesh and strategy to the loss of each step; in float64, so that rounding hides nothing."""
    known: dict[tuple[str, Axes, str], list[float]] = {}

    def train(name: str, axes: Axes, strategy: Any) -> list[float]:
        if (name, axes, strategy) not in known:
            # experts of transformers multiply in 32 bits alone
            torch.set_default_dtype(torch.float32 if name == "mixtral" else torch.float64)
            with tempfile.TemporaryDirectory() as out:

                def rank(ctx: accel.DistContext) -> None:
                    ctx = accel.replace(ctx, mesh=str(axes) or "dp=1", strategy=strategy)
                    example.main(ctx, steps=3, out=out, model=name, **SIZES)

                ranks.run(rank, axes.world_size, default_group=True, timeout_s=300)
                rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
            known[name, axes, strategy] = [row["loss"] for row in rows]
        return known[name, axes, strategy]

    yield train
    torch.set_default_dtype(torch.float32)


def _check(losses: Losses, name: str, axes: Axes, strategy: str) -> None:
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
    _check(losses, name, axes, strategy)


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "axes", "strategy"), [*ON_MESHES, *OF_EXPERTS], ids=str)
def test_models_train_alike_on_every_mesh(losses: Losses, name: str, axes: Axes, strategy: str) -> None:
    _check(losses, name, axes, strategy)


@pytest.mark.slow
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
