# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, on one rank: of each tensor the part that is asked for, from the files that hold it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from accel.checkpoint._boxes import Box, intersect, whole, within
from accel.checkpoint._directory import read_manifest
from accel.checkpoint._manifest import Manifest, Piece, TensorEntry
from accel.errors import CheckpointError
from accel.storage import OpenDirectory, dtype_name, open_directory, read_tensors, sha256, stored_dtype

_HASHERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """An open checkpoint whose manifest has been checked, and the sizes of its files.

    Attributes:
        path: the folder.
        manifest: its contents.
        digest: the manifest's, in hex; it stands for every byte of the checkpoint.
        entries: tensors by name, aliases included.
    """

    path: Path
    manifest: Manifest
    digest: str
    entries: Mapping[str, TensorEntry]
    _folder: OpenDirectory
    _listed: Mapping[str, Mapping[str, Piece]]
    _views: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict[str, Mapping[str, torch.Tensor]])

    def stub(self, name: str) -> torch.Tensor:
        """Return a tensor of the right dtype and shape that holds nothing.

        Raises:
            CheckpointError: no tensor can have that dtype.
        """
        entry = self.entries[name]
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype) or stored_dtype(dtype) is None:
            raise CheckpointError(f"tensor {name!r} has the unknown dtype {entry.dtype!r}", where=str(self.path))
        return torch.empty(entry.shape, dtype=dtype, device="meta")

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a tensor, or the part of it in a box, in new memory on the CPU.

        Raises:
            CheckpointError: a file does not hold what the manifest says.
        """
        stub = self.stub(name)
        part = torch.empty(stub.shape if box is None else box.shape, dtype=stub.dtype)
        self.read_into(part, name, box)
        return part

    def read_into(self, target: torch.Tensor, name: str, box: Box | None = None) -> None:
        """Copy a tensor, or the part of it in a box, into one of that part's shape. Mutates it.

        Raises:
            CheckpointError: a file does not hold what the manifest says.
        """
        box = whole(self.entries[name].shape) if box is None else box
        with torch.no_grad():
            for piece, shared in self._pieces(name, box):
                view = self._view(self.manifest.aliases.get(name, name), piece)
                target[within(shared, box)].copy_(view[within(shared, piece.box)])

    def open_files(self, wanted: Iterable[tuple[str, Box | None]]) -> None:
        """Open the files that hold what is wanted, and compare their headers with the manifest.

        Raises:
            CheckpointError: a file is missing, or does not hold what the manifest says.
        """
        for name, box in wanted:
            for piece, _ in self._pieces(name, whole(self.entries[name].shape) if box is None else box):
                _ = self._view(self.manifest.aliases.get(name, name), piece)

    def bytes_of_files(self, wanted: Iterable[tuple[str, Box | None]]) -> list[int]:
        """Return how many bytes of what is wanted lie in each file, in order of the files' names; at least 1 of any."""
        found = dict.fromkeys(sorted(self.manifest.files), 0)
        for name, box in wanted:
            itemsize = self.stub(name).element_size()
            for piece, shared in self._pieces(name, whole(self.entries[name].shape) if box is None else box):
                found[piece.file] += max(1, shared.size * itemsize)
        return list(found.values())

    def verify(self, files: Iterable[str]) -> None:
        """Compare every byte of some files with their digests.

        Raises:
            CheckpointError: one is damaged; it is named.
        """
        names = sorted(files)
        data = [self._folder.read(name, size=self.manifest.files[name].size) for name in names]
        with ThreadPoolExecutor(_HASHERS) as pool:
            for name, digest in zip(names, pool.map(_digest, data), strict=True):
                if digest != self.manifest.files[name].sha256:
                    raise self._folder.refusal(name, "damaged: the digest does not fit the contents")

    def _pieces(self, name: str, box: Box) -> Iterator[tuple[Piece, Box]]:
        """The pieces that hold a part of a tensor, with what of it they hold."""
        for piece in self.entries[name].pieces:
            shared = intersect(piece.box, box) if box.size else piece.box
            if shared is not None:
                yield piece, shared

    def _view(self, name: str, piece: Piece) -> torch.Tensor:
        if piece.file not in self._views:
            self._views[piece.file] = self._open(piece.file)
        return self._views[piece.file][name]

    def _open(self, file: str) -> Mapping[str, torch.Tensor]:
        listed = self._listed[file]
        found = read_tensors(self._folder.read(file, size=self.manifest.files[file].size), str(self.path / file))
        if found.keys() != listed.keys():
            differing = ", ".join(sorted(found.keys() ^ listed.keys()))
            raise self._folder.refusal(file, "other tensors than the manifest lists", got=differing)
        views: dict[str, torch.Tensor] = {}
        for name, piece in listed.items():
            tensor, dtype, shape = found[name], self.manifest.tensors[name].dtype, piece.shape
            pair = dtype == "complex128" and tensor.dtype == torch.float64 and tensor.shape[-1:] == (2,)
            views[name] = torch.view_as_complex(tensor) if pair else tensor
            if (dtype_name(views[name].dtype), tuple(views[name].shape)) != (dtype, shape):
                expected, got = f"{dtype} {list(shape)}", f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
                problem = f"tensor {name!r} is not what the manifest lists"
                raise self._folder.refusal(file, problem, expected=expected, got=got)
        return views


def _digest(data: memoryview) -> str:
    return sha256([data])


@contextlib.contextmanager
def open_checkpoint(path: Path) -> Generator[Saved]:
    """Hold a checkpoint open for the block; its tensors are read when they are asked for.

    Raises:
        CheckpointError: the folder is no checkpoint, or a file is missing or of another size; the file is named.
    """
    with open_directory(path) as folder:
        manifest, digest = read_manifest(folder)
        for name, entry in manifest.files.items():
            if (size := folder.size(name)) != entry.size:
                raise folder.refusal(name, "wrong size", expected=f"{entry.size} bytes", got=f"{size} bytes")
        entries = manifest.tensors | {name: manifest.tensors[target] for name, target in manifest.aliases.items()}
        listed: dict[str, dict[str, Piece]] = {name: {} for name in manifest.files}
        for name, entry in manifest.tensors.items():
            for piece in entry.pieces:
                listed[piece.file][name] = piece
        yield Saved(path=path, manifest=manifest, digest=digest, entries=entries, _folder=folder, _listed=listed)
