# SPDX-License-Identifier: Apache-2.0
"""`save_state` and `load_state`: the whole state of a run, committed at once and loaded at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args, overload

from accel.checkpoint import (
    Content,
    Keep,
    Manifest,
    Saving,
    Skipped,
    check_keep,
    check_metrics,
    hold_newest,
    save,
    save_async,
    settle,
)
from accel.comm import Call, call_site
from accel.context import DistContext, context_first
from accel.errors import CheckpointError, ConfigError, check_choice
from accel.items._finite import check_finite
from accel.items._items import capture, check_items
from accel.items._loaded import Loaded as Loaded
from accel.items._loaded import Loading
from accel.items._parts import join_values, own_values
from accel.items._renaming import LoadTransform, SaveTransform
from accel.items._restore import LoadOptions
from accel.storage import RemotePath, as_place

SaveMode = Literal["sync", "async"]

_LARGEST_STEP = 10**18


@overload
def save_state(
    ctx: DistContext,
    out: os.PathLike[str],
    items: Mapping[str, object],
    *,
    step: int,
    keep: int | Keep | None = None,
    metrics: Mapping[str, float] | None = None,
    mode: Literal["sync"] = "sync",
    allow_non_finite: bool = False,
    transform: SaveTransform | None = None,
) -> Path: ...


@overload
def save_state(
    ctx: DistContext,
    out: str | os.PathLike[str] | RemotePath,
    items: Mapping[str, object],
    *,
    step: int,
    keep: int | Keep | None = None,
    metrics: Mapping[str, float] | None = None,
    mode: Literal["sync"] = "sync",
    allow_non_finite: bool = False,
    transform: SaveTransform | None = None,
) -> Path | RemotePath: ...


@overload
def save_state(
    ctx: DistContext,
    out: str | os.PathLike[str] | RemotePath,
    items: Mapping[str, object],
    *,
    step: int,
    keep: int | Keep | None = None,
    metrics: Mapping[str, float] | None = None,
    mode: Literal["async"],
    allow_non_finite: bool = False,
    transform: SaveTransform | None = None,
) -> Saving: ...


@context_first
def save_state(
    ctx: DistContext,
    out: str | os.PathLike[str] | RemotePath,
    items: Mapping[str, object],
    *,
    step: int,
    keep: int | Keep | None = None,
    metrics: Mapping[str, float] | None = None,
    mode: SaveMode = "sync",
    allow_non_finite: bool = False,
    transform: SaveTransform | None = None,
) -> Path | RemotePath | Saving:
    """Save items as the checkpoint of a step: either all of it, on the disk, or nothing. A collective.

    Every rank writes its share. Parameters and optimizer state are taken to be equal on all ranks; of buffers, records
    and other values rank 0's count. The random streams of all ranks are saved too. A checkpoint of the same step is
    replaced when the new one is complete.

    Args:
        ctx: the context.
        out: the folder of this run's checkpoints, on a file system that all nodes share; made if it is missing. Or the
            URL of one in a store, such as "s3://bucket/run", or a `RemotePath` with options.
        items: modules, optimizers, objects with state_dict and load_state_dict, records, and plain values, by name. A
            `Part` of a module or an optimizer is what this rank has of one that ranks divide.
        step: names the checkpoint, 0 or above.
        keep: which checkpoints stay: a number from 1, this one and the newest others; or a `Keep`; None for all. They
            are deleted after the commit, and only if they hold nothing but what accel wrote.
        metrics: finite numbers to keep the best by, stored with the checkpoint; rank 0's count.
        mode: "sync" returns after the commit. "async" returns once every rank has copied its share to host memory, and
            writes from there; the next save and the end of the session wait for it, and raise what went wrong if its
            `result` has not been asked for.
        allow_non_finite: whether parameters and optimizer state may hold inf or NaN, and other tensors inf or NaN
            beside the -inf of masks.
        transform: a pure function of the modules' tensors by name that gives what is saved of them: other names, fewer
            tensors, other dtypes. The parameters of optimizers follow.

    Returns:
        The checkpoint's folder, `out/step-00000003`, on every rank, after it has been committed; in mode "async", a
        `Saving`, whose `result` is that.

    Raises:
        ConfigError: no items, a name, step, keep, metric, mode or path out of range, or a record that is not at a
            step's end.
        CheckpointError: something cannot be stored, another process, which is named, is saving into the folder, or the
            disk failed; the same on every rank, nothing has changed.
        NonFiniteError: a tensor on any rank is not finite; the same on every rank, nothing has changed. In mode
            "async", `result` raises it, of what is written.
        CollectiveMismatch: ranks passed other steps or differently shaped items.

    Example:
        >>> path = accel.save_state(ctx, "runs/demo", {"model": model, "optimizer": optimizer}, step=3, keep=2)
        >>> path.name
        'step-00000003'
    """
    ctx.comm.finish()
    error, place, content, rule, rated = None, None, None, None, {}
    try:
        place = as_place(out)
        _check_step(step)
        check_choice(mode, get_args(SaveMode), "unknown mode", where="save_state, mode=")
        rule = check_keep(keep)
        rated = check_metrics(metrics, rule)
        check_items(items, "save_state")
        content = capture(ctx, items, transform)
        if mode == "sync" and not allow_non_finite:
            check_finite(content)
    except Exception as failure:
        error = failure
    own = own_values(items, content) if isinstance(content, Content) else b""
    said = settle(ctx, Call("save_state", f"step {step}\nkeep {keep}\nmode {mode}", call_site()), error, own, bytes)
    assert place is not None  # settle raised otherwise
    assert isinstance(content, Content)
    content = join_values(content, said)
    if mode == "sync":
        return save(ctx, place, content, step=step, keep=rule, metrics=rated)
    check = None if allow_non_finite else check_finite
    return save_async(ctx, place, content, step=step, keep=rule, metrics=rated, check=check)


@context_first
def load_state(
    ctx: DistContext,
    path: str | os.PathLike[str] | RemotePath,
    items: Mapping[str, object],
    *,
    verify: bool = True,
    strict: bool = True,
    cast: bool = False,
    transform: LoadTransform | None = None,
) -> Loaded:
    """Load a checkpoint into items, all of it or nothing. A collective. Mutates modules, optimizers, random streams.

    Gradients of the items are dropped, those of an unfinished window too.

    Every rank checks everything before any changes anything, and reads what it holds: of sharded tensors its part,
    whatever mesh they were saved on. At the world size that was saved, random
    streams go on where they were; at another, or on another kind of device, each rank's are seeded from the
    checkpoint's digest and the rank.

    Args:
        ctx: the context.
        path: the folder or URL that was given to `save_state`, for its newest checkpoint; or a checkpoint's own. In the
            first case rank 0 chooses, damaged checkpoints are skipped with a warning of the logger
            `accel.checkpoint`, and a writer may go on beside.
        items: what was saved, by the same names: live objects to load into, and records and plain values of the types
            to return; a number comes back as it was saved, int or float. None for an item leaves it in the file.
        verify: whether to compare every byte of the files that are read with their digests. The ranks divide that, so
            the folder must be one that all nodes share.
        strict: whether any difference is an error. Else what fits is loaded: of modules each tensor, of the rest each
            item; what was skipped is in the result, and told by the logger `accel.checkpoint`.
        cast: whether floating-point tensors may be of another dtype, to which the stored ones are converted; so is
            optimizer state that was of its parameter's dtype. Devices may always differ.
        transform: a pure function of what the checkpoint holds of modules, by name, that gives the names to load it by;
            of optimizers, the parameters follow.

    Returns:
        Every item: the live objects that were passed, and new records and values; with `path` and `skipped`.

    Raises:
        CheckpointError: there is none, it has been deleted, is damaged, half-written, of a newer format, or it does not
            fit: every difference is listed. The same on every rank; nothing has been changed, unless the disk fails
            after all has been checked, which the error says.
        ConfigError: no items, a name that is no identifier, or a transform that returned what it may not.

    Example:
        >>> path = accel.save_state(ctx, "runs/demo", {"model": model, "best": 0.25}, step=3)
        >>> loaded = accel.load_state(ctx, path, {"model": model, "best": 0.0})
        >>> loaded["best"]
        0.25
    """
    options = LoadOptions(strict, cast, transform)
    loaded = load_newest(ctx, path, lambda _: items, verify=verify, options=options, site=call_site())
    if loaded is None:
        raise CheckpointError(
            "no checkpoint in this folder",
            expected="a folder that save_state has written to, or a checkpoint's own",
            where=str(path),
            fix="See whether the path is right, and on a file system that every node shares.",
        )
    return loaded


def load_newest(
    ctx: DistContext,
    path: str | os.PathLike[str] | RemotePath,
    items_for: Callable[[Manifest], Mapping[str, object]],
    *,
    verify: bool = True,
    options: LoadOptions,
    site: str,
    verb: str = "load_state",
) -> Loaded | None:
    """Load the checkpoint at a path, or the newest of a run's folder, into items that may depend on what it holds.

    A collective; see `load_state`.

    Args:
        ctx: the context.
        path: as there.
        items_for: gives the items to load into; called on every rank with the manifest of the checkpoint that all
            ranks have agreed on, and once more if another checkpoint must take its place.
        verify: as there.
        options: how the checkpoint may differ.
        site: the user's call that this is part of.
        verb: the name of the user's call.

    Returns:
        None if the path is a folder without checkpoints, or does not exist.
    """
    folder, error = as_place(""), None
    try:
        folder = as_place(path)
    except Exception as failure:
        error = failure
    call = Call(verb, f"{folder.name}\nverify {verify}\nstrict {options.strict}", site)
    skipped = Skipped()
    while True:
        with hold_newest(ctx, folder, call, skipped, error) as held:
            if held is None:
                return None
            loading = Loading(ctx, held, verify, options, site, verb)
            damage = loading.compare(items_for) or loading.check_bytes()
            if not damage:
                return loading.apply()
            if ctx.is_main_process:
                skipped.add_held(held, damage)


def _check_step(step: int) -> None:
    if type(step) is not int or not 0 <= step < _LARGEST_STEP:
        raise ConfigError("not a step", expected="an integer from 0", got=repr(step), where="save_state, step=")
