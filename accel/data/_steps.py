# SPDX-License-Identifier: Apache-2.0
"""Steps of a prepared loader: skipped within an epoch, and counted for a schedule."""

from __future__ import annotations

from accel.data._cursor import Cursor
from accel.data._epoch import plan_epoch, skip_steps
from accel.data._loader import Loader
from accel.data._plan import check_count
from accel.errors import ConfigError, DataError


def skip_first_batches(cursor: Cursor, steps: int, loader: Loader) -> Cursor:
    """Return the cursor after some steps of its epoch, without reading them. No communication.

    Arithmetic for batches of one size; otherwise the epoch is drawn and cut.

    Args:
        cursor: the start position.
        steps: number of global batches to skip.
        loader: the prepared loader.

    Raises:
        ConfigError: a negative number of steps.
        DataError: the epoch has fewer steps, the cursor is another dataset's, or the loader reads a stream.
    """
    if not isinstance(loader, Loader):  # pyright: ignore[reportUnnecessaryIsInstance] - others take the loader first
        raise DataError(
            "only steps of a prepared loader over positions can be skipped",
            expected="skip_first_batches(cursor, steps, loader)",
            got=f"{type(loader).__name__} for the loader",
        )
    if type(steps) is not int or steps < 0:
        raise ConfigError("not a number of steps", expected="0 or more", got=repr(steps), where="skip_first_batches")
    return skip_steps(plan_epoch(loader.source, cursor), steps)


def total_steps(loader: Loader, *, accumulation: int = 1, epochs: int = 1) -> int:
    """Return the number of optimizer steps of a run, for a schedule's length. Pure arithmetic, no communication.

    It is the same on all ranks. With `global_batch` it is also the same on any number of ranks. The epoch's last window
    steps even if it is not full.

    Args:
        loader: from `prepare_loader`.
        accumulation: micro-batches in a full window.
        epochs: passes over the loader.

    Raises:
        ConfigError: a number below 1.
        DataError: a loader that is not prepared, or one whose epochs have no fixed number of steps.

    Example:
        >>> rows = torch.utils.data.TensorDataset(torch.arange(100))
        >>> loader = accel.prepare_loader(accel.single(), torch.utils.data.DataLoader(rows, batch_size=8))
        >>> accel.total_steps(loader, accumulation=4, epochs=3)  # 13 batches are 4 windows
        12
    """
    check_count(accumulation, "not a number of micro-batches", where="total_steps(accumulation=)")
    check_count(epochs, "not a number of epochs", where="total_steps(epochs=)")
    if not isinstance(loader, Loader):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass torch's, or a stream's
        raise DataError(
            "only a prepared loader over positions has a fixed number of steps",
            expected="total_steps(accel.prepare_loader(ctx, loader), ...)",
            got=type(loader).__name__,
            where="total_steps",
            fix="The length of a stream is for the script to know: give the schedule a number of steps.",
        )
    return epochs * -(-len(loader) // accumulation)
