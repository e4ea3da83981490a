# SPDX-License-Identifier: Apache-2.0
"""The chain of a model's blocks, and the modules before and behind it. Pure: modules are looked at, never called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

from torch import nn

from accel.errors import PrepareError
from accel.parallel._select import repeated

_LISTS = (nn.ModuleList, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
_FIX = "Name the modules of each stage: Plan(stages=[[...], [...]])."


class Chain(NamedTuple):
    """Paths of modules in the order in which a model calls them.

    Attributes:
        before: modules in front of the blocks, such as an embedding.
        blocks: modules that follow one another.
        behind: modules behind the blocks, such as a norm and a head.
    """

    before: tuple[str, ...]
    blocks: tuple[str, ...]
    behind: tuple[str, ...]


def find_chain(model: nn.Module) -> Chain:
    """Return the chain of a model: its repeated blocks, or the modules of its outermost Sequential or ModuleList.

    Modules without parameters stand in the chain where torch has their class, as that of Dropout. Others, such as
    rotary embeddings, stand nowhere in it and run on every rank.

    Args:
        model: on any device, the meta device too.

    Raises:
        PrepareError: the model has no list of blocks, or several.
    """
    holder = _holder(model)
    listed = cast("nn.Sequential | nn.ModuleList", model.get_submodule(holder))
    blocks = tuple(_joined(holder, key) for key, _ in listed.named_children())
    if not holder:
        return Chain((), blocks, ())
    around = tuple(_walk(model, "", holder))
    at = around.index(holder)
    return Chain(around[:at], blocks, around[at + 1 :])


def _holder(model: nn.Module) -> str:
    """The path of the list that holds the blocks."""
    wanted = repeated(model)
    holders = dict.fromkeys(path.rpartition(".")[0] for path in _outermost(model, wanted, ""))
    if len(holders) > 1:
        raise PrepareError(
            "the model has several lists of blocks, so their order is unknown",
            expected="one list of repeated blocks, each called with what the one before returned",
            got=", ".join(holders),
            where="stage_plan",
            fix=_FIX,
        )
    if holders:
        return next(iter(holders))
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    for path, module in waiting:
        if isinstance(module, _LISTS) and len(module) > 1:
            return path
        waiting.extend((_joined(path, key), child) for key, child in module.named_children())
    raise PrepareError(
        "the model has no list of blocks to make stages of",
        expected="a ModuleList or Sequential of several modules",
        got=f"a {type(model).__name__} without one",
        where="stage_plan",
        fix=_FIX,
    )


def _outermost(module: nn.Module, wanted: set[int], path: str) -> Iterator[str]:
    if path and id(module) in wanted:
        yield path
        return
    for key, child in module.named_children():
        yield from _outermost(child, wanted, _joined(path, key))


def _walk(module: nn.Module, path: str, holder: str) -> Iterator[str]:
    """Paths in the chain's order, the holder's for its blocks; above the holder, what has a forward is one entry."""
    for key, child in module.named_children():
        here = _joined(path, key)
        if here == holder:
            yield holder
        elif holder.startswith(f"{here}.") or isinstance(child, _WITHOUT_FORWARD):
            yield from _walk(child, here, holder)
        elif _is_link(module, child):
            yield here


def _is_link(parent: nn.Module, child: nn.Module) -> bool:
    """Whether a module outside of the blocks belongs to one place of the chain."""
    has_parameters = any(True for _ in child.parameters())
    is_torchs = type(child).__module__.startswith("torch.nn.")
    return has_parameters or is_torchs or isinstance(parent, nn.Sequential)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
