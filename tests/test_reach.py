# SPDX-License-Identifier: Apache-2.0
"""Tests use public names; where one reaches into a package, this list says what for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from uncollected import no_collections

TESTS = Path(__file__).parent
# By package: what its private modules hold that no public name shows.
REASONS = {
    "bigmodel": "the order in which slots are filled, without threads",
    "checkpoint": "arithmetic of boxes and of what is kept, the format's number, notes that ranks leave each other",
    "cli": "the words that a command takes, what a terminal shows, completion without a shell",
    "collectives": "the check of tensor kinds, passed by tensors of a stand-in device",
    "comm": "gloo's threads at exit; transport that a test counts or lets fail",
    "config": "the reader of YAML, value by value",
    "context": "devices and sessions that a test replaces, limits that pages of docs quote",
    "data": "what goes through the wire of a dispatched batch; transfers and reads that a test counts",
    "engines": "the list of private names of engines",
    "errors": "errors as plain values between ranks; advice on names",
    "env": "names of hosts in Slurm's notation",
    "estimate": "the arithmetic of a plan, without a model",
    "items": "the parts of a save and a load, exchanged by a test; which files a load has read",
    "lazy": "reads of sources, counted",
    "launching": "pure parts of a launcher (plans, relays, reports, stacks, records), without processes",
    "trackers": "snapshots of CUDA's memory, with no GPU",
    "optim": "the orthogonalization, counted",
    "parallel": "plans of sharding without ranks; the list of torch's private names",
    "post_training": "the worker of a DataLoader, replaced",
    "precision": "fp8 backends that are not installed",
    "migrate": "the rewriter, which a test hides as if libcst were missing",
    "metrics": "the path for accelerators, run on tensors of the CPU",
    "report": "markup of one element",
    "run_folder": "the rule that hides credentials, text by text",
    "storage": "disks and stores that a test lets fail, sizes that pages of docs quote",
    "tree": "walks over the leaves of a tree, by path",
    "testing": "the simulator's own threads, hooks into torch and checks",
    "training": "the step's parts, exchanged for others to see that a law notices",
}
PRIVATE = re.compile(r"accel\.(?:(?P<package>[a-z]\w*)\.)(?:[a-z]\w*\.)*_[a-z]\w*(?:\.\w+)*")

# in one line, or a line of an import in parentheses
MAY_REACH = re.compile(r"accel\..*\b_[a-z]|^ +_[a-z]\w*( as \w+)?,?$", re.MULTILINE)


def reached(tree: ast.Module) -> Iterator[str]:
    """The private names of accel that a test imports, or replaces by their path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def reaches() -> list[tuple[str, re.Match[str]]]:
    """Each test's file, and a private name that it reaches for."""
    texts = [(path.name, path.read_text()) for path in TESTS.rglob("*.py")]
    with no_collections():
        named = [(name, {*reached(ast.parse(text))}) for name, text in texts if MAY_REACH.search(text)]
    return [(file, match) for file, names in named for name in names if (match := PRIVATE.fullmatch(name))]


@pytest.mark.kept("default")
def test_each_reach_into_a_package_has_its_reason(reaches: list[tuple[str, re.Match[str]]]) -> None:
    found: dict[str, set[str]] = {}
    for file, match in reaches:
        found.setdefault(match["package"], set()).add(f"{file}: {match[0]}")
    unknown = {package: sorted(found[package]) for package in found.keys() - REASONS.keys()}
    assert not unknown, f"use public names, or say why not in {Path(__file__).name}: {unknown}"
    assert REASONS.keys() <= found.keys()


def test_checkpoints_are_saved_and_loaded_by_public_names(reaches: list[tuple[str, re.Match[str]]]) -> None:
    entries = {"save_state", "load_state", "save_model", "resume", "optimizer_step", "backward", "prepare", "gather"}
    found = {f"{file}: {match[0]}" for file, match in reaches if match[0].rpartition(".")[2] in entries}
    assert not found, found
