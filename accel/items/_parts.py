# SPDX-License-Identifier: Apache-2.0
"""Items of which each rank has a part: what it says of its own before a save, and what all of them make together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec
import torch
from torch import nn

from accel.checkpoint import Content
from accel.errors import CheckpointError, ConfigError
from accel.items._bases import TrainableOnly, trainable_names
from accel.items._optimizers import OptimizerValue, join_optimizers
from accel.items._zero import is_zero


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a module, or of an optimizer, that ranks divide among them by names, as pipelines do.

    Names are those of the whole: a rank with the last two layers of ten has `layers.8.weight` and so on. Ranks that
    have the same name hold the same tensor, or parts of one DTensor.

    Attributes:
        item: the module, or an optimizer of it; with as many parameter groups as on other ranks, empty ones included.
    """

    item: nn.Module | torch.optim.Optimizer


def without_parts(items: Mapping[str, object]) -> dict[str, object]:
    """Return items with what is in their `Part`s.

    Raises:
        ConfigError: a `Part` of something that has no names to divide it by.
    """
    for name, item in items.items():
        if isinstance(item, Part) and not isinstance(item.item, nn.Module | torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            got = type(item.item).__name__
            raise ConfigError("not a Part of a module or an optimizer", got=got, where=f"item {name}")
    _ = trainable_names(items)
    return {name: _inside(item) for name, item in items.items()}


def part_names(items: Mapping[str, object]) -> frozenset[str]:
    """Return the names of items that are `Part`s."""
    return frozenset(name for name, item in items.items() if isinstance(item, Part))


def divided_names(items: Mapping[str, object]) -> frozenset[str]:
    """Return the names of items of which each rank has a part, by its kind or because it says so."""
    return part_names(items) | {name for name, item in items.items() if is_zero(item)}


def own_values(items: Mapping[str, object], content: Content) -> bytes:
    """Return this rank's value of every item of which it has a part; nothing if there is none. No communication."""
    own = {name: content.items[name].value for name in sorted(divided_names(items))}
    return msgspec.msgpack.encode(own) if own else b""


def join_values(content: Content, said: Sequence[bytes]) -> Content:
    """Return what a rank brings to a checkpoint, with the values that all ranks make together.

    Args:
        content: this rank's.
        said: what each rank gave by `own_values`.

    Raises:
        CheckpointError: the parts do not go together; alike on every rank.
    """
    if not any(said):
        return content
    ranks = [msgspec.msgpack.decode(each, type=dict[str, Any]) if each else {} for each in said]
    items = dict(content.items)
    for name in sorted(set[str]().union(*ranks)):
        if missing := [rank for rank, own in enumerate(ranks) if name not in own]:
            raise CheckpointError(
                "an item of which some ranks have a part and others have not",
                expected="a Part, or a ZeroRedundancyOptimizer, on every rank",
                got=f"none on rank {', '.join(map(str, missing))}",
                where=name,
            )
        values = [own[name] for own in ranks]
        items[name] = msgspec.structs.replace(items[name], value=_join(name, items[name].kind, values))
    return dataclasses.replace(content, items=items)


def check_taken(left: Sequence[Set[str]]) -> None:
    """Raise unless some rank takes each of the tensors and parameters that a checkpoint holds of `Part`s.

    Args:
        left: what each rank does not take.

    Raises:
        CheckpointError: no rank takes them; each is named.
    """
    if lost := sorted(name for name in left[0] if all(name in other for other in left)):
        raise CheckpointError(
            "in the checkpoint, but in no rank's part:" + "".join(f"\n  {name}" for name in lost),
            fix="Build the parts so that together they are the whole, or pass strict=False.",
        )


def _inside(item: object) -> object:
    return item.item if isinstance(item, Part) else item.model if isinstance(item, TrainableOnly) else item


def _join(name: str, kind: str, values: list[Any]) -> Any:
    if kind == "optimizer":
        joined = join_optimizers([msgspec.convert(value, OptimizerValue) for value in values], name)
        return msgspec.to_builtins(joined)
    extras: dict[str, Any] = {}
    for value in reversed(values):
        extras |= value
    return extras
