# SPDX-License-Identifier: Apache-2.0
"""Tensors as safetensors files: written straight from their memory and read as views on a file's bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from accel.errors import CheckpointError
from accel.storage._digests import Bytes, FileEntry
from accel.storage._either import write_file
from accel.storage._header import Header, TensorHeader, encode_header
from accel.storage._place import Place


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


def write_tensors(
    folder: Place, name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write tensors as a new safetensors file, return once it is on the disk.

    Args:
        folder: an existing folder.
        name: the new file's.
        tensors: of any device, stride and shape, of a dtype that `stored_dtype` knows.
        metadata: texts to put into the header.

    Raises:
        CheckpointError: the disk failed, is full or forbids it.
    """
    plain = {key: _plain(tensor) for key, tensor in tensors.items()}
    order = sorted(plain, key=lambda key: (-plain[key].element_size(), key))  # keeps every tensor aligned
    header, position = dict[str, TensorHeader](), 0
    for key in order:
        tensor = plain[key]
        dtype = stored_dtype(tensor.dtype)
        assert dtype is not None, key
        header[key] = TensorHeader(dtype, tuple(tensor.shape), (position, position + tensor.nbytes))
        position += tensor.nbytes
    chunks: list[Bytes] = [encode_header(header, metadata or {}), *(memory_of(plain[key]) for key in order)]
    return write_file(folder, name, chunks)


def view_tensors(data: memoryview, header: Header) -> dict[str, torch.Tensor]:
    """Return the tensors of a file as views on its bytes; copies of those that are unaligned, or truth values.

    Raises:
        CheckpointError: a tensor is of a dtype that is never written here; see `read_reference`.
    """
    payload, dtypes = data[header.end :], _dtypes()
    for name, entry in header.tensors.items():
        if entry.dtype not in dtypes:
            raise CheckpointError(f"{name!r} has the dtype {entry.dtype}", expected=", ".join(sorted(dtypes)))
    return {
        name: _view(payload[slice(*entry.data_offsets)], dtypes[entry.dtype], entry.shape)
        for name, entry in header.tensors.items()
    }


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's own bytes, which can be written to."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    setattr(memory, "owner", tensor)  # noqa: B010 - the tensor lives as long as the view on its bytes
    return memoryview(memory).cast("B")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return torch.view_as_real(tensor) if tensor.dtype == torch.complex128 else tensor


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
