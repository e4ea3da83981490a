# SPDX-License-Identifier: Apache-2.0
"""Items divided among ranks: the values of all parts are joined before a save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import msgspec

from accel.checkpoint import Content, Item
from accel.errors import CheckpointError
from accel.items._bases import BASE, join_bases
from accel.items._optimizer_state import Group, OptimizerValue, ParamFacts


def own_values(content: Content, divided: Iterable[str]) -> bytes:
    """Return this rank's values of divided items. No communication."""
    return msgspec.msgpack.encode({name: content.items[name].value for name in sorted(divided)})


def join_values(mine: Mapping[str, Item], said: Sequence[bytes]) -> Mapping[str, Item]:
    """Return a checkpoint's items, with the values of divided ones joined over ranks.

    Args:
        mine: items of this rank.
        said: results of `own_values`, by rank.

    Raises:
        CheckpointError: the parts do not fit together; the same on every rank.
    """
    ranks = [msgspec.msgpack.decode(each, type=dict[str, Any]) if each else {} for each in said]
    items = dict(mine)
    for name in sorted(set[str]().union(*ranks)):
        if missing := [rank for rank, own in enumerate(ranks) if name not in own]:
            raise CheckpointError(
                "an item that is a part on some ranks and whole on others",
                expected="a Part, or a ZeroRedundancyOptimizer, on every rank",
                got=f"none on rank {', '.join(map(str, missing))}",
                where=name,
            )
        values = [own[name] for own in ranks]
        items[name] = msgspec.structs.replace(items[name], value=_join(name, items[name].kind, values))
    return items


def check_taken(left: Sequence[Set[str]]) -> None:
    """Raise unless some rank loads each stored tensor and parameter of `Part`s.

    Args:
        left: entries that a rank does not load, by rank.

    Raises:
        CheckpointError: no rank loads an entry; each is named.
    """
    if lost := sorted(name for name in left[0] if all(name in other for other in left)):
        raise CheckpointError(
            "stored, but in no rank's part:" + "".join(f"\n  {name}" for name in lost),
            fix="Build the parts so that together they are the whole, or pass strict=False.",
        )


def _join(name: str, kind: str, values: list[Any]) -> Any:
    if kind == "optimizer":
        joined = _join_optimizers([msgspec.convert(value, OptimizerValue) for value in values], name)
        return msgspec.to_builtins(joined)
    extras: dict[str, Any] = {}
    for value in reversed(values):
        extras |= value
    if BASE in extras:
        extras[BASE] = join_bases(name, [value[BASE] for value in values])
    return extras


def _join_optimizers(values: Sequence[OptimizerValue], item: str) -> OptimizerValue:
    """Join the state of a divided optimizer. Where several ranks hold a value, the lowest rank wins."""
    counts = [len(value.groups) for value in values]
    if len(set(counts)) > 1:
        raise CheckpointError(
            "ranks have other numbers of parameter groups",
            expected="the groups on every rank, empty ones where it has no such parameters",
            got=f"by rank: {', '.join(map(str, counts))}",
            where=item,
        )
    groups: list[Group] = []
    for same in zip(*(value.groups for value in values), strict=True):
        names = dict.fromkeys(name for group in same for name in group.params)
        groups.append(Group(tuple(names), same[0].options))
    params: dict[str, ParamFacts] = {}
    state: dict[str, Any] = {}
    for value in reversed(values):
        params |= value.params
        state |= value.state
    return OptimizerValue(tuple(groups), params, state, values[0].rest)
