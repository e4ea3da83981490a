# SPDX-License-Identifier: Apache-2.0
"""An open checkpoint on one rank: boxes of tensors, read from their files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import msgspec
import torch

from accel.checkpoint._boxes import Box, intersect, whole, within
from accel.checkpoint._manifest import (
    Manifest,
    StoredPiece,
    TensorEntry,
    check_sizes,
    check_step,
    deleted,
    files_here,
    read_manifest,
    step_of,
)
from accel.errors import CheckpointError
from accel.storage import (
    OpenDirectory,
    Place,
    Span,
    dtype_name,
    memory_of,
    read_header,
    stored_dtype,
    view_tensors,
)

_READERS = 4
_PIECE_BYTES = 4 << 20
_DIRECT_BYTES = 1 << 20  # from here on a system call costs less than the faults of mapped pages


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor, or a box of one, in a file."""

    view: torch.Tensor  # the tensor, on the mapped file
    start: int  # its first byte in the file


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """An open checkpoint with a checked manifest and checked sizes of files."""

    path: Place  # the folder
    manifest: Manifest  # its contents
    # Digest of the manifest, in hex, which covers every byte of the checkpoint; of a host's part the number of
    # the save, the same on all hosts.
    digest: str
    entries: Mapping[str, TensorEntry]  # tensors by name, aliases included
    _folder: OpenDirectory
    _listed: Mapping[str, Mapping[str, StoredPiece]]
    _readers: ThreadPoolExecutor
    _files: dict[str, Mapping[str, _StoredTensor]] = field(default_factory=dict[str, Mapping[str, _StoredTensor]])

    def stub(self, name: str) -> torch.Tensor:
        """Return a tensor of the stored dtype and shape, without values."""
        entry = self.entries[name]
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype) or stored_dtype(dtype) is None:
            raise CheckpointError(f"tensor {name!r} has the unknown dtype {entry.dtype!r}", where=str(self.path))
        return torch.empty(entry.shape, dtype=dtype, device="meta")

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a tensor or a box of it, in new memory on the CPU."""
        stub = self.stub(name)
        part = torch.empty(stub.shape if box is None else box.shape, dtype=stub.dtype)
        self.read_into(part, name, box)
        return part

    def read_into(self, target: torch.Tensor, name: str, box: Box | None = None) -> None:
        """Copy a tensor or a box of it into a tensor of that shape. Mutates it."""
        self.read_all([(target, name, box)])

    def read_all(self, wanted: Iterable[tuple[torch.Tensor, str, Box | None]]) -> None:
        """Copy many tensors or parts of them, several at once; see `read_into`."""
        reading: list[Future[None]] = []
        try:
            # targets may be live parameters
            with torch.no_grad():
                for target, name, box in wanted:
                    reading += self._start(target, name, whole(self.entries[name].shape) if box is None else box)
            for each in reading:
                each.result()
        finally:
            for each in reading:
                _ = each.cancel()
            _ = wait(reading)  # none may write to memory that has another use by then

    def _start(self, target: torch.Tensor, name: str, box: Box) -> Iterator[Future[None]]:
        """Copy small and strided parts; let threads read contiguous ones straight into memory."""
        for piece, shared in self._pieces(name, box):
            stored = self._stored(self.manifest.aliases.get(name, name), piece)
            part = target[within(shared, box)]
            source = stored.view[within(shared, piece.box)]
            if not _is_one_run(part, source):
                part.copy_(_aligned(source))
                continue
            # threads write past torch: autograd must learn that saved values have changed
            torch.autograd.graph.increment_version(part)
            memory = memory_of(part)
            start = stored.start + source.data_ptr() - stored.view.data_ptr()
            # pieces let several threads read one large tensor
            for at in range(0, len(memory), _PIECE_BYTES):
                run = memory[at : at + _PIECE_BYTES]
                yield self._readers.submit(self._folder.read_into, piece.file, start + at, run)

    def open_files(self, wanted: Iterable[tuple[str, Box | None]]) -> None:
        """Open the files of the wanted boxes, and compare their headers with the manifest."""
        for name, box in wanted:
            for piece, _ in self._pieces(name, whole(self.entries[name].shape) if box is None else box):
                _ = self._stored(self.manifest.aliases.get(name, name), piece)

    def bytes_of_files(self, wanted: Iterable[tuple[str, Box | None]]) -> list[int]:
        """Return the bytes wanted from each file, in order of file names; at least 1 for any box."""
        found = dict.fromkeys(sorted(self.manifest.files), 0)
        for name, box in wanted:
            itemsize = self.stub(name).element_size()
            for piece, shared in self._pieces(name, whole(self.entries[name].shape) if box is None else box):
                # 1 for an empty box: its file is to be checked too
                found[piece.file] += max(1, shared.size * itemsize)
        return list(found.values())

    def spans(self, files: Iterable[str]) -> list[tuple[str, Span]]:
        """Return the parts of files with a digest each, with the file's name."""
        return [(name, span) for name in files for span in self.manifest.files[name].spans()]

    def verify(self, spans: Iterable[tuple[str, Span]], advance: Callable[[int], object] | None = None) -> None:
        """Compare every byte of some parts of files, from `spans`, with their digests; the error names the file.
        `advance` gets numbers of bytes that have been read, for a progress bar."""
        self._folder.check_all(spans, advance)

    def is_current(self) -> bool:
        """Return whether the path still leads to this checkpoint, which a writer may have deleted or replaced."""
        return self._folder.is_in_place()

    def _pieces(self, name: str, box: Box) -> Iterator[tuple[StoredPiece, Box]]:
        """Yield the pieces of a part of a tensor, each with the intersection."""
        for piece in self.entries[name].pieces:
            shared = intersect(piece.box, box) if box.size else piece.box
            if shared is not None:
                yield piece, shared

    def _stored(self, name: str, piece: StoredPiece) -> _StoredTensor:
        if piece.file not in self._files:
            self._files[piece.file] = self._open(piece.file)
        return self._files[piece.file][name]

    def _open(self, file: str) -> Mapping[str, _StoredTensor]:
        if (host := self.manifest.elsewhere.get(file)) is not None and file not in self._folder.names():
            raise CheckpointError(
                f"{file}: in the folder of {host}, not in this host's",
                expected="the layout of ranks and hosts that wrote the checkpoint",
                where=str(self.path),
                fix="Start the same ranks on the same hosts, or copy the files of all hosts into one folder.",
            )
        listed, data = self._listed[file], self._folder.read(file, size=self.manifest.files[file].size)
        # a file of another host may hold copies of what this host has in files of its own
        exact = file not in self.manifest.elsewhere
        header = read_header(data, str(self.path / file), listed if exact else None)
        if header.tensors.keys() != listed.keys() and (exact or not header.tensors.keys() >= listed.keys()):
            differing = ", ".join(sorted(header.tensors.keys() ^ listed.keys()))
            raise self._folder.refusal(file, "other tensors than the manifest lists", got=differing)
        # views of the mapped file, whose pages are read when a tensor is copied
        found = view_tensors(data, header)
        stored = dict[str, _StoredTensor]()
        for name, piece in listed.items():
            tensor, dtype, shape = found[name], self.manifest.tensors[name].dtype, piece.shape
            # the format has no complex128: files hold pairs of float64
            pair = dtype == "complex128" and tensor.dtype == torch.float64 and tensor.shape[-1:] == (2,)
            view = torch.view_as_complex(tensor) if pair else tensor
            if (dtype_name(view.dtype), tuple(view.shape)) != (dtype, shape):
                expected = f"{dtype} {list(shape)}"
                got = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
                problem = f"tensor {name!r} is not what the manifest lists"
                raise self._folder.refusal(file, problem, expected=expected, got=got)
            stored[name] = _StoredTensor(view, header.end + header.tensors[name].data_offsets[0])
        return stored


def _is_one_run(part: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether a part can be read at once: the same bytes in tensor and file, and enough of them."""
    plain = type(part) is torch.Tensor and part.device.type == "cpu" and not part.is_conj() and not part.is_neg()
    same = part.dtype == source.dtype != torch.bool and part.is_contiguous() and source.is_contiguous()
    return plain and same and part.nbytes >= _DIRECT_BYTES


def _aligned(source: torch.Tensor) -> torch.Tensor:
    """Return a tensor that torch can copy: files align complex numbers as their halves, which crashes torch."""
    if source.is_complex() and source.data_ptr() % source.element_size():
        return torch.view_as_complex(torch.view_as_real(source).clone())
    return source


@contextlib.contextmanager
def open_checkpoint(path: Place, *, follow: bool = True, step: int | None = None) -> Generator[Saved]:
    """Hold a checkpoint open for the block; tensors are read on request. Retention on this host keeps it meanwhile.
    With `follow` the path may end in a symbolic link; `step` is the expected step, None for any."""
    with _opened(path, follow) as folder, folder.kept() as kept, ThreadPoolExecutor(_READERS) as readers:
        # the lock came too late: retention has renamed the folder already
        if not kept:
            raise deleted(path)
        manifest, digest = read_manifest(folder)
        if step is not None:
            check_step(folder, manifest, step)
        check_sizes(folder, files_here(folder, manifest))
        entries = manifest.tensors | {name: manifest.tensors[target] for name, target in manifest.aliases.items()}
        listed: dict[str, dict[str, StoredPiece]] = {name: {} for name in manifest.files}
        for name, entry in manifest.tensors.items():
            for piece in entry.pieces:
                listed[piece.file][name] = piece
        yield Saved(
            path=path,
            manifest=manifest,
            digest=digest if manifest.host is msgspec.UNSET else manifest.host.save,
            entries=entries,
            _folder=folder,
            _listed=listed,
            _readers=readers,
        )


@contextlib.contextmanager
def _opened(path: Place, follow: bool) -> Generator[OpenDirectory]:
    """Open a folder; the error for a deleted step's folder reports the deletion."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(path.open(follow=follow))
        except CheckpointError:
            if step_of(path.name.partition(".")[0]) is not None and not path.exists():
                raise deleted(path) from None
            raise
        yield folder
