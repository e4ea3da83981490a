# SPDX-License-Identifier: Apache-2.0
"""Classes put before the class of a live object: once, in any order, and taken away from wherever they stand."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from catching import assert_raises
from hypothesis import given, strategies as st
from planned_parts import Recomputed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import accel
from accel.mixins import INSERTED, Mixin, add_mixin, place_of, remove_mixin
from accel.parallel._offload import Offloaded
from accel.parallel.axes.context._forward import _ByPositions
from accel.parallel.axes.tensor._part_layers import RegionEnd
from accel.parallel.parts import PartRegion


class Plus(Mixin, nn.Module):
    amount = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + self.amount


class Twice(Mixin, nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * 2


class Negated(Mixin, nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return -super().forward(inputs)


MIXINS: list[type[Mixin]] = [Plus, Twice, Negated]
COPIES = {"itself": lambda module: module, "copy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}


@given(
    added=st.lists(st.sampled_from(MIXINS), max_size=5),
    removed=st.lists(st.sampled_from(MIXINS), max_size=5),
    way=st.sampled_from(sorted(COPIES)),
)
def test_mixins_apply_once_each_in_their_order_and_leave_no_trace(added, removed, way):
    module: Any = nn.Identity()
    for mixin in added:
        add_mixin([module], mixin)
    module = COPIES[way](module)
    for mixin in removed:
        remove_mixin([module], mixin)
    expected = torch.ones(1)
    for mixin in dict.fromkeys(added):
        if mixin not in removed:
            expected = {Plus: lambda x: x + 1, Twice: lambda x: x * 2, Negated: lambda x: -x}[mixin](expected)
    assert torch.equal(module(torch.ones(1)), expected)
    assert isinstance(module, nn.Identity)
    assert type(module).__qualname__ == "Identity"
    assert (type(module) is nn.Identity) == set(removed).issuperset(added)


class Counted(nn.Module):
    """Makes its objects itself."""

    def __new__(cls, rows: int) -> Any:
        made = super().__new__(cls)
        vars(made)["rows"] = rows
        return made

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layer = nn.Linear(rows, 1)


def test_new_objects_of_a_class_with_mixins_are_made_by_the_class_behind_them():
    module: Any = Counted(3)
    add_mixin([module], Plus)
    made = type(module)(5)
    assert type(made) is type(module)
    assert (made.rows, made.layer.in_features) == (5, 5)


def test_modules_of_one_class_stay_of_one_class():
    modules = [nn.Identity(), nn.Identity(), nn.Flatten()]
    add_mixin(modules, Plus, amount=3.0)
    add_mixin(modules, Twice)
    assert type(modules[0]) is type(modules[1])
    assert [float(each(torch.ones(1, 1)).sum()) for each in modules] == [8.0] * 3
    remove_mixin(modules, Plus)
    assert type(modules[0]) is type(modules[1])
    assert [float(each(torch.ones(1, 1)).sum()) for each in modules] == [2.0] * 3


def test_settings_stay_when_another_mixin_is_taken_away():
    module: Any = nn.Identity()
    add_mixin([module], Twice)
    add_mixin([module], Plus, amount=5.0)
    remove_mixin([module], Twice)
    assert float(pickle.loads(pickle.dumps(module))(torch.ones(()))) == 6.0


def test_a_class_behind_another_librarys_is_not_taken_away(ranks):
    def rank(_ctx):
        module = nn.Linear(2, 2)
        add_mixin([module], Plus)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        with assert_raises(
            accel.errors.ConfigError, problem="another library's", expected="Plus in front", got="FSDPLinear"
        ):
            remove_mixin([module], Plus)
        return isinstance(module, Plus)

    assert ranks.run(rank, 1, default_group=True) == [True]


def test_forwards_behind_mixins_are_called_as_torch_compile_follows_them():
    """From Python 3.12 on it breaks its graph at `cast(Any, super()).forward`."""
    package = Path(accel.__file__).parent
    casts = [path for path in package.rglob("*.py") if "super()).forward" in path.read_text()]
    assert not casts


PACKAGE = Path(accel.__file__).parent


def _mixins() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the name, the file and the bases of each class of the package that stands before others."""
    classes = [
        (name, str(path.relative_to(PACKAGE)), re.findall(r"\w+", bases))
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, bases in re.findall(r"^class (\w+)\(([^)]*)\):", path.read_text(), re.MULTILINE)
    ]
    known = {"Mixin"}
    while more := {name for name, _, bases in classes if known & set(bases)} - known:
        known |= more
    yield from (each for each in classes if each[0] in known - {"Mixin"})


def test_each_inserted_class_stands_in_the_table_once_with_its_file():
    rows = {each.name: each.home for each in INSERTED}
    found = {name: (home, bases) for name, home, bases in _mixins()}
    assert len(found) > 40
    assert len(rows) == len(INSERTED)
    assert {name: found[name][0] for name in rows} == rows
    bases_alone = {"KeepsFormat", "NotPickled"}  # of others, and inserted only with these
    covered = set(rows) | bases_alone
    while more := {name for name, (_, bases) in found.items() if covered - bases_alone & set(bases)} - covered:
        covered |= more
    assert set(found) == covered


KNOWN = [Recomputed, Offloaded, _ByPositions, RegionEnd, PartRegion]


@given(order=st.permutations(KNOWN), removed=st.sampled_from(KNOWN), foreign=st.integers(0, len(KNOWN)))
def test_inserted_classes_keep_the_order_of_the_table_in_front_and_behind_of_another_librarys(order, removed, foreign):
    module: Any = nn.Linear(2, 2)
    for at, mixin in enumerate(order):
        if at == foreign:
            module.__class__ = type("Foreign", (type(module),), {})
        add_mixin([module], mixin)
    stands = [each for each in type(module).__mro__ if each in KNOWN]
    in_front, behind = sorted(order[foreign:], key=place_of), sorted(order[:foreign], key=place_of)
    assert stands == [*in_front, *behind]
    if removed in in_front:
        remove_mixin([module], removed)
        assert [each for each in type(module).__mro__ if each in KNOWN] == [e for e in stands if e is not removed]


def test_the_page_on_the_design_draws_the_order_of_inserted_classes():
    page = (PACKAGE.parent / "docs" / "design.md").read_text()
    width = max(len(each.name) for each in INSERTED)
    by = max(len(each.by) for each in INSERTED)
    rows = [f"  {each.name:{width}}  {each.by:{by}}  {each.until}".rstrip() for each in INSERTED]
    drawn = "\n".join([" a call of the module", "  │", *rows, "  │", "  ▼", " the class of its author"])
    assert f"```text\n{drawn}\n```" in page, drawn
