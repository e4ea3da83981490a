# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints, which are committed, and the `manifest.json` that is written last and checked first."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, overload

import msgspec
from typing_extensions import TypeIs

from accel.checkpoint._boxes import Box, shape_problem, tiling_problem
from accel.errors import CheckpointError
from accel.storage import Digest, FileEntry, OpenDirectory, Place, RemotePath, as_place, is_file_name, lag_of

MANIFEST = "manifest.json"
FORMAT = 4
FORMAT_OF_HOSTS = 5  # of a separate folder on each host
LARGEST_MANIFEST = 256 * 2**20  # bytes; about a million pieces
RANKS = "$rng"  # the tensor with a row of each rank; no item's name begins with "$"

ItemKind = Literal["module", "optimizer", "stateful", "record", "value"]
Size = Annotated[int, msgspec.Meta(ge=0)]

_FORMAT_OF_SPANS = 3
_SEAL = re.compile(rb'\{"digest":"([0-9a-f]{64})",')
_SEAL_BYTES = 77
_STEP = re.compile(r"step-([0-9]{8,18})", re.ASCII)


class StoredPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a tensor, stored in a file under the tensor's name."""

    file: str  # the safetensors file
    offset: tuple[Size, ...]  # first element of the box in the whole tensor, one index a dimension
    shape: tuple[Size, ...]  # the box's extent

    @property
    def box(self) -> Box:
        """The part of the tensor in this piece."""
        return Box(self.offset, self.shape)


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor."""

    dtype: str  # torch's name, such as "float32"
    shape: tuple[Size, ...]  # shape of the whole tensor
    # Boxes that together hold each element once, each in another file; in format 1 a single one.
    pieces: tuple[StoredPiece, ...]


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents that were saved under one name."""

    kind: ItemKind  # kind of the item, which decides how it is loaded
    type: str  # the class's name
    value: Any  # its non-tensor state, encoded


class HostPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One host's part of a checkpoint, where each host has a separate folder.

    Attributes:
        save: number of the save in hex, the same on all hosts.
        elsewhere: files that other hosts hold, each with its host's name; any of them may have been copied here.
    """

    save: Digest
    elsewhere: dict[str, str]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A checkpoint's contents."""

    format: int  # version of this format
    accel: str  # version of accel that wrote it
    torch: str  # version of torch that wrote it
    step: Size  # step of the run that wrote it
    world_size: Annotated[int, msgspec.Meta(ge=1)]  # world size of that run
    files: dict[str, FileEntry]  # files of the folder besides the manifest, by name
    tensors: dict[str, TensorEntry]  # tensors by full name
    aliases: dict[str, str]  # other names of tensors
    items: dict[str, Item]  # items by name
    metrics: dict[str, float] = {}  # metrics of the checkpoint, for `Keep`
    host: HostPart | msgspec.UnsetType = msgspec.UNSET  # the part in this folder; unset for all of the checkpoint

    @property
    def elsewhere(self) -> dict[str, str]:
        """Files that other hosts hold, each with its host's name."""
        return self.host.elsewhere if self.host is not msgspec.UNSET else {}

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.size for entry in self.files.values())


class _Version(msgspec.Struct, frozen=True):
    format: int
    accel: str


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON. The first field is the digest of the rest; readers accept the size."""
    # its digest goes in front, so that a cut or changed file is found before it is parsed
    body = msgspec.json.encode(manifest)[1:]
    if len(body) + _SEAL_BYTES > LARGEST_MANIFEST:
        raise CheckpointError(
            f"{MANIFEST} would be too large to be read",
            expected=f"at most {LARGEST_MANIFEST} bytes",
            got=f"{len(body) + _SEAL_BYTES} bytes for {len(manifest.tensors)} tensors",
            fix="Keep large values in tensors, and shard over fewer ranks with copies (HSDP).",
        )
    return b'{"digest":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body


def decode_manifest(data: bytes | memoryview, where: str) -> tuple[Manifest, str]:
    """Return a manifest and its digest in hex, checked against the digest and against itself; `where` is its path."""
    seal = _SEAL.match(data)
    if seal is None or hashlib.sha256(data[_SEAL_BYTES:]).hexdigest() != seal[1].decode():
        raise _refusal("damaged: the digest does not fit the contents", where)
    body = b"{" + bytes(data[_SEAL_BYTES:])
    try:
        # the version first: a newer format may have fields that `Manifest` refuses
        version = msgspec.json.decode(body, type=_Version)
        if version.format > FORMAT_OF_HOSTS:
            raise CheckpointError(
                f"{MANIFEST}: a checkpoint of a newer format",
                expected=f"format {FORMAT_OF_HOSTS} or older",
                got=f"format {version.format}, written by accel {version.accel}",
                where=where,
                fix="Load it with that version of accel.",
            )
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(f"cannot be read: {error}", where) from error
    if problem := _contradiction(manifest):
        raise _refusal(problem, where)
    return manifest, seal[1].decode()


def step_name(step: int) -> str:
    """Return the folder's name of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a folder's name, None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match is not None and step_name(int(match[1])) == name else None


def candidates(folder: Place) -> list[tuple[int, bool, Place, tuple[int, int]]]:
    """List folders with the name of a checkpoint, newest first: step, whether the name is final, path, identity."""
    found = [(step_of(name), True, folder / name) for name in folder.names()]
    # a writer that died between two renames left the former checkpoint of its step aside
    aside = [left for left in folder.leftovers() if left.kind == "old"]
    found += [(step_of(left.target), False, folder / left.path.name) for left in aside]
    known = [(step, final, path, path.identity()) for step, final, path in found if step is not None]
    return sorted(known, key=lambda each: each[:2], reverse=True)


def read_manifest(folder: OpenDirectory) -> tuple[Manifest, str]:
    """Return an open folder's manifest and its digest."""
    if MANIFEST not in folder.names():
        raise CheckpointError(
            "the folder holds no complete checkpoint",
            expected=f"a folder with {MANIFEST}",
            got=f"a folder of {len(folder.names())} entries without it",
            where=str(folder.path),
            fix="Pass the folder that was given to save_state, or one of its step folders.",
        )
    return decode_manifest(folder.read(MANIFEST, limit=LARGEST_MANIFEST), str(folder.path / MANIFEST))


def check_step(folder: OpenDirectory, manifest: Manifest, step: int) -> None:
    """Raise `CheckpointError` unless a manifest's step is the step in its folder's name."""
    if manifest.step != step:
        raise folder.refusal(MANIFEST, "of another step", expected=f"step {step}", got=f"step {manifest.step}")


def check_sizes(folder: OpenDirectory, files: Mapping[str, FileEntry]) -> None:
    """Raise `CheckpointError` for a file of an open folder that is missing or of another size."""
    for name, entry in files.items():
        # sizes show a cut or lost file without reading any byte
        folder.check_size(name, entry.size)


def files_here(folder: OpenDirectory, manifest: Manifest) -> dict[str, FileEntry]:
    """Return the files that an open folder must hold: not other hosts' files, unless they have been copied here."""
    if not manifest.elsewhere:
        return manifest.files
    # a file that was copied here from another host is checked as the own ones
    absent = manifest.elsewhere.keys() - {*folder.names()}
    return {name: entry for name, entry in manifest.files.items() if name not in absent}


def _contradiction(manifest: Manifest) -> str:
    """Return the first contradiction inside a manifest, "" if there is none."""
    if manifest.format < 1:
        return f"there never was a format {manifest.format}"
    if (manifest.format == FORMAT_OF_HOSTS) != (manifest.host is not msgspec.UNSET):
        return f"format {manifest.format} and a part of a host do not go together"
    if absent := manifest.elsewhere.keys() - manifest.files.keys():
        return f"{min(absent)!r} of another host is not listed"
    for name, entry in manifest.files.items():
        # a name that comes from a file must not lead out of the folder
        if not is_file_name(name) or name == MANIFEST:
            return f"{name!r} is not a name of a file in this folder"
        if not entry.is_complete or isinstance(entry.sha256, str) != (manifest.format < _FORMAT_OF_SPANS):
            return f"{name!r} has not the digests that format {manifest.format} asks for"
    for name, entry in manifest.tensors.items():
        if problem := _tensor_problem(entry, manifest):
            return f"tensor {name!r} {problem}"
    for name, target in manifest.aliases.items():
        if name in manifest.tensors or target not in manifest.tensors:
            return f"alias {name!r} of {target!r} leads nowhere"
    for name in manifest.items:
        if not name.isidentifier():
            return f"{name!r} is not an item's name"
    return ""


def _tensor_problem(entry: TensorEntry, manifest: Manifest) -> str:
    """Return the first contradiction among a tensor's pieces, "" if there is none."""
    # before any product of sizes: numbers from a file may be of any size
    if problem := shape_problem(entry.shape):
        return problem
    files = [piece.file for piece in entry.pieces]
    if missing := [file for file in files if file not in manifest.files]:
        return f"is in {missing[0]!r}, which is not listed"
    # a piece has its tensor's name in a file, so a file has room for one
    if len(set(files)) < len(files):
        return "has two pieces in one file"
    if manifest.format == 1 and len(files) != 1:
        return "is not stored in one piece, which format 1 asks for"
    return tiling_problem(entry.shape, [piece.box for piece in entry.pieces])


def _refusal(problem: str, where: str) -> CheckpointError:
    fix = "Load an older checkpoint; `latest_checkpoint` skips folders without a valid manifest."
    return CheckpointError(f"{MANIFEST}: {problem}", where=where, fix=fix)


@overload
def latest_checkpoint(out: os.PathLike[str], *, verify: bool = False) -> Path | None: ...


@overload
def latest_checkpoint(out: str | RemotePath, *, verify: bool = False) -> Path | RemotePath | None: ...


def latest_checkpoint(out: str | os.PathLike[str] | RemotePath, *, verify: bool = False) -> Path | RemotePath | None:
    """Return the newest committed checkpoint by step, None if there is none. No communication.

    A folder with a damaged manifest, or with missing files or wrong sizes, is skipped with a warning of the logger
    `accel.checkpoint`.

    Args:
        out: folder or URL as for `save_state`; it need not exist.
        verify: whether to read every file and skip a folder with changed bytes. Without it, such a folder is returned,
            and `load_state` refuses it.

    Raises:
        CheckpointError: the folder cannot be read.

    Examples:
        >>> accel.latest_checkpoint("runs/demo") is None
        True
        >>> path = accel.save_state(ctx, "runs/demo", items, step=3)
        >>> accel.latest_checkpoint("runs/demo") == path
        True
    """
    newest = newest_in(as_place(out), verify=verify)
    return newest.path if newest is not None else None


def newest_in(folder: Place, *, verify: bool = False) -> Place | None:
    """Return the newest committed checkpoint in a folder; see `latest_checkpoint`."""
    look = folder.listed()
    if not look.exists():
        return None
    seen = None
    while (found := candidates(look)) != seen:  # a writer may replace all of them while they are looked at
        for step, _, path, _ in found:
            try:
                manifest = manifest_of(path, step)
                if verify:
                    check_bytes(path, manifest)
            except CheckpointError as error:
                warn_skipped(path, error)
            else:
                return path
        seen = found
        look = folder.listed()
    return None


def warn_skipped(path: Place, error: CheckpointError) -> None:
    """Log that a step's folder is no checkpoint. In a store, a save that is under way has objects but no manifest."""
    log = logging.getLogger("accel.checkpoint")
    try:
        is_uncommitted = isinstance(path.path, RemotePath) and MANIFEST not in path.names()
    except CheckpointError:
        is_uncommitted = False
    if is_uncommitted:
        log.info("%s has no %s yet and is skipped: its save is under way, or was ended", path, MANIFEST)
    else:
        log.warning("%s is not a checkpoint and is skipped: %s", path, error)


def deleted(path: Place) -> CheckpointError:
    """Make the error for a step's folder that no longer exists."""
    try:
        left = [name for name in sorted(path.parent.names()) if step_of(name) is not None]
    except CheckpointError:
        left = []
    fix = "Pass the run's folder: load_state takes its newest checkpoint. save_state's keep= is the number that stays."
    return CheckpointError(
        "this checkpoint has been deleted, or never was",
        expected="a committed checkpoint",
        got=f"{path.parent} holds {', '.join(left) or 'no checkpoint'}",
        where=str(path),
        fix=f"{fix}{lag_of(path.path)}",
    )


def committed(out: Place) -> list[tuple[int, Place]]:
    """List committed steps with their folders, newest first."""
    steps = [(step, out / name) for name in out.names() if (step := step_of(name)) is not None]
    return [(step, path) for step, path in sorted(steps, reverse=True) if is_committed(path, step)]


def is_committed(path: Place, step: int | None = None) -> bool:
    """Return whether a folder is a checkpoint (of that step), with a valid manifest and files of the right size."""
    try:
        manifest_of(path, step)
    except CheckpointError:
        return False
    return True


def is_exactly_ours(path: Place, step: int | None = None) -> bool:
    """Return whether a folder is a checkpoint (of that step) without files that its manifest does not list."""
    try:
        with path.open(follow=False) as folder:
            manifest, _ = read_manifest(folder)
            if step is not None:
                check_step(folder, manifest, step)
                check_sizes(folder, files_here(folder, manifest))
            # retention deletes whole folders: one with files of others must stay
            return folder.names() == sorted([MANIFEST, *files_here(folder, manifest)])
    except CheckpointError:
        return False


def manifest_of(path: Place, step: int | None = None) -> Manifest:
    """Return a checkpoint's manifest, checked against its step and the sizes of its files; not through a link."""
    with path.open(follow=False) as folder:
        manifest, _ = read_manifest(folder)
        if step is not None:
            check_step(folder, manifest, step)
        check_sizes(folder, files_here(folder, manifest))
    return manifest


def check_bytes(path: Place, manifest: Manifest) -> None:
    """Compare every byte of a checkpoint's files with its manifest."""
    with path.open() as folder:
        files = sorted(files_here(folder, manifest).items())
        folder.check_all((name, span) for name, entry in files for span in entry.spans())


def is_list(value: object) -> TypeIs[list[Any]]:
    """Return whether a value is a list of JSON."""
    return isinstance(value, list)


def is_object(value: object) -> TypeIs[dict[str, Any]]:
    """Return whether a value is an object of JSON."""
    return isinstance(value, dict)


def stored_field(record: object, name: str) -> object:
    """Return a field of an encoded record, an item or inside another value, from any JSON; None if there is none."""
    if not is_object(record):
        return None
    nested = record.get("$record")
    return stored_field(nested[-1], name) if is_list(nested) else record.get(name)


def tensors_in(value: object) -> set[str]:
    """Return the names of the tensors that an encoded value refers to, from any JSON."""
    if is_list(value):
        return set[str]().union(*map(tensors_in, value))
    if not is_object(value):
        return set()
    name = value.get("$tensor")
    return {name} if isinstance(name, str) and len(value) == 1 else tensors_in(list(value.values()))


def has_records(value: object) -> bool:
    """Return whether an encoded value names classes, of records or enums."""
    return bool(record_names(value))


def record_names(value: object) -> set[str]:
    """Return the names of the classes, of records and enums, in an encoded value, from any JSON."""
    if is_list(value):
        return set[str]().union(*map(record_names, value))
    if not is_object(value):
        return set()
    found = record_names(list(value.values()))
    for tag in ("$record", "$enum"):
        named = value.get(tag)
        if len(value) == 1 and is_list(named) and named:
            found.add(str(named[0]))
    return found
