# SPDX-License-Identifier: Apache-2.0
"""An error in a dataset names its cause and the user's line, and shows the traceback once, with workers or without."""

from __future__ import annotations

import inspect
import traceback

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

import accel
from accel import Cursor
from accel.errors import DataError

MESSAGES = ["row 3 is broken", "row 3 is broken:\nits second line\n  is indented", ""]


def spoil(message: str) -> None:
    raise ValueError(message)


class Rows(Dataset[int]):
    def __init__(self, message: str) -> None:
        self.message = message

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 3:
            spoil(self.message)
        return index


class Stream(IterableDataset[int]):
    def __init__(self, message: str) -> None:
        self.message = message

    def __iter__(self):
        yield from range(3)
        spoil(self.message)


def _read(data: Dataset[int], workers: int) -> DataError:
    ctx = accel.single("cpu")
    stream = "dispatch" if isinstance(data, Stream) else None
    loader = accel.prepare_loader(ctx, DataLoader(data, batch_size=2, num_workers=workers), stream=stream)
    with pytest.raises(DataError) as caught:
        for _ in accel.batches(ctx, loader, Cursor()):
            pass
    return caught.value


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Rows, Stream])
@pytest.mark.parametrize("message", MESSAGES)
def test_the_headline_has_the_cause_and_the_users_line(kind, workers, message):
    error = _read(kind(message), workers)
    lines, start = inspect.getsourcelines(spoil)
    line = start + next(at for at, text in enumerate(lines) if "raise" in text)
    assert f"ValueError: {message}".splitlines()[0].strip(": ") in str(error)
    assert f"test_read_errors.py:{line} in spoil" in error.where
    assert ("worker process 0" in error.where) == bool(workers)
    assert "Traceback" not in str(error)
    shown = "".join(traceback.format_exception(error))
    assert shown.count("in spoil\n") == 1
