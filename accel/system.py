# SPDX-License-Identifier: Apache-2.0
"""A process and its system: signals that ask it to stop, streams, working directory, and helper programs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, NamedTuple

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # their meaning is the script's own
# A closed terminal sends the first more than once, by the shell and by the kernel; the kernel sends the second every
# second. So another one of them is no second request.
REPEATED = (signal.SIGHUP, signal.SIGXCPU)
SAME_REQUEST_S = 0.3  # a scheduler may signal the ranks and the launcher, which forwards the signal


def not_ignored(signals: Collection[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that this process does not ignore, as `nohup` lets it ignore SIGHUP."""
    return [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]


def open_streams() -> None:
    """Open /dev/null as each standard stream that is closed; else another file gets its number, here or in a child."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


def write_error(text: str) -> None:
    """Write to stderr at once; without a stderr, or if its terminal is gone, nothing."""
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison] - it was closed as Python started
        with contextlib.suppress(OSError):
            _ = sys.stderr.write(text)
            sys.stderr.flush()


def current_folder() -> str:
    """Return the working directory; a deleted one by the name that it had."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            return os.readlink("/proc/self/cwd")  # with " (deleted)" at its end
        return "(deleted)"


def absolute(path: str) -> str:
    """Return an absolute path, in a deleted working directory too."""
    return os.path.normpath(os.path.join(current_folder(), path))


_LAST_BYTES = 4096  # of the output that is kept for a message
_CHUNK_BYTES = 1 << 16
_POLL_S = 0.05  # between two looks at a program while another process holds its pipes open
_FLOOD_BYTES = 1 << 20  # of output that is not kept; beyond it is read slowly, so that the program waits
_FLOOD_PAUSE_S = 0.01
_KILLED_S = 1.5  # a program that waits for a device may outlive SIGKILL


class HelperEnd(NamedTuple):
    """The end of a helper program."""

    # Exit status, or minus the number of the signal that killed it; None if it was killed at its limit.
    status: int | None
    out: bytes = b""  # first bytes of its standard output
    err: bytes = b""  # last 4 kB of its standard error
    is_cut: bool = False  # whether it was killed because its output was longer than what is kept

    def last_line(self) -> str:
        """Return the last line of its standard error."""
        return self.err.decode(errors="replace").strip().rpartition("\n")[2]


class Helpers:
    """The helper programs that run, for a process that also reaps what others have left behind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pids: set[int] = set()

    @contextmanager
    def held(self) -> Generator[set[int]]:
        """Give the process ids; no helper starts in the block."""
        with self._lock:
            yield self._pids


def run_helper(
    words: Sequence[str],
    *,
    limit_s: float,
    stdin: bytes = b"",
    most_out: int = 0,
    environ: Mapping[str, str] | None = None,
    helpers: Helpers | None = None,
) -> HelperEnd:
    """Run a program in a new session until it ends; at the limit, kill it and what it has started.

    It ends with its process: a child of it that still holds its pipes is not waited for.

    Args:
        words: the program and its arguments.
        limit_s: seconds; `math.inf` for no limit.
        stdin: its standard input.
        most_out: bytes of standard output to keep, beyond which it is killed; 0 discards the output.
        environ: its environment; by default the environment of this process.
        helpers: takes note of the process while it runs.

    Raises:
        OSError, ValueError: the program cannot be started.
    """
    with (helpers or Helpers()).held() as pids:
        process = subprocess.Popen(
            words,
            env=None if environ is None else dict(environ),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE if most_out else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        pids.add(process.pid)
    try:
        return _Streams(process, stdin, most_out).follow(time.monotonic() + limit_s)
    except BaseException:  # Ctrl-C, which does not reach another session
        _kill(process)
        raise
    finally:
        with (helpers or Helpers()).held() as pids:
            pids.discard(process.pid)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a helper program and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        _ = process.wait(_KILLED_S)


class _Streams:
    """The streams of a helper program, read and written as they become ready."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, most_out: int) -> None:
        self._process = process
        self._left = memoryview(stdin)
        self._most_out = most_out
        self._out = bytearray()
        self._err = bytearray()
        self._discarded = 0
        for pipe in self._open():
            os.set_blocking(pipe.fileno(), False)

    def follow(self, deadline: float) -> HelperEnd:
        """Follow the program to its end."""
        process = self._process
        is_late = is_cut = False
        while process.poll() is None and not is_late and not is_cut:
            self._turn(min(_POLL_S, max(0.0, deadline - time.monotonic())))
            is_cut = len(self._out) > self._most_out
            is_late = time.monotonic() >= deadline and process.poll() is None
        if is_late or is_cut:
            _kill(process)
        # What it has written before its end; more may come from others for ever.
        while not is_late and len(self._out) <= self._most_out and self._discarded < _FLOOD_BYTES and self._turn(0.0):
            pass
        for pipe in self._open():
            pipe.close()
        is_cut = is_cut or len(self._out) > self._most_out
        status = None if is_late else process.returncode
        return HelperEnd(status, bytes(self._out[: self._most_out]), bytes(self._err), is_cut)

    def _open(self) -> list[IO[bytes]]:
        process = self._process
        return [pipe for pipe in (process.stdin, process.stdout, process.stderr) if pipe and not pipe.closed]

    def _turn(self, timeout_s: float) -> bool:
        """Wait until a stream is ready, and read or write it once; return whether output came."""
        pipes = {pipe.fileno(): pipe for pipe in self._open()}
        if not pipes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _ = self._process.wait(timeout_s)
            return False
        poller = select.poll()  # `select.select` takes no number above 1023
        for number, pipe in pipes.items():
            poller.register(number, select.POLLOUT if pipe is self._process.stdin else select.POLLIN)
        ready = [pipes[number] for number, _ in poller.poll(timeout_s * 1000)]
        for pipe in ready:
            if pipe is self._process.stdin:
                self._feed(pipe)
            else:
                self._take(pipe)
        return any(pipe is not self._process.stdin for pipe in ready)

    def _feed(self, pipe: IO[bytes]) -> None:
        try:
            self._left = self._left[os.write(pipe.fileno(), self._left[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:  # it reads no more
            self._left = self._left[:0]
        if not self._left:
            pipe.close()

    def _take(self, pipe: IO[bytes]) -> None:
        try:
            chunk = os.read(pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            pipe.close()
        elif pipe is self._process.stdout:
            self._out += chunk
        else:
            self._err = (self._err + chunk)[-_LAST_BYTES:]
            self._discarded += len(chunk)
            if self._discarded > _FLOOD_BYTES:
                time.sleep(_FLOOD_PAUSE_S)
