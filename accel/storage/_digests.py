# SPDX-License-Identifier: Apache-2.0
"""What written files must look like when they are read: a digest of every 16 MiB, so that threads share the hashing."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Annotated

import msgspec

Bytes = bytes | memoryview

HASHERS = 4
_HASHERS_BESIDE = 2  # as fast as one thread writes
SPAN_BYTES = 16 * 2**20

Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class Span(msgspec.Struct, frozen=True):
    """Consecutive bytes of a file, from `start` to before `stop`, and their SHA-256 in hex."""

    start: int
    stop: int
    sha256: str


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a written file must look like when it is read.

    Attributes:
        size: bytes.
        sha256: digests in hex: of every 16 MiB of it, the last of what is left; or one of all of it.
    """

    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: tuple[Digest, ...] | Digest

    @property
    def is_complete(self) -> bool:
        """Whether every byte is in exactly one digest."""
        return isinstance(self.sha256, str) or len(self.sha256) == -(-self.size // SPAN_BYTES)

    def spans(self) -> list[Span]:
        """Return the file's parts, each of which has a digest of its own; of an entry that is complete."""
        if isinstance(self.sha256, str):
            return [Span(0, self.size, self.sha256)]
        starts = range(0, self.size, SPAN_BYTES)
        return [
            Span(start, min(start + SPAN_BYTES, self.size), digest)
            for start, digest in zip(starts, self.sha256, strict=True)
        ]


@contextlib.contextmanager
def hashed_beside(chunks: Sequence[Bytes]) -> Generator[Callable[[], FileEntry]]:
    """Hash chunks on threads while the block writes them; gives what waits for the entry of a file that holds them.

    The threads are no pool's: that would refuse to start while the interpreter waits for the last save.
    """
    waiting, found = deque(enumerate(cut(chunks))), dict[int, str]()
    count = len(waiting)

    def work() -> None:
        while True:
            try:
                at, parts = waiting.popleft()
            except IndexError:
                return
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part)
            found[at] = digest.hexdigest()

    threads = [threading.Thread(target=work, name="accel-hash") for _ in range(min(_HASHERS_BESIDE, count))]

    def entry() -> FileEntry:
        for thread in threads:
            thread.join()
        return FileEntry(sum(map(len, chunks)), tuple(found[at] for at in range(count)))

    try:
        for thread in threads:
            thread.start()
        yield entry
    finally:
        waiting.clear()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def cut(chunks: Sequence[Bytes]) -> Iterator[list[memoryview]]:
    """Cut chunks, as if they were one, into the parts that get a digest each."""
    parts, room = list[memoryview](), SPAN_BYTES
    for chunk in chunks:
        left = memoryview(chunk)
        while left:
            parts.append(left[:room])
            left, room = left[room:], room - len(parts[-1])
            if not room:
                yield parts
                parts, room = [], SPAN_BYTES
    if parts:
        yield parts
