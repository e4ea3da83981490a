# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: headers checked against themselves and the file's length, tensors straight from and to memory.

A file is eight bytes of header length, a JSON header of name -> dtype, shape and byte range, and the bytes of the
tensors without gaps. Headers are read without torch. Reference: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec

from accel.errors import CheckpointError
from accel.storage._files import Bytes, FileEntry, write_file

if TYPE_CHECKING:
    import torch

    from accel.storage._files import OpenDirectory

MOST_TENSORS = 2**18  # of a file without a manifest

_LARGEST = 100_000_000  # what the reference implementation accepts
_MOST_FIELDS = 2**21  # of its JSON; a tensor has four
_MOST_DIMS = 64 + 1  # complex128 is stored with one more
_LONGEST_ENTRY = 4096
_SPARE = 2**16  # for texts besides the tensors
_WORD = 8
_POINTER = b"version "  # the first bytes of a pointer of Git LFS, and no length of a header
_METADATA = "__metadata__"
ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 8),
    **dict.fromkeys(("F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
DTYPE_NAMES = {  # by torch's names
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "complex64": "C64", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
FLOATS = frozenset(("F64", "F32", "F16", "BF16"))  # dtypes that a cast of a model changes
WEIGHT_FLOATS = FLOATS | {"F8_E4M3", "F8_E5M2"}  # dtypes of floating-point weights
MEMORY_BITS = {**ITEM_BITS, "C128": 128}  # complex128 is in no file, but in memory


def tensor_bytes(shape: Iterable[int], dtype: str) -> int:
    """Return the bytes of a tensor's elements, by the format's name of its dtype; "C128" is complex128."""
    return -(-math.prod(shape) * MEMORY_BITS[dtype] // 8)


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in a file."""

    dtype: str  # the format's name, such as "F32"
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=_MOST_DIMS)]  # its sizes
    data_offsets: tuple[_Count, _Count]  # first byte and end of its bytes, counted from the end of the header


class Header(msgspec.Struct, frozen=True):
    """A file's header."""

    tensors: dict[str, TensorHeader]  # by name, in the order of their bytes
    metadata: dict[str, str]  # texts of the writer
    end: int  # first byte after the header in the file


def encode_header(tensors: Mapping[str, TensorHeader], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the tensors' bytes; a multiple of eight."""
    text = msgspec.json.encode(({_METADATA: metadata} if metadata else {}) | dict(tensors))
    text += b" " * (-len(text) % _WORD)
    return len(text).to_bytes(_WORD, "little") + text


def header_size(data: bytes | memoryview, size: int, where: str) -> int:
    """Return the bytes of a header, the eight of its length included; raise if they exceed the file's size."""
    if bytes(data[:_WORD]) == _POINTER:
        fix = "Fetch the files themselves: git lfs pull."
        raise CheckpointError("a Git LFS pointer instead of the file", where=where, fix=fix)
    length = int.from_bytes(data[:_WORD], "little")
    if len(data) < _WORD or length > min(_LARGEST, size - _WORD):
        raise _broken("the header does not fit the file", where)
    return _WORD + length


def read_header(data: memoryview, where: str, names: Collection[str] | None = None, size: int | None = None) -> Header:
    """Read a header and check it against itself and the file's length; fast and in little memory for any bytes.

    `data` begins the file; `names` are the tensors that a manifest lists for it.
    """
    size = len(data) if size is None else size
    after = header_size(data, size, where)
    _bound(data[_WORD:after], names, where)
    try:
        entries = msgspec.json.decode(data[_WORD:after], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop(_METADATA, b"{}"), type=dict[str, str])
        if len(entries) > (MOST_TENSORS if names is None else len(names)):
            raise _broken(f"the header lists {len(entries)} tensors", where)
        tensors = {name: _entry(name, entry, where) for name, entry in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(f"the header cannot be read: {error}", where) from error
    position, payload = 0, size - after
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1].data_offsets))
    end = max((entry.data_offsets[1] for entry in tensors.values()), default=0)
    if end > payload:
        raise CheckpointError(
            "the file ends before its tensors do",
            expected=f"{after + end} bytes",
            got=f"{size}",
            where=where,
            fix="Download or copy it again.",
        )
    for name, entry in tensors.items():
        start, end = entry.data_offsets
        if entry.dtype not in ITEM_BITS:
            raise _broken(f"{name!r} has the unknown dtype {entry.dtype!r}", where)
        bits = math.prod(entry.shape) * ITEM_BITS[entry.dtype]
        if start != position or not start <= end <= payload or bits != 8 * (end - start):
            raise _broken(f"the byte range of {name!r} does not fit its shape and its neighbours", where)
        position = end
    if position != payload:
        raise _broken("bytes after the last tensor", where)
    return Header(tensors, metadata, after)


def fetch_header(read: Callable[[int, int], bytes], size: int, where: str) -> Header:
    """Read the header of a file of `size` bytes; `read` takes a position and a number of bytes."""
    end = header_size(read(0, min(_WORD, size)), size, where)
    return read_header(memoryview(read(0, end)), where, size=size)


def _bound(text: memoryview, names: Collection[str] | None, where: str) -> None:
    """Refuse a header that is larger than its tensors need, before it is parsed."""
    if names is None:
        if bytes(text).count(b":") > _MOST_FIELDS:
            raise _broken(f"the header has more than {_MOST_FIELDS} fields", where)
        return
    most = _SPARE + sum(_LONGEST_ENTRY + 6 * len(name) for name in names)  # a character is six bytes at most
    if len(text) > most:
        raise _broken(f"the header has {len(text)} bytes for {len(names)} tensors", where)


def _entry(name: str, text: msgspec.Raw, where: str) -> TensorHeader:
    """Decode a tensor's entry, unless its numbers would take long to multiply."""
    if len(memoryview(text)) > _LONGEST_ENTRY:
        raise _broken(f"{name!r} has more than {_MOST_DIMS} dimensions, or other text", where)
    return msgspec.json.decode(text, type=TensorHeader)


def _broken(problem: str, where: str) -> CheckpointError:
    return CheckpointError(problem, expected="a safetensors file", where=where)


def stored_dtype(dtype: torch.dtype) -> str | None:
    """Return the format's name of a dtype, None if it cannot be stored; complex128 is stored as pairs of F64."""
    name = dtype_name(dtype)
    return "F64" if name == "complex128" else DTYPE_NAMES.get(name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's own name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def encode_tensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> list[Bytes]:
    """Return the bytes of a safetensors file: the header, and the memory of the tensors, which is not copied."""
    plain = {key: _plain(tensor) for key, tensor in tensors.items()}
    order = sorted(plain, key=lambda key: (-plain[key].element_size(), key))  # keeps every tensor aligned
    header, position = dict[str, TensorHeader](), 0
    for key in order:
        tensor = plain[key]
        dtype = stored_dtype(tensor.dtype)
        assert dtype is not None, key
        header[key] = TensorHeader(dtype, tuple(tensor.shape), (position, position + tensor.nbytes))
        position += tensor.nbytes
    return [encode_header(header, metadata or {}), *(memory_of(plain[key]) for key in order)]


def write_tensors(
    folder: Path, name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write tensors as a new safetensors file, and return once it is on the disk; see `encode_tensors`."""
    return write_file(folder, name, encode_tensors(tensors, metadata))


def view_tensors(data: memoryview, header: Header) -> dict[str, torch.Tensor]:
    """Return the tensors of a file as views of its bytes; copies of unaligned and bool ones; for other dtypes, see
    `read_reference`."""
    payload, dtypes = data[header.end :], torch_dtypes()
    for name, entry in header.tensors.items():
        if entry.dtype not in dtypes:
            raise CheckpointError(f"{name!r} has the dtype {entry.dtype}", expected=", ".join(sorted(dtypes)))
    return {
        name: _view(payload[slice(*entry.data_offsets)], dtypes[entry.dtype], entry.shape)
        for name, entry in header.tensors.items()
    }


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's own bytes, writable."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    setattr(memory, "owner", tensor)  # noqa: B010 - the tensor lives as long as the view on its bytes
    return memoryview(memory).cast("B")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return torch.view_as_real(tensor) if tensor.dtype == torch.complex128 else tensor


def _view(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    if not len(data):
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:  # a byte that is neither 0 nor 1 would be a bool that is neither true nor false
        return torch.frombuffer(data, dtype=torch.uint8).ne(0).view(shape)
    aligned = ctypes.addressof(ctypes.c_ubyte.from_buffer(data)) % dtype.itemsize == 0
    return torch.frombuffer(data if aligned else bytearray(data), dtype=dtype).view(shape)


def torch_dtypes() -> Mapping[str, torch.dtype]:
    """Return torch's dtypes by the format's names."""
    import torch

    return {name: getattr(torch, own) for own, name in DTYPE_NAMES.items()}


def storable_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of torch with a name that a file has, such as "bfloat16"; None if it cannot be stored."""
    import torch

    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) and stored_dtype(dtype) is not None else None


def read_reference(folder: OpenDirectory, name: str) -> Mapping[str, torch.Tensor]:
    """Return the tensors of another writer's file in an open folder, in memory that the file backs; read by the
    format's own library, which knows every dtype of the format."""
    import torch
    from safetensors import SafetensorError, safe_open

    where = str(folder.path / name)
    found = dict[str, torch.Tensor]()
    header = read_header(folder.read(name), where)  # bounded in time and memory, unlike the library's own
    with folder.descriptor(name) as path:
        try:
            with cast(Any, safe_open)(path, framework="pt") as file:
                for key in header.tensors:
                    tensor: torch.Tensor = file.get_tensor(key)
                    # a byte that is neither 0 nor 1 would be a bool that is neither true nor false
                    found[key] = tensor.view(torch.uint8).ne(0) if tensor.dtype == torch.bool else tensor
        except (SafetensorError, OSError, AttributeError, TypeError) as error:  # the last two: no such dtype in torch
            raise CheckpointError("cannot be read", expected="safetensors", got=str(error), where=where) from error
    return found
