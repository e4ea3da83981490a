# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file, checked against itself and the file's length, without torch.

A file is eight bytes of header length, a JSON header of name -> dtype, shape and byte range, and the bytes of the
tensors without gaps. Reference: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec

from accel.errors import CheckpointError

_LARGEST = 100_000_000  # what the reference implementation accepts
MOST_TENSORS = 2**18  # of a file without a manifest
_MOST_FIELDS = 2**21  # of its JSON; a tensor has four
_MOST_DIMS = 64 + 1  # complex128 is stored with one more
_LONGEST_ENTRY = 4096
_SPARE = 2**16  # for texts beside the tensors
_WORD = 8
_METADATA = "__metadata__"
_ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 8),
    **dict.fromkeys(("F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in a file.

    Attributes:
        dtype: the format's name, such as "F32".
        shape: its sizes.
        data_offsets: where its bytes begin and end, after the header.
    """

    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=_MOST_DIMS)]
    data_offsets: tuple[_Count, _Count]


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


def read_header(data: memoryview, where: str, names: Collection[str] | None = None) -> Header:
    """Read a header and check it; little time and memory for any bytes.

    Args:
        data: the whole file; only the header's bytes are touched.
        where: the file's path, for errors.
        names: of the tensors that a manifest lists for this file; None for a file without a manifest.

    Raises:
        CheckpointError: the header contradicts itself or the file's length, or has more in it than its tensors need.
    """
    length = int.from_bytes(data[:_WORD], "little")
    if len(data) < _WORD or length > min(_LARGEST, len(data) - _WORD):
        raise _broken("the header does not fit the file", where)
    _bound(data[_WORD : _WORD + length], names, where)
    try:
        entries = msgspec.json.decode(data[_WORD : _WORD + length], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop(_METADATA, b"{}"), type=dict[str, str])
        if len(entries) > (MOST_TENSORS if names is None else len(names)):
            raise _broken(f"the header lists {len(entries)} tensors", where)
        tensors = {name: _entry(name, entry, where) for name, entry in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(f"the header cannot be read: {error}", where) from error
    position, payload = 0, len(data) - _WORD - length
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1].data_offsets))
    for name, entry in tensors.items():
        start, end = entry.data_offsets
        if entry.dtype not in _ITEM_BITS:
            raise _broken(f"{name!r} has the unknown dtype {entry.dtype!r}", where)
        bits = math.prod(entry.shape) * _ITEM_BITS[entry.dtype]
        if start != position or not start <= end <= payload or bits != 8 * (end - start):
            raise _broken(f"the byte range of {name!r} does not fit its shape and its neighbours", where)
        position = end
    if position != payload:
        raise _broken("bytes after the last tensor", where)
    return Header(tensors, metadata, _WORD + length)


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
        raise _broken(f"{name!r} has more than {_MOST_DIMS} dimensions, or other text beside them", where)
    return msgspec.json.decode(text, type=TensorHeader)


def _broken(problem: str, where: str) -> CheckpointError:
    return CheckpointError(problem, expected="a safetensors file", where=where)
