# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is written or loaded leaves one log record, on rank 0."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from processes import script_ranks
from torch import nn

import accel
from accel.testing import Simulator


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_and_a_load_leave_one_record_each(
    tmp_path: Path, ranks: Simulator, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    def run(ctx: accel.DistContext) -> None:
        items = {"model": nn.Linear(2, 1)}
        saved = accel.save_state(ctx, tmp_path, items, step=3, mode=mode)
        path = saved.result() if isinstance(saved, accel.checkpoint.Saving) else saved
        _ = accel.load_state(ctx, path, items)

    with caplog.at_level(logging.INFO, logger="accel.checkpoint"):
        _ = ranks.run(run, 2)
    wrote, loaded = (record.getMessage() for record in caplog.records)
    assert wrote.startswith(f"wrote {tmp_path / 'step-00000003'}, ")
    assert loaded == f"load_state: loaded {tmp_path / 'step-00000003'}"


@pytest.mark.multiprocess
@pytest.mark.parametrize("setup", ["", "import logging; logging.basicConfig()"])
def test_a_run_that_goes_on_says_so_once_unless_the_script_logs_by_itself(tmp_path: Path, setup: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""{setup}
import os, sys
import accel, torch
os.chdir(sys.argv[1])
with accel.session() as ctx:
    model, start = torch.nn.Linear(2, 1), accel.train_state(ctx)
    for _ in range(2):
        state = accel.resume(ctx, "run", {{"model": model}}, start)
        if state is start:
            accel.save_state(ctx, "run", {{"model": model, "state": state}}, step=3)
    accel.load_state(ctx, "run", {{"model": model, "state": start}})
    accel.load_state(ctx, "run", {{"model": model, "state": None}})
""")
    with script_ranks(script, [{}], tmp_path, folder=tmp_path) as (rank,):
        assert rank.wait(120) == 0, rank.said()
        resumes, loads = "accel: resumes from run/step-00000003\n", "accel: loaded run/step-00000003\n"
        assert rank.said() == ("" if setup else resumes + resumes + loads)
