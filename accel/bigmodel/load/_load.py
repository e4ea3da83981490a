# SPDX-License-Identifier: Apache-2.0
"""Weights at a path, opened as a source or loaded into a model: headers, all problems, bytes, and then the model."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import nn

from accel.bigmodel._arguments import dtype_of, name_of
from accel.bigmodel.load._files import (
    FileWeights,
    checkpoint_tensors,
    new_memory,
    page_offset,
    pickled_in,
    plan_comparison,
    plan_jobs,
    safetensors_in,
)
from accel.bigmodel.load._targets import (
    DeviceChoice,
    LoadTarget,
    Match,
    Patterns,
    TensorFacts,
    fill,
    find_targets,
    match,
    place_others,
    refusal,
)
from accel.checkpoint import Recipe
from accel.checkpoint._boxes import Strided, cut
from accel.checkpoint._manifest import Manifest, manifest_of
from accel.checkpoint._recipes import apply_recipes, check_recipes
from accel.checkpoint._retention import find_checkpoint
from accel.comm import Call, Comm, agreed, agreed_values, broadcast_flat, call_site, refuse_replaced
from accel.context import DistContext, context_first
from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import check_count
from accel.storage import (
    CHUNK,
    INDEX,
    WEIGHTS,
    ByteRanges,
    LocalRanges,
    Passed,
    Place,
    RemotePath,
    RemoteRanges,
    Wanted,
    as_place,
    decode_index,
)
from accel.tensors import is_dtensor, local_part
from accel.terminal import byte_progress, show_names

Kind = Literal["safetensors", "pickled", "checkpoint"]

_MANIFEST = "manifest.json"
_SUFFIX = ".safetensors"
_PICKLED = (".bin", ".pt", ".pth")
_PICKLED_WEIGHTS = "pytorch_model.bin"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LARGEST_INDEX = 64 << 20


class WeightFiles(NamedTuple):
    """Files that together hold weights."""

    kind: Kind  # their format
    folder: Place  # their place
    names: tuple[str, ...]  # names of the files; none for a checkpoint: its manifest lists them
    # The file of each tensor by name, from an index; empty without one.
    listed: Mapping[str, str] = MappingProxyType({})


def find_files(path: str | os.PathLike[str] | RemotePath) -> WeightFiles:
    """Find the weights at a path: a file, an index, a folder with either, a checkpoint, or a run's folder with some.

    Raises `ConfigError` where there are none, `CheckpointError` where an index lists a missing file.
    """
    place = as_place(path)
    name = place.name
    if name.endswith(".json") and name != _MANIFEST:
        return _indexed(place.parent, name)
    for kind, suffixes in _kinds():
        if name.endswith(suffixes):
            return WeightFiles(kind, place.parent, (name,))
    is_file = not isinstance(place.path, RemotePath) and place.path.is_file()
    found = set(place.names()) if place.exists() and not is_file else set[str]()
    for index, single in ((INDEX, WEIGHTS), (f"{_PICKLED_WEIGHTS}.index.json", _PICKLED_WEIGHTS)):
        if index in found:
            return _indexed(place, index)
        if single in found:
            return WeightFiles(_kind_of(single), place, (single,))
    if _MANIFEST in found or any(each.startswith("step-") for each in found):
        return WeightFiles("checkpoint", find_checkpoint(place), ())
    for kind, suffixes in _kinds():
        if names := sorted(each for each in found if each.endswith(suffixes)):
            return WeightFiles(kind, place, tuple(names))
    got = show_names(sorted(found), 5) or ("nothing of the kind" if place.exists() else "nothing")
    raise ConfigError(
        "no weights at the path",
        expected=f"a *{_SUFFIX} or *.bin file, an index of such files, a folder with either, or a checkpoint of accel",
        got=got,
        where=str(path),
        fix=_download(str(path)) if not place.exists() else "",
    )


def _download(path: str) -> str:
    """Return the way to the files of what may be a name on the Hugging Face hub, "" for other paths."""
    if not _HUB_NAME.fullmatch(path):
        return ""
    return f"If this is a name on the Hugging Face hub, pass huggingface_hub.snapshot_download({path!r})."


def _kinds() -> tuple[tuple[Kind, tuple[str, ...]], ...]:
    return ("safetensors", (_SUFFIX,)), ("pickled", _PICKLED)


def _kind_of(name: str) -> Kind:
    return "safetensors" if name.endswith(_SUFFIX) else "pickled"


def _indexed(folder: Place, name: str) -> WeightFiles:
    data = folder.get(name, _LARGEST_INDEX)
    where = f"{folder.path}/{name}"
    index = decode_index(data) if data is not None else None
    if index is None or not index.files:
        expected = 'JSON with "weight_map", the file of each tensor by name, in the same folder'
        raise CheckpointError("the index cannot be read", expected=expected, where=where)
    held = set(folder.names())
    if missing := [file for file in index.files if file not in held]:
        raise CheckpointError(
            f"{len(missing)} of {len(index.files)} files are missing",
            got=show_names(missing, 5),
            where=where,
            fix="Download or copy them again.",
        )
    return WeightFiles(_kind_of(index.files[0]), folder, tuple(index.files), index.weight_map)


Rename = Callable[[str], str] | Sequence[Recipe]


def open_weights(
    path: str | os.PathLike[str] | RemotePath, *, rename: Rename = (), readers: int = 4, direct: bool = True
) -> FileWeights:
    """Open the weights at a path; only reads headers.

    Args:
        path: a safetensors file, a file of torch.save, the index of several, a folder with either, a checkpoint of
            accel, or a run's folder; on a local disk or in a store.
        rename: maps a stored name to the model's; or recipes, for a checkpoint with another layout than the model's.
        readers: number of threads that read.
        direct: whether to read past the page cache what is not in it, where the file system can.

    Returns:
        The source; the caller closes it.

    Raises:
        CheckpointError: a file is missing or damaged, a recipe does not fit, or two tensors have the same name.
        ConfigError: nothing at the path is known as weights, `rename` is neither a function nor recipes, or no reader.
    """
    check_count(readers, "the number of readers is not valid", where="readers=")
    files = find_files(path)
    where = str(files.folder.path)
    manifest = manifest_of(files.folder) if files.kind == "checkpoint" else None
    names = tuple(manifest.files) if manifest is not None else files.names
    ranges = _open(files, names, readers, direct)
    try:
        found = _tensors(files, manifest, names, ranges, where)
        return FileWeights(found if rename == () else _renamed(found, rename, where), ranges, where)
    except BaseException:
        ranges.close()
        raise


def _open(files: WeightFiles, names: Sequence[str], readers: int, direct: bool) -> ByteRanges:
    folder = files.folder.path
    if isinstance(folder, RemotePath):
        return RemoteRanges(folder, names, readers=readers)
    return LocalRanges({name: folder / name for name in names}, readers=readers, direct=direct)


def _tensors(
    files: WeightFiles, manifest: Manifest | None, names: Sequence[str], ranges: ByteRanges, where: str
) -> dict[str, Strided]:
    if manifest is not None:
        return checkpoint_tensors(ranges, manifest, where)
    if files.kind == "safetensors":
        return _joined(files, {name: safetensors_in(ranges, name, f"{where}/{name}") for name in names}, where)
    if isinstance(files.folder.path, RemotePath):
        raise ConfigError(
            "files of torch.save are read only from local disks",
            expected="safetensors",
            got=names[0],
            where=where,
            fix="Copy them to a local disk.",
        )
    return _joined(files, {name: pickled_in(Path(where) / name) for name in names}, where)


def _joined(files: WeightFiles, found: Mapping[str, Mapping[str, Strided]], where: str) -> dict[str, Strided]:
    """Join the tensors of files, which must match their index."""
    lost = [(name, file) for name, file in files.listed.items() if name not in found[file]]
    if lost:
        name, file = lost[0]
        raise CheckpointError(
            "the index names tensors that its files lack",
            expected=f"{name!r} in {file}",
            got=f"{len(lost)} of {len(files.listed)} such names",
            where=where,
            fix="Download or copy the files again, the index with them.",
        )
    return _merged(found.values(), where)


def _renamed(found: Mapping[str, Strided], rename: Rename, where: str) -> dict[str, Strided]:
    if not callable(rename):
        check_recipes(rename, "a function of a stored name, or a sequence of accel.checkpoint.Recipe")
        return apply_recipes(found, rename, where)
    named: dict[str, Strided] = {}
    former: dict[str, str] = {}
    for name, stored in found.items():
        new = rename(name)
        if new in named:
            got = f"{former[new]!r} and {name!r}"
            raise ConfigError(f"rename gives two tensors the name {new!r}", got=got, where=where)
        named[new] = stored
        former[new] = name
    return named


def _merged(files: Iterable[Mapping[str, Strided]], where: str) -> dict[str, Strided]:
    """Join the tensors of several files; a name in two of them is a `CheckpointError`."""
    found: dict[str, Strided] = {}
    for tensors in files:
        for name, stored in tensors.items():
            if name in found:
                both = " and ".join(part.file for each in (found[name], stored) for part in each.parts[:1])
                fix = "Name one of the files, or their index."
                raise CheckpointError(f"two files hold {name!r}", got=both, where=where, fix=fix)
            found[name] = stored
    return found


def shareable(source: FileWeights, targets: Sequence[LoadTarget], matched: Match) -> list[int]:
    """Return the numbers of the targets that ranks need not each fetch; none of files on local disks.

    The page cache serves the ranks of a host from one read of its disk. A store would send bytes to each of them.
    """
    if not isinstance(source.ranges, RemoteRanges):
        return []
    return [
        at
        for at, (target, names) in enumerate(zip(targets, matched.found, strict=True))
        if names and target.device is not None and target.box is not None and _is_plain(target.live)
    ]


def digest(targets: Sequence[LoadTarget], shared: Sequence[int]) -> str:
    """Return a text that is the same on ranks that share the same tensors; "" for none."""
    if not shared:
        return ""
    facts = [(each.names, str(each.dtype), each.shape, str(each.device)[:3]) for each in (targets[at] for at in shared)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def assign(nbytes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that fetches each tensor: the largest go first, each to the rank with the fewest bytes so far."""
    loads = [0] * ranks
    owners = [0] * len(nbytes)
    for at in sorted(range(len(nbytes)), key=lambda at: (-nbytes[at], at)):
        owners[at] = loads.index(min(loads))
        loads[owners[at]] += nbytes[at]
    return owners


def broadcast_shared(
    comm: Comm,
    targets: Sequence[LoadTarget],
    made: Sequence[tuple[LoadTarget, torch.Tensor]],
    owners: Mapping[int, int],
) -> None:
    """Broadcast each shared tensor from its owner, the rank that fetched it, a chunk at a time. A collective.

    `made` has the targets with new memory; others are filled in their own.
    """
    memory = {id(target): tensor for target, tensor in made}
    for at, owner in owners.items():
        target = targets[at]
        tensor = memory[id(target)] if id(target) in memory else local_part(target.live)
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), CHUNK):
            broadcast_flat(comm, flat[start : start + CHUNK], source=owner)


def _is_plain(live: torch.Tensor) -> bool:
    return not is_dtensor(live) and live.is_contiguous()


M = TypeVar("M", bound=nn.Module)

_NAME = "load_checkpoint_in_model"


@context_first
def load_checkpoint_in_model(
    ctx: DistContext,
    model: M,
    path: str | os.PathLike[str] | RemotePath,
    device_map: DeviceChoice = None,
    *,
    dtype: torch.dtype | None = None,
    rename: Rename = (),
    allow_missing: Patterns = (),
    allow_unexpected: Patterns = (),
    readers: int = 4,
    advance: Callable[[int], object] | None = None,
    show: bool = False,
) -> M:
    """Load weights into a model, all of them or nothing. A collective. Mutates the model.

    Each rank reads the bytes of its shards, from the page cache what is there and past it what is not. Bytes that
    several ranks of a host want go through the page cache, so that the disk reads them once. From a store, what all
    ranks hold whole is fetched once: each rank fetches a share, and broadcasts it. Tensors of an empty model get memory
    into which the bytes are read directly; a load into tensors with values keeps both until the end. Beside
    the result, memory holds 8 MiB for each reader.

    Args:
        ctx: the context.
        model: built by `init_empty_weights` or with values, before or after `prepare`.
        path: a safetensors file, a file of torch.save, the index of several, a folder with either, a checkpoint of
            accel, or a run's folder; on a local disk or in a store.
        device_map: home of each segment, or one device. None for the context's device where tensors are empty; those
            with values stay where they are. Segments with a home in files stay empty.
        dtype: of floating-point tensors of an empty model; None for the dtype of each tensor. The storage dtypes of a
            device map count first.
        rename: maps a stored name to the model's; or recipes, for a checkpoint with another layout than the model's.
        allow_missing: names of the model that may be missing, or patterns of such names. They stay as they are.
        allow_unexpected: stored names that the model may lack, or patterns of such names.
        readers: number of threads that read.
        advance: called with numbers of bytes that this rank has read, for a progress bar of the caller's.
        show: whether the main rank shows a progress bar, on a terminal and once it takes long.

    Returns:
        The same model.

    Raises:
        CheckpointError: weights that are missing, unexpected, or of other shapes or dtypes, all in one error; a file
            that is missing, damaged, or changes meanwhile. The model is unchanged. The same on every rank.
        ConfigError: no model, no weights at the path, a map of another model, a dtype that tensors with values do not
            have, or an argument that is not what it is to be.
        DeviceError: the device is not there.
        StepError: a block, such as `Ema.applied_to`, has replaced the model's weights.
        StreamError: the model's weights are elsewhere, by `dispatch_model`.
    """
    site = call_site()
    with ExitStack() as stack:
        stages = ctx.axis("pp").size > 1

        def plan() -> list[str]:
            source = stack.enter_context(open_weights(path, rename=rename, readers=readers))
            targets = find_targets(model, device_map, dtype, ctx.device)
            refuse_replaced((each.live for each in targets), "accel.load_checkpoint_in_model")
            facts = [TensorFacts(each.names, name_of(each.live.dtype), tuple(each.live.shape)) for each in targets]
            matched = match(facts, _stored(source), allow_missing)
            shared = shareable(source, targets, matched) if ctx.world_size > 1 else []
            planned.append((source, targets, matched, shared))
            if not stages and (error := refusal(matched, matched.unused, _stored(source), allow_unexpected, where)):
                raise error
            return [digest(targets, shared), *(matched.unused if stages else [])]

        planned: list[tuple[FileWeights, list[LoadTarget], Match, list[int]]] = []
        where = str(path)
        heads = agreed_values(ctx.comm, Call(f"{_NAME}: headers", site=site), plan, list)
        unused = [each[1:] for each in heads]
        source, targets, matched, shared = planned[0]
        owners: dict[int, int] = {}
        if len({each[0] for each in heads}) == 1:  # all ranks hold these, so that each fetches some
            sizes = [targets[at].live.nbytes for at in shared]
            owners = dict(zip(shared, assign(sizes, ctx.world_size), strict=True))
        with agreed(ctx.comm, Call(f"{_NAME}: names", site=site)):
            nobody = set(matched.unused).intersection(*unused) if stages else set[str]()
            common = [name for name in matched.unused if name in nobody]
            if stages and (error := refusal(matched, common, _stored(source), allow_unexpected, where)):
                raise error
        with agreed(ctx.comm, Call(f"{_NAME}: reading", site=site)):
            bar = show and ctx.is_main_process
            others = {at for at, owner in owners.items() if owner != ctx.rank}
            made = _read(source, targets, matched, advance, others, has_peers=ctx.local_world_size > 1, show=bar)
        broadcast_shared(ctx.comm, targets, made, owners)
        for target, tensor in made:
            fill(target, tensor)
        place_others(model, device_map, any(target.is_empty for target, _ in made), ctx.device)
    return model


def _read(
    source: FileWeights,
    targets: Sequence[LoadTarget],
    matched: Match,
    advance: Callable[[int], object] | None,
    others: Container[int],
    *,
    has_peers: bool,
    show: bool,
) -> list[tuple[LoadTarget, torch.Tensor]]:
    """Read the tensors of this rank into new memory; for a prepared empty model into the model's.

    Raises `CheckpointError` for a damaged file, or for two values of a tied tensor.
    """
    made: list[tuple[LoadTarget, torch.Tensor]] = []
    straight: list[torch.Tensor] = []
    jobs: list[Wanted | Passed] = []
    twins: list[Passed] = []
    differing: list[str] = []
    for at, (target, names) in enumerate(zip(targets, matched.found, strict=True)):
        if not names or target.device is None or target.box is None:
            continue
        stored = cut(source.stored[names[0]], target.box)
        if target.is_unknown:
            memory = local_part(target.live)
            straight.append(memory)
        else:
            memory = _memory(target, stored)
            made.append((target, memory))
        if at in others:  # another rank fetches it, and broadcasts into this memory
            continue
        is_shared = has_peers and target.is_copied
        jobs += plan_jobs(stored, memory, name=names[0], is_shared=is_shared, has_peers=has_peers)
        for name in names[1:]:
            twin = cut(source.stored[name], target.box)
            if twin.parts != stored.parts and memory.device.type == "cpu":
                note = f"{names[0]!r} and {name!r}"
                twins += plan_comparison(twin, memory, lambda note=note: differing.append(note))
    try:
        with byte_progress("load", sum(job.nbytes for job in jobs)) if show else nullcontext() as bar:
            source.ranges.read(jobs, partial(_report_bytes, [each for each in (bar, advance) if each is not None]))
        source.ranges.read(twins)
        if differing:
            raise CheckpointError(
                "two different tensors for one that the model ties",
                got=show_names(sorted(set(differing)), 5),
                fix="Build the model without the tie, or leave one of them out by rename=.",
            )
    except BaseException:
        for memory in straight:  # as `prepare` left it
            _ = memory.fill_(float("nan"))
        raise
    return made


def _report_bytes(listeners: Sequence[Callable[[int], object]], nbytes: int) -> None:
    for each in listeners:
        _ = each(nbytes)


def _memory(target: LoadTarget, stored: Strided) -> torch.Tensor:
    source = dtype_of(stored.dtype)
    if target.device is not None and target.device.type == "cpu":
        aligned = page_offset(stored, source.itemsize) if source == target.dtype else None
        return new_memory(target.shape, target.dtype, aligned)
    return torch.empty(target.shape, dtype=target.dtype, device=target.device)


def _stored(source: FileWeights) -> dict[str, TensorFacts]:
    return {name: TensorFacts((name,), each.dtype, each.shape, each.where) for name, each in source.entries.items()}
