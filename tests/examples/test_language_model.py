# SPDX-License-Identifier: Apache-2.0
"""The language-model example: each model's losses are the same on every mesh, and it learns on real processes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
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

EXAMPLE = Path(__file__).parents[2] / "examples" / "language_model.py"
Losses = Callable[[str, Axes, str], list[float]]

pytest.importorskip("transformers", reason="needs accel-torch[transformers]")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("language_model_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def losses(ranks: Simulator, example: ModuleType) -> Iterator[Losses]:
    """A function from model, mesh and strategy to the loss of each step; in float64, so that rounding hides nothing."""
    known: dict[tuple[str, Axes, str], list[float]] = {}

    def train(name: str, axes: Axes, strategy: Any) -> list[float]:
        def rank(ctx: accel.DistContext) -> list[float]:
            ctx = accel.replace(ctx, mesh=str(axes) or "dp=1", strategy=strategy)
            return example.train(ctx, name, steps=3, batch=8, lr=1e-2)

        if (name, axes, strategy) not in known:
            # experts of transformers multiply in 32 bits alone
            torch.set_default_dtype(torch.float32 if name == "mixtral" else torch.float64)
            first, *others = ranks.run(rank, axes.world_size, default_group=True, timeout_s=300)
            assert all(each == pytest.approx(first, rel=1e-12) for each in others)
            known[name, axes, strategy] = first
        return known[name, axes, strategy]

    yield train
    torch.set_default_dtype(torch.float32)


def _check(losses: Losses, name: str, axes: Axes, strategy: str) -> None:
    expected = losses(name, Axes(), "ddp")
    assert losses(name, axes, strategy) == pytest.approx(expected, rel=1e-5 if name == "mixtral" else 1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "axes", "strategy"),
    [
        ("transformer", Axes(dp=2), "fsdp"),
        ("transformer", Axes(tp=2), "ddp"),
        ("llama", Axes(cp=2), "ddp"),
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
OF_EXPERTS = ((Axes(tp=2, ep=2), "ddp"), (Axes(dp=2, tp=2, ep=4), "fsdp"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "axes", "strategy"),
    [
        *((name, *mesh) for name in ("transformer", "llama", "gpt2", "mixtral") for mesh in MESHES),
        *(("mixtral", *mesh) for mesh in OF_EXPERTS),
    ],
    ids=str,
)
def test_every_model_trains_alike_on_every_mesh(losses: Losses, name: str, axes: Axes, strategy: str) -> None:
    if name == "transformer" and axes.cp > 1:
        with pytest.raises(accel.errors.ConfigError, match="did not see each other's positions"):
            losses(name, axes, strategy)
        return
    _check(losses, name, axes, strategy)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2"])
def test_it_learns_on_real_processes(mesh: str) -> None:
    command = [str(Path(sys.executable).with_name("accel")), "launch", "--nproc-per-node", "2", "--cpu", "--mesh", mesh]
    words = ["--model", "llama", "--steps", "30", "--batch", "16"]
    done = subprocess.run(
        [*command, str(EXAMPLE), *words], capture_output=True, text=True, timeout=patience(120), check=False
    )
    assert done.returncode == 0, done.stderr
    found = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(found) == 30
    assert found[0] > 5.4  # a byte is one of 256: ln 256 = 5.55
    assert found[-1] < 3.4
