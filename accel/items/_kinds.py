# SPDX-License-Identifier: Apache-2.0
"""The table of kinds of items, and what is asked of items of any kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import torch
from torch import nn

from accel.checkpoint._manifest import Item, ItemKind
from accel.comm import refuse_replaced_memory
from accel.context import DistContext
from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import did_you_mean
from accel.items._folder_files import FOLDER
from accel.items._module import MODULE
from accel.items._optimizer import OPTIMIZER
from accel.items._source import Captured, ItemHandler
from accel.items._values import RECORD, STATEFUL, VALUE, Stateful
from accel.parallel._engines import ENGINES, engine_items
from accel.parallel._modules import refuse_assigned

HANDLERS: tuple[ItemHandler, ...] = (
    MODULE,
    OPTIMIZER,
    FOLDER,
    msgspec.structs.replace(RECORD, takes=msgspec.Struct),  # also one with state_dict and load_state_dict
    STATEFUL,
    RECORD,
    VALUE,
)


_ONLY = "load_state, only="


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a module, an optimizer or an object's state that ranks divide by names, as pipelines do.

    Names are the names in the full model: a rank with the last two layers of ten has `layers.8.weight` and so on. Ranks
    with the same name hold the same tensor, or parts of one DTensor.

    Attributes:
        item: the module, or an optimizer of it; with as many parameter groups as on other ranks, empty ones included.
            Or an object with a `state_dict` that returns a dict of this rank's values by name, and a `load_state_dict`
            that takes a dict with the same names.
    """

    item: nn.Module | torch.optim.Optimizer | Stateful


@dataclass(frozen=True, slots=True)
class TrainableOnly:
    """A module saved without its frozen parameters, for `save_state`.

    The checkpoint holds the parameters with `requires_grad`, buffers and extra state. Of each frozen parameter it holds
    a digest, with which `load_state` compares the live one.

    Attributes:
        model: plain model, or from `prepare`; frozen parameters may be sharded.
    """

    model: nn.Module


def handler_of(item: object) -> ItemHandler:
    """Return the handler of a live item: the first that takes it."""
    if isinstance(item, type):
        return VALUE  # a class has the methods of its instances
    for each in HANDLERS:
        if isinstance(item, each.takes) if isinstance(each.takes, type) else each.takes(item):
            return each
    return VALUE


def stored_handler(item: Item) -> ItemHandler:
    """Return the handler of a stored item."""
    return next(each for each in HANDLERS if each.kind == item.kind and each.stored_type in ("", item.type))


def kind_of(item: object) -> ItemKind:
    """Return the kind of an item, which decides how it is saved and loaded."""
    return handler_of(item).kind


def unstorable(item: object) -> CheckpointError | None:
    """Return the error that a save would raise for an item's values. No communication; nothing is copied."""
    to = Captured(modules={}, names={}, equal={}, loose={}, kept={})
    try:
        handler_of(item).capture("item", item, to)
    except CheckpointError as error:
        return error
    return None


def begin_again(items: Iterable[object]) -> None:
    """Drop gradients of before a load, of modules and of optimizers' parameters. No communication."""
    for item in items:
        if (begin := handler_of(item).begin_again) is not None:
            begin(item)


def check_mapping(items: object, where: str) -> None:
    """Raise `ConfigError` unless items come by name, whatever kind of mapping they are."""
    if not hasattr(items, "keys"):
        raise ConfigError(
            "items have no names",
            expected='a dict of items by name, such as {"model": model}',
            got=type(items).__name__,
            where=where,
        )


def check_items(items: Mapping[str, object], where: str) -> None:
    """Raise `ConfigError` unless there are items, named by identifiers."""
    check_mapping(items, where)
    if not items:
        raise ConfigError("there are no items to checkpoint", expected="at least one item", got="none", where=where)
    for name in items:
        if not isinstance(name, str) or not name.isidentifier():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "the name of an item is not valid", expected="an identifier, such as model", got=repr(name), where=where
            )


def chosen_items(items: Mapping[str, object], only: Sequence[str] | None) -> Mapping[str, object]:
    """Return the items that `only` names, all for None; raises `ConfigError` for a name of no item."""
    if only is None:
        return items
    check_mapping(items, "load_state, items")
    if isinstance(only, str) or not only:
        fix = 'Write only=("model",).'
        raise ConfigError(
            "the names of items are not valid", expected="a tuple of names", got=repr(only), where=_ONLY, fix=fix
        )
    for name in only:
        if name not in items:
            fix = did_you_mean(str(name), [*items])
            raise ConfigError(
                "no item has such a name", expected=", ".join(items), got=repr(name), where=_ONLY, fix=fix
            )
    return {name: items[name] for name in only}


def refuse_replaced_items(items: object, call: str) -> None:
    """Raise `StepError` if a block holds other values in the tensors of modules, or in what optimizers step, or an
    assignment to them had no effect."""
    if not hasattr(items, "keys"):
        return  # refused with the other arguments
    for name, item in without_parts(cast("Mapping[str, object]", items)).items():
        if (tensors := handler_of(item).tensors) is not None:
            held = list(tensors(item))
            refuse_replaced_memory(held, call, f"{call}, item {name}")
            refuse_assigned(held, f"{call}, item {name}")


def without_parts(items: Mapping[str, object]) -> dict[str, object]:
    """Return items with each `Part` and `TrainableOnly` replaced by its own item."""
    found: dict[str, object] = {}
    for name, item in items.items():
        held = item.item if isinstance(item, Part) else item.model if isinstance(item, TrainableOnly) else item
        got = type(held).__name__
        if isinstance(item, Part) and not handler_of(held).is_part:
            raise ConfigError("a Part holds a module, an optimizer or a state", got=got, where=f"item {name}")
        if isinstance(item, TrainableOnly) and not isinstance(held, nn.Module):
            raise ConfigError("the item is not a module", got=got, where=f"item {name}, TrainableOnly")
        found[name] = held
    return found


def with_engine_state(ctx: DistContext, items: Mapping[str, object]) -> Mapping[str, object]:
    """Return items with each object of the context's engine replaced by one that gives its state, a `TrainableOnly`'s
    model included. A collective where the strategy is an engine's.
    """
    if ctx.settings.strategy not in ENGINES:
        return items
    held = {name: item.model if isinstance(item, TrainableOnly) else item for name, item in items.items()}
    made = engine_items(ctx, held)
    return {
        name: TrainableOnly(cast(nn.Module, made[name])) if isinstance(item, TrainableOnly) else made[name]
        for name, item in items.items()
    }


def divided_names(ctx: DistContext, items: Mapping[str, object]) -> frozenset[str]:
    """Return the names of items that are divided among ranks: by their kind, by a pipeline, or as a `Part`."""
    found = set(staged_names(ctx, items))
    for name, held in without_parts(items).items():
        if (is_divided := handler_of(held).is_divided) is not None and is_divided(held):
            found.add(name)
    return frozenset(found)


def staged_names(ctx: DistContext, items: Mapping[str, object]) -> frozenset[str]:
    """Return the names of `Part`s, and of items that a pipeline divides."""
    found = {name for name, item in items.items() if isinstance(item, Part)}
    for name, held in without_parts(items).items():
        if (is_staged := handler_of(held).is_staged) is not None and is_staged(ctx, held):
            found.add(name)
    return frozenset(found)
