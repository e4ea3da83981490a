# SPDX-License-Identifier: Apache-2.0
"""Sizes, ages, tables and a progress bar, as terminals show them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

_WIDTH = 30
_PAUSE_S = 0.1
_PATIENCE_S = 0.5  # what ends sooner needs no bar


def show_size(count: float) -> str:
    """Return bytes for people: "1.2 GB", with thousands of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def show_age(seconds: float) -> str:
    """Return a duration for people: "5 min", in the largest unit that it has one of."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def show_text(text: str) -> str:
    """Return a text of a file as one line, in which terminals find nothing to act on: escapes stand for it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def show_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns, the first row being their titles; cells as `show_text` gives them."""
    rows = [[show_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    padded = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(padded)


@contextmanager
def progress(what: str, total: int) -> Generator[Callable[[int], None]]:
    """Give a function to be told how many bytes more are done; shows a bar on a terminal once it takes long.

    Args:
        what: is being done.
        total: bytes in all.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    done, start, shown = 0, time.monotonic(), 0.0

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        now = time.monotonic()
        if now - start < _PATIENCE_S or now - shown < _PAUSE_S:
            return
        shown, part = now, min(done / total, 1.0) if total else 1.0
        rate = done / (now - start)
        bar = "#" * int(part * _WIDTH)
        line = f"{what} [{bar:{_WIDTH}}] {part:4.0%}  {show_size(rate)}/s, {show_age((total - done) / rate)} left"
        print(f"\r{line:79}", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if shown:
            print(f"\r{'':79}\r", end="", file=sys.stderr, flush=True)
