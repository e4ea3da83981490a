# SPDX-License-Identifier: Apache-2.0
"""The header of a first message: the fingerprint of a call, and what may differ between the ranks of one call."""

from __future__ import annotations

import functools
import hashlib
import struct
from typing import NamedTuple

_LAYOUT = struct.Struct("<16s16sQ?8s15x")  # the fields of Head
HEADER_BYTES = _LAYOUT.size  # a multiple of 16


class Head(NamedTuple):
    """One rank's header.

    Attributes:
        fingerprint: hash of the call's name and detail.
        variant: facts that may differ between ranks of one call, or a hash of them.
        payload_bytes: size of the payload.
        failed: whether the payload is this rank's error.
        place: code place of the call; empty where its order does not matter.
    """

    fingerprint: bytes
    variant: bytes
    payload_bytes: int
    failed: bool
    place: bytes


def write_head(message: bytearray, head: Head) -> None:
    """Write a header to the begin of a message; the variant is hashed above 16 bytes."""
    _LAYOUT.pack_into(message, 0, *head._replace(variant=_digest(head.variant)))


def read_head(message: bytes | bytearray, offset: int = 0) -> Head:
    """Read the header at an offset."""
    return Head._make(_LAYOUT.unpack_from(message, offset))


@functools.lru_cache(maxsize=64)
def fingerprint(name: str, detail: str) -> bytes:
    """Hash a call's name and detail to at most 16 bytes."""
    return _digest(f"{name}\n{detail}".encode())


def _digest(data: bytes) -> bytes:
    return data if len(data) <= 16 else hashlib.blake2b(data, digest_size=16).digest()
