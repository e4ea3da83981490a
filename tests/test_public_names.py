# SPDX-License-Identifier: Apache-2.0
"""Public names: each stands on a page of docs/, and the verbs of the loop have examples that run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs"

VERBS = (
    "autocast",
    "gather_for_metrics",
    "latest_checkpoint",
    "load_state",
    "loss_scale",
    "prepare",
    "prepare_loader",
    "save_state",
    "session",
    "unwrap_model",
)


def mentioned() -> set[str]:
    """Names that stand in the pages' code: `name`, `name(...)`, accel.name, or imported from accel."""
    text = "\n".join(page.read_text() for page in PAGES.glob("*.md"))
    imports = "\n".join(re.findall(r"^from accel(?:\.\w+)* import .*$", text, flags=re.M))
    return set(re.findall(r"(?:\baccel\.|`)(\w+)", text)) | set(re.findall(r"\w+", imports))


@pytest.mark.parametrize("package", ["accel", "accel.testing", "accel.schedules"])
def test_each_public_name_stands_on_a_page(package: str) -> None:
    missing = sorted(set(public_names(package)) - mentioned())
    assert not missing, f"{', '.join(missing)}: on no page of docs/, neither as `name` nor as accel.name"


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_of_each_verb_runs(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function = getattr(accel, verb)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(function) or "", around(), verb, None, None)
    assert 1 <= len(test.examples) <= 6, f"accel.{verb} has no example of about three lines (>>>) in its docstring"
    found = list[str]()
    doctest.DocTestRunner(verbose=False).run(test, out=found.append)
    assert not found, "".join(found)


def around() -> dict[str, Any]:
    """What an example finds beside `accel`: the objects of a small run on one rank, by their usual names."""
    torch.manual_seed(0)
    ctx = accel.single()
    dataset = TensorDataset(torch.randn(10, 4), torch.randn(10, 1))
    net = nn.Linear(4, 1)
    model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader = accel.prepare_loader(ctx, DataLoader(dataset, batch_size=4, shuffle=True))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    inputs, targets = dataset.tensors
    return {
        "accel": accel,
        "torch": torch,
        "nn": nn,
        "DataLoader": DataLoader,
        "ctx": ctx,
        "dataset": dataset,
        "net": net,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "inputs": inputs,
        "targets": targets,
        "items": {"model": model, "optimizer": optimizer},
    }


def public_names(package: str) -> list[str]:
    module = importlib.import_module(package)
    listed = getattr(module, "__all__", None)
    return sorted(listed if listed is not None else _defined(module))


def _defined(module: Any) -> Iterator[str]:
    """Classes and functions of a module without a list, of which those that it imports for itself are none."""
    for name, each in vars(module).items():
        here = getattr(each, "__module__", "").startswith(module.__name__)
        if not name.startswith("_") and here and (inspect.isclass(each) or inspect.isfunction(each)):
            yield name
