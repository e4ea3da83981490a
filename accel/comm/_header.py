# SPDX-License-Identifier: Apache-2.0
"""The header of a first message: the fingerprint of a call, and what may differ between the ranks of one call.

Each field is made of whole words of 8 bytes, so that the minimum and the maximum of each word over all ranks show
which fields differ.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from typing import NamedTuple

_LAYOUT = struct.Struct("<16s16sQ8s?7xQ")  # the fields of Head
HEADER_BYTES = _LAYOUT.size  # a multiple of 16
_ONES = (1 << 8 * HEADER_BYTES) - 1


class Head(NamedTuple):
    """One rank's header.

    Attributes:
        fingerprint: hash of the call's name and detail.
        variant: facts that may differ between ranks of one call, or a hash of them.
        payload_bytes: size of the payload.
        place: code place of the call; empty where its order does not matter.
        failed: whether the payload is this rank's error.
        order: number of the comparison in which ranks' orders of this call and the one before proved right; 0 for none.
    """

    fingerprint: bytes
    variant: bytes
    payload_bytes: int
    place: bytes = b""
    failed: bool = False
    order: int = 0

    def is_like(self, other: Head) -> bool:
        """Return whether two ranks sent payloads of one size and variant, or errors alike."""
        return self[:3] == other[:3] and self.failed == other.failed


def write_head(message: bytearray, head: Head) -> None:
    """Write a header to the begin of a message; the variant is hashed above 16 bytes."""
    _LAYOUT.pack_into(message, 0, *head._replace(variant=_digest(head.variant)))


def read_head(message: bytes | bytearray, offset: int = 0) -> Head:
    """Read the header at an offset."""
    return Head._make(_LAYOUT.unpack_from(message, offset))


def complement(header: bytes | bytearray) -> bytes:
    """Invert all bits of a header, so that the minimum of complements is the complement of the maximum."""
    return (int.from_bytes(header, "little") ^ _ONES).to_bytes(HEADER_BYTES, "little")


@functools.lru_cache(maxsize=64)
def fingerprint(name: str, detail: str) -> bytes:
    """Hash a call's name and detail to at most 16 bytes."""
    return _digest(f"{name}\n{detail}".encode())


def _digest(data: bytes) -> bytes:
    return data if len(data) <= 16 else hashlib.blake2b(data, digest_size=16).digest()
