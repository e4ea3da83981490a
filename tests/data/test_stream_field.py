# SPDX-License-Identifier: Apache-2.0
"""Two real processes run what goes wrong with streams in the field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import patience

pytestmark = pytest.mark.multiprocess


def test_what_goes_wrong_with_streams_in_the_field(tmp_path: Path) -> None:
    script = Path(__file__).parent / "stream_field_cases.py"
    command = [sys.executable, "-m", "accel.cli", "launch", "--nproc-per-node", "2", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        failed = json.loads((tmp_path / f"{rank}.json").read_text())
        assert not failed, "\n".join(failed.values())
