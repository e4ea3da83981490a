# SPDX-License-Identifier: Apache-2.0
"""One rank's row of a record of metrics, and the one collective that combines all ranks' rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from accel.comm import Call, as_bytes, as_tensor, call_site, exchange, shared_failure
from accel.context import DistContext
from accel.errors import DataError
from accel.metrics._kinds import START, Kind, Nested, Shapes, merged, merged_number, shapes_of, show_shapes
from accel.tree._walk import map_leaves, tensors

Number = tuple[float, float]  # state and weight


class NestedRow(msgspec.Struct, frozen=True, array_like=True):
    """The state of a metric of several numbers.

    Attributes:
        shapes: paths and shapes of its tensors.
        data: their elements one after another, float64.
        weight: weight behind it.
        outline: the containers in plain ones, each tensor as text, for ranks that added nothing.
    """

    shapes: Shapes
    data: bytes
    weight: float
    outline: Any


class MetricsRow(msgspec.Struct, frozen=True, array_like=True):
    """One rank's states by name."""

    numbers: dict[str, Number] = {}
    nested: dict[str, NestedRow] = {}


def nested_row(state: Nested) -> NestedRow:
    """Return the state of a metric of several numbers as bytes. Waits for its device."""
    flat = [leaf.cpu().double().reshape(-1) for _, leaf in tensors(state.values)]
    data = as_bytes(torch.cat(flat).view(torch.uint8)) if flat else b""
    outline = msgspec.to_builtins(map_leaves(lambda _: "", state.values))
    return NestedRow(shapes_of(state.values), data, float(state.weight), outline)


def combine_numbers(kind: Kind, states: Sequence[Number]) -> Number:
    """Return state and weight of several ranks together, in their order; of "last" the first rank that has a value."""
    state, total = START[kind], 0.0
    for value, weight in states:
        if weight and not (kind == "last" and total):
            state = merged_number(kind, state, value)
        total += weight
    return state, total


def combine_nested(kind: Kind, rows: Sequence[NestedRow]) -> tuple[torch.Tensor, float]:
    """Return the elements of several ranks' states together, float64, shape [elements], and their weight."""
    state, total = torch.full((len(rows[0].data) // 8,), START[kind], dtype=torch.float64), 0.0
    for row in rows:
        if row.weight and row.data and not (kind == "last" and total):
            state = merged(kind, state, torch.frombuffer(bytearray(row.data), dtype=torch.float64), row.weight)
        total += row.weight
    return state, total


def value_of(kind: Kind, name: str, state: float, weight: float) -> float:
    """Return the value of a metric's state, of a count as an int; raise `DataError` for a count of parts."""
    if kind == "mean":
        return state / weight
    if kind != "count":
        return state
    if state != state or state % 1:
        raise DataError("a count that is not an integer", got=str(state), where=name, fix='Declare it as a "sum".')
    return int(state)


def values_of(kinds: Mapping[str, Kind], rows: Sequence[MetricsRow], own: Mapping[str, Nested]) -> dict[str, Any]:
    """Return the values over all ranks by name, in the order of the declaration; none where all weights are 0.

    `rows` are all ranks', in rank order; `own` gives the values their containers.
    """
    found: dict[str, Any] = {}
    for name, kind in kinds.items():
        if nested := _nested_rows(name, rows):
            elements, weight = combine_nested(kind, nested)
            if weight:
                containers = own[name].values if name in own else nested[0].outline
                found[name] = filled(containers, nested[0].shapes, elements / weight if kind == "mean" else elements)
            continue
        state, weight = combine_numbers(kind, [row.numbers[name] for row in rows if name in row.numbers])
        if weight:
            found[name] = value_of(kind, name, state, weight)
    return found


def rank_values(kind: Kind, name: str, rows: Sequence[MetricsRow]) -> dict[int, float]:
    """Return the values of single ranks by rank; ranks without one are left out."""
    states = {rank: row.numbers[name] for rank, row in enumerate(rows) if name in row.numbers}
    return {rank: value_of(kind, name, *state) for rank, state in states.items() if state[1]}


def spread_of(name: str, by_rank: Mapping[int, float]) -> dict[str, float]:
    """Return median and largest value of the ranks, and the rank that has it; of even numbers the lower median."""
    if not by_rank:
        return {}
    worst = max(by_rank, key=lambda rank: (by_rank[rank], -rank))
    middle = statistics.median_low(by_rank.values())
    largest = f"{name}_max"
    return {f"{name}_median": middle, largest: by_rank[worst], f"{largest}_rank": worst}


def filled(containers: Any, shapes: Shapes, elements: torch.Tensor) -> Any:
    """Return containers with tensors in the place of their leaves, by paths and shapes."""
    counts = [math.prod(shape) for _, shape in shapes]
    parts = iter(torch.split(elements, counts))
    new = iter([part.view(shape) for part, (_, shape) in zip(parts, shapes, strict=True)])
    return map_leaves(lambda _: next(new), containers)


def _nested_rows(name: str, rows: Sequence[MetricsRow]) -> list[NestedRow]:
    """Return the ranks' states of a metric of several numbers, all of one form; none of a scalar."""
    nested = {rank: row.nested[name] for rank, row in enumerate(rows) if name in row.nested}
    if not nested:
        return []
    first = next(iter(nested))
    forms = {rank: show_shapes(row.shapes) for rank, row in nested.items()}
    forms |= {rank: "a number" for rank, row in enumerate(rows) if name in row.numbers}
    for rank, form in forms.items():
        if form != forms[first]:
            raise DataError(
                "ranks added values of different forms",
                expected=f"{forms[first]}, as on rank {first}",
                got=f"{form} on rank {rank}",
                where=name,
                fix="Add the same containers and shapes on every rank.",
            )
    return list(nested.values())


def gather_rows(
    ctx: DistContext, name: str, kinds: Mapping[str, Kind], own: Callable[[], MetricsRow]
) -> list[MetricsRow]:
    """Return the rows of all ranks, in rank order; `own` waits for its device. A collective that compares names."""
    call = Call(name, "\n".join(f"{metric}: {kind}" for metric, kind in kinds.items()), call_site())
    with shared_failure(ctx.comm, call):
        ctx.comm.settle()  # else it would read values of a step that was left out
        row = own()
    payload = as_tensor(msgspec.msgpack.encode(row))
    return [msgspec.msgpack.decode(as_bytes(each), type=MetricsRow) for each in exchange(ctx.comm, call, payload)]
