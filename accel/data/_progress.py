# SPDX-License-Identifier: Apache-2.0
"""`progress`: how far an epoch is and how fast all ranks together are, as a line of text on the main rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from numbers import Real
from typing import TextIO

import torch

from accel.context import DistContext, context_first
from accel.data._batches import Batch
from accel.errors import ConfigError

_BAR = 24


@context_first
def progress(
    ctx: DistContext,
    batches: Iterable[Batch],
    *,
    total: int | None = None,
    label: str = "",
    show: bool = True,
    file: TextIO | None = None,
    every_s: float | None = None,
    values: Callable[[], Mapping[str, float | torch.Tensor]] | None = None,
) -> Generator[Batch]:
    """Give the batches, and show on the main rank how far they are. No communication beyond theirs.

    A bar that redraws itself on a terminal; elsewhere, as in a log, a line now and then and one at the end. The rate
    counts the real samples of all ranks since the start, and the bar where the epoch stands, so that a resumed one does
    not begin at nothing.

    Args:
        ctx: the context.
        batches: from `accel.batches`.
        total: samples in the epoch, such as `loader.samples`; without it there is neither bar nor remaining time.
        label: what is shown first; the epoch by default.
        show: whether to show anything.
        file: where to; standard error by default.
        every_s: seconds between two showings; by default 0.2 on a terminal and 10 elsewhere.
        values: returns numbers and scalar tensors by name, such as the loss and the learning rate. Called on the main
            rank alone, after a batch that is shown, so it must not communicate; a tensor of a GPU is waited for then.

    Yields:
        The batches.

    Raises:
        ConfigError: `values` returned something else than numbers by name; on the main rank.
    """
    out = sys.stderr if file is None else file
    terminal = out.isatty()
    if not ctx.is_main_process or not show:
        yield from batches
        return
    pause = (0.2 if terminal else 10.0) if every_s is None else every_s
    started = shown = time.monotonic()
    seen, line = 0, ""
    try:
        for batch in batches:
            yield batch
            seen += batch.valid.world
            now = time.monotonic()
            if batch.is_last or now - shown >= pause:
                shown = now
                name = label or f"epoch {batch.next.epoch - batch.is_last}"
                at = (total if batch.is_last else batch.next.consumed) or seen
                facts = "" if values is None else _facts(values())
                line = _line(name, at, total, seen, now - started, _columns(out) if terminal else None, facts)
                out.write(f"\r{line}\x1b[K" if terminal else f"{line}\n")
                out.flush()
    finally:
        if terminal and line:
            out.write("\n")
            out.flush()


def _columns(terminal: TextIO) -> int:
    """How wide a line may be; a terminal may not know its size."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except (OSError, ValueError):  # not a file of the system's
        return 80


def _line(
    label: str, at: int, total: int | None, seen: int, seconds: float, columns: int | None, facts: str = ""
) -> str:
    """Say how far an epoch is; in less than so many columns, because what breaks into two lines is not redrawn."""
    rate = seen / seconds if seconds > 0 else 0.0
    speed = f"{rate:,.0f} samples/s{facts}" if rate >= 10 else f"{rate:.2f} samples/s{facts}"
    if not total:
        return f"{label}: {at:,} samples  {speed}"[: columns and columns - 1]
    done = min(at / total, 1.0)
    time_left = f"{_clock_text((total - at) / rate)} left" if rate and at < total else _clock_text(seconds)
    head, rest = f"{label}: {done:4.0%}", f" {at:,}/{total:,} samples  {speed}  {time_left}"
    width = _BAR if columns is None else min(_BAR, columns - len(f"{head} []{rest}") - 1)
    bar = f" [{'#' * int(done * width):.<{width}}]" if width > 0 else ""
    return f"{head}{bar}{rest}"[: columns and columns - 1]


def _facts(values: Mapping[str, float | torch.Tensor]) -> str:
    """Return names with four digits of each number."""
    for name, value in values.items():
        if not isinstance(value, Real) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
            shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise ConfigError(
                "a progress line shows numbers only",
                expected="a number or a tensor of one element",
                got=f"{type(value).__name__}{shape}",
                where=f"progress(values=), {name}",
            )
    return "".join(f"  {name} {float(value):.4g}" for name, value in values.items())


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
