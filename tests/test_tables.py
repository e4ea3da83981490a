# SPDX-License-Identifier: Apache-2.0
"""Rows of a table stand alone: a skipped one hides no other, and a failed one is listed."""

from __future__ import annotations

import pytest
from tables import rows


def _run(outcomes: list[str]) -> list[str]:
    ran: list[str] = []

    @rows("outcome", outcomes)
    def table(outcome: str) -> None:
        ran.append(outcome)
        if outcome == "skip":
            pytest.skip("not here")
        assert outcome != "fail"

    table()
    return ran


def test_a_skipped_row_hides_no_other() -> None:
    assert _run(["skip", "pass"]) == ["skip", "pass"]
    with pytest.raises(AssertionError, match="1 of 2 rows"):
        _ = _run(["skip", "fail"])


def test_a_table_of_skipped_rows_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        _ = _run(["skip", "skip"])
