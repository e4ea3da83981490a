# SPDX-License-Identifier: Apache-2.0
"""Sizes, durations, tables and a progress bar, as terminals show them."""

from __future__ import annotations

import io
import math
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

_BAR_WIDTH = 24
_COLUMNS = 80  # of a terminal that does not know its width
_REDRAW_S = 0.2
_NOTEBOOK_S = 1.0
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))  # of a number
_LOG_S = 10.0  # between two lines where nothing can be redrawn
_PATIENCE_S = 0.5  # shorter work on files shows no bar


def show_size(count: float) -> str:
    """Return bytes for people: "1.2 GB", with thousands of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def show_count(count: int) -> str:
    """Return a number for people: "2.87 million"."""
    for size, unit in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)


def show_age(seconds: float) -> str:
    """Return a duration for people: "5 min", in the largest unit that it has one of."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def show_clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds: "0:05:12"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def show_seconds(seconds: float) -> str:
    """Return a measured time for people, in three digits: "1.32 s", "12.5 ms", "350 us"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            scaled = seconds / size
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    return "0 s" if not seconds else f"{seconds / 1e-9:.3g} ns"


def show_limit(seconds: float) -> str:
    """Return the seconds of a setting, as it gives them: "30 s", "0.5 s"."""
    return f"{seconds:g} s"


def show_value(value: float) -> str:
    """Return a number as people write it: 200k, 0.4312, 5e-4."""
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if size == 0 or (size < 1e4 and value == int(value)):
        return str(int(value))
    if size < 1e-3 or size >= 1e15:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{_trim(mantissa)}e{int(exponent)}"
    if size < 9999.5:
        return _trim(f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}")
    for unit, letter in _UNITS:
        if size >= unit * 0.9995:
            scaled = value / unit
            return _trim(f"{scaled:.{max(0, 2 - math.floor(math.log10(abs(scaled) * 1.0005)))}f}") + letter
    raise AssertionError


def _trim(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def show_duration(seconds: float) -> str:
    """Return a duration as people write it: 45 s, 12 min, 3 h 20 min, 2 d 4 h."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    for unit, length, inner, part in (("d", 1440, "h", 60), ("h", 60, "min", 1)):
        if minutes >= length:
            rest = minutes % length // part
            return f"{minutes // length} {unit}" + (f" {rest} {inner}" if rest else "")
    raise AssertionError


def show_text(text: str) -> str:
    """Return a text of a file as one line, with escapes for whatever terminals act on."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def show_names(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """Return the first names, and how many there are beside them: "a, b, c and 4 more"."""
    rest = len(names) - most
    return between.join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return what sorts names as people do: layer2 before layer10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def show_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns, the first row being their titles; cells as `show_text` gives them."""
    rows = [[show_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    padded = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(padded)


def is_notebook_stream(stream: object) -> bool:
    """Return whether a stream belongs to a notebook's kernel, which shows it below a cell."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


class LastStates:
    """Lines of a stream without a cursor: of a bar's redraws the newest now and then, and the last."""

    def __init__(self) -> None:
        self._held = b""
        self._shown_s: float | None = None  # when this bar was last shown, or first seen

    def take(self, lines: Iterable[bytes]) -> list[bytes]:
        r"""Return the lines to write, each with its end; a redraw ends in "\r"."""
        written: list[bytes] = []
        for line in lines:
            if not line.endswith(b"\r"):
                self._held = b""
                self._shown_s = None
                written.append(line)
            elif line.strip():
                self._held = line.rstrip(b"\r") + b"\n"
                written += self.due()
        return written

    def due(self) -> list[bytes]:
        """Return the newest state, if a line of it is due."""
        now_s = time.monotonic()
        if self._shown_s is None:
            self._shown_s = now_s if self._held else None
        elif self._held and now_s >= self._shown_s + _LOG_S:
            self._shown_s = now_s
            return self.end()
        return []

    def end(self) -> list[bytes]:
        """Return the last state, if it has not been returned."""
        held, self._held = self._held, b""
        return [held] if held else []


class ProgressBar:
    """A line of progress, redrawn in place on a terminal and in a notebook; elsewhere a new line now and then.

    Args:
        file: stream to write to.
        total: amount of work; None if unknown, which leaves out bar and remaining time.
        show: text of an amount, or of an amount per second.
        unit: text behind amounts.
        every_s: seconds between two lines; by default 0.2 on a terminal, 1 in a notebook and 10 elsewhere.
        patience_s: seconds before the first line.
        columns: width of the terminal behind a pipe to a launcher that redraws lines; 0 for none.
    """

    def __init__(
        self,
        file: TextIO | None,
        total: int | None,
        *,
        show: Callable[[float], str],
        unit: str = "",
        every_s: float | None = None,
        patience_s: float = 0.0,
        columns: int = 0,
    ) -> None:
        file = io.StringIO() if file is None else file  # Python has no stderr if it was closed at the start
        self._file = file
        self._columns = columns if columns and _is_pipe(file) else 0
        self._total = total
        self._show = show
        self._unit = unit
        self._on_terminal = file.isatty() or self._columns > 0
        self.redraws = self._on_terminal or is_notebook_stream(file)
        by_default = _REDRAW_S if self._on_terminal else _NOTEBOOK_S if self.redraws else _LOG_S
        self._every_s = by_default if every_s is None else every_s
        self._width = 0  # of the longest line in a notebook, where a shorter one does not erase it
        self._started_s = time.monotonic()
        self._next_s = self._started_s + max(self._every_s, patience_s)
        self._drawn = False

    def is_due(self) -> bool:
        """Whether the next line should be drawn."""
        return time.monotonic() >= self._next_s

    def draw(self, label: str, at: int, done: int, facts: str = "") -> None:
        """Draw the line; `done` is the amount since the start, for the rate, and may be less than `at`."""
        now_s = time.monotonic()
        self._next_s = now_s + self._every_s
        self._drawn = True
        line = self._line(label, at, done, now_s - self._started_s, facts)
        self._width = max(self._width, len(line))
        if self._on_terminal:
            self._write(f"\r{line}\x1b[K")
        else:
            self._write(f"\r{line:{self._width}}" if self.redraws else f"{line}\n")

    def close(self, *, erase: bool = False) -> None:
        """End a line that is redrawn, or erase it."""
        if self.redraws and self._drawn:
            erased = "\r\x1b[K" if self._on_terminal else f"\r{'':{self._width}}\r"
            self._write(erased if erase else "\n")

    def _line(self, label: str, at: int, done: int, seconds: float, facts: str) -> str:
        columns = (self._columns or _columns(self._file)) if self._on_terminal else None
        longest = columns and columns - 1  # a longer line breaks in two, which cannot be redrawn
        rate = done / seconds if seconds > 0 else 0.0
        speed = f"{self._show(rate)}{self._unit}/s{facts}"
        if not self._total:
            return f"{label}: {self._show(at)}{self._unit}  {speed}"[:longest]
        part = min(at / self._total, 1.0)
        goes_on = rate and at < self._total
        clock = f"{show_clock((self._total - at) / rate)} left" if goes_on else show_clock(seconds)
        head = f"{label}: {part:4.0%}"
        tail = f" {self._show(at)}/{self._show(self._total)}{self._unit}  {speed}  {clock}"
        width = _BAR_WIDTH if longest is None else min(_BAR_WIDTH, longest - len(f"{head} []{tail}"))
        bar = f" [{'#' * int(part * width):.<{width}}]" if width > 0 else ""
        return f"{head}{bar}{tail}"[:longest]

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a terminal that is gone ends no checkpoint's write
            _ = self._file.write(text)
            self._file.flush()


@contextmanager
def byte_progress(label: str, total: int) -> Generator[Callable[[int], None]]:
    """Show a bar on a terminal or in a notebook while bytes are read or written, once it takes long.

    Yields a function that takes the number of bytes since its last call.
    """
    bar = ProgressBar(sys.stderr, total, show=show_size, patience_s=_PATIENCE_S)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if bar.redraws and bar.is_due():
            bar.draw(label, done, done)

    try:
        yield advance
    finally:
        bar.close(erase=True)


def terminal_columns(file: TextIO | None) -> int:
    """Return the width of a terminal, or of a notebook's cell; 0 for another stream, or none."""
    if is_notebook_stream(file):
        return _COLUMNS
    return _columns(file) if file is not None and file.isatty() else 0


def _is_pipe(file: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _columns(terminal: TextIO) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or _COLUMNS
    except (OSError, ValueError):  # not a file of the system's
        return _COLUMNS
