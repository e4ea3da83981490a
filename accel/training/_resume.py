# SPDX-License-Identifier: Apache-2.0
"""`resume`: the state of the newest checkpoint, or the initial one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from accel.checkpoint._manifest import Manifest, stored_field
from accel.comm import call_site
from accel.context import DistContext, context_first
from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import check_kind
from accel.items import Folder, Part, TrainableOnly
from accel.items._kinds import check_mapping, kind_of
from accel.items._loading import load_newest
from accel.items._source import LoadOptions
from accel.loop_state import Accumulation, Cursor, LossScale
from accel.storage import RemotePath
from accel.training._train_state import TrainState

_PARTS = {"cursor": Cursor, "accum": Accumulation, "scaler": LossScale}


@context_first
def resume(
    ctx: DistContext, out: str | os.PathLike[str] | RemotePath, items: Mapping[str, object], start: TrainState
) -> TrainState:
    """Load the newest checkpoint of a run, and return its state; return `start` if there is none. A collective.

    Mutates modules, optimizers and random streams, as `load_state` does. Position, counts and loss scale come from
    the checkpoint. Settings come from `start`: the accumulation's steps, the growth of the loss scale and whether it is
    dynamic. The state is found by its type, under any name. A checkpoint may also hold its parts: a `Cursor`, an
    `Accumulation` and a `LossScale`.

    Args:
        ctx: the context.
        out: folder or URL as for `save_state`; it need not exist yet.
        items: live objects by their names in the checkpoint; None leaves an item in the file. No records or plain
            values: `load_state` returns those.
        start: initial state, from `train_state`.

    Returns:
        The state to continue with.

    Raises:
        CheckpointError: as `load_state`; or the checkpoint holds no state, or several.
        ConfigError: a record among the items, or another seed than the run's; nothing was changed.

    Examples:
        >>> ctx, model = accel.single(), torch.nn.Linear(2, 1)
        >>> state = accel.resume(ctx, "runs/new", {"model": model}, accel.train_state(ctx))
        >>> state.updates
        0
    """

    def state_for(manifest: Manifest) -> Mapping[str, object]:
        names = _names(manifest)
        # Before anything is loaded: data in another order would resume at a position that means nothing in it.
        _check_seed(manifest, names, start)
        parts = {"": start, "cursor": start.cursor, "accum": start.accum, "scaler": start.scaler}
        return {name: parts[part] for part, name in names.items()}

    _check_items(items, start)
    options = LoadOptions(strict=True, cast=False, transform=None)
    loaded = load_newest(ctx, out, items, state_for, options=options, site=call_site(), verb="resume")
    if loaded is None:
        return start
    state = _with_settings(_joined(loaded), start)
    ctx.comm.marks.watch(state.scaler)
    return state


def _check_items(items: Mapping[str, object], start: object) -> None:
    check_kind(
        start,
        TrainState,
        "the state to start with is not valid",
        expected="accel.train_state(ctx, ...)",
        where="resume, start",
        fix="state = accel.resume(ctx, out, items, accel.train_state(ctx))",
    )
    check_mapping(items, "resume, items")
    for name, item in items.items():
        if (
            item is not None
            and not isinstance(item, Folder | Part | TrainableOnly)
            and kind_of(item) in ("record", "value")
        ):
            raise ConfigError(
                "resume does not return a value among the items",
                expected="live objects: modules, optimizers, schedulers",
                got=f"{name}: {type(item).__name__}",
                where="resume, items",
                fix='Load it with the state: loaded = accel.load_state(ctx, out, items | {"state": state}). Or leave it'
                f" in the file: {{{name!r}: None}}.",
            )


def _names(manifest: Manifest) -> dict[str, str]:
    """Return the name of the checkpoint's state under "", or the names of its three parts."""
    states = _of_type(manifest, TrainState)
    if len(states) == 1:
        return {"": states[0]}
    found = {part: _of_type(manifest, kind) for part, kind in _PARTS.items()}
    if not states and all(len(names) == 1 for names in found.values()):
        return {part: name for part, [name] in found.items()}
    several = states or [name for names in found.values() for name in names]
    parts = ", ".join([f"{name!r}: state" for name in several[-1:]] + [f"{name!r}: None" for name in several[:-1]])
    raise CheckpointError(
        "the checkpoint holds more than one state" if several else "the checkpoint holds no state of a loop",
        expected="one TrainState; or a Cursor, an Accumulation and a LossScale",
        got=", ".join(several) or f"{', '.join(sorted(manifest.items))}",
        where="resume",
        fix=f"Load by name: loaded = accel.load_state(ctx, out, items | {{{parts}}})."
        if several
        else "Load the items alone: accel.load_state(ctx, out, items).",
    )


def _of_type(manifest: Manifest, kind: type) -> list[str]:
    return [name for name, item in manifest.items.items() if (item.kind, item.type) == ("record", kind.__qualname__)]


def _check_seed(manifest: Manifest, names: dict[str, str], start: TrainState) -> None:
    if "cursor" in names:
        cursor = manifest.items[names["cursor"]].value
    else:
        cursor = stored_field(manifest.items[names[""]].value, "cursor")
    stored = stored_field(cursor, "seed")
    if isinstance(stored, int) and stored != start.cursor.seed:
        raise ConfigError(
            "the run began with another seed",
            expected=f"train_state(ctx, seed={stored})",
            got=f"seed={start.cursor.seed}",
            where="resume",
            fix="Pass the seed of the run, or another folder to begin a new one.",
        )


def _joined(loaded: Mapping[str, object]) -> TrainState:
    found = {type(value): value for value in loaded.values()}
    if TrainState in found:
        return cast(TrainState, found[TrainState])
    return TrainState(*(cast(Any, found[kind]) for kind in _PARTS.values()))


def _with_settings(state: TrainState, start: TrainState) -> TrainState:
    # Counts are the run's, settings the script's: who changes the accumulation and resumes means it.
    accum = msgspec.structs.replace(state.accum, steps=start.accum.steps, sync_each_batch=start.accum.sync_each_batch)
    scaler = start.scaler
    if scaler.dynamic and state.scaler.dynamic:
        stored = state.scaler
        scaler = msgspec.structs.replace(
            scaler, scale=stored.scale, good_steps=stored.good_steps, overflows=stored.overflows
        )
    return msgspec.structs.replace(state, accum=accum, scaler=scaler)
