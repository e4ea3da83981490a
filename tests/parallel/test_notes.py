# SPDX-License-Identifier: Apache-2.0
"""What accel notes on users' objects: few attributes, all in one table; copies and pickles keep what holds for them."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_parts import note_module, notes_of
from torch import nn

import accel
from accel.parallel._copies import shallow_copy
from accel.parallel._labels import heir_of, label_parameters, name_of, replace_parameter
from accel.parallel._modules import (
    ModuleNotes,
    Prepared,
    TensorNotes,
    forget,
    note_prepared,
    note_tensor,
    prepared_of,
    tensor_notes,
)

PACKAGE = Path(accel.__file__).parent
PAGE = PACKAGE.parent / "docs" / "design.md"
MOST_ON_MODELS = 10  # 44 once, more with those set by a literal name
OF_OTHERS = {
    "_accel_mixed": "classes that accel makes",
    "accel_style": "classes that accel makes",
    "accel_context": "an attention function of transformers",
    "accel_entry": "a keyword of a call",
    "accel_given": "a keyword of a call",
    "accel_master": "a key of an optimizer's state",
    "accel_records": "a mode of accel's",
}


def _attributes() -> set[str]:
    """Names that begin like accel's attributes: as texts, and as targets of assignments to objects."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if "migrate" in path.parts or not re.search(r"[\"'.]_?accel_", text):  # migrate writes scripts of users
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.attr
            else:
                continue
            if re.fullmatch(r"_?accel_[a-z_]+", name):
                found.add(name)
    return found


def test_all_attributes_of_users_objects_stand_in_one_table():
    section = PAGE.read_text().partition("## Attributes of users' objects")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:-1] for row in section.splitlines() if row.startswith("| `")]
    names = [row[0].strip().strip("`") for row in rows]
    assert all(cell.strip() for row in rows for cell in row)
    assert len(set(names)) == len(names)
    assert _attributes() - OF_OTHERS.keys() == set(names)
    assert OF_OTHERS.keys() <= _attributes()
    on_models = [name for name, row in zip(names, rows, strict=True) if not re.search("optimizers|copies", row[1])]
    assert len(on_models) <= MOST_ON_MODELS


@pytest.mark.parametrize("record", [Prepared, ModuleNotes, TensorNotes])
def test_each_field_of_the_records_is_described_written_and_read(record):
    source = inspect.getsource(record)
    described = re.findall(r"^    ([a-z_]+): .*  # \w", source, re.M) + re.findall(r"    # .*\n    ([a-z_]+): ", source)
    fields = sorted(typing.get_type_hints(record))
    assert sorted(described) == fields
    sources = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in fields:
        assert re.search(rf"note_(module|prepared|tensor)\([^\n]*\b{name}=", sources), name
        assert re.search(rf"\"{name}\"", sources), f"nothing reads {name}"


KINDS: list[tuple[Any, Any, Any, Any]] = [
    (lambda: nn.Linear(2, 2), lambda each: note_prepared(each, micro_batches=3), prepared_of, {"micro_batches": 3}),
    (lambda: nn.Linear(2, 2), lambda each: note_module(each, path="a"), notes_of, {"path": "a"}),
    (lambda: nn.Parameter(torch.ones(2)), lambda each: note_tensor(each, name="a"), tensor_notes, {"name": "a"}),
]


@pytest.mark.parametrize(("make", "note", "read", "expected"), KINDS)
def test_notes_load_without_accel_and_end(make, note, read, expected):
    owner = make()
    assert read(owner) == {}
    note(owner)
    assert read(owner) == expected
    assert all(type(value) is dict for name, value in vars(owner).items() if name.startswith("accel_"))
    file = io.BytesIO()
    torch.save(owner, file)
    _ = file.seek(0)
    # a parameter loads by torch's weights-only reader, as a checkpoint of parameters does
    assert read(torch.load(file, weights_only=isinstance(owner, nn.Parameter))) == expected
    forget(owner, *expected)
    assert read(owner) == {}


@pytest.mark.parametrize("way", [copy.copy, shallow_copy, copy.deepcopy])
def test_a_copy_of_a_module_has_notes_of_its_own(way):
    module = nn.Linear(2, 2)
    note_module(module, path="a")
    note_prepared(module, micro_batches=2)
    copied = way(module)
    note_module(copied, expert=1)
    note_prepared(copied, micro_batches=4)
    assert (notes_of(module), prepared_of(module)) == ({"path": "a"}, {"micro_batches": 2})
    assert (notes_of(copied), prepared_of(copied)) == ({"path": "a", "expert": 1}, {"micro_batches": 4})


def test_a_parameter_in_the_place_of_another_has_its_notes_and_is_not_its_own_heir():
    module = nn.Linear(2, 2, bias=False)
    label_parameters(dict(module.named_parameters()), needed=True)
    old, new = module.weight, nn.Parameter(torch.ones(1))
    old.of_the_user = "kept"  # type: ignore[attr-defined]
    note_tensor(old, alone=True)
    replace_parameter("weight", old, new)
    assert (name_of(new), tensor_notes(new).get("needed"), tensor_notes(new).get("alone")) == ("weight", True, True)
    assert new.of_the_user == "kept"  # type: ignore[attr-defined]
    assert heir_of(old) is new
    assert heir_of(new) is None
