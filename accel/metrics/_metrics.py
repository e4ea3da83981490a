# SPDX-License-Identifier: Apache-2.0
"""`Metrics`: running values as one frozen record. Adding never waits for the device; reading is one collective."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import torch

from accel.comm import Call, as_bytes, as_tensor, call_site, exchange, shared_failure
from accel.context import DistContext, check_context
from accel.errors import ConfigError, DataError
from accel.errors._checks import check_choice, did_you_mean
from accel.metrics._adding import States, add_others, fetched
from accel.metrics._kinds import (
    KINDS,
    START,
    Kind,
    Nested,
    Shapes,
    Weight,
    merged,
    merged_number,
    shapes_of,
    show_shapes,
)
from accel.tree._walk import map_leaves, tensors

_RESERVED = ("step", "time")  # of a line in a run's folder


class Metrics(States, frozen=True, eq=False):
    """Running metrics of this rank, from `running_metrics`. A record: `add` and `read` return new ones.

    A checkpoint keeps the numbers of every rank. As many ranks resume with the same bits; of another number of ranks,
    rank 0 resumes with all of them together.

    Attributes:
        kinds: kind of each metric by name.
        by_rank: metrics that are also read as the median and the largest value over ranks.
        numbers: states on the host by name: sums of values times weight, sums, extremes, last values.
        weights: the weights behind the states.
        groups: states of scalars on an accelerator.
        nested: states of tensors with dimensions, and of containers.
    """

    def add(self, weight: Weight, /, **values: Any) -> Metrics:
        """Return the record with values added. No communication, and no wait for an accelerator.

        Values of weight 0 are left out, whatever they are: of a batch without samples, or nan as the mean of no
        tokens. Everything is added in float64.

        Args:
            weight: units behind the values, such as `batch.weight` or the number of valid tokens: a number from 0, or a
                tensor of shape []. Or one weight for each sample, shape [rows], such as `batch.weights`.
            values: by declared name. A number or a tensor of shape [] is a mean over the weight, a sum, an extreme or
                the last value, as declared. A tensor of another shape, or nested containers, is a metric of several
                numbers, of the same form each time. With one weight for each sample, tensors of shape [rows, ...] are
                one value a sample.

        Raises:
            ConfigError: a name that was not declared, or a weight below 0.
            DataError: values of another form than before, or without a row for each weight.
            TreeError: a container that cannot be flattened, or a leaf that is no real number.

        Examples:
            >>> metrics = accel.metrics.running_metrics(loss="mean", lr="last")
            >>> metrics = metrics.add(3, loss=2.0, lr=0.1).add(1, loss=6.0, lr=0.05)
            >>> metrics.read(accel.single())[0]
            {'loss': 3.0, 'lr': 0.05}
        """
        if weight.__class__ is torch.Tensor and weight.is_cpu and not weight.ndim:  # pyright: ignore
            weight = cast("float", weight.item())  # pyright: ignore
        if isinstance(weight, torch.Tensor):
            return self._with_others(weight, values)
        if not isinstance(weight, int | float) or not 0 <= weight < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "the weight is not valid", expected="a number from 0", got=repr(weight), where="metrics.add"
            )
        kinds = self.kinds
        numbers = self.numbers.copy()
        weights = self.weights.copy()
        elsewhere = bool(self.groups or self.nested)
        others: dict[str, Any] = {}
        for name, value in values.items():
            kind = kinds.get(name)
            if kind is None:
                raise self._undeclared(name)
            if value.__class__ is torch.Tensor:
                if value.ndim or not value.is_cpu or value.is_complex():
                    others[name] = value
                    continue
                value = value.item()
            elif value.__class__ is not float and value.__class__ is not int:
                others[name] = value
                continue
            if elsewhere and name not in numbers:
                others[name] = value
                continue
            if weight:
                if kind == "mean":
                    numbers[name] = numbers.get(name, 0.0) + value * weight
                elif kind == "sum" or kind == "count":
                    numbers[name] = numbers.get(name, 0.0) + value
                else:
                    numbers[name] = merged_number(kind, numbers.get(name, START[kind]), value)
                weights[name] = weights.get(name, 0.0) + weight
        after = Metrics(kinds, self.by_rank, numbers, weights, self.groups, self.nested)
        return after._with_others(weight, others) if others else after

    def read(self, ctx: DistContext) -> tuple[dict[str, Any], Metrics]:
        """Return the values over all ranks, and an empty record for the next ones. One collective.

        Returns:
            The values by name, equal on every rank: floats, a count as an int, tensors of float64 on the CPU in the
            containers of `add`, or in plain ones on a rank that added none. A metric to which no rank added with a
            weight above 0 has no value. For the names in `by_rank` also `<name>_median`, `<name>_max` and
            `<name>_max_rank`, of the ranks' own values.

        Raises:
            CollectiveMismatch: ranks declare different metrics; on every rank.
            DataError: ranks added values of different forms, or a count of parts; on every rank.
        """
        check_context(ctx, "metrics.read(ctx)")
        rows = gather_rows(ctx, "metrics.read", self.kinds, lambda: own_row(self))
        return read_values(self, rows), emptied(self)

    def without_rank_part(self) -> Metrics:
        """Return what is common to all ranks, which a checkpoint stores once: only the declaration."""
        return emptied(self)

    def declared_as(self, live: Metrics) -> Metrics:
        """Return a stored record with the declaration of the live one, which may have more metrics.

        Raises:
            msgspec.ValidationError: a metric of another kind than the stored one.
        """
        for name in self.kinds.keys() & live.kinds.keys():
            if self.kinds[name] != live.kinds[name]:
                raise msgspec.ValidationError(f"{name} was a {self.kinds[name]!r}, and is a {live.kinds[name]!r}")
        return emptied(live)

    def rank_part(self) -> object:
        """Return this rank's numbers, None if there are none; a checkpoint keeps them for each rank."""
        row = own_row(self)
        if not row.numbers and not row.nested:
            return None
        nested = {name: [state.values, row.nested[name].weight] for name, state in self.nested.items()}
        return {"numbers": {name: list(number) for name, number in row.numbers.items()}, "nested": nested}

    def with_rank_part(self, part: object) -> Metrics:
        """Return the record with numbers of one rank, from `rank_part` in plain values.

        Raises:
            msgspec.ValidationError: the part does not fit.
        """
        stored = msgspec.convert(part, _MetricsPart)
        if unknown := {*stored.numbers, *stored.nested} - self.kinds.keys():
            raise msgspec.ValidationError(f"numbers of {', '.join(sorted(unknown))}, which are not declared")
        numbers = {name: value for name, (value, _) in stored.numbers.items()}
        weights = {name: weight for name, (_, weight) in stored.numbers.items()}
        nested = {name: Nested(values, weight) for name, (values, weight) in stored.nested.items()}
        return Metrics(self.kinds, self.by_rank, numbers, weights, {}, nested)

    def with_rank_parts(self, parts: Sequence[object]) -> Metrics:
        """Return the record with the numbers of several ranks together.

        Args:
            parts: as for `with_rank_part`, in rank order; None for a rank without numbers.

        Raises:
            msgspec.ValidationError: a part does not fit.
        """
        records = [self.with_rank_part(part) for part in parts if part is not None]
        rows = [own_row(record) for record in records]
        after = emptied(self)
        for name, kind in self.kinds.items():
            states = [row.numbers[name] for row in rows if name in row.numbers]
            if states:
                after.numbers[name], after.weights[name] = combine_numbers(kind, states)
            nested = [row.nested[name] for row in rows if name in row.nested]
            if nested:
                elements, weight = combine_nested(kind, nested)
                template = next(record.nested[name] for record in records if name in record.nested)
                after.nested[name] = Nested(filled(template.values, nested[0].shapes, elements), weight)
        return after

    def _with_others(self, weight: Weight, values: Mapping[str, Any]) -> Metrics:
        for name in values:
            if name not in self.kinds:
                raise self._undeclared(name)
        return add_others(self, weight, values)

    def _undeclared(self, name: str) -> ConfigError:
        return ConfigError(
            "a metric that was not declared",
            expected=", ".join(self.kinds),
            got=repr(name),
            where="metrics.add",
            fix=did_you_mean(
                name, self.kinds, f'Declare it with its kind, such as {name}="mean", where the record is made.'
            ),
        )


Number = tuple[float, float]  # state and weight


class NestedRow(msgspec.Struct, frozen=True, array_like=True):
    """The state of a metric of several numbers."""

    shapes: Shapes  # paths and shapes of its tensors
    data: bytes  # their elements one after another, float64
    weight: float  # weight behind it
    outline: Any  # the containers in plain ones, each tensor as text, for ranks that added nothing


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


def own_row(metrics: Metrics) -> MetricsRow:
    """Return this rank's states as plain numbers. Waits for the device."""
    return MetricsRow(fetched(metrics), {name: nested_row(state) for name, state in metrics.nested.items()})


def read_values(metrics: Metrics, rows: Sequence[MetricsRow]) -> dict[str, Any]:
    """Return the values of all ranks' rows together; see `Metrics.read`."""
    found = values_of(metrics.kinds, rows, metrics.nested)
    for name in metrics.by_rank:
        found |= spread_of(name, rank_values(metrics.kinds[name], name, rows))
    return found


def emptied(metrics: Metrics) -> Metrics:
    """Return a record of the same metrics without values."""
    return Metrics(metrics.kinds, metrics.by_rank)


class _MetricsPart(msgspec.Struct, frozen=True):
    numbers: dict[str, Number]
    nested: dict[str, tuple[Any, float]]


def running_metrics(*, by_rank: Sequence[str] = (), **kinds: Kind) -> Metrics:
    """Return an empty record of running metrics. No communication.

    Kinds: "mean", weighted; "sum"; "count", a sum of integers or booleans, read as an int; "min"; "max"; "last", the
    lowest rank's that has one.

    Args:
        by_rank: names of scalars to read also as the median and the largest value over ranks.
        kinds: kind of each metric, by name, in the order in which they are read.

    Raises:
        ConfigError: no metric, an unknown kind, a reserved name ("step", "time"), or one in `by_rank` without a kind.

    Examples:
        >>> metrics = accel.metrics.running_metrics(loss="mean", tokens="count")
        >>> metrics = metrics.add(8, loss=torch.tensor(0.5), tokens=4096)
        >>> metrics.read(accel.single())[0]
        {'loss': 0.5, 'tokens': 4096}
    """
    if not kinds:
        raise ConfigError("no metrics", expected='a kind by name, such as loss="mean"', where="running_metrics")
    for name, kind in kinds.items():
        check_choice(kind, KINDS, f"the metric {name!r} has an unknown kind", where="running_metrics")
        if name in _RESERVED:
            raise ConfigError("a reserved name", got=repr(name), where="running_metrics", fix="Rename the metric.")
    for name in by_rank:
        check_choice(name, tuple(kinds), "no such metric", where="running_metrics, by_rank=")
    return Metrics(kinds, tuple(by_rank))
