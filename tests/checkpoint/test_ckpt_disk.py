# SPDX-License-Identifier: Apache-2.0
"""A disk that is full or broken for one rank: one error for all, the last good checkpoint stays, training goes on."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_helpers import CPU, Run, equal

import accel
from accel.errors import CheckpointError
from accel.storage import AFTER_WRITE
from accel.testing import simulate


def fails_at(write: int, number: int) -> Callable[[Path], None]:
    """What a rank's disk does: it fails at the file of a number, with the system's error of another."""
    count = iter(range(1000))

    def after_write(path: Path) -> None:
        if next(count) == write:
            os.truncate(path, path.stat().st_size // 2)
            raise OSError(number, os.strerror(number))

    return after_write


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    ("failing", "write", "mode"),
    [
        *((0, 0, mode) for mode in ("sync", "async")),  # rank 0's share
        *((0, 1, mode) for mode in ("sync", "async")),  # the manifest
        *((2, 0, mode) for mode in ("sync", "async")),  # another's share
        (2, 1, "async"),  # its note to rank 0
    ],
)
def test_one_failing_disk_is_one_error_and_costs_nothing(
    failing: int, write: int, mode: Any, number: int, tmp_path: Path
) -> None:
    good = Run()
    good.step(1)
    accel.save_state(CPU, tmp_path, good.items(), step=1)

    def save(ctx: accel.DistContext, run: Run, step: int) -> str:
        try:
            saved = accel.save_state(ctx, tmp_path, run.items(), step=step, keep=1, mode=mode)
            return f"saved {saved.result() if mode == 'async' else saved}"
        except CheckpointError as error:
            return str(error)

    def body(ctx: accel.DistContext) -> tuple[str, list[str], Any, str]:
        run = Run(seed=3)
        torch.manual_seed(0)
        run.step(2)
        if ctx.rank == failing:
            AFTER_WRITE.set(fails_at(write, number))
        told = save(ctx, run, 2)
        AFTER_WRITE.set(None)
        accel.wait_for_everyone(ctx)
        left = sorted(os.listdir(tmp_path))
        resumed = Run(seed=9).load(ctx, accel.latest_checkpoint(tmp_path, verify=True)).state()
        accel.wait_for_everyone(ctx)
        run.step(1)
        return told, left, resumed, save(ctx, run, 3)

    results = simulate(body, 3)
    told = {result[0] for result in results}
    assert len(told) == 1
    text = told.pop()
    assert f"{os.strerror(number)} ({errno.errorcode[number]})" in text
    assert str(tmp_path) in text
    for _, left, resumed, after in results:
        assert left == ["step-00000001"]
        assert equal(resumed, good.state())
        assert after == f"saved {tmp_path / 'step-00000003'}"
    assert os.listdir(tmp_path) == ["step-00000003"]
