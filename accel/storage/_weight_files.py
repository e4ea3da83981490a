# SPDX-License-Identifier: Apache-2.0
"""A model's weights in the layout of other libraries, and their replacement: at any moment either set is whole."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import cast

import msgspec

from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import disk_errors
from accel.storage._files import is_file_name, open_directory, write_file
from accel.storage._lock import take_lock
from accel.storage._place import leftovers, make_folder, make_stage, remove_flat, sync_folder
from accel.storage._safetensors import MOST_TENSORS

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SHARD = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}(\.old-[0-9a-f]{8})?\.safetensors", re.ASCII)
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(I?)B", re.ASCII)
_POWERS = " KMGT"


class Index(msgspec.Struct, frozen=True):
    """The contents of an index.

    Attributes:
        weight_map: the file of each tensor.
        metadata: `total_size` in bytes, and other entries of the writer; some write none.
    """

    weight_map: dict[str, str]
    metadata: dict[str, msgspec.Raw] | None = None

    @property
    def files(self) -> list[str]:
        """The files that hold tensors, sorted."""
        return sorted(set(self.weight_map.values()))


def local_target(path: str | os.PathLike[str], where: str) -> Path:
    """Return the path of a file or folder of weights to write; raise `ConfigError` for a URL."""
    if not isinstance(cast(object, path), str | os.PathLike):
        raise ConfigError("no path", expected="a local path", got=type(path).__name__, where=where)
    if "://" in os.fspath(path):
        raise ConfigError(
            "weights for others are written to local folders",
            expected="a local path",
            got=os.fspath(path),
            where=where,
            fix="Write to a local folder and upload it; save_state writes to object stores.",
        )
    return Path(path)


def parse_size(size: int | str, where: str) -> int:
    """Return a number of bytes, rounded down: "1.5GB" is 15 * 10**8, "5GiB" is 5 * 2**30; else raise `ConfigError`."""
    match = _SIZE.fullmatch(size.strip().upper()) if isinstance(size, str) else None
    if match is not None:
        count = int(Fraction(match[1]) * (1024 if match[3] else 1000) ** _POWERS.index(match[2] or " "))
    else:
        count = size if type(size) is int else 0
    if count < 1:
        expected = "bytes as an integer from 1, or a text such as '5GB' or '512MiB'"
        raise ConfigError("the size is not valid", expected=expected, got=repr(size), where=where)
    return count


def plan_shards(sizes: Mapping[str, int], limit: int) -> tuple[tuple[str, ...], ...]:
    """Divide tensors among files, in order; return the names in each file, at least one file.

    A tensor larger than the limit has a separate file. The number of tensors in a file is limited too, as readers do.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and (filled + size > limit or len(shards[-1]) == MOST_TENSORS):
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return tuple(map(tuple, shards))


def file_names(count: int) -> list[str]:
    """Return the names of that many files."""
    if count == 1:
        return [WEIGHTS]
    return [f"model-{at + 1:05d}-of-{count:05d}.safetensors" for at in range(count)]


def aside_name(name: str, mark: str) -> str:
    """Return the second name of an older file, until a new index replaces its own."""
    return f"{name.split('.', 1)[0]}.old-{mark}.safetensors"


def replaceable(names: Iterable[str], index: Index | None) -> set[str]:
    """Return the files of a folder that a new save may delete: those in the index of a sharded save."""
    listed = index.weight_map.values() if index is not None else ()
    found = {name: match for name in names if (match := _SHARD.fullmatch(name)) is not None}
    # `match[1]`: a name of `aside_name`, which no reader follows and which may always go
    return {name for name, match in found.items() if match[1] is not None or name in listed}


def encode_index(shards: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> bytes:
    """Return the index of tensors divided among `file_names(len(shards))`."""
    files = {name: file for file, names in zip(file_names(len(shards)), shards, strict=True) for name in names}
    text = msgspec.json.encode({"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}, order="sorted")
    return msgspec.json.format(text) + b"\n"


def decode_index(data: bytes | memoryview) -> Index | None:
    """Read an index; None for something else, or for one that leads out of its folder."""
    try:
        index = msgspec.json.decode(data, type=Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return index if all(is_file_name(file) for file in index.files) else None


_LARGEST_INDEX = 256 * 2**20


def stage_files(target: Path) -> Path:
    """Make a folder next to a target to write its files in; remove folders of dead writers."""
    for left in leftovers(target.parent):
        if left.dead and left.kind == "tmp" and left.target == target.name.split(".", 1)[0]:
            remove_flat(left.path)
    return make_stage(target)


@contextmanager
def staged(target: Path, *, locks: bool = True) -> Generator[Path]:
    """Hold a stage next to a target for the block, under the lock of their common folder if it `locks`.

    The block moves the files out, and the stage with them. What is left of it is removed.
    """
    make_folder(target.parent)
    with ExitStack() as held:
        # a second writer into the folder gets an error that names this one
        if locks:
            held.callback(take_lock(target.parent).release)
        stage = stage_files(target)
        try:
            yield stage
        finally:
            with suppress(CheckpointError, OSError):  # a disk that fails: the first error is the one to raise
                if stage.exists():
                    remove_flat(stage)


def publish_file(stage: Path, name: str, target: Path) -> None:
    """Move the only file of a stage to its final path, over a former file."""
    with disk_errors(target):
        os.rename(stage / name, target)
        os.rmdir(stage)
    sync_folder(target.parent)


def publish_weights(stage: Path, files: Sequence[str], index: bytes | None) -> None:
    """Move new weights out of their stage and delete those that they replace; after an error, either set is whole."""
    folder = stage.parent
    names, listed = _read_index(folder)
    old = replaceable(names, listed)  # of this format's names, and listed: others are not ours
    if index is not None:
        write_file(stage, INDEX, [index])
    sync_folder(stage)
    old |= _make_way(stage, listed, old & set(files))
    with disk_errors(folder):
        # readers follow either `model.safetensors` or the index, so that comes after the files it refers to
        for name in [*files, INDEX] if index is not None else files:
            if name == INDEX:
                sync_folder(folder)
            os.rename(stage / name, folder / name)
        sync_folder(folder)
        stale = [WEIGHTS] if index is not None else [INDEX]
        for name in [*stale, *sorted(old - set(files))]:
            with suppress(FileNotFoundError):
                os.unlink(folder / name)
        os.rmdir(stage)


def _read_index(folder: Path) -> tuple[list[str], Index | None]:
    """Return the names in a folder, and its index if it has a valid one."""
    with open_directory(folder) as opened:
        names = opened.names()
        return names, decode_index(opened.read(INDEX, limit=_LARGEST_INDEX)) if INDEX in names else None


def _make_way(stage: Path, index: Index | None, names: Set[str]) -> set[str]:
    """Give old files in the way a second name, point the old index there, and return those names."""
    if index is None or not names:
        return set()
    folder, mark = stage.parent, secrets.token_hex(4)
    moved = {name: aside_name(name, mark) for name in sorted(names)}
    led = Index({key: moved.get(file, file) for key, file in index.weight_map.items()}, index.metadata or {})
    write_file(stage, "old.json", [msgspec.json.encode(led)])
    for name, other in moved.items():
        try:
            os.link(folder / name, folder / other, follow_symlinks=False)
        except OSError as error:
            raise CheckpointError(
                f"weights cannot be replaced without hard links: {error.strerror}",
                where=str(folder / name),
                fix="Save into another folder, or delete the old weights first.",
            ) from error
    with disk_errors(folder):
        sync_folder(folder)
        os.rename(stage / "old.json", folder / INDEX)
        sync_folder(folder)
    return set(moved.values())
