# SPDX-License-Identifier: Apache-2.0
"""The page on configuration and the record say the same."""

from __future__ import annotations

from pathlib import Path

from accel.config import FIELDS, Field, to_text

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def row(field: Field) -> str:
    flags = [f"`{field.flag}`", *([f"`{field.shorthand[0]}`"] if field.shorthand else [])]
    default = f"`{to_text(field.default)}`" if to_text(field.default) else "empty"
    cells = [f"`{field.name}`", ", ".join(flags), f"`{field.variable}`", field.expects, default, field.doc]
    return f"| {' | '.join(cells)} |"


def test_the_pages_table_is_the_records() -> None:
    lines = PAGE.read_text().splitlines()
    assert [line for line in lines if line.startswith("| `")] == [row(field) for field in FIELDS]
