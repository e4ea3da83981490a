# SPDX-License-Identifier: Apache-2.0
"""Recipes: what torch makes of the tensors, and the way back; recipes that do not fit."""

from __future__ import annotations

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

from accel.checkpoint import Recipe
from accel.checkpoint._boxes import Strided, file_order, in_file, runs
from accel.checkpoint._recipes import apply_recipes, inverse
from accel.errors import CheckpointError, ConfigError


def stored(tensors: dict[str, torch.Tensor]) -> dict[str, Strided]:
    return {name: in_file("I64", each.shape, 8, name, 0) for name, each in tensors.items()}


def read(tensor: Strided, memory: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the memory that its parts name, read by read."""
    found = torch.full(tensor.shape, -1)
    for part in tensor.parts:
        order = file_order(part)
        view = found[tuple(slice(at, at + n) for at, n in zip(part.box.offset, part.box.shape, strict=True))]
        view = view.permute(order) if order else view
        strides = [part.strides[dim] for dim in order]
        for run in runs(view.shape, strides, 8, most=40, gap=8):
            assert run.nbytes <= 40
            box = tuple(slice(at, at + n) for at, n in zip(run.box.offset, run.box.shape, strict=True))
            begin = (part.start + run.start) // 8
            flat = memory[part.file].flatten()[begin : begin + run.nbytes // 8]
            view[box] = torch.as_strided(flat, run.box.shape, [each // 8 for each in run.strides])
    return found


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.integers(0, 1), st.data())
@settings(max_examples=share(0.8))
def test_recipes_do_what_torch_does_and_lead_back(
    experts: int, rows: int, columns: int, where: int, joined: int, data: st.DataObject
) -> None:
    names = [f"layers.{layer}.experts.{at}.{kind}" for layer in range(2) for at in range(experts) for kind in "ab"]
    tensors = {name: torch.randint(0, 1000, (rows, columns)) for name in names}
    tensors["head.weight"] = torch.randint(0, 1000, (rows + columns, 3))
    recipes = [
        Recipe("stack", "{x...}.experts.{expert}.a", "{x...}.a", dim=where),
        Recipe("stack", "{x...}.experts.{expert}.b", "{x...}.b", dim=where),
        Recipe("transpose", "{x...}.b", "{x...}.bt", dim=0, other=2),
        Recipe("transpose", "{x...}.bt", "{x...}.b", dim=2, other=0),
        Recipe("concat", ("{x...}.a", "{x...}.b"), "{x...}.both", dim=joined),
        Recipe("split", "head.{kind}", ("q.{kind}", "k.{kind}"), sizes=(rows, columns)),
        Recipe("transpose", "q.weight", "qt"),
        Recipe("rename", "layers.{layer}.{x...}", "blocks.{layer}.{x...}"),
    ]
    made = apply_recipes(stored(tensors), recipes, "here")
    expected = {"qt": tensors["head.weight"][:rows].t(), "k.weight": tensors["head.weight"][rows:]}
    for layer in range(2):
        kinds = [
            torch.stack([tensors[f"layers.{layer}.experts.{at}.{kind}"] for at in range(experts)], where)
            for kind in "ab"
        ]
        expected[f"blocks.{layer}.both"] = torch.cat(kinds, joined)
    live = {name: read(tensor, tensors) for name, tensor in made.items()}
    assert live.keys() == expected.keys()
    assert all(torch.equal(live[name], expected[name]) for name in live)
    back = apply_recipes(stored(live), inverse(recipes), "there")
    assert back.keys() == tensors.keys()
    name = data.draw(st.sampled_from(sorted(tensors)))
    assert torch.equal(read(back[name], live), tensors[name])


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        (Recipe("concat", ("a", "z"), "b"), "sources are missing next to a"),
        (Recipe("concat", ("a", "wide"), "b"), "sources differ"),
        (Recipe("split", "a", ("x", "y")), "5 is not split into"),
        (Recipe("transpose", "a", "b", dim=2), "has no dimension 2"),
        (Recipe("stack", "list.{at}", "b"), "sources are missing next to list.0, list.2"),
        (Recipe("stack", "{at}", "b"), "'a' has no number"),
        (Recipe("rename", "{x}", "wide.{x}"), ""),
        (Recipe("rename", "a", "wide"), "the name 'wide' is taken"),
        (Recipe("rename", "list.{at}", "list.{at}.{at}"), ""),
    ],
)
def test_recipes_that_do_not_fit_are_refused(recipe: Recipe, problem: str) -> None:
    tensors = {name: torch.zeros(5, 2, dtype=torch.int64) for name in ("a", "list.0", "list.2")}
    tensors["wide"] = torch.zeros(5, 3, dtype=torch.int64)
    if not problem:
        assert len(apply_recipes(stored(tensors), [recipe], "here")) == 4
        return
    with assert_raises(CheckpointError, problem=f"a recipe does not fit: .*{problem}"):
        apply_recipes(stored(tensors), [recipe], "here")


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (("fold", "a", "b"), {"problem": "unknown operation"}),
        (("concat", "a", "b"), {"problem": "wrong source", "expected": "several names"}),
        (("rename", ("a", "b"), "c"), {"problem": "wrong source", "expected": "one name"}),
        (("split", "a", "b"), {"problem": "wrong target"}),
        (("rename", "{x}", "b"), {"expected": "none", "got": "x"}),
        (("stack", "a", "b"), {"expected": "one that is counted"}),
        (("unstack", "{x}", "b"), {"expected": "one that is counted"}),
    ],
)
def test_recipes_must_make_sense(arguments: tuple[str, str, str], fields: dict[str, str]) -> None:
    with assert_raises(ConfigError, **fields):
        Recipe(*arguments)  # pyright: ignore[reportArgumentType]


def test_unequal_parts_of_a_concat_must_be_told_as_the_way_back_divides_them() -> None:
    tensors = {name: torch.arange(rows * 2).reshape(rows, 2) for name, rows in (("q", 4), ("k", 2), ("v", 2))}
    parts = ("q", "k", "v")
    for sizes in ((), (2, 4, 2)):
        with assert_raises(CheckpointError, problem=r"sources of sizes \[4, 2, 2\] along 0 need sizes=\(4, 2, 2\)"):
            apply_recipes(stored(tensors), [Recipe("concat", parts, "qkv", sizes=sizes)], "here")
    recipes = [Recipe("concat", parts, "qkv", sizes=(4, 2, 2))]
    made = apply_recipes(stored(tensors), recipes, "here")
    back = apply_recipes({"qkv": made["qkv"]}, inverse(recipes), "there")
    for name, tensor in tensors.items():
        assert torch.equal(read(back[name], tensors), tensor)
