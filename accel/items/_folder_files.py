# SPDX-License-Identifier: Apache-2.0
"""Folders of files as items: each file is a tensor of bytes in the checkpoint, mapped from the disk on both ways."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from accel.checkpoint._manifest import Item
from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import disk_errors
from accel.items._source import Captured, ItemHandler, ItemLoad, StateChange, fields_in, join_fields


@dataclass(frozen=True, slots=True)
class Folder:
    """An item that is a folder of files: functions write it for a save, and read it for a load.

    Takes what another library saves its own way, such as an adapter of PEFT or an engine's checkpoint, into the same
    commit: the files are part of the checkpoint, their digests are in its manifest, and stores of objects take them.

    On a save, `save(folder)` runs on every rank, each with a separate empty folder on its host, and may be a
    collective. The checkpoint gets the files of all ranks, by their paths in the folder; of a path that several ranks
    wrote, with as many bytes, the lowest rank's. Empty folders are not kept.

    On a load, after every check, `load(folder)` runs on every rank, with a folder of all files, or of those in
    `select`. It runs after the other items have taken their state, but before the tensors of modules are copied in
    place. If it raises, or another rank fails, the other items get their former state back; what `load` did stays.
    The folders are deleted when the functions have returned, so nothing may keep files of them open.

    Attributes:
        save: writes files into a folder; None where only loads are made. It gets the folder's path.
        load: reads them; None where only saves are made.
        select: whether this rank needs the file at a path, such as "rank-3/model.pt"; None for all files.
        scratch: parent of the temporary folders, on a disk with room for the files; None for the system's folder of
            temporary files.

    Examples:
        >>> load = lambda path: load_adapter(peft_model, path)
        >>> adapter = accel.items.Folder(save=peft_model.save_pretrained, load=load)
        >>> accel.save_state(ctx, "runs/demo", {"adapter": adapter, "optimizer": optimizer}, step=3)
    """

    save: Callable[[Path], object] | None = None
    load: Callable[[Path], object] | None = None
    select: Callable[[str], bool] | None = None
    scratch: str | Path | None = None


_TYPE = Folder.__qualname__  # which no other value has


def _capture(name: str, live: Folder, to: Captured) -> Item:
    """Return a folder's entry in a checkpoint. Runs its `save`, and communicates where that does. The bytes of its
    files are mapped, from files that have no name any more."""
    if live.save is None:
        raise ConfigError(
            "the Folder has no save function", where=f"item {name}", fix="Pass accel.items.Folder(save=...)."
        )
    value = dict[str, object]()
    with _scratch(live) as scratch:
        live.save(scratch)
        for path, file in sorted(_files_in(scratch, name)):
            key = f"{name}.{path}"
            to.loose[key] = _mapped(file)
            value[path] = {"$tensor": key}
    return Item("value", _TYPE, value)


@dataclass(kw_only=True, slots=True)
class FolderLoad(ItemLoad):
    """Files that are written to a temporary folder, for a function of the user to read."""

    live: Folder

    def compare(self) -> None:
        """Check that the stored names are names of files inside a folder, and want the files that this rank reads."""
        if self.live.load is None:
            raise ConfigError(
                "the Folder has no load function", where=f"item {self.name}", fix="Pass accel.items.Folder(load=...)."
            )
        names = self.source.names_in(self.name, self.item.value)
        select = self.live.select
        for path, stored in fields_in(self.item.value, self.name).items():
            key = f"{self.name}.{path}"
            facts = self.source.facts(key) if key in names else None
            if (
                stored != {"$tensor": key}
                or not _is_inside(path)
                or facts is None
                or facts[0] != "uint8"
                or len(facts[1]) != 1
            ):
                raise CheckpointError("the stored file is not valid", got=repr(path), where=f"item {self.name}")
            if select is None or select(path):
                self.wanted.append((key, None))

    def read(self) -> Sequence[StateChange]:
        """Return the change that writes the files and runs `load`, which cannot be undone."""
        return [StateChange(f"item {self.name}", self._apply, None)]

    def _apply(self) -> None:
        assert self.live.load is not None
        with _scratch(self.live) as scratch:
            for key, _ in self.wanted:
                file = scratch / key.removeprefix(f"{self.name}.")
                size = self.source.facts(key)[1][0]
                _reserve(file, size)
                if size:
                    mapped = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
                    self.source.saved.read_into(mapped, key)
            self.live.load(scratch)


FOLDER = ItemHandler(
    kind="value",
    stored_type=_TYPE,
    takes=Folder,
    type_of=lambda _: _TYPE,
    capture=_capture,
    load=FolderLoad,
    join=join_fields,
    is_divided=lambda _: True,
    loads_last=True,
)


@contextlib.contextmanager
def _scratch(live: Folder) -> Generator[Path]:
    """Make a folder for the block, in the place of `live`."""
    with disk_errors(live.scratch or tempfile.gettempdir()):
        made = tempfile.mkdtemp(prefix="accel-folder-", dir=live.scratch)
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _files_in(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Yield the files in a folder and those inside, with their paths from it; raises for a link, or another thing that
    no manifest holds."""
    for found in folder.rglob("*"):
        path = found.relative_to(folder).as_posix()
        kind = found.lstat().st_mode
        if stat.S_ISDIR(kind):
            continue
        if not stat.S_ISREG(kind):
            raise CheckpointError("only regular files are stored", got=path, where=f"item {name}")
        if not _is_inside(path):
            raise CheckpointError("the name of the file cannot be stored", got=repr(path), where=f"item {name}")
        yield path, found


def _is_inside(path: str) -> bool:
    """Return whether a text is the path of a file inside of a folder, in its normal form and valid Unicode."""
    parts = path.split("/")
    plain = path.isprintable() and "\\" not in path and not path.startswith("$")
    return plain and not any(part in ("", ".", "..") for part in parts)


def _reserve(file: Path, size: int) -> None:
    """Make a file of a size, with its blocks on the disk: a full disk is an error here, not a signal later."""
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as opened:
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(opened.fileno(), 0, size)
            else:
                os.truncate(opened.fileno(), size)


def _mapped(file: Path) -> torch.Tensor:
    """Return a file's bytes, read from the disk when they are touched."""
    with disk_errors(file):
        size = file.stat().st_size
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
