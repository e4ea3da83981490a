# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's GPT in its own DDP, optimizers and schedules: killed and resumed exactly, loaded at other layouts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from ckpt_helpers import Item, open_checkpoint
from processes import patience, same_path

from accel.storage import as_place

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::"),
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs accel-torch[engine-tests]"),
]

WORKER = Path(__file__).parent / "megatron_worker.py"


def launch(part: str, folder: Path, count: int, layout: str = "") -> subprocess.CompletedProcess[str]:
    """Run a part of the worker on so many processes."""
    command = [sys.executable, "-m", "accel.cli", "launch", "--nproc-per-node", str(count)]
    return subprocess.run(
        [*command, str(WORKER), part, str(folder), layout],
        env={**same_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience(150),
        check=False,
    )


def saved(folder: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, Item]]:
    """The tensors of a run's checkpoint by name, random streams of ranks among them, and its items."""
    with open_checkpoint(as_place(folder / "step-00000003")) as found:
        return {name: found.read(name) for name in found.entries}, found.manifest.items


LAYOUTS = ["tp", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("pp", "dp"))]


@pytest.fixture(scope="module", params=LAYOUTS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A layout and its runs: killed in its third step and resumed, uninterrupted, and saved again at other layouts.

    Two ranks each; dp with the distributed optimizer."""
    layout, folder = request.param, tmp_path_factory.mktemp("megatron")
    killed = launch("killed", folder, 2, layout)
    assert "rank 1 failed" in killed.stderr, killed.stderr
    assert "step-00000002" in killed.stderr, killed.stderr
    assert not list(folder.glob("*/step-00000003"))
    for part, count in (("resumed", 2), ("one", 1)):
        done = launch(part, folder, count, layout)
        assert done.returncode == 0, done.stderr
    return layout, folder


def test_a_killed_run_goes_on_as_if_it_had_not_been_killed(runs: tuple[str, Path]) -> None:
    layout, folder = runs
    one, items = saved(folder / layout)
    other, expected = saved(folder / f"{layout}-whole")
    assert items == expected
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.nightly
def test_momentum_goes_on(tmp_path: Path) -> None:
    done = launch("sgd", tmp_path, 1)
    assert done.returncode == 0, done.stderr
    one, other = saved(tmp_path / "sgd")[0], saved(tmp_path / "sgd-whole")[0]
    assert any("momentum_buffer" in name for name in one)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.kept("slow")
@pytest.mark.parametrize("at", ["pp", "dp", "one"])
def test_weights_and_optimizer_state_load_at_another_layout(runs: tuple[str, Path], at: str) -> None:
    layout, folder = runs
    one, items = saved(folder / layout)
    other, expected = saved(folder / f"{layout}-at-{at}")
    assert items["optimizer"] == expected["optimizer"]
    names = [name for name in one if name.startswith(("model[", "optimizer["))]
    assert names == [name for name in other if name.startswith(("model[", "optimizer["))]
    assert one['model["decoder.layers.mlp.linear_fc1.weight[1]"]'].shape == (256, 64)  # the whole, not a part
    assert one['optimizer["optimizer.state.exp_avg_sq.output_layer.weight"]'].shape == (256, 64)
    for name in names:
        assert torch.equal(one[name], other[name]), name
