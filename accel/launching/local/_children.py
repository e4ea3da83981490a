# SPDX-License-Identifier: Apache-2.0
"""The started processes: their starts, ends and failures, signals to them, and their output as whole lines."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from accel.errors import LaunchError
from accel.launching.local._launch_plan import LaunchPlan, ProcessPlan
from accel.launching.local._machine import bound
from accel.launching.reports._failure import Failure, file_beside, read_failure
from accel.launching.reports._report import notify
from accel.terminal import LastStates

_CHUNK_BYTES = 1 << 16
_QUIET_S = 0.2
_KILLED_S = 1.5  # a process that waits for a device may outlive SIGKILL
_ABANDONED_S = 5.0  # a progress bar without a change gives its line to another rank's


def split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    r"""Return the lines of `data` with their ends ("\n", "\r\n", or the "\r" of a progress bar), and the rest."""
    lines = data.splitlines(keepends=True)
    # What ends in "\r" is left as well: it may be the first half of "\r\n".
    rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
    return lines, rest


class Sink:
    """A stream of this process, to which the lines of all ranks go.

    One progress bar at a time is redrawn: while a rank's is open, others show only the last state of theirs. Where
    nothing can be redrawn, a bar is a line now and then."""

    def __init__(self, fd: int, redraw_s: float = 0.0, *, redraws: bool = True) -> None:
        self._fd = fd
        self._states: dict[bytes, LastStates] | None = None if redraws else {}
        self._redraw_s = redraw_s
        self._open_line: bytes | None = None  # prefix of the rank with the progress bar at the cursor
        self._changed_s = 0.0  # when that bar last changed
        self._drawn_s = -redraw_s  # when a bar was last drawn
        self._held: tuple[bytes, bytes] | None = None  # prefix and newest state of a bar that is not drawn yet

    def write(self, prefix: bytes, lines: Iterable[bytes]) -> None:
        """Write whole lines; a rank overwrites only its own progress bar."""
        if self._states is not None:
            self._write_plain(prefix, self._states.setdefault(prefix, LastStates()).take(lines))
            return
        text = bytearray()
        now_s = time.monotonic()
        for line in lines:
            if line == b"\r":
                continue
            is_bar = line.endswith(b"\r")
            if is_bar and not self._takes_bar(prefix, now_s):
                continue
            if is_bar and now_s < self._drawn_s + self._redraw_s:
                self._held = prefix, line
                continue
            text += self._drawn(prefix, line, now_s)
        write_all(self._fd, text)

    def refresh(self) -> None:
        """Draw the newest state of the progress bar, if it is due."""
        for prefix, states in (self._states or {}).items():
            self._write_plain(prefix, states.due())
        now_s = time.monotonic()
        if self._held is not None and now_s >= self._drawn_s + self._redraw_s:
            write_all(self._fd, self._drawn(*self._held, now_s))

    def finish(self, prefix: bytes) -> None:
        """End the rank's progress bar if the cursor is still on it."""
        if self._states is not None and (states := self._states.pop(prefix, None)) is not None:
            self._write_plain(prefix, states.end())
        if self._held is not None and self._held[0] == prefix:
            self._held = None
        if self._open_line == prefix:
            self._open_line = None
            write_all(self._fd, b"\n")

    def _write_plain(self, prefix: bytes, lines: Iterable[bytes]) -> None:
        write_all(self._fd, b"".join(line if line.startswith(prefix) else prefix + line for line in lines))

    def _takes_bar(self, prefix: bytes, now_s: float) -> bool:
        """Return whether a rank's progress bar has the line."""
        owner = self._open_line if self._held is None else self._held[0]
        if owner in (None, prefix):
            self._changed_s = now_s
        return owner in (None, prefix) or now_s >= self._changed_s + _ABANDONED_S

    def _drawn(self, prefix: bytes, line: bytes, now_s: float) -> bytes:
        """Return what to write for a line, and note that it is written."""
        is_bar = line.endswith(b"\r")
        before = b"\n" if self._open_line not in (None, prefix) else b""
        if self._held is not None and (is_bar or self._held[0] == prefix):
            self._held = None
        if is_bar:
            self._drawn_s = self._changed_s = now_s
        self._open_line = prefix if is_bar else None
        return before + (line if line.startswith(prefix) else prefix + line)  # a logger may have named the rank


class Log:
    """The file of one rank's output, appended to the output of earlier launches."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file = open(log_path(folder, rank), "ab", buffering=0)  # noqa: SIM115 - open until the relay ends
        self._states = LastStates()

    def write(self, lines: Iterable[bytes]) -> None:
        """Write whole lines, of a bar the newest state; when the disk is full, print that once and write no more."""
        self._append(self._states.take(lines))

    def _append(self, lines: Iterable[bytes]) -> None:
        if self._file.closed:
            return
        try:
            write_all(self._file.fileno(), b"".join(lines))
        except OSError as error:
            self._file.close()
            write_all(2, f"accel: {self._file.name} ends here: {error.strerror}\n".encode())

    def close(self) -> None:
        """Close the file; closing twice is closing once."""
        self._append(self._states.end())
        self._file.close()


def log_path(folder: str, rank: int) -> str:
    """Return the path of a rank's log file."""
    return os.path.join(folder, f"rank-{rank}.log")


class Relay(threading.Thread):
    """A thread that copies pipes to sinks until all are at their end: a slow reader never delays the launcher."""

    def __init__(self, pipes: Iterable[Pipe], logs: Iterable[Log] = ()) -> None:
        super().__init__(name="accel-launch-relay", daemon=True)
        self._pipes = list(pipes)
        self._logs = list(logs)
        self._ended = threading.Event()
        self.last_s = time.monotonic()  # when something was printed, or this was made

    def end(self) -> None:
        """Note that the ranks have ended: a pipe that a process of theirs still holds is left once it is quiet."""
        self._ended.set()

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for pipe in self._pipes:
                _ = selector.register(pipe.source, selectors.EVENT_READ, pipe)
            while selector.get_map():
                ready = selector.select(_QUIET_S)
                if not ready and self._ended.is_set():
                    break
                self.last_s = time.monotonic() if ready else self.last_s
                for key, _ in ready:
                    if not key.data.copy():
                        _ = selector.unregister(key.fileobj)
                for pipe in self._pipes:
                    pipe.refresh()
            for each in (*self._pipes, *self._logs):
                each.close()


class Pipe:
    """One output stream of one process; its lines go to a sink, if they are shown, and to a log, if there is one."""

    def __init__(self, source: IO[bytes], sink: Sink | None, *, prefix: bytes, log: Log | None = None) -> None:
        self.source = source
        self._prefix = prefix
        self._sink = sink
        self._log = log
        self._rest = b""

    def copy(self) -> bool:
        """Copy the output that is there; return False at its end."""
        chunk = os.read(self.source.fileno(), _CHUNK_BYTES)
        lines, self._rest = split_lines(self._rest + chunk)
        try:
            self._write(lines)
        except OSError as error:
            self._rest = b""
            # Nobody reads: closing our end ends the child's writes, as its own stream would have. With a terminal that
            # is gone, SIGHUP has come as well, and the child must not fail at a line of output before it has saved.
            if error.errno != errno.EIO:
                chunk = b""
        if not chunk:
            self.close()
        return bool(chunk)

    def refresh(self) -> None:
        """Draw a progress bar that has been held back."""
        with contextlib.suppress(OSError):  # nobody reads; the next line closes the pipe
            if self._sink is not None:
                self._sink.refresh()

    def close(self) -> None:
        """Write the last line if it has no end, and close the pipe; closing twice is closing once."""
        if self.source.closed:
            return
        self.source.close()
        try:
            if self._rest:
                self._write([self._rest.rstrip(b"\r") + b"\n"])
            if self._sink is not None:
                self._sink.finish(self._prefix)
        except OSError:
            return

    def _write(self, lines: list[bytes]) -> None:
        if self._log is not None:
            self._log.write(lines)
        if self._sink is not None:
            self._sink.write(self._prefix, lines)


def write_all(fd: int, data: bytes | bytearray) -> None:
    """Write all of the data to a file, a terminal or a pipe."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # somebody made the terminal non-blocking
            _ = select.select([], [fd], [])


class Children:
    """The processes of one launch, each in a separate session."""

    def __init__(self) -> None:
        self._processes: list[tuple[ProcessPlan, subprocess.Popen[bytes]]] = []
        self._noticed_s: dict[int, float] = {}

    def start(self, plan: LaunchPlan) -> Relay | None:
        """Start every process of a plan; return the relay of their output, None if they share these streams.

        If one does not start, those that have are killed."""
        alone = len(plan.processes) == 1
        logs = open_logs(plan)
        if plan.unbound and not plan.restarts:
            notify(f"accel: processes are not bound to cores: {plan.unbound}\n")
        if plan.idle and not plan.restarts:
            notify(f"accel: {plan.idle}\n")
        piped = not alone or bool(logs) or plan.hang_timeout_s is not None or plan.redraw_s > 0
        for process in plan.processes:
            pipe = subprocess.PIPE if piped else None
            stdin = None if process.rank == 0 else subprocess.DEVNULL
            try:
                if plan.hang_timeout_s is not None:
                    os.mkfifo(file_beside(process.record, "ask"))
                with bound(process.cores):
                    popen = subprocess.Popen(
                        process.command,
                        env=process.environ,
                        stdin=stdin,
                        stdout=pipe,
                        stderr=pipe,
                        bufsize=0,
                        start_new_session=True,
                    )
            except (OSError, ValueError) as error:
                self._abandon()
                raise LaunchError(
                    f"rank {process.rank} of {len(plan.processes)} does not start",
                    got=str(error),
                    fix="Start fewer processes, or raise the limits that `ulimit -a` shows.",
                ) from error
            self._processes.append((process, popen))
        return self._relay(plan, logs) if piped else None

    def pids(self) -> list[int]:
        """Return the processes that have been started."""
        return [popen.pid for _, popen in self._processes]

    def running(self) -> list[int]:
        """Return the ranks that have not ended."""
        return [rank for rank, status in self.statuses().items() if status is None]

    def left(self) -> list[int]:
        """Return the ranks that have ended with status 0."""
        return [rank for rank, status in self.statuses().items() if status == 0]

    def statuses(self) -> dict[int, int | None]:
        """Return the exit status of each rank; None for one that has not ended."""
        return {process.rank: popen.poll() for process, popen in self._processes}

    def failures(self) -> list[Failure]:
        """Return the failure of each rank that has ended with another status than 0."""
        now_s = time.time()
        return [
            read_failure(
                process.rank, popen.returncode, process.record, self._noticed_s.setdefault(process.rank, now_s)
            )
            for process, popen in self._processes
            if popen.poll()
        ]

    def recorded(self) -> list[Failure]:
        """Return the failures that running ranks have recorded; these ranks are about to end."""
        ending = [process for process, popen in self._processes if popen.poll() is None]
        return [
            read_failure(process.rank, 1, process.record, time.time())
            for process in ending
            if os.path.exists(process.record)
        ]

    def signal(self, number: int) -> None:
        """Send a signal to each rank that has not ended, but not to processes that it started itself."""
        for _, popen in self._processes:
            popen.send_signal(number)

    def signal_rank(self, rank: int, number: int) -> None:
        """Send a signal to one rank, if it has not ended."""
        for process, popen in self._processes:
            if process.rank == rank:
                popen.send_signal(number)

    def stopped(self) -> dict[int, str]:
        """Return, for each rank that the system has stopped and that cannot answer, what would resume it."""
        found = {process.rank: _stopped(popen.pid) for process, popen in self._processes if popen.poll() is None}
        return {rank: text for rank, text in found.items() if text}

    def records(self) -> dict[int, str]:
        """Return the path of the failure record of each rank that has not ended."""
        return {process.rank: process.record for process, popen in self._processes if popen.poll() is None}

    def signal_groups(self, number: int) -> bool:
        """Send a signal (0 for none) to each rank and the processes it has started; return False if none is left."""
        reached = [_signal_group(popen.pid, number) for _, popen in self._processes]
        return any(reached)

    def _abandon(self) -> None:
        _ = self.signal_groups(signal.SIGKILL)
        for _, popen in self._processes:
            for pipe in (popen.stdout, popen.stderr):
                if pipe is not None:
                    pipe.close()  # a process that left the group may hold the other end
            with contextlib.suppress(subprocess.TimeoutExpired):
                _ = popen.wait(_KILLED_S)

    def _relay(self, plan: LaunchPlan, logs: Mapping[int, Log]) -> Relay:
        return start_relay(
            plan, logs, {process.rank: (popen.stdout, popen.stderr) for process, popen in self._processes}
        )


def start_relay(plan: LaunchPlan, logs: Mapping[int, Log], pipes: Mapping[int, Sequence[IO[bytes] | None]]) -> Relay:
    """Start to show the output of each rank, given its pipes for standard output and error."""
    stdout = Sink(1, plan.redraw_s, redraws=os.isatty(1) or plan.redraw_s > 0)
    is_shared = os.path.samestat(os.fstat(1), os.fstat(2))  # one terminal has one cursor
    stderr = stdout if is_shared else Sink(2, plan.redraw_s, redraws=os.isatty(2) or plan.redraw_s > 0)
    prefixed = plan.prefix and len(plan.processes) > 1
    streams = [(rank, out, stdout) for rank, (out, _) in pipes.items()]
    streams += [(rank, err, stderr) for rank, (_, err) in pipes.items()]
    relay = Relay(
        (
            Pipe(
                pipe,
                None if plan.quiet and rank else sink,
                prefix=b"[rank %d] " % rank if prefixed else b"",
                log=logs.get(rank),
            )
            for rank, pipe, sink in streams
            if pipe is not None
        ),
        logs.values(),
    )
    relay.start()
    return relay


def open_logs(plan: LaunchPlan) -> dict[int, Log]:
    """Open the log file of each process, if there is a folder for them."""
    try:
        return {process.rank: Log(plan.log_dir, process.rank) for process in plan.processes if plan.log_dir}
    except OSError as error:
        raise LaunchError(
            "a log file cannot be written",
            got=str(error.strerror),
            where=str(error.filename),
            fix="Name another folder with --log-dir.",
        ) from error


def _stopped(pid: int) -> str:
    state = ""
    with contextlib.suppress(OSError):  # there is no /proc, or the process has just ended
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    texts = {"T": f"stopped by a signal (state T); `kill -CONT {pid}` continues it", "t": "stopped by a debugger"}
    return texts.get(state, "")


def _signal_group(pid: int, number: int) -> bool:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
