# SPDX-License-Identifier: Apache-2.0
"""Two real processes run what goes wrong with streams in the field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import job, script_ranks

pytestmark = pytest.mark.multiprocess


def test_what_goes_wrong_with_streams_in_the_field(tmp_path: Path) -> None:
    script = Path(__file__).parent / "stream_field_cases.py"
    with script_ranks(script, job(2), tmp_path, folder=tmp_path) as ranks:
        assert not any(rank.wait(120) for rank in ranks), [rank.said() for rank in ranks]
    for rank in range(2):
        failed = json.loads((tmp_path / f"{rank}.json").read_text())
        assert not failed, "\n".join(failed.values())
