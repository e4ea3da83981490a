# SPDX-License-Identifier: Apache-2.0
"""Recipes: steps between stored tensors and a model's, of other names and shapes; plain data, in both directions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, cast

import msgspec

from accel.checkpoint._boxes import Box, intersect
from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import check_choice

_GAP = 32 << 10  # unwanted bytes between two rows that cost less than another request


class StridedPart(msgspec.Struct, frozen=True):
    """A box of a tensor in a file."""

    file: str  # name of the file, or of a tensor in memory
    start: int  # byte of the box's first element
    box: Box  # place in the tensor
    strides: tuple[int, ...]  # bytes from an element to the next, one a dimension


class Strided(msgspec.Struct, frozen=True):
    """A tensor in files."""

    dtype: str  # safetensors' name of its dtype, such as "BF16"
    shape: tuple[int, ...]  # its sizes
    parts: tuple[StridedPart, ...]  # boxes that together hold each element once


class ElementRun(msgspec.Struct, frozen=True):
    """Elements of a part that one read brings, with the elements between them."""

    start: int  # first byte in the file
    nbytes: int  # bytes from there to the end of the last element
    box: Box  # place in the part
    strides: tuple[int, ...]  # bytes from an element to the next, one a dimension


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of elements in row-major order."""
    sizes = [*shape[1:], itemsize] if shape else []
    return tuple(reversed(list(itertools.accumulate(reversed(sizes), lambda a, b: a * b))))


def in_file(dtype: str, shape: Sequence[int], itemsize: int, file: str, start: int) -> Strided:
    """Return a tensor that one file holds in row-major order from a byte on."""
    box = Box((0,) * len(shape), tuple(shape))
    return Strided(dtype, tuple(shape), (StridedPart(file, start, box, row_major(shape, itemsize)),))


def cut(tensor: Strided, box: Box) -> Strided:
    """Return a box of a tensor as a separate tensor."""
    found: list[StridedPart] = []
    for part in tensor.parts:
        shared = intersect(part.box, box)
        if shared is not None:
            skipped = zip(shared.offset, part.box.offset, part.strides, strict=True)
            start = part.start + sum((at - first) * stride for at, first, stride in skipped)
            found.append(StridedPart(part.file, start, _moved(shared, box.offset, -1), part.strides))
    return Strided(tensor.dtype, box.shape, tuple(found))


def concat(tensors: Sequence[Strided], dim: int) -> Strided:
    """Join tensors along a dimension; the other sizes are equal."""
    parts: list[StridedPart] = []
    length = 0
    for tensor in tensors:
        shift = tuple(length if at == dim else 0 for at in range(len(tensor.shape)))
        parts += [msgspec.structs.replace(part, box=_moved(part.box, shift, 1)) for part in tensor.parts]
        length += tensor.shape[dim]
    first = tensors[0]
    return Strided(first.dtype, (*first.shape[:dim], length, *first.shape[dim + 1 :]), tuple(parts))


def split(tensor: Strided, sizes: Sequence[int], dim: int) -> list[Strided]:
    """Cut a tensor along a dimension; the sizes add up to its own."""
    found: list[Strided] = []
    start = 0
    for size in sizes:
        offset = tuple(start if at == dim else 0 for at in range(len(tensor.shape)))
        found.append(cut(tensor, Box(offset, (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))))
        start += size
    return found


def stack(tensors: Sequence[Strided], dim: int) -> Strided:
    """Join tensors of one shape along a new dimension."""

    def widened(tensor: Strided) -> Strided:
        return _reshaped(tensor, lambda values, added: (*values[:dim], added, *values[dim:]))

    return concat([widened(tensor) for tensor in tensors], dim)


def unstack(tensor: Strided, dim: int) -> list[Strided]:
    """Cut a tensor into those along a dimension, which falls away."""
    pieces = split(tensor, [1] * tensor.shape[dim], dim)
    return [_reshaped(piece, lambda values, _: (*values[:dim], *values[dim + 1 :])) for piece in pieces]


def transpose(tensor: Strided, one: int, other: int) -> Strided:
    """Swap two dimensions."""
    order = list(range(len(tensor.shape)))
    order[one] = other
    order[other] = one
    return _reshaped(tensor, lambda values, _: tuple(values[at] for at in order))


def file_order(part: StridedPart) -> list[int]:
    """Return the dimensions of a part in the order of its bytes, slowest first."""
    return sorted(range(len(part.strides)), key=lambda dim: (-part.strides[dim], dim))


def is_contiguous(part: StridedPart, itemsize: int) -> bool:
    """Return whether a part's elements follow each other in the file in row-major order."""
    expected = row_major(part.box.shape, itemsize)
    facts = zip(part.box.shape, part.strides, expected, strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in facts)


def runs(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, most: int, gap: int = _GAP
) -> Iterator[ElementRun]:
    """Plan the reads of a strided part: boxes that hold each element once, of at most `most` bytes a read. `strides`
    descend; `gap` is the most unwanted bytes between two rows of a read."""
    if not shape:
        yield ElementRun(0, itemsize, Box((), ()), ())
        return
    if 0 in shape:
        return
    inner = itemsize + sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True))
    stride = strides[0]
    # a row alone exceeds a read: its inner rows are planned in turn
    if inner > most:
        for at in range(shape[0]):
            for run in runs(shape[1:], strides[1:], itemsize, most, gap):
                box = Box((at, *run.box.offset), (1, *run.box.shape))
                yield ElementRun(at * stride + run.start, run.nbytes, box, (stride, *run.strides))
        return
    # bytes of a small gap cost less than one more request
    step = 1 if stride - inner > gap else 1 + (most - inner) // max(stride, 1)
    for at in range(0, shape[0], step):
        rows = min(step, shape[0] - at)
        box = Box((at,) + (0,) * (len(shape) - 1), (rows, *shape[1:]))
        yield ElementRun(at * stride, inner + (rows - 1) * stride, box, tuple(strides))


def _moved(box: Box, shift: Sequence[int], sign: int) -> Box:
    return Box(tuple(at + sign * by for at, by in zip(box.offset, shift, strict=True)), box.shape)


def _reshaped(tensor: Strided, change: Callable[[Sequence[int], int], tuple[int, ...]]) -> Strided:
    """Change the dimensions of a tensor and its parts: `change` takes a value for each, and the value for a new one."""
    parts = (
        StridedPart(
            part.file,
            part.start,
            Box(change(part.box.offset, 0), change(part.box.shape, 1)),
            change(part.strides, 0),
        )
        for part in tensor.parts
    )
    return Strided(tensor.dtype, change(tensor.shape, 1), tuple(parts))


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
