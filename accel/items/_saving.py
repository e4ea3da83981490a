# SPDX-License-Identifier: Apache-2.0
"""`save_state`: items become this rank's content of a checkpoint, which all ranks write and commit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, overload, runtime_checkable

import msgspec
import torch
from torch.nn.utils import get_total_norm

from accel.checkpoint import Keep, Saving
from accel.checkpoint._background import save_async
from accel.checkpoint._encoding import Kept
from accel.checkpoint._manifest import Item, step_of
from accel.checkpoint._retention import check_keep, check_metrics
from accel.checkpoint._save import save
from accel.checkpoint._snapshot import Content
from accel.comm import Call, call_site, refuse_replaced_memory, shared_failure
from accel.context import DistContext, context_first
from accel.errors import CheckpointError, ConfigError, NonFiniteError
from accel.errors._checks import check_choice
from accel.items._bases import BASE, Sums, has_sums, without_base
from accel.items._kinds import (
    TrainableOnly,
    check_items,
    divided_names,
    handler_of,
    refuse_replaced_items,
    stored_handler,
    with_engine_state,
    without_parts,
)
from accel.items._module import capture_tensors, module_states
from accel.items._rng import capture_row
from accel.items._source import Captured, SaveTransform
from accel.storage import RemotePath, folder_of
from accel.tensors import local_part
from accel.terminal import show_names


def own_values(content: Content, divided: Iterable[str]) -> bytes:
    """Return this rank's values of divided items. No communication."""
    return msgspec.msgpack.encode({name: content.items[name].value for name in sorted(divided)})


def join_values(mine: Mapping[str, Item], statements: Sequence[bytes]) -> Mapping[str, Item]:
    """Return a checkpoint's items, with the values of divided ones joined over ranks; `statements` has `own_values` by
    rank."""
    ranks = [msgspec.msgpack.decode(each, type=dict[str, Any]) if each else {} for each in statements]
    items = dict(mine)
    for name in sorted(set[str]().union(*ranks)):
        if missing := [rank for rank, own in enumerate(ranks) if name not in own]:
            raise CheckpointError(
                "the item is a part on some ranks and full on others",
                expected="a Part, or a ZeroRedundancyOptimizer, on every rank",
                got=f"none on rank {', '.join(map(str, missing))}",
                where=name,
            )
        values = [own[name] for own in ranks]
        join = stored_handler(items[name]).join
        assert join is not None  # this rank has divided it
        items[name] = msgspec.structs.replace(items[name], value=join(name, values))
    return items


@runtime_checkable
class CheckedBeforeSave(Protocol):
    """A record that cannot be saved at every moment."""

    def check_saveable(self) -> None:
        """Raise `ConfigError` unless a checkpoint may be taken now."""
        ...


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

    Every rank writes its share. Parameters and optimizer state are assumed equal on all ranks; of buffers, records and
    other values rank 0's are saved. The random streams of all ranks are saved too. A checkpoint of the same step is
    replaced when the new one is complete.

    Args:
        ctx: the context.
        out: folder of this run's checkpoints, on a file system that all nodes share; made if it is missing. Or the URL
            of a folder in a store, such as "s3://bucket/run", or a `RemotePath` with options. Or a `HostFolder`, where
            each host has a local disk.
        items: modules, optimizers, objects with state_dict and load_state_dict, records, and plain values, by name. A
            `Part` is this rank's part of a divided module or optimizer; a `Folder` has functions that write files.
        step: step of the checkpoint, 0 or above.
        keep: checkpoints to keep: a number from 1, this one and the newest others; or a `Keep`; None for all. The
            others are deleted after the commit, unless they hold files that accel did not write.
        metrics: finite numbers by name, stored with the checkpoint, for `Keep(best=)`; rank 0's are used.
        mode: "sync" returns after the commit. "async" returns once every rank has copied its share to host memory, and
            writes from there; the next save and the end of the session wait for it, and raise its failure unless
            `result` has.
        allow_non_finite: whether parameters and optimizer state may hold inf or NaN, and other tensors inf or NaN
            other than the -inf of masks.
        transform: maps the modules' tensors, by name, to the tensors to save, with other names, other dtypes or fewer;
            a pure function. The parameters of optimizers follow.

    Returns:
        The checkpoint's folder, `out/step-00000003`, on every rank, after the commit. In mode "async" a `Saving`; its
        `result` returns the folder.

    Raises:
        ConfigError: no items, a name, step, keep, metric, mode or path out of range, or a record within a window.
        CheckpointError: a value cannot be stored, another process, named in the error, is saving into the folder, or
            the disk failed; the same on every rank, nothing has changed.
        NonFiniteError: a tensor on any rank is not finite; the same on every rank, nothing has changed. In mode
            "async", `result` raises it. Or a gradient of a deferred step was not finite.
        StepError: a block, such as `Ema.applied_to`, has replaced an item's weights; nothing has changed.
        CollectiveMismatch: ranks passed other steps or differently shaped items.

    Examples:
        >>> path = accel.save_state(ctx, "runs/demo", {"model": model, "optimizer": optimizer}, step=3, keep=2)
        >>> path.name
        'step-00000003'
    """
    ctx.comm.finish()
    with shared_failure(ctx.comm, Call("save_state", site=call_site())):
        ctx.comm.settle()
        place, per_host = folder_of(out)
        _check_folder(place.name)
        _check_step(step)
        check_choice(mode, get_args(SaveMode), "unknown mode", where="save_state, mode=")
        if per_host and mode == "async":
            raise ConfigError(
                "a folder on each host takes no asynchronous save",
                expected='mode="sync", as hosts commit together',
                where="save_state, mode=",
                fix="Or pass a folder or store that all hosts share.",
            )
        rule = check_keep(keep)
        rated = check_metrics(metrics, rule)
        check_items(items, "save_state")
        refuse_replaced_items(items, "accel.save_state")
        items = with_engine_state(ctx, items)
        content = capture(ctx, items, transform)
        for name, tensor in {**content.own, **content.main, **content.loose}.items():  # of values and other objects
            refuse_replaced_memory([tensor], "accel.save_state", f"accel.save_state, {name}")
        if mode == "sync" and not allow_non_finite:
            check_finite(content)
        trainable = [name for name, item in items.items() if isinstance(item, TrainableOnly)]
        divided = divided_names(ctx, items) | {name for name in trainable if has_sums(content.items[name].value)}
        own = own_values(content, divided) if divided else b""
        content = dataclasses.replace(content, divided=own, join=join_values)
    if mode == "sync":
        return save(ctx, place, content, step=step, keep=rule, metrics=rated, per_host=per_host)
    check = None if allow_non_finite else check_finite
    return save_async(ctx, place, content, step=step, keep=rule, metrics=rated, check=check)


def capture(ctx: DistContext, items: Mapping[str, object], transform: SaveTransform | None = None) -> Content:
    """Return this rank's content of a checkpoint. Nothing is copied; no communication except in `Folder.save`."""
    shared: dict[str, torch.Tensor] = {}
    main: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {}
    loose: dict[str, torch.Tensor] = {}
    divided = divided_names(ctx, items)
    live = without_parts(items)
    modules = module_states(live)
    bases = dict[str, dict[str, str | Sums]]()
    for name in sorted(name for name, item in items.items() if isinstance(item, TrainableOnly)):
        trained, bases[name] = without_base(name, modules[name].parameters)
        modules[name] = dataclasses.replace(modules[name], parameters=trained)
    parameters, buffers, names = capture_tensors(modules, transform)
    for found, to_all, to_some in ((parameters, shared, own), (buffers, main, loose)):
        for name, (item, tensor) in found.items():
            (to_some if item in divided else to_all)[name] = tensor
    entries = dict[str, Item]()
    kept = Kept()
    for name, item in live.items():
        to_all, to_some = (own, loose) if name in divided else (shared, main)
        to = Captured(modules=modules, names=names, equal=to_all, loose=to_some, kept=kept)
        try:
            entries[name] = handler_of(item).capture(name, item, to)
        except CheckpointError:
            _check_records(kept)  # a record within a step may hold an unstorable value, and its own error explains more
            raise
        except RecursionError as error:
            raise CheckpointError("the value contains itself, or is nested too deeply", where=name) from error
    for name, digests in bases.items():
        value = {**entries[name].value, BASE: msgspec.to_builtins(digests)}
        entries[name] = msgspec.structs.replace(entries[name], value=value)
    _check_records(kept)
    return Content(shared=shared, main=main, own=own, loose=loose, items=entries, row=capture_row(ctx, kept))


def _check_records(kept: Kept) -> None:
    """Check that every record can be saved now; the error of one that refuses names its path."""
    for path, record in kept.items():
        if isinstance(record, CheckedBeforeSave):
            try:
                record.check_saveable()
            except ConfigError as error:
                facts = {"expected": error.expected, "got": error.got, "fix": error.fix}
                raise ConfigError(error.problem, where=f"item {path}", **facts) from error


def check_finite(content: Content) -> None:
    """Raise `NonFiniteError` unless the content is finite: one pass, no communication. Parameters and optimizer state
    must be; other tensors may hold -inf, as attention masks do."""
    strict = {**content.shared, **content.own}
    bad = sorted([*_nonfinite(strict, masks=False), *_nonfinite({**content.main, **content.loose}, masks=True)])
    if not bad:
        return
    raise NonFiniteError(
        "the state is not finite, so nothing was saved",
        expected="no inf and no NaN",
        got=f"{len(bad)} tensors with some",
        where=show_names(bad),
        fix="Go on from the newest checkpoint, or pass allow_non_finite=True to keep this state, as for a post-mortem.",
    )


def _nonfinite(tensors: Mapping[str, torch.Tensor], *, masks: bool) -> Iterator[str]:
    """Yield the names of tensors with inf or NaN."""
    kinds: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, tensor in ((name, local_part(tensor)) for name, tensor in tensors.items()):
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # nothing is computed in fp8
            kinds.setdefault((wide.device, wide.dtype), {})[name] = wide
    for same in kinds.values():  # one fast pass; a norm is not finite either where values are merely huge
        if not get_total_norm(same.values()).isfinite():
            yield from (name for name, tensor in same.items() if not _allowed(tensor, masks=masks))


def _allowed(tensor: torch.Tensor, *, masks: bool) -> bool:
    fine = torch.isfinite(tensor)
    if masks and not tensor.is_complex():
        fine |= tensor == -torch.inf
    return bool(fine.all())


def _check_folder(name: str) -> None:
    if step_of(name.partition(".")[0]) is not None:
        raise ConfigError(
            "the run's folder has the name of a checkpoint",
            expected="another name, such as runs/demo",
            got=name,
            where="save_state, out=",
            fix="Pass the folder above it, or rename it: load_state and resume take it for a single checkpoint.",
        )


def _check_step(step: int) -> None:
    if type(step) is not int or not 0 <= step < _LARGEST_STEP:
        raise ConfigError(
            "the step is not valid", expected="an integer from 0", got=repr(step), where="save_state, step="
        )
