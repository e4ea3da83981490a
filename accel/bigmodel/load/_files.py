# SPDX-License-Identifier: Apache-2.0
"""Tensors in files of weights: the headers of each format, and reads straight to a tensor's memory or in chunks."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from accel.bigmodel._arguments import copy_in_range, dtype_of, dtypes, name_of
from accel.bigmodel._describe import StoredTensor
from accel.checkpoint._boxes import Box, Strided, StridedPart, cut, file_order, in_file, is_contiguous, runs
from accel.checkpoint._manifest import Manifest
from accel.checkpoint._retention import all_tensors
from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import did_you_mean
from accel.fakes import fake_mode
from accel.storage import CHUNK, PAGE, ByteRanges, Header, LocalRanges, Passed, Wanted, fetch_header, storable_dtype


def safetensors_in(ranges: ByteRanges, name: str, where: str) -> dict[str, Strided]:
    """Return the tensors of a safetensors file, in the order of their bytes."""
    header = _header(ranges, name, where)
    known = dtypes()
    found: dict[str, Strided] = {}
    for key, entry in header.tensors.items():
        if entry.dtype not in known:
            problem = f"{key!r} has the dtype {entry.dtype}"
            raise CheckpointError(problem, expected=", ".join(sorted(known)), where=where)
        start = header.end + entry.data_offsets[0]
        found[key] = in_file(entry.dtype, entry.shape, known[entry.dtype].itemsize, name, start)
    return found


def pickled_in(path: Path) -> dict[str, Strided]:
    """Return the tensors of a file of torch.save, which is read as weights only: no code of it runs.

    Raises `CheckpointError` for other content, and for the format before torch 1.6.
    """
    try:
        with fake_mode():
            loaded = torch.load(path, weights_only=True)
    except Exception as error:  # whatever torch raises for other files
        fix = "Load it where you trust it, and save its tensors as safetensors."
        raise CheckpointError("cannot be read as weights", got=str(error), where=str(path), fix=fix) from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError("no weights by name", got=type(loaded).__name__, where=str(path))
    found: dict[str, Strided] = {}
    for name, tensor in cast("Mapping[Any, Any]", loaded).items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            got = f"{type(tensor).__name__} under {name!r}"
            fix = "Save only its state dict: torch.save(torch.load(path, weights_only=True)[name], path)."
            fix = fix if isinstance(tensor, Mapping) else "Save only its tensors, by name."
            raise CheckpointError(
                "the value does not map names to weights", expected="a state dict", got=got, where=str(path), fix=fix
            )
        found[name] = _in_storage(name, tensor, path)
    return found


def checkpoint_tensors(ranges: ByteRanges, manifest: Manifest, where: str) -> dict[str, Strided]:
    """Return the tensors of a checkpoint's item `model`, or of its only module, by their names in the module."""
    headers = {name: _header(ranges, name, f"{where}/{name}") for name in manifest.files}
    prefix = f"{_module_of(manifest, where)}."
    found: dict[str, Strided] = {}
    for name, entry in all_tensors(manifest).items():
        if not name.startswith(prefix):
            continue
        dtype = storable_dtype(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"tensor {name!r} has the unknown dtype {entry.dtype!r}", where=where)
        stored = manifest.aliases.get(name, name)
        parts: list[StridedPart] = []
        for piece in entry.pieces:
            header = headers[piece.file]
            if stored not in header.tensors:
                raise CheckpointError(f"{piece.file}: tensor {stored!r} is missing", where=where)
            start, stop = header.tensors[stored].data_offsets
            part = in_file("", piece.shape, dtype.itemsize, piece.file, header.end + start).parts[0]
            if piece.box.size * dtype.itemsize != stop - start:
                raise CheckpointError(f"{piece.file}: tensor {stored!r} is not what the manifest lists", where=where)
            parts.append(StridedPart(part.file, part.start, Box(piece.offset, piece.shape), part.strides))
        found[name.removeprefix(prefix)] = Strided(name_of(dtype), entry.shape, tuple(parts))
    return found


def _header(ranges: ByteRanges, name: str, where: str) -> Header:
    return fetch_header(partial(ranges.read_bytes, name), ranges.sizes[name], where)


def _in_storage(name: str, tensor: torch.Tensor, path: Path) -> Strided:
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if start is None:
        raise CheckpointError(
            "a file of torch.save as before torch 1.6",
            where=str(path),
            fix="Write it anew: torch.save(torch.load(path, weights_only=True), path).",
        )
    itemsize = tensor.element_size()
    strides = tuple(stride * itemsize for stride in tensor.stride())
    box = Box((0,) * tensor.dim(), tuple(tensor.shape))
    part = StridedPart(path.name, start + tensor.storage_offset() * itemsize, box, strides)
    try:
        return Strided(name_of(tensor.dtype), tuple(tensor.shape), (part,) if tensor.numel() else ())
    except ConfigError as error:
        raise CheckpointError(f"{name!r}: {error.problem}", got=error.got, where=str(path)) from error


def _module_of(manifest: Manifest, where: str) -> str:
    modules: list[str] = [name for name, item in manifest.items.items() if item.kind == "module"]
    if "model" in modules:
        return "model"
    if len(modules) != 1:
        raise ConfigError(
            "which module of the checkpoint is meant",
            expected="an item `model`, or a single module",
            got=", ".join(modules) or "no module",
            where=where,
            fix="Load the item by accel.load_state.",
        )
    return modules[0]


_LARGE = 1 << 20  # from here on memory has separate pages
_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def plan_jobs(
    stored: Strided, target: torch.Tensor, *, name: str, is_shared: bool = False, has_peers: bool = False
) -> Iterator[Wanted | Passed]:
    """Plan the reads that fill a plain tensor; other dtypes, strides and devices cost a chunk of memory at a time.

    `is_shared`, `has_peers`: other processes of the host read the same elements, or elements between these.
    """
    dtype = dtype_of(stored.dtype)
    plain = target.device.type == "cpu" and target.dtype == dtype != torch.bool
    with torch.no_grad():
        torch.autograd.graph.increment_version(target)
        for part in stored.parts:
            inside = target.detach()[_index(part.box)]
            if not inside.numel():
                continue
            if plain and inside.is_contiguous() and is_contiguous(part, dtype.itemsize):
                yield Wanted(part.file, part.start, inside.nbytes, inside.data_ptr(), is_shared)
            else:
                yield from _passes(part, inside, dtype, partial(copy_in_range, name=name), is_shared, has_peers)


def plan_comparison(stored: Strided, target: torch.Tensor, differs: Callable[[], object]) -> Iterator[Passed]:
    """Plan the reads that compare a CPU tensor with a stored one; calls `differs` for each read that differs."""
    dtype = dtype_of(stored.dtype)
    for part in stored.parts:
        inside = target.detach()[_index(part.box)]
        if inside.numel():
            yield from _passes(part, inside, dtype, lambda view, read: view.equal(read.to(view)) or differs())


def new_memory(shape: Sequence[int], dtype: torch.dtype, page_offset: int | None) -> torch.Tensor:
    """Return an empty CPU tensor that begins as many bytes into a page as its file's bytes do."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < _LARGE or page_offset is None or page_offset % dtype.itemsize:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, page_offset + nbytes, flags=_OWN)  # the default is shared with forks, and slower
    return torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=page_offset).view(tuple(shape))


def page_offset(stored: Strided, itemsize: int) -> int | None:
    """Return how far into a page a stored tensor begins; None unless it is one range of bytes."""
    if len(stored.parts) != 1 or not is_contiguous(stored.parts[0], itemsize):
        return None
    return stored.parts[0].start % PAGE


def _passes(
    part: StridedPart,
    target: torch.Tensor,
    dtype: torch.dtype,
    use: Callable[[torch.Tensor, torch.Tensor], object],
    is_shared: bool = False,
    has_peers: bool = False,
) -> Iterator[Passed]:
    """Plan reads in the order of the file; `use` gets each with the part of the target that it is for."""
    order = file_order(part)
    view = target.permute(order) if order else target
    strides = [part.strides[dim] for dim in order]
    for run in runs(tuple(view.shape), strides, dtype.itemsize, CHUNK):
        take = partial(_take, use, view[_index(run.box)], dtype, run.strides)
        others = has_peers and run.nbytes > run.box.size * dtype.itemsize
        yield Passed(part.file, part.start + run.start, run.nbytes, take, is_shared or others)


def _take(
    use: Callable[[torch.Tensor, torch.Tensor], object],
    inside: torch.Tensor,
    dtype: torch.dtype,
    strides: Sequence[int],
    memory: memoryview,
) -> None:
    with torch.no_grad():
        _ = use(inside, _elements(memory, dtype, tuple(inside.shape), strides))


def _elements(memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...], strides: Sequence[int]) -> torch.Tensor:
    """Return bytes of a file as a tensor, on the same memory where its alignment allows that."""
    read = torch.frombuffer(memory, dtype=torch.uint8)
    if dtype == torch.bool:  # a byte that is neither 0 nor 1 would be a bool that is neither true nor false
        read = read.ne(0)
    elif read.data_ptr() % dtype.itemsize:
        read = read.clone().view(dtype)
    else:
        read = read.view(dtype)
    return read.as_strided(shape, [stride // dtype.itemsize for stride in strides])


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))


class FileWeights:
    """Tensors of open files, by name. Its owner closes it.

    Attributes:
        entries: tensors by name, in the order of the files.
        stored: their bytes.
        ranges: the open files.
    """

    def __init__(self, stored: Mapping[str, Strided], ranges: ByteRanges, where: str) -> None:
        """Take over open files, which close with the source; `where` is their folder, for errors."""
        self._where = where
        self.stored = stored
        self.ranges = ranges
        self.entries: Mapping[str, StoredTensor] = {name: _entry(each, where) for name, each in stored.items()}

    def parts(self, boxes: Mapping[str, Box]) -> FileWeights:
        """Return a source of boxes of some tensors and the whole others; the open files stay this one's to close."""
        stored = {name: cut(each, boxes[name]) if name in boxes else each for name, each in self.stored.items()}
        return FileWeights(stored, self.ranges, self._where)

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill tensors; see `WeightSource`."""
        for name, target in targets:
            self._check(name, target)
        jobs = (plan_jobs(self.stored[name], target, name=name) for name, target in targets)
        self.ranges.read(job for each in jobs for job in each)

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor in mapped memory: its pages are read when they are touched. It outlives `close`.

        Raises `ConfigError` for a weight in several parts or in a store, `CheckpointError` for a file that has changed.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise ConfigError("no such weight", got=repr(name), where="mapped", fix=did_you_mean(name, self.entries))
        dtype = dtype_of(entry.dtype)
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        parts = self.stored[name].parts
        part = parts[0]
        if len(parts) > 1 or any(at % dtype.itemsize for at in (part.start, *part.strides)):
            problem = f"{name!r} cannot be mapped, because its bytes are not contiguous or not aligned"
            raise ConfigError(problem, where=entry.where, fix="Use the home 'disk' or 'cpu'.")
        if not isinstance(self.ranges, LocalRanges):
            raise ConfigError(
                "files of a store cannot be mapped", where=entry.where, fix="Use the home 'disk' or 'cpu'."
            )
        memory = self.ranges.mapped(part.file)[part.start : _stop(part, dtype.itemsize)]
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
        return flat.as_strided(entry.shape, [stride // dtype.itemsize for stride in part.strides])

    def watch(self, names: Iterable[str]) -> None:
        """Note some bytes of weights that are to be read again and again, or are mapped; of local files."""
        if not isinstance(self.ranges, LocalRanges):
            return
        spans: list[tuple[str, int, int]] = []
        for stored in (self.stored[name] for name in names):
            itemsize = dtype_of(stored.dtype).itemsize
            spans += [(each.file, each.start, _stop(each, itemsize)) for each in stored.parts]
        self.ranges.watch(spans)

    def check(self, names: Iterable[str]) -> None:
        """Raise `CheckpointError` if files of mapped weights have changed since they were opened, as `read` does."""
        if isinstance(self.ranges, LocalRanges):
            self.ranges.check({part.file for name in names for part in self.stored[name].parts})

    def close(self) -> None:
        """Close the files."""
        self.ranges.close()

    def __enter__(self) -> FileWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, name: str, target: torch.Tensor) -> None:
        entry = self.entries.get(name)
        if entry is None:
            raise ConfigError("no such weight", got=repr(name), where="read", fix=did_you_mean(name, self.entries))
        fits = target.dtype == dtype_of(entry.dtype) and tuple(target.shape) == entry.shape
        if not fits or target.device.type != "cpu" or not target.is_contiguous():
            expected = f"a contiguous CPU tensor of {entry.dtype} {list(entry.shape)}"
            got = f"{target.dtype} {list(target.shape)} on {target.device}"
            raise ConfigError("a tensor that does not fit", expected=expected, got=got, where=f"read, {name}")


def _stop(part: StridedPart, itemsize: int) -> int:
    """Return the end of a part in its file."""
    steps = zip(part.box.shape, part.strides, strict=True)
    return part.start + sum((size - 1) * stride for size, stride in steps) + itemsize


def _entry(stored: Strided, where: str) -> StoredTensor:
    itemsize = dtype_of(stored.dtype).itemsize
    return StoredTensor(
        shape=stored.shape,
        dtype=stored.dtype,
        nbytes=math.prod(stored.shape) * itemsize,
        where=f"{where}/{stored.parts[0].file}" if stored.parts else where,
        page_offset=page_offset(stored, itemsize),
    )
