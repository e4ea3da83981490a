# SPDX-License-Identifier: Apache-2.0
"""The one opener of files that others may have written: regular files, opened without waiting, read within a limit."""

from __future__ import annotations

import errno
import os
import stat

from accel.terminal import show_size

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # opening a pipe must not wait for its writer
MOST_BYTES = 16_000_000  # of a file that is decoded as a whole


def open_regular(
    path: str | os.PathLike[str],
    *,
    within: str | os.PathLike[str] | None = None,
    follow: bool = True,
    dir_fd: int | None = None,
) -> int:
    """Open a regular file for reading; return its descriptor.

    Args:
        path: the file.
        within: folder that the file must lie in; links that lead out of it are refused.
        follow: whether the last part of the path may be a link.
        dir_fd: descriptor of the folder that `path` is relative to.

    Raises:
        OSError: No such file, no permission, another kind of file, or a link that leads out of the folder.
    """
    # devices and sockets are not opened at all: opening some of them has effects
    _check_regular(os.stat(path, dir_fd=dir_fd, follow_symlinks=follow), path, follow=follow)
    file = os.open(path, _FLAGS | (0 if follow else os.O_NOFOLLOW), dir_fd=dir_fd)
    try:
        _check_regular(os.fstat(file), path, follow=follow)  # it may have been replaced since
        if within is not None and not _leads_to(file, path).startswith(os.path.join(os.path.realpath(within), "")):
            raise OSError(errno.ELOOP, "a link leads out of the folder", os.fspath(path))
    except OSError:
        os.close(file)
        raise
    return file


def _check_regular(found: os.stat_result, path: str | os.PathLike[str], *, follow: bool) -> None:
    if stat.S_ISLNK(found.st_mode) and not follow:
        raise OSError(errno.ELOOP, "a symbolic link", os.fspath(path))
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def _leads_to(file: int, path: str | os.PathLike[str]) -> str:
    """Return the path of an open file without links; a folder that is replaced meanwhile does not change it."""
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except OSError:  # no such file system
        return os.path.realpath(path)


def read_regular(
    path: str | os.PathLike[str],
    most: int = MOST_BYTES,
    *,
    within: str | os.PathLike[str] | None = None,
) -> bytes:
    """Return the bytes of a regular file of at most `most` bytes; raise `OSError` as `open_regular`, or for a larger
    one."""
    with open(open_regular(path, within=within), "rb") as file:
        _check_size(os.fstat(file.fileno()).st_size, most, path)
        content = file.read(most + 1)
    _check_size(len(content), most, path)  # it may have grown since
    return content


def read_named(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file that the user named, also of a pipe or a device; raise `OSError` beyond `most`."""
    with open(path, "rb") as file:
        content = file.read(most + 1)
    _check_size(len(content), most, path)
    return content


def _check_size(size: int, most: int, path: str | os.PathLike[str]) -> None:
    if size > most:
        raise OSError(errno.EFBIG, f"larger than {show_size(most)}", os.fspath(path))
