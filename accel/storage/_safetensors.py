# SPDX-License-Identifier: Apache-2.0
"""The safetensors format, written straight from the tensors' memory and read as views on a file's bytes.

A file is eight bytes of header length, a JSON header of name -> dtype, shape and byte range, and the bytes of the
tensors without gaps. Reference: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from accel.errors import CheckpointError
from accel.storage._files import Bytes, FileEntry, write_file

_LARGEST_HEADER = 100_000_000  # what the reference implementation accepts
_WORD = 8


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


def stored_dtype(dtype: torch.dtype) -> str | None:
    """Return the format's name of a dtype, None if it cannot be stored; complex128 is stored as pairs of F64."""
    names = {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.uint16: "U16",
        torch.uint32: "U32",
        torch.uint64: "U64",
        torch.bool: "BOOL",
        torch.complex64: "C64",
        torch.complex128: "F64",
    }
    return names.get(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's own name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def write_tensors(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    """Write tensors as a new safetensors file, return once it is on the disk.

    Args:
        folder: an existing folder.
        name: the new file's.
        tensors: of any device, stride and shape, of a dtype that `stored_dtype` knows.

    Raises:
        CheckpointError: the disk failed, is full or forbids it.
    """
    plain = {key: _plain(tensor) for key, tensor in tensors.items()}
    order = sorted(plain, key=lambda key: (-plain[key].element_size(), key))  # keeps every tensor aligned
    header, position = dict[str, _Entry](), 0
    for key in order:
        tensor = plain[key]
        dtype = stored_dtype(tensor.dtype)
        assert dtype is not None, key
        header[key] = _Entry(dtype, tuple(tensor.shape), (position, position + tensor.nbytes))
        position += tensor.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _WORD)
    chunks: list[Bytes] = [len(text).to_bytes(_WORD, "little") + text, *(_memory(plain[key]) for key in order)]
    return write_file(folder, name, chunks)


def read_tensors(data: memoryview, where: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file as views on its bytes.

    Args:
        data: the whole file, in memory that may be written to.
        where: the file's path, for errors.

    Raises:
        CheckpointError: the header contradicts itself or the file's length.
    """
    length = int.from_bytes(data[:_WORD], "little")
    if len(data) < _WORD or length > min(_LARGEST_HEADER, len(data) - _WORD):
        raise _broken("the header does not fit the file", where)
    try:
        header = msgspec.json.decode(data[_WORD : _WORD + length], type=dict[str, _Entry])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(f"the header cannot be read: {error}", where) from error
    payload, position = data[_WORD + length :], 0
    dtypes = _dtypes()
    tensors: dict[str, torch.Tensor] = {}
    for key, entry in sorted(header.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        dtype = dtypes.get(entry.dtype)
        if dtype is None:
            raise _broken(f"{key!r} has the unknown dtype {entry.dtype!r}", where)
        if (
            start != position
            or not start <= end <= len(payload)
            or math.prod(entry.shape) * dtype.itemsize != end - start
        ):
            raise _broken(f"the byte range of {key!r} does not fit its shape and its neighbours", where)
        position = end
        tensors[key] = _view(payload[start:end], dtype, entry.shape)
    if position != len(payload):
        raise _broken("bytes after the last tensor", where)
    return tensors


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return torch.view_as_real(tensor) if tensor.dtype == torch.complex128 else tensor


def _memory(tensor: torch.Tensor) -> memoryview:
    if not tensor.nbytes:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    setattr(memory, "owner", tensor)  # noqa: B010 - the tensor lives as long as the view on its bytes
    return memoryview(memory).cast("B")


def _view(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:  # a byte that is neither 0 nor 1 would be a bool that is neither true nor false
        return torch.frombuffer(data, dtype=torch.uint8).ne(0).view(shape)
    aligned = ctypes.addressof(ctypes.c_ubyte.from_buffer(data)) % dtype.itemsize == 0
    return torch.frombuffer(data if aligned else bytearray(data), dtype=dtype).view(shape)


def _dtypes() -> dict[str, torch.dtype]:
    known = (getattr(torch, name) for name in dir(torch))
    dtypes = [dtype for dtype in known if isinstance(dtype, torch.dtype) and dtype != torch.complex128]
    return {name: dtype for dtype in dtypes if (name := stored_dtype(dtype)) is not None}


def _broken(problem: str, where: str) -> CheckpointError:
    return CheckpointError(problem, expected="a safetensors file", where=where)
