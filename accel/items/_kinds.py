# SPDX-License-Identifier: Apache-2.0
"""Kinds of items, and the live object inside wrappers of other libraries, of torch or of the user."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast, runtime_checkable

import msgspec
import torch
from torch import nn

from accel.checkpoint import ItemKind, Kept, is_record
from accel.context import DistContext
from accel.errors import CheckpointError, ConfigError
from accel.parallel import ENGINES, engine_items, is_divided, unwrap_model
from accel.tensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


@dataclass(frozen=True, slots=True)
class Folder:
    """An item whose state is a folder of files: functions write it for a save, and read it for a load.

    Takes what another library saves its own way, such as an adapter of PEFT or an engine's checkpoint, into the same
    commit: the files are part of the checkpoint, their digests are in its manifest, and stores of objects take them.

    On a save, `save(folder)` runs on every rank, each with an empty folder of its own on its host, and may be a
    collective. The checkpoint gets the files of all ranks, by their paths in the folder; of a path that several ranks
    wrote, with as many bytes, the lowest rank's. Empty folders are not kept.

    On a load, after every check, `load(folder)` runs on every rank, with a folder of all files, or those of `select`.
    It runs after the other items have taken their state, but before the tensors of modules are copied in place. If it
    raises, or another rank fails, the other items get their former state back; what `load` did itself stays. The
    folders are deleted when the functions have returned, so nothing may keep files of them open.

    Attributes:
        save: writes files into a folder; None where only loads are made. It gets the folder's path.
        load: reads them; None where only saves are made.
        select: whether this rank needs the file at a path, such as "rank-3/model.pt"; None for all files.
        scratch: parent of the temporary folders, on a disk with room for the files; None for the system's folder of
            temporary files.

    Example:
        >>> adapter = accel.Folder(save=peft_model.save_pretrained, load=lambda path: load_adapter(peft_model, path))
        >>> accel.save_state(ctx, "runs/demo", {"adapter": adapter, "optimizer": optimizer}, step=3)
    """

    save: Callable[[Path], object] | None = None
    load: Callable[[Path], object] | None = None
    select: Callable[[str], bool] | None = None
    scratch: str | Path | None = None


_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
_BITS = ("8", "16", "32", "64")
_NUMBERS = frozenset({"int", "float", "longdouble", *(kind + n for kind in ("int", "uint", "float") for n in _BITS)})


@runtime_checkable
class Stateful(Protocol):
    """An object that returns its state as plain values and tensors, and loads it in place."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Load a state from `state_dict`."""
        ...


@runtime_checkable
class CheckedBeforeSave(Protocol):
    """A record that cannot be saved at every moment."""

    def check_saveable(self) -> None:
        """Raise `ConfigError` unless a checkpoint may be taken now."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a module, an optimizer or an object's state that ranks divide by names, as pipelines do.

    Names are those of the whole: a rank with the last two layers of ten has `layers.8.weight` and so on. Ranks with the
    same name hold the same tensor, or parts of one DTensor.

    Attributes:
        item: the module, or an optimizer of it; with as many parameter groups as on other ranks, empty ones included.
            Or an object whose `state_dict` is a dict of this rank's values by name, and whose `load_state_dict` takes
            one with the same names.
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


def kind_of(item: object) -> ItemKind:
    """Return the kind of an item, which decides how it is saved and loaded."""
    if isinstance(item, nn.Module):
        return "module"
    if isinstance(item, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(item, Folder):
        return "value"
    if isinstance(item, msgspec.Struct):
        return "record"
    if isinstance(item, Stateful) and not isinstance(item, type):
        return "stateful"
    return "record" if is_record(item) else "value"


def type_name(item: object) -> str:
    """Return the name of an item's class, without wrappers."""
    if isinstance(item, torch.Tensor) and is_dtensor(item):
        return "Tensor"  # what a mesh spreads, another mesh or none takes back
    if isinstance(item, torch.optim.Optimizer):
        return type(local_optimizer(bare_optimizer(item))).__qualname__
    if isinstance(item, Path):
        return "Path"  # whatever system it is of
    return type(unwrap_model(item) if isinstance(item, nn.Module) else item).__qualname__


def are_numbers(type_names: Iterable[str]) -> bool:
    """Return whether all classes are of real numbers: a saved 0 may have become 0.5."""
    return _NUMBERS.issuperset(type_names)


def is_floating(dtype: str) -> bool:
    """Return whether a dtype's name is one of real floating-point numbers."""
    found = getattr(torch, dtype, None)
    return isinstance(found, torch.dtype) and found.is_floating_point


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
    """Raise unless there are items, named by identifiers.

    Raises:
        ConfigError: no items, something else than items by name, or a name that is no identifier.
    """
    check_mapping(items, where)
    if not items:
        raise ConfigError("nothing to checkpoint", expected="at least one item", got="none", where=where)
    for name in items:
        if not isinstance(name, str) or not name.isidentifier():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "not a name of an item", expected="an identifier, such as model", got=repr(name), where=where
            )


def check_records(kept: Kept) -> None:
    """Check that every record can be saved now.

    Args:
        kept: the records, by path.

    Raises:
        ConfigError: a record refuses; `where` is its path.
    """
    for path, record in kept.items():
        if isinstance(record, CheckedBeforeSave):
            try:
                record.check_saveable()
            except ConfigError as error:
                facts = {"expected": error.expected, "got": error.got, "fix": error.fix}
                raise ConfigError(error.problem, where=f"item {path}", **facts) from error


def without_parts(items: Mapping[str, object]) -> dict[str, object]:
    """Return items without their `Part`s and `TrainableOnly`s, by what these hold.

    Raises:
        ConfigError: a `Part` of something without a state, or a `TrainableOnly` of no module.
    """
    found: dict[str, object] = {}
    for name, item in items.items():
        held = item.item if isinstance(item, Part) else item.model if isinstance(item, TrainableOnly) else item
        got = type(held).__name__
        if isinstance(item, Part) and kind_of(held) not in ("module", "optimizer", "stateful"):
            raise ConfigError("not a Part of a module, an optimizer or a state", got=got, where=f"item {name}")
        if isinstance(item, TrainableOnly) and not isinstance(held, nn.Module):
            raise ConfigError("not a module", got=got, where=f"item {name}, TrainableOnly")
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


def without_wrappers(items: Mapping[str, object]) -> dict[str, object]:
    """Return items with optimizers out of their wrappers."""
    return {
        name: bare_optimizer(item) if isinstance(item, torch.optim.Optimizer) else item for name, item in items.items()
    }


def divided_names(ctx: DistContext, items: Mapping[str, object]) -> frozenset[str]:
    """Return the names of items that are divided among ranks: by their kind, by a pipeline, or as a `Part`."""
    return frozenset(
        name for name, item in items.items() if isinstance(item, Part | Folder) or is_zero(item) or is_staged(ctx, item)
    )


def is_staged(ctx: DistContext, item: object) -> bool:
    """Return whether a pipeline divides an item among ranks; all optimizers of a mesh with a pipeline are divided."""
    if isinstance(item, TrainableOnly):
        item = item.model
    if isinstance(item, torch.optim.Optimizer):
        return ctx.axis("pp").size > 1
    return isinstance(item, nn.Module) and is_divided(item)


def bare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside of wrappers that share its state, as those of Accelerate and Fabric do."""
    held = getattr(optimizer, "optimizer", None)
    if not isinstance(held, torch.optim.Optimizer) or held is optimizer:
        return optimizer
    shares = held.state is optimizer.state and held.param_groups is optimizer.param_groups
    return bare_optimizer(held) if shares else optimizer


def is_zero(optimizer: object) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Return whether an optimizer is a `ZeroRedundancyOptimizer`. No communication."""
    module = sys.modules.get(_ZERO)  # its import takes long
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer with the state: inside a `ZeroRedundancyOptimizer` this rank's, else the optimizer itself.

    Raises:
        CheckpointError: a `ZeroRedundancyOptimizer` with `overlap_with_ddp`, which divides parameters at the first
            step.
    """
    if not is_zero(optimizer):
        return optimizer
    if optimizer._overlap_with_ddp:
        raise CheckpointError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True cannot be saved or loaded",
            fix="Build it without overlap_with_ddp, or shard the model by fully_shard.",
        )
    return optimizer.optim
