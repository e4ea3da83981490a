# SPDX-License-Identifier: Apache-2.0
"""A record cut into stages: where each begins, what it holds, and which tensors are sent. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import get_args

import msgspec

from accel.errors import ConfigError
from accel.errors._checks import check_choice, did_you_mean
from accel.parallel._record import ForwardRecord, Label, Labels
from accel.topology import Balance, CallCosts


class StageCut(msgspec.Struct, frozen=True):
    """One stage of a cut."""

    begin: int  # number of its first call
    end: int  # number of the first call behind it
    # Outputs and arguments of earlier stages, sorted. An argument is one of the stage's first call, which the stage
    # writes into the tensor that the call is given.
    needs: tuple[Label, ...]
    # Outputs and arguments that later stages need, sorted. An argument is one of the first call of the next stage, at
    # which this stage stops.
    gives: tuple[Label, ...]
    # Tensors that the stage sends to the next one, sorted: those that it gives, and others of earlier stages. Empty for
    # the last.
    passes: tuple[Label, ...]
    # Names of the parameters and buffers that it reads or stores, tied names included. Buffers outside of units are in
    # every stage, as all run the code between calls.
    holds: frozenset[str]


class Cut(msgspec.Struct, frozen=True):
    """A record cut into stages."""

    stages: tuple[StageCut, ...]  # in order
    # Outputs with placeholders that need separate memory, as arguments that are written are views of them.
    dense: Labels


# Weights of what a place to begin a stage at costs, where the load of an equal stage costs 1.
_TRAFFIC, _TWICE, _REPEATED = 0.03, 0.3, 2.0
MOST_TWICE = 0.05  # share of a forward's FLOPs that stages may compute once more


def call_costs(record: ForwardRecord, blocks: Collection[str] = ()) -> tuple[CallCosts, ...]:
    """Return what each call of a record costs. Pure.

    Args:
        record: of a forward.
        blocks: paths of the model's blocks; without any among the calls, each call is one.
    """
    known = set(blocks) & set(record.paths) or set(record.paths)
    held = [each for each in record.held if each.is_parameter]
    memory = {path: sum(each.bytes for each in held if _within(each.names, [path])) for path in set(record.paths)}
    return tuple(
        CallCosts(each.path, each.flops, float(memory[each.path]), float(each.path in known), price)
        for each, price in zip(record.calls, _prices(record), strict=True)
    )


def costs_of(calls: Sequence[CallCosts], balance: Balance, given: Mapping[str, float] | None = None) -> list[float]:
    """Return what each call costs by a balance; an unknown one is a `ConfigError`. Pure.

    `given`: cost of modules by path, in the place of the balance's; another path or cost is a `ConfigError`.
    """
    check_choice(balance, get_args(Balance), "unknown balance of stages", where="stage_plan, balance=")
    paths = [each.path for each in calls]
    for path, cost in (given or {}).items():
        if path not in paths:
            raise ConfigError(
                "a cost of something else than a module that stages divide",
                expected="a path such as " + paths[0],
                got=repr(path),
                where="costs=",
                fix=did_you_mean(path, paths),
            )
        if not isinstance(cost, int | float) or not 0 <= cost < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError("the cost is not valid", expected="0 or above", got=repr(cost), where=f"costs=, {path}")
    return [(given or {}).get(each.path, each.cost(balance)) for each in calls]


def _prices(record: ForwardRecord) -> list[float]:
    """Costs of a stage's begin at each call: bytes sent, modules of two stages, FLOPs computed twice."""
    crossing = [_crossing(record, at) for at in range(len(record.calls))]
    least = min(crossing[1:], default=1) or 1
    again = list(itertools.accumulate(record.between))
    found = [0.0]
    for at in range(1, len(crossing)):
        twice = len(set(record.paths[:at]) & set(record.paths[at:]))
        found.append(_TRAFFIC * crossing[at] / least + _TWICE * twice + _REPEATED * again[at] / (record.flops or 1))
    return found


def share_twice(record: ForwardRecord, begins: Sequence[int]) -> float:
    """Return the FLOPs that stages compute again, as a share of the forward's.

    Each stage runs the code between calls from the beginning to the first call of the next one.
    """
    before = list(itertools.accumulate(record.between))
    return sum(before[begin] for begin in begins[1:]) / (record.flops or 1)


def _crossing(record: ForwardRecord, at: int) -> int:
    """Bytes that are sent if a stage begins at a call."""
    labels = record.end.union(*(each.needs for each in record.calls[at:]))
    own = frozenset(Label("argument", at, number) for number in record.calls[at].arguments)
    ways = [_resolved(record, labels, sent) for sent in (frozenset[Label](), own)]
    crossing = [[x for x in way if x.kind == "argument" or (x.kind == "output" and x.call < at)] for way in ways]
    return min(sum(record.leaf(x).bytes for x in way) for way in crossing)


def _resolved(record: ForwardRecord, labels: Iterable[Label], sent: Labels) -> set[Label]:
    """Sources of labels: outputs, parameters and arguments that are sent."""
    found: set[Label] = set()
    todo = list(labels)
    while todo:
        each = todo.pop()
        if each in found:
            continue
        if each.kind == "argument" and each not in sent:
            todo += record.calls[each.call].arguments[each.leaf].sources
        else:
            found.add(each)
    return found


def cut_record(record: ForwardRecord, begins: Sequence[int], held: Sequence[Collection[str]] = ()) -> Cut:
    """Cut a record at the first calls of stages.

    `held`: names of the tensors that stages hold already, which they rather read than others.
    """
    sent = _sent_arguments(record, begins, held)
    needs, reads = _needs(record, begins, sent)
    everything = set[Label]().union(*needs)
    last = len(begins) - 1
    holds = _holds(record, begins, reads)
    stages: list[StageCut] = []
    for at, (begin, end) in enumerate(_spans(record, begins)):
        gives = {each for each in everything if _maker(record, begins, each) == at}
        later = set[Label]().union(*needs[at + 1 :])
        passes = {each for each in later if _maker(record, begins, each) <= at}
        stages.append(
            StageCut(
                begin,
                end,
                tuple(sorted(needs[at])),
                tuple(sorted(gives)),
                tuple(sorted(passes)) if at < last else (),
                holds[at],
            )
        )
    bases = {record.calls[each.call].arguments[each.leaf].base for each in sent}
    return Cut(tuple(stages), frozenset(each for each in bases if each is not None))


def _spans(record: ForwardRecord, begins: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(begins, [*begins[1:], len(record.calls)], strict=True)


def _maker(record: ForwardRecord, begins: Sequence[int], label: Label) -> int:
    """The stage that makes an output or an argument."""
    spans = enumerate(_spans(record, begins))
    if label.kind == "argument":
        return next(at for at, (_, end) in spans if end == label.call)
    return next(at for at, (begin, end) in spans if begin <= label.call < end)


def _sent_arguments(record: ForwardRecord, begins: Sequence[int], held: Sequence[Collection[str]]) -> Labels:
    """The arguments of first calls that are sent instead of their sources if that sends less, or if a stage does not
    hold what it reads of them."""
    sent: Labels = frozenset()

    def cost(these: Labels) -> tuple[int, int]:
        needs, reads = _needs(record, begins, these)
        missing = sum(len(each.difference(own)) for each, own in zip(reads, held, strict=False))
        sizes = {name: each.bytes for each in record.held if each.is_parameter for name in each.names}
        memory = sum(sizes.get(name, 0) for each in reads for name in each)
        return missing, memory + sum(record.leaf(x).bytes for each in needs for x in each)

    for begin in begins[1:]:
        more = sent | {Label("argument", begin, number) for number in record.calls[begin].arguments}
        for each in sorted(more - sent):
            if cost(more - {each}) <= cost(more):
                more -= {each}
        if cost(more) < cost(sent):
            sent = more
    return sent


def _needs(record: ForwardRecord, begins: Sequence[int], sent: Labels) -> tuple[list[set[Label]], list[set[str]]]:
    """By stage: what comes from earlier stages, and the names of the parameters and buffers that it reads."""
    needs: list[set[Label]] = []
    reads: list[set[str]] = []
    last = len(begins) - 1
    for at, (begin, end) in enumerate(_spans(record, begins)):
        labels = set[Label]().union(*(each.needs for each in record.calls[begin:end]))
        labels = labels.union(*(each.sources for each in record.decisions if each.call <= end))
        if at == last:
            labels |= record.end
        made = [each for each in sent if at < last and each.call == end]
        labels = labels.union(*(record.calls[each.call].arguments[each.leaf].sources for each in made))
        known = frozenset(each for each in sent if each.call <= begin)
        found = _resolved(record, labels, known)
        needs.append({x for x in found if x.kind == "argument" or (x.kind == "output" and not begin <= x.call < end)})
        reads.append({x.name for x in found if x.kind == "tensor"})
    return needs, reads


def _holds(record: ForwardRecord, begins: Sequence[int], reads: Sequence[set[str]]) -> list[frozenset[str]]:
    """Return names of tensors by stage: tensors that it reads, tensors of its calls' modules, and unread tensors next
    to tensors of one module."""
    found: list[set[str]] = [set() for _ in begins]
    left: list[tuple[str, ...]] = []
    for each in record.held:
        if not each.is_parameter and not _within(each.names, record.units):
            for names in found:
                names.update(each.names)
            continue
        inside = _within(each.names, record.paths)
        where = [
            at
            for at, (begin, end) in enumerate(_spans(record, begins))
            if not reads[at].isdisjoint(each.names) or not set(inside).isdisjoint(record.paths[begin:end])
        ]
        for at in where:
            found[at].update(each.names)
        if not where:
            left.append(each.names)
    known = {name: at for at, names in enumerate(found) for name in names}
    for names in left:
        found[_nearest(names[0], known)].update(names)
    return list(map(frozenset, found))


def _within(names: Iterable[str], paths: Iterable[str]) -> list[str]:
    """The modules that have a tensor."""
    return [path for path in paths if any(name.startswith(f"{path}.") for name in names)]


def _nearest(name: str, known: dict[str, int]) -> int:
    """The last stage with tensors of the innermost module around one that nothing reads."""
    while name:
        name = name.rpartition(".")[0]
        beside = [at for other, at in known.items() if not name or other.startswith(f"{name}.")]
        if beside:
            return max(beside)
    return 0
