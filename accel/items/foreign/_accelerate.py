# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Hugging Face Accelerate, into live objects or imported; pickles by torch's weights-only loader."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from accel.checkpoint._encoding import encode
from accel.checkpoint._live_tensors import check_tensor
from accel.checkpoint._manifest import Item, ItemKind, is_list, is_object
from accel.checkpoint._save import save
from accel.checkpoint._snapshot import Content
from accel.comm import Call, agreed, call_site
from accel.context import DistContext, context_first, single
from accel.errors import CheckpointError, ConfigError
from accel.items._kinds import begin_again, check_items
from accel.items._module import module_states
from accel.items._optimizer import bare_optimizer
from accel.items._packed_state import optimizer_change, with_own_flags
from accel.items._rng import capture_row
from accel.items._source import ModuleState, Problems, StateChange, apply_on_all_ranks, facts
from accel.items._values import Stateful
from accel.loop_state import LossScale
from accel.storage import RemotePath, as_place, open_directory, read_reference
from accel.tensors import is_dtensor, parameters_of
from accel.terminal import show_names

Copy = tuple[torch.Tensor, torch.Tensor]

_WHERE = "load_accelerate_state"
_NOT_TAKEN = {
    "random_states_": "random streams, which are not changed",
    "sampler": "the order of data; state.at(Cursor(seed, epoch, consumed)) continues after the samples that were read",
    "dl_state_dict": "the position of data loaders",
    "profile": "profiles",
}


@context_first
def load_accelerate_state(
    ctx: DistContext, folder: str | os.PathLike[str], items: Mapping[str, object]
) -> dict[str, object]:
    """Load a folder of Accelerate's `save_state`. A collective. Mutates modules, optimizers and other objects.

    Accelerate numbers its files, so items are matched by order: the first module gets `model.safetensors`, the second
    `model_1.safetensors`; optimizers, schedulers and other objects with `load_state_dict` (`custom_checkpoint_0.pkl`)
    likewise, and a `LossScale` takes `scaler.pt`. Everything is read and compared before anything changes. Random
    streams and the position in the data are not loaded; the logger `accel.checkpoint` lists what was not. Pickles are
    read by torch's weights-only loader, which runs no code of theirs.

    Args:
        ctx: the context.
        folder: folder of Accelerate's `save_state`, such as `checkpoint_3`.
        items: modules, optimizers, schedulers, objects with state_dict and load_state_dict, and a `LossScale`, by
            name, in the order in which Accelerate prepared or registered them.

    Returns:
        Every item: the live objects, and a new `LossScale`.

    Raises:
        CheckpointError: a file is missing, holds more than weights, or does not fit; the same on every rank, and
            nothing has been changed.
        ConfigError: an item that Accelerate does not save.
    """
    source = Path(folder)
    site = call_site()
    with agreed(ctx.comm, Call(_WHERE, source.name, site)):
        check_items(items, _WHERE)
        found = _read(source, items)
    apply_on_all_ranks(ctx.comm, Call(f"{_WHERE}: applying", site=site), lambda: found.changes)
    with torch.no_grad():
        for live, stored in found.copies:
            live.copy_(stored)
    begin_again(items.values())
    return found.results


@dataclass(frozen=True, slots=True)
class _LoadPlan:
    """Plan of a load: changes that can fail, copies into live tensors, and the result."""

    changes: list[StateChange]
    copies: list[Copy]
    results: dict[str, object]


def _read(source: Path, items: Mapping[str, object]) -> _LoadPlan:
    """Read and compare everything."""
    found = _LoadPlan([], [], dict(items))
    problems = Problems()
    states = module_states(items)
    taken: list[str] = []
    counts: dict[str, int] = {}
    with open_directory(source) as folder:
        present = folder.names()

    def next_name(kind: str, *endings: str, first: str = "") -> str:
        count = counts[kind] = counts.get(kind, -1) + 1
        stem = kind + (first if count == 0 else f"_{count}")
        names = [stem + ending for ending in endings]
        name = next((name for name in names if name in present), None)
        if name is None:
            raise _missing(source, names[0], present)
        taken.append(name)
        return name

    for name, item in items.items():
        if isinstance(item, nn.Module):
            _module(source / next_name("model", ".safetensors"), name, states[name], problems, found.copies)
        elif isinstance(item, torch.optim.Optimizer):
            _optimizer(source / next_name("optimizer", ".bin"), name, item, problems, found.changes)
        elif isinstance(item, LossScale):
            found.results[name] = _loss_scale(source / next_name("scaler", ".pt"), item)
        elif isinstance(item, Stateful):
            kind = "scheduler" if isinstance(item, LRScheduler) else "custom_checkpoint"
            ending, first = (".bin", "") if kind == "scheduler" else (".pkl", "_0")
            state = read_saved(source / next_name(kind, ending, first=first))
            back = partial(item.load_state_dict, item.state_dict())
            found.changes.append(StateChange(f"item {name}", partial(item.load_state_dict, state), back))
        else:
            fix = "Leave it out, and begin with a new one."
            got = type(item).__qualname__
            raise ConfigError("Accelerate saves no such item", got=got, where=f"{_WHERE}, {name}", fix=fix)
    if problems:
        raise problems.error(source)
    for name in sorted(set(present) - set(taken)):
        why = next((why for start, why in _NOT_TAKEN.items() if name.startswith(start)), "of no item that was passed")
        logging.getLogger("accel.checkpoint").warning("not taken from %s: %s (%s)", source, name, why)
    return found


def _module(path: Path, name: str, live: ModuleState, problems: Problems, copies: list[Copy]) -> None:
    with open_directory(path.parent) as folder:
        stored = read_reference(folder, path.name)
    tensors = {**live.parameters, **live.buffers}
    if any(is_dtensor(tensor) for tensor in tensors.values()):
        fix = "Load into the plain model, then spread it."
        raise CheckpointError("a sharded model takes no full tensors", where=f"{_WHERE}, {name}", fix=fix)
    held = {id(tensors[key]) for key in tensors.keys() & stored.keys()}
    needed = {key for key, tensor in tensors.items() if key in stored or id(tensor) not in held}  # not tied to another
    problems.compare_names(needed, stored.keys(), f"{name}.")
    for key in sorted(needed & stored.keys()):
        problems.compare_tensor(f"{name}.{key}", facts(tensors[key]), facts(stored[key]))
        copies.append((tensors[key], stored[key]))


def _optimizer(
    path: Path, name: str, passed: torch.optim.Optimizer, problems: Problems, changes: list[StateChange]
) -> None:
    state = read_saved(path)
    live = bare_optimizer(passed)
    groups = state.get("param_groups")
    if not is_list(groups) or not isinstance(state.get("state"), dict):
        raise CheckpointError("the file does not hold an optimizer's state", where=str(path))
    stored = [len(group["params"]) for group in groups]
    mine = [len(group["params"]) for group in live.param_groups]
    if stored != mine:
        problems.wrong_type(f"{name}: groups of parameters", f"groups of {mine}", f"groups of {stored}")
        return
    params = parameters_of([live])
    for index, entries in cast("dict[int, dict[str, object]]", state["state"]).items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.dim() and key.startswith("exp_avg"):
                problems.compare_tensor(
                    f"{name}: {key} of parameter {index}", ("", tuple(params[index].shape)), ("", tuple(value.shape))
                )
    state, kept = with_own_flags(live, state)
    for line in kept:
        logging.getLogger("accel.checkpoint").info("%s: %s", name, line)
    changes.append(optimizer_change(f"item {name}", live, passed, state))


def _loss_scale(path: Path, live: LossScale) -> LossScale:
    state = read_saved(path)
    fields = {"scale": "scale", "growth_factor": "growth_factor", "backoff_factor": "backoff_factor"}
    fields |= {"growth_interval": "growth_interval", "good_steps": "_growth_tracker"}
    try:
        renamed = {mine: state[theirs] for mine, theirs in fields.items()}
        return msgspec.convert(msgspec.structs.asdict(live) | renamed, LossScale)
    except (KeyError, msgspec.ValidationError) as error:
        raise CheckpointError(f"the state of the gradient scaler is not valid: {error}", where=str(path)) from error


def read_saved(path: Path) -> dict[str, Any]:
    """Read a file of torch.save with weights and plain values, and without code."""
    try:
        state: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile file can raise anything
        raise CheckpointError(
            f"{path.name}: cannot be read without running code from it: {str(error).splitlines()[0]}",
            where=str(path),
            fix="Leave that object out of the items, and build it anew.",
        ) from error
    if not is_object(state):
        raise CheckpointError(f"{path.name}: not a state", expected="a dict", got=type(state).__name__, where=str(path))
    return state


def _missing(source: Path, name: str, present: list[str]) -> CheckpointError:
    sharded = [found for found in present if found.startswith(("pytorch_model_fsdp", "pytorch_model", "zero_"))]
    fix = "Pass as many items of a kind as were saved."
    if sharded:
        fix = f"{sharded[0]} is of another format: only what Accelerate writes as safetensors is read."
    got = show_names(present, 8) or "an empty folder"
    return CheckpointError(
        f"{name}: missing", expected="a folder that Accelerate's save_state wrote", got=got, where=str(source), fix=fix
    )


_MODULE = re.compile(r"(model(?:_[0-9]+)?)\.safetensors", re.ASCII)
_STATEFUL = re.compile(r"(scheduler(?:_[0-9]+)?|custom_checkpoint_[0-9]+)\.(bin|pkl)", re.ASCII)


def import_accelerate(
    folder: str | os.PathLike[str], out: str | os.PathLike[str] | RemotePath, *, step: int
) -> Path | RemotePath:
    """Convert a folder of Accelerate's `save_state` to a checkpoint at `out`, and return its folder. No communication.

    Optimizers are left out: their files number parameters, so only `load_accelerate_state`, with live ones, loads them.
    """
    source = Path(folder)
    tensors: dict[str, torch.Tensor] = {}
    items: dict[str, Item] = {}
    with open_directory(source) as opened:
        names = opened.names()
        for file in names:
            if (match := _MODULE.fullmatch(file)) is not None:
                for key, tensor in read_reference(opened, file).items():
                    check_tensor(tensor, f"{match[1]}.{key}")
                    tensors[f"{match[1]}.{key}"] = tensor
                items[match[1]] = _item("module", {})
            elif (match := _STATEFUL.fullmatch(file)) is not None:
                items[match[1]] = _item("stateful", encode(read_saved(source / file), match[1], tensors))
            else:
                logging.getLogger("accel.checkpoint").warning("not taken from %s: %s", source, file)
        if not any(item.kind == "module" for item in items.values()):
            raise CheckpointError(
                "no model.safetensors",
                expected="a folder that Accelerate's save_state wrote",
                got=show_names(names, 8) or "an empty folder",
                where=str(source),
                fix="Only models that were saved as safetensors are taken.",
            )
        content = Content(shared={}, main=tensors, own={}, loose={}, items=items, row=capture_row(single(), {}))
        return save(single(), as_place(out), content, step=step, keep=None, metrics={})


def _item(kind: ItemKind, value: object) -> Item:
    return Item(kind=kind, type="", value=value)  # the files name no classes
