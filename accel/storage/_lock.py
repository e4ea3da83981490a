# SPDX-License-Identifier: Apache-2.0
"""One writer at a time in a folder: a file that names its holder, unlocked by the system when the holder ends.

The file is made exclusively. Its holder also locks it by `flock`, which ends with the process. So another process of
the same host can tell a living holder from a dead one, even if the pid was reused. Without `flock`, pid and start time
of the process tell the same. The state of a holder on another host is unknown.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from accel.errors import CheckpointError
from accel.storage._files import disk_errors, try_flock, unlock

LOCK = "save.lock"

_FILLED_S = 0.4  # by then whoever made the file has named itself, or is gone
_PATIENCE_S = 0.8  # where others keep taking the lock, or clearing it away
_PAUSE_S = 0.02
_LONGEST = 4096
_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a lock.

    Attributes:
        host, pid: the process.
        started: its start in clock ticks of the system; "" where unknown.
        since: when it took the lock, in UTC.
    """

    host: str
    pid: int
    started: str
    since: str


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
    """Take the folder's lock, if need be from a dead holder; wait less than a second.

    Args:
        folder: an existing folder.

    Raises:
        CheckpointError: another writer holds it, named by host and process; or the disk failed.
    """
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
        got = "a lock whose holder cannot be told"
    else:
        here = " (this host)" if holder.host == host_name() else ""
        mine = ", which is this process" if here and holder.pid == os.getpid() else ""
        got = f"process {holder.pid} on host {holder.host}{here}{mine}, saving since {holder.since}"
    return CheckpointError(
        "another writer is saving into this folder",
        expected="one writer at a time",
        got=got,
        where=str(path),
        fix="Give each run a folder of its own. If that process is gone, delete this file.",
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
    """Remove the file of a dead holder; return a living one.

    Args:
        path: the file.
        late: whether an empty file has had the time to be filled.
    """
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
    except (msgspec.MsgspecError, UnicodeDecodeError):
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
