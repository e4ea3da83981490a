# SPDX-License-Identifier: Apache-2.0
"""Recipes: steps between stored tensors and a model's, of other names and shapes; plain data, in both directions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import msgspec

from accel.checkpoint._boxes import Strided, concat, split, stack, transpose, unstack
from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import check_choice

Operation = Literal["rename", "concat", "split", "stack", "unstack", "transpose"]

_INVERSES: dict[str, Operation] = {
    "rename": "rename",
    "concat": "split",
    "split": "concat",
    "stack": "unstack",
    "unstack": "stack",
    "transpose": "transpose",
}
_FIELD = re.compile(r"\{(\w+)(\.\.\.)?\}")


class Recipe(msgspec.Struct, frozen=True):
    """One step from stored tensors to a model's. Recipes run in order, each on the names that the one before gives.

    Names are patterns. `{layer}` is one part of a path, without dots; `{before...}` for any text, which may be
    empty. A field has one value in all names of a step.

    Attributes:
        operation: "rename"; "concat" of several sources along `dim`; "split" into several targets along `dim`; "stack"
            of the sources along a new dimension `dim`, over the one field that the target lacks, which counts from 0;
            "unstack", its inverse; "transpose" of `dim` and `other`.
        source: names before the step.
        target: names after it.
        dim: the dimension, from 0.
        other: the second dimension of a transpose.
        sizes: sizes along `dim` of a split, or of the parts of a concat, which the way back divides; none for equal
            parts.

    Raises:
        ConfigError: patterns that do not fit the operation.
    """

    operation: Operation
    source: str | tuple[str, ...]
    target: str | tuple[str, ...]
    dim: int = 0
    other: int = 1
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        where = f"Recipe({self.operation!r}, {self.source!r})"
        check_choice(self.operation, tuple(_INVERSES), "unknown operation", where=where)
        many = self.operation == "concat", self.operation == "split"
        for names, several, what in ((self.sources, many[0], "source"), (self.targets, many[1], "target")):
            if (len(names) > 1) != several:
                expected = "several names" if several else "one name"
                raise ConfigError(f"a recipe with a wrong {what}", expected=expected, got=repr(names), where=where)
        lost = _fields(self.sources) ^ _fields(self.targets)
        counted = {"stack": _fields(self.sources), "unstack": _fields(self.targets)}.get(self.operation)
        if len(lost) != (counted is not None) or not lost <= (counted or set[str]()):
            raise ConfigError(
                "fields of a recipe that source and target do not share",
                expected="one that is counted" if counted is not None else "none",
                got=", ".join(sorted(lost)) or "none",
                where=where,
            )

    @property
    def sources(self) -> tuple[str, ...]:
        """The names before the step, as a tuple."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def targets(self) -> tuple[str, ...]:
        """The names after the step, as a tuple."""
        return (self.target,) if isinstance(self.target, str) else self.target


def check_recipes(rename: object, expected: str) -> None:
    """Refuse other things than a sequence of recipes, such as a dict of names or one recipe alone."""
    listed = cast("Sequence[object]", rename) if isinstance(rename, Sequence) else [rename]
    if listed is rename and all(isinstance(each, Recipe) for each in listed):
        return
    fix = 'Write Recipe("rename", old, new) for each name, or for a pattern of names.'
    if isinstance(rename, Recipe):
        fix = "Pass a list of it: rename=[recipe]."
    raise ConfigError(
        "the recipes are not valid", expected=expected, got=repr(cast(object, rename)), where="rename=", fix=fix
    )


def inverse(recipes: Sequence[Recipe]) -> tuple[Recipe, ...]:
    """Return the recipes that lead back, from a model's tensors to stored ones."""
    return tuple(
        msgspec.structs.replace(each, operation=_INVERSES[each.operation], source=each.target, target=each.source)
        for each in reversed(recipes)
    )


def apply_recipes(tensors: Mapping[str, Strided], recipes: Sequence[Recipe], where: str) -> dict[str, Strided]:
    """Return the tensors after all steps, by name; those that no step takes stay as they are."""
    found = dict(tensors)
    for recipe in recipes:
        taken, made = _step(found, recipe, where)
        kept = {name: tensor for name, tensor in found.items() if name not in taken}
        # one of the two would be lost silently
        if twice := sorted(kept.keys() & made.keys()):
            raise _refusal(recipe, f"the name {twice[0]!r} is taken", where)
        found = kept | made
    return found


def _step(found: Mapping[str, Strided], recipe: Recipe, where: str) -> tuple[set[str], dict[str, Strided]]:
    """Return the names that a step takes, and the tensors that it makes."""
    groups: dict[tuple[tuple[str, str], ...], dict[tuple[int, int], str]] = {}
    counted = next(iter(_fields(recipe.sources) - _fields(recipe.targets)), None)
    for at, pattern in enumerate(recipe.sources):
        regex = _regex(pattern)
        for name in found:
            if (match := regex.fullmatch(name)) is None:
                continue
            fields = match.groupdict()
            number = fields.pop(counted) if counted is not None else "0"
            if not number.isdecimal():
                raise _refusal(recipe, f"{name!r} has no number for {{{counted}}}", where)
            groups.setdefault(tuple(sorted(fields.items())), {})[at, int(number)] = name
    made: dict[str, Strided] = {}
    taken: set[str] = set()
    for fields, names in groups.items():
        ordered = sorted(names)
        count = len(recipe.sources) if counted is None else len(names)
        expected = [(at, 0) for at in range(count)] if counted is None else [(0, at) for at in range(count)]
        # a hole in the numbers is a cut checkpoint, not a shorter list
        if ordered != expected:
            listed = ", ".join(sorted(names.values())[:5])
            raise _refusal(recipe, f"sources are missing next to {listed}", where)
        taken |= set(names.values())
        sources = [found[names[key]] for key in ordered]
        for name, tensor in _make(recipe, sources, dict(fields), where).items():
            if name in made:
                raise _refusal(recipe, f"two tensors get the name {name!r}", where)
            made[name] = tensor
    return taken, made


def _make(recipe: Recipe, tensors: Sequence[Strided], fields: dict[str, str], where: str) -> dict[str, Strided]:
    """Carry out one step on its sources."""
    first = tensors[0]
    if recipe.operation == "rename":  # also of a number, which has no dimension
        return {_named(recipe.targets[0], fields): first}
    dim = recipe.dim
    rank = len(first.shape)
    if not 0 <= dim < rank + (recipe.operation == "stack") or not 0 <= recipe.other < max(rank, 2):
        raise _refusal(recipe, f"a tensor of shape {list(first.shape)} has no dimension {dim}", where)
    alike = {(each.dtype, *each.shape[: dim * (recipe.operation == "concat")]) for each in tensors}
    shapes = {each.shape if recipe.operation == "stack" else each.shape[dim + 1 :] for each in tensors}
    if len(alike) > 1 or len(shapes) > 1:
        raise _refusal(recipe, f"sources differ: {', '.join(str(list(each.shape)) for each in tensors[:5])}", where)
    match recipe.operation:
        case "concat":
            # a later save must split the tensor as it was
            _check_parts(recipe, tuple(each.shape[dim] for each in tensors), where)
            results = [concat(tensors, dim)]
        case "stack":
            results = [stack(tensors, dim)]
        case "transpose":
            results = [transpose(first, dim, recipe.other)]
        case "split":
            results = split(first, _sizes(recipe, first.shape[dim], where), dim)
        case "unstack":
            results = unstack(first, dim)
            counted = next(iter(_fields(recipe.targets) - _fields(recipe.sources)))
            return {_named(recipe.targets[0], fields | {counted: str(at)}): each for at, each in enumerate(results)}
    return {_named(name, fields): each for name, each in zip(recipe.targets, results, strict=True)}


def _check_parts(recipe: Recipe, parts: tuple[int, ...], where: str) -> None:
    """Refuse parts that the way back would divide otherwise: of other sizes than the recipe's, or unequal ones."""
    if parts != (recipe.sizes or parts[:1] * len(parts)):
        raise _refusal(recipe, f"sources of sizes {list(parts)} along {recipe.dim} need sizes={parts}", where)


def _sizes(recipe: Recipe, length: int, where: str) -> tuple[int, ...]:
    count = len(recipe.targets)
    sizes = recipe.sizes or (length // count,) * count
    if len(sizes) != count or sum(sizes) != length:
        raise _refusal(recipe, f"{length} is not split into {list(sizes)}", where)
    return sizes


def _fields(patterns: Sequence[str]) -> set[str]:
    return {match[1] for pattern in patterns for match in _FIELD.finditer(pattern)}


def _regex(pattern: str) -> re.Pattern[str]:
    text, at, seen = "", 0, set[str]()
    for match in _FIELD.finditer(pattern):
        text += re.escape(pattern[at : match.start()])
        # a field that comes again must match the same text
        text += f"(?P={match[1]})" if match[1] in seen else f"(?P<{match[1]}>{'.*?' if match[2] else '[^.]+'})"
        seen.add(match[1])
        at = match.end()
    return re.compile(text + re.escape(pattern[at:]))


def _named(pattern: str, fields: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda match: fields[match[1]], pattern)


def _refusal(recipe: Recipe, problem: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"a recipe does not fit: {problem}", got=f"{recipe.operation} {recipe.source!r}", where=where
    )
