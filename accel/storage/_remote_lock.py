# SPDX-License-Identifier: Apache-2.0
"""One writer at a time in a folder of a store: an object that names its holder, which renews it.

Few stores can tell which of two writers was first, and none unlocks for a dead process. So a writer reads the object
again after writing it, a holder renews it every 15 s, and one without a renewal for a minute is dead; on the same host,
the process itself is checked. Two writers at once only refuse each other's commit: each save has objects of its own.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable

import msgspec

from accel.errors import CheckpointError
from accel.storage._lock import LOCK, Holder, is_gone, me, refusal
from accel.storage._objects import RemotePath, get_object, put_object, remove_objects

FRESH_S = 60.0
_BEAT_S = 15.0
_TRIALS = 3
_LONGEST = 4096


class Lease(msgspec.Struct, frozen=True):
    """The contents of a lock's object.

    Attributes:
        holder: the process.
        token: token of this lock alone.
        renewed: time of the last renewal, in seconds since 1970.
    """

    holder: Holder
    token: str
    renewed: float


class Beat:
    """Calls a function every 15 s on a thread, until it is stopped; errors of the function are ignored."""

    __slots__ = ("_ended", "_thread")

    def __init__(self, call: Callable[[], object]) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(call,), name="accel-beat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, and wait for a call that has begun."""
        self._ended.set()
        self._thread.join()

    def _run(self, call: Callable[[], object]) -> None:
        while not self._ended.wait(_BEAT_S):
            with contextlib.suppress(CheckpointError):
                call()


class RemoteLock:
    """A lock held until `release`."""

    __slots__ = ("_beat", "_lease", "_path")

    def __init__(self, path: RemotePath, lease: Lease) -> None:
        self._path, self._lease = path, lease
        self._beat: Beat | None = Beat(self._renew)

    def check(self) -> None:
        """Raise unless the lock is still held.

        Raises:
            CheckpointError: another writer has taken it as abandoned, or it was deleted; or the store failed.
        """
        if not self._is_mine():
            raise CheckpointError(
                "another writer has taken the lock meanwhile",
                expected="one writer at a time",
                where=str(self._path),
                fix="Give each run a folder of its own; the checkpoint that the folder held is untouched.",
            )

    def release(self) -> None:
        """Release the lock. Never raises: an object that cannot be removed counts as abandoned after a minute."""
        if self._beat is None:
            return
        self._beat.stop()
        self._beat = None
        with contextlib.suppress(CheckpointError):
            if self._is_mine():
                remove_objects(self._path.parent, [self._path.name])

    def _renew(self) -> None:
        if self._is_mine():
            put_object(self._path, msgspec.json.encode(msgspec.structs.replace(self._lease, renewed=time.time())))

    def _is_mine(self) -> bool:
        held = _read(self._path)
        return held is not None and held.token == self._lease.token


def take_remote_lock(folder: RemotePath) -> RemoteLock:
    """Take the lock of a folder of a store, if need be from a dead holder.

    Raises:
        CheckpointError: another writer holds it, named by host and process; or the store failed.
    """
    path, held = folder / LOCK, None
    lease = Lease(me(), secrets.token_hex(8), time.time())
    for _ in range(_TRIALS):
        data = get_object(path, 0, _LONGEST)
        held = _decode(data)
        if data is not None and (held is None or not _is_over(held)):
            raise refusal(path, held.holder if held is not None else None)
        if data is not None:
            remove_objects(folder, [LOCK])
        failure = None
        try:
            put_object(path, msgspec.json.encode(lease), new=True)
        except CheckpointError as error:  # such as that it exists by now; whose it is tells what it was
            failure = error
        held = _read(path)
        if held is not None and held.token == lease.token:
            return RemoteLock(path, lease)
        if held is None and failure is not None:
            raise failure
    raise refusal(path, held.holder if held is not None else None)


def _read(path: RemotePath) -> Lease | None:
    return _decode(get_object(path, 0, _LONGEST))


def _decode(data: bytes | None) -> Lease | None:
    try:
        return msgspec.json.decode(data, type=Lease) if data is not None else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _is_over(lease: Lease) -> bool:
    here = lease.holder.host == me().host
    return (here and is_gone(lease.holder)) or time.time() - lease.renewed > FRESH_S
