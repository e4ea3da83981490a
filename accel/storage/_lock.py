# SPDX-License-Identifier: Apache-2.0
"""One writer at a time in a folder, by a file or by an object of a store that names its holder."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from accel.errors import AccelError, CheckpointError
from accel.errors._checks import disk_errors
from accel.storage._files import try_flock, unlock
from accel.storage._objects import RemotePath, get_object, list_objects, put_object, remove_objects

LOCK = "save.lock"

_FILLED_S = 0.4  # by then whoever made the file has named itself, or is gone
_PATIENCE_S = 0.8  # where others keep taking the lock, or clearing it away
_PAUSE_S = 0.02
_LONGEST = 4096
_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a lock."""

    host: str  # its host
    pid: int  # its number there
    started: str  # its start in clock ticks of the system; "" where unknown
    since: str  # when it took the lock, in UTC


class FolderLock:
    """A lock held by the process until `release`, from any of its threads."""

    __slots__ = ("_file", "_path")

    def __init__(self, file: int, path: Path) -> None:
        self._file = file
        self._path = path

    def check(self) -> None:
        """Do nothing: no writer takes the lock from a living holder."""

    def release(self) -> None:
        """Release the lock. Never raises: a file that cannot be removed is recognized as stale."""
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            if _is_at(self._file, self._path):  # else somebody has removed ours, and this is another's
                os.unlink(self._path)
        unlock(self._file)
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = -1


def take_lock(folder: Path) -> FolderLock:
    """Take the folder's lock, if need be from a dead holder, within a second; raise `CheckpointError` with a living
    holder's host and process."""
    path, start = folder / LOCK, time.monotonic()
    with disk_errors(path):
        while True:
            if (mine := _make(path)) is not None:
                return mine
            waited = time.monotonic() - start
            if (holder := _clear(path, late=waited > _FILLED_S)) is not None or waited > _PATIENCE_S:
                raise refusal(path, holder)
            time.sleep(_PAUSE_S)


def me() -> Holder:
    """Return this process as a holder from now on."""
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Holder(host_name(), os.getpid(), _started(os.getpid()), since)


def is_gone(holder: Holder) -> bool:
    """Whether a process of this host has ended."""
    started = _started(holder.pid)
    another = bool(started and holder.started) and started != holder.started
    return another or not is_alive(holder.pid)


def refusal(path: object, holder: Holder | None) -> CheckpointError:
    """Make the error that names the holder; None for an unknown one."""
    if holder is None:
        got = "a lock without a readable holder"
    else:
        here = " (this host)" if holder.host == host_name() else ""
        mine = ", which is this process" if here and holder.pid == os.getpid() else ""
        got = f"process {holder.pid} on host {holder.host}{here}{mine}, saving since {holder.since}"
    return CheckpointError(
        "another writer is saving into this folder",
        expected="one writer at a time",
        got=got,
        where=str(path),
        fix="Give each run its own folder. If that process is gone, delete this file.",
    )


def _make(path: Path) -> FolderLock | None:
    """Make the file; None if there is one."""
    try:
        file = os.open(path, _MAKE, 0o666)
    except FileExistsError:
        return None
    lock = FolderLock(file, path)
    try:
        _ = try_flock(file)
        _ = os.write(file, msgspec.json.encode(me()))
        os.fsync(file)  # so that other hosts can read it
    except BaseException:
        lock.release()
        raise
    return lock


def _clear(path: Path, *, late: bool) -> Holder | None:
    """Remove the file of a dead holder, return a living one; `late` if an empty file has had the time to be filled."""
    try:
        file = os.open(path, _OPEN)
    except FileNotFoundError:
        return None
    try:
        holder = _read(file)
        if holder is not None and holder.host != host_name():
            return holder
        locked = try_flock(file)
        if locked is False or (locked is None and holder is not None and not is_gone(holder)):
            return holder
        # only who has the file locked, and sees it in its place, removes it: never one that another has just made
        if (holder is not None or late) and _is_at(file, path):
            os.unlink(path)
        return None
    finally:
        os.close(file)


def _read(file: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(file, _LONGEST, 0), type=Holder)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _started(pid: int) -> str:
    """Return the start of a process in clock ticks of the system; "" where unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def host_name() -> str:
    """Return this host's name, for use in names of files."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", os.uname().nodename)[:100] or "host"


def is_alive(pid: int) -> bool:
    """Whether this host has a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


FRESH_S = 60.0
_CLOCK_SKEW_S = 5.0  # between clocks that agree
_BEAT_S = 15.0
_TRIALS = 3


class Lease(msgspec.Struct, frozen=True):
    """The contents of a lock's object."""

    holder: Holder  # the process
    token: str  # token of this lock alone
    renewed: float  # time of the last renewal, in seconds since 1970


class Beat:
    """Calls a function every 15 s on a thread, until it is stopped; errors of the function are ignored."""

    __slots__ = ("_ended", "_thread")

    def __init__(self, call: Callable[[], object], name: str = "accel-beat") -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(call,), name=name, daemon=True)
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
    """A lock held until `release`, once its object has been written.

    Its thread runs before that: a writer that finds the object takes it for abandoned without the thread.
    """

    __slots__ = ("_beat", "_lease", "_path", "_writing")

    def __init__(self, path: RemotePath, lease: Lease) -> None:
        self._path, self._lease = path, lease
        self._writing = threading.Lock()  # of the object, by the thread or by `release`
        self._beat: Beat | None = Beat(self._renew, _beat_name(lease))

    def check(self) -> None:
        """Raise unless the lock is still held: another writer may have taken it as abandoned, or deleted it."""
        if not self._is_mine():
            raise CheckpointError(
                "another writer has taken the lock meanwhile",
                expected="one writer at a time",
                where=str(self._path),
                fix="Give each run its own folder; the checkpoint that the folder held is untouched.",
            )

    def release(self) -> None:
        """Release the lock. Never raises: an object that cannot be removed is abandoned, as this process knows."""
        if self._beat is None:
            return
        # the thread ends last: without it, a writer of this process takes the lock, and that one would be removed
        with contextlib.suppress(AccelError), self._writing:  # MissingExtraError too: no store was reached
            if self._is_mine():
                remove_objects(self._path.parent, [self._path.name])
        self._beat.stop()
        self._beat = None

    def _renew(self) -> None:
        with self._writing:
            if self._is_mine():
                put_object(self._path, msgspec.json.encode(msgspec.structs.replace(self._lease, renewed=time.time())))

    def _is_mine(self) -> bool:
        held = _read_lease(self._path)
        return held is not None and held.token == self._lease.token


def take_remote_lock(folder: RemotePath) -> RemoteLock:
    """Take the lock of a folder of a store, if need be from a dead holder; raise `CheckpointError` with a living one's
    host and process."""
    path, held = folder / LOCK, None
    lease = Lease(me(), secrets.token_hex(8), time.time())
    mine = RemoteLock(path, lease)
    try:
        for _ in range(_TRIALS):
            data = get_object(path, 0, _LONGEST)
            held = _decode(data)
            if data is not None and (held is None or not _is_over(folder, held)):
                break
            if data is not None:
                remove_objects(folder, [LOCK])
            failure = None
            try:
                put_object(path, msgspec.json.encode(lease), new=True)
            except CheckpointError as error:  # such as that it exists by now; its holder shows which
                failure = error
            held = _read_lease(path)
            if held is not None and held.token == lease.token:
                return mine
            if held is None and failure is not None:
                raise failure
        raise refusal(path, held.holder if held is not None else None)
    except BaseException:
        mine.release()
        raise


def _read_lease(path: RemotePath) -> Lease | None:
    return _decode(get_object(path, 0, _LONGEST))


def _decode(data: bytes | None) -> Lease | None:
    try:
        return msgspec.json.decode(data, type=Lease) if data is not None else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _is_over(folder: RemotePath, lease: Lease) -> bool:
    """Return whether a holder is gone, has failed to release the lock, or has not renewed it for a minute."""
    mine, holder = me(), lease.holder
    if holder.host == mine.host:
        if is_gone(holder):
            return True
        if (holder.pid, holder.started) == (mine.pid, mine.started):
            return _beat_name(lease) not in {thread.name for thread in threading.enumerate()}
    age = time.time() - lease.renewed
    if -_CLOCK_SKEW_S <= age <= FRESH_S:
        return False
    in_store = _age_in_store(folder)
    return (age if in_store is None else in_store) > FRESH_S


def _age_in_store(folder: RemotePath) -> float | None:
    """Return the seconds since the lock was written by the store's own clock; None where it keeps no times."""
    probe = f"{LOCK}.{secrets.token_hex(8)}"
    put_object(folder / probe, b"now")
    written = {each.name: each.changed for each in list_objects(folder)}
    remove_objects(folder, [name for name in written if name.startswith(f"{LOCK}.")])  # and probes of dead processes
    then = written.get(LOCK)
    now = written.get(probe)
    return now - then if then and now else None


def _beat_name(lease: Lease) -> str:
    """Return the name of the thread that renews a lock; without it, its process holds it no longer."""
    return f"accel-beat-{lease.token}"
