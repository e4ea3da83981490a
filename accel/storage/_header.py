# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file, checked against itself and the file's length, without torch.

A file is eight bytes of header length, a JSON header of name -> dtype, shape and byte range, and the bytes of the
tensors without gaps. Reference: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

from accel.errors import CheckpointError

_LARGEST = 100_000_000  # what the reference implementation accepts
_WORD = 8
_METADATA = "__metadata__"
_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in a file.

    Attributes:
        dtype: the format's name, such as "F32".
        shape: its sizes.
        data_offsets: where its bytes begin and end, after the header.
    """

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


class Header(msgspec.Struct, frozen=True):
    """A file's header.

    Attributes:
        tensors: by name, in the order of their bytes.
        metadata: texts that the writer put beside them.
        end: where the bytes of the tensors begin in the file.
    """

    tensors: dict[str, TensorHeader]
    metadata: dict[str, str]
    end: int


def encode_header(tensors: Mapping[str, TensorHeader], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes that stand before those of the tensors; a multiple of eight."""
    text = msgspec.json.encode(({_METADATA: metadata} if metadata else {}) | dict(tensors))
    text += b" " * (-len(text) % _WORD)
    return len(text).to_bytes(_WORD, "little") + text


def read_header(data: memoryview, where: str) -> Header:
    """Read a header and check it.

    Args:
        data: the whole file; only the header's bytes are touched.
        where: the file's path, for errors.

    Raises:
        CheckpointError: the header contradicts itself or the file's length.
    """
    length = int.from_bytes(data[:_WORD], "little")
    if len(data) < _WORD or length > min(_LARGEST, len(data) - _WORD):
        raise _broken("the header does not fit the file", where)
    try:
        entries = msgspec.json.decode(data[_WORD : _WORD + length], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop(_METADATA, b"{}"), type=dict[str, str])
        tensors = {name: msgspec.json.decode(entry, type=TensorHeader) for name, entry in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(f"the header cannot be read: {error}", where) from error
    position, payload = 0, len(data) - _WORD - length
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1].data_offsets))
    for name, entry in tensors.items():
        start, end = entry.data_offsets
        if entry.dtype not in _ITEM_BYTES:
            raise _broken(f"{name!r} has the unknown dtype {entry.dtype!r}", where)
        size = math.prod(entry.shape) * _ITEM_BYTES[entry.dtype]
        if start != position or not start <= end <= payload or size != end - start:
            raise _broken(f"the byte range of {name!r} does not fit its shape and its neighbours", where)
        position = end
    if position != payload:
        raise _broken("bytes after the last tensor", where)
    return Header(tensors, metadata, _WORD + length)


def _broken(problem: str, where: str) -> CheckpointError:
    return CheckpointError(problem, expected="a safetensors file", where=where)
