# SPDX-License-Identifier: Apache-2.0
"""`progress`: position in the epoch and rate of all ranks, as a line of text on the main rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from numbers import Real
from typing import TextIO

import torch

from accel.context import DistContext, context_first
from accel.data._batches import Batch
from accel.errors import ConfigError
from accel.terminal import ProgressBar


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
    """Yield batches, and show their progress on the main rank. No communication beyond theirs.

    A terminal or a notebook shows a bar; a log gets a line now and then, and one at the end. The rate counts the real
    samples of all ranks since the start. The bar shows the position in the epoch, so a resumed epoch does not begin at
    zero.

    Args:
        ctx: the context.
        batches: from `accel.batches`.
        total: samples in the epoch, such as `loader.samples`; without it neither bar nor remaining time is shown.
        label: text in front; the epoch by default.
        show: whether to show anything.
        file: stream to print to; standard error by default.
        every_s: seconds between two updates; by default 0.2 on a terminal, 1 in a notebook and 10 elsewhere.
        values: function that returns numbers and scalar tensors by name, such as the loss and the learning rate. Called
            on the main rank only, at each update, so it must not communicate. Waits for tensors on a GPU.

    Yields:
        The batches.

    Raises:
        ConfigError: something else than batches, or `values` returned something else than numbers by name; on the main
            rank.
    """
    if not ctx.is_main_process or not show:
        yield from batches
        return
    out = sys.stderr if file is None else file
    bar = ProgressBar(out, total, show=_show_count, unit=" samples", every_s=every_s)
    seen = 0
    try:
        for batch in batches:
            if not isinstance(batch, Batch):  # pyright: ignore[reportUnnecessaryIsInstance] - what tqdm is given
                raise ConfigError(
                    "progress counts the samples of batches",
                    expected="accel.batches(ctx, loader, ...)",
                    got=type(batch).__name__,
                    where="progress",
                    fix="For other things take tqdm itself: tqdm(things, disable=not ctx.is_main_process).",
                )
            yield batch
            seen += batch.valid.world
            if batch.is_last or bar.is_due():
                epoch = batch.next.epoch - batch.is_last
                at = (total if batch.is_last else batch.next.consumed) or seen
                facts = "" if values is None else _facts(values())
                bar.draw(label or f"epoch {epoch}", at, seen, facts)
    finally:
        bar.close()


def _show_count(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 10 else f"{value:.2f}"


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
