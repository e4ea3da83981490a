# SPDX-License-Identifier: Apache-2.0
"""Advisory locks on open files and folders, which the system drops when their holder ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl

_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF)


def try_flock(file: int, *, shared: bool = False) -> bool | None:
    """Lock an open file or folder without waiting.

    Args:
        file: descriptor.
        shared: whether other shared locks may be held beside it.

    Returns:
        True if it is locked, False if another holder prevents that, None where the file system has no locks.

    Raises:
        OSError: the disk failed.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def unlock(file: int) -> None:
    """Drop the lock. Closing is not enough: a forked process may hold the file open, too."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
