# SPDX-License-Identifier: Apache-2.0
"""Two real processes run what goes wrong in the field, and rank after rank fails in a way that all are told of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import job, patience, script_ranks

pytestmark = pytest.mark.multiprocess
HERE = Path(__file__).parent


def launch(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accel.cli", "launch", "--nproc-per-node", "2", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(120))


def test_what_goes_wrong_in_the_field(tmp_path: Path) -> None:
    with script_ranks(HERE / "field_cases.py", job(2), tmp_path, folder=tmp_path) as ranks:
        assert not any(rank.wait(120) for rank in ranks), [rank.said() for rank in ranks]
    for rank in range(2):
        failed = json.loads((tmp_path / f"{rank}.json").read_text())
        assert not failed, "\n".join(failed.values())


FAILING = """
import os, signal, sys
from pathlib import Path
import accel
from torch.utils.data import DataLoader, Dataset

class Faulty(Dataset):
    def __len__(self): return 12
    def __getitem__(self, index):
        if index == 7 and sys.argv[2] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 7:
            raise KeyError("lost")
        return index

with accel.session(device="cpu") as ctx:
    workers = int(sys.argv[2] == "killed")
    loader = accel.prepare_loader(ctx, DataLoader(Faulty(), batch_size=2, num_workers=workers))
    try:
        for batch in accel.batches(ctx, loader, accel.Cursor()):
            accel.gather_for_metrics(ctx, batch.data, batch)
    except accel.AccelError as error:
        (Path(sys.argv[1]) / str(ctx.rank)).write_text(f"{type(error).__name__}: {error}")
        raise
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [("raised", "KeyError: 'lost'"), pytest.param("killed", "DataLoader worker (pid", marks=pytest.mark.slow)],
)
def test_a_rank_that_cannot_read_says_so_and_the_others_end(tmp_path: Path, how: str, said: str) -> None:
    """Nothing is sent for each batch, so the others learn of it from the rank that leaves."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = launch(script, tmp_path, how)
    assert done.returncode == 1
    one, other = ((tmp_path / name).read_text() for name in ("1", "0"))
    assert one.startswith("DataError: a batch could not be read")
    assert said in one
    assert "rank 1, epoch 0" in one
    assert other.startswith("PeerError: rank 1 left: the context there is closed")
    assert done.stderr.startswith(f"accel: rank 1 failed: accel.errors.{one.splitlines()[0]}")
