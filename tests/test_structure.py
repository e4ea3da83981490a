# SPDX-License-Identifier: Apache-2.0
"""Verbs enter few files of the package, so that a reader opens few: the benchmark of the structure counts them."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from accel.testing import simulate

SCRIPT = Path(__file__).parent / "benchmarks" / "structure.py"
MOST_FILES = {
    "batches": 8,
    "prepare": 13,
    "a loop's pass": 21,
    "save a layer": 17,
    "load a layer": 17,
    "save a run": 24,  # a run is a model, AdamW, a scheduler, a TrainState and a loader
    "load a run": 24,
}
MOST_OF_A_LAUNCH = 26  # two of them the doors to files of others and to signals and helper programs
MOST_OF_A_DISPATCH = 22


MOST_WALKS = {"ddp": 3, "fsdp": 17}  # functions that walk over a model in prepare_model
MOST_RETURNS = {"ddp": 12, "fsdp": 12}  # of a model, to a room that it has left


def benchmark() -> ModuleType:
    if "torch._dynamo" in sys.modules:  # a backward looks for compiled gradients once something has been compiled
        torch.compiler.reset()
    spec = importlib.util.spec_from_file_location("structure", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    structure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(structure)
    return structure


def test_a_verb_enters_few_files(tmp_path: Path) -> None:
    structure = benchmark()
    _ = simulate(lambda ctx: structure.verbs(ctx, str(tmp_path / "first")), 2)  # looks public names up
    seen = simulate(lambda ctx: structure.verbs(ctx, str(tmp_path / "again")), 2)[0]
    for verb, most in MOST_FILES.items():
        files = seen[verb].files()
        assert 0 < len(files) <= most, f"{verb} enters {len(files)} files, the most is {most}: {', '.join(files)}"


def test_a_model_that_streams_enters_few_files(tmp_path: Path) -> None:
    structure = benchmark()
    _ = simulate(lambda ctx: structure.dispatched(ctx, str(tmp_path)), 1)  # looks names up
    files = simulate(lambda ctx: structure.dispatched(ctx, str(tmp_path)), 1)[0].files()
    assert "bigmodel/run/_stream.py" in files
    assert len(files) <= MOST_OF_A_DISPATCH, f"a dispatch enters {len(files)} files: {', '.join(files)}"


@pytest.mark.parametrize("strategy", MOST_WALKS)
def test_few_places_inspect_a_model(strategy: str) -> None:
    structure = benchmark()
    run = partial(structure.visited, strategy=strategy)
    _ = simulate(run, 2, default_group=True)  # looks names up
    visits = simulate(run, 2, default_group=True)[0]
    walks = sorted(visits.walks)
    assert 0 < len(walks) <= MOST_WALKS[strategy], f"{len(walks)} functions walk over a model: {', '.join(walks)}"
    assert visits.returns <= MOST_RETURNS[strategy], f"{visits.returns} returns: {', '.join(visits.rooms)}"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_launch_of_a_function_enters_few_files() -> None:
    files = benchmark().launched().files()
    assert "launching/_function.py" in files
    assert len(files) <= MOST_OF_A_LAUNCH, f"a launch enters {len(files)} files: {', '.join(files)}"
