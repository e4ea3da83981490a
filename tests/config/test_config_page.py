# SPDX-License-Identifier: Apache-2.0
"""The page on configuration and the record say the same.

`python tests/config/test_config_page.py` writes the page's table anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from configs import FIELDS, Field, to_text

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def row(field: Field) -> str:
    flags = [f"`{field.flag}`", *([f"`{field.shorthand[0]}`"] if field.shorthand else [])]
    default = f"`{to_text(field.default)}`" if to_text(field.default) else "empty"
    cells = [f"`{field.name}`", ", ".join(flags), f"`{field.variable}`", field.expects, default, field.doc]
    return f"| {' | '.join(cells)} |"


def with_table(page: str) -> str:
    """The page with the rows that the record asks for."""
    rows = "".join(f"{row(field)}\n" for field in FIELDS)
    return re.sub(r"(?:^\| `.*\n)+", lambda _: rows, page, count=1, flags=re.MULTILINE)


def test_the_pages_table_is_the_records() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "write it anew: python tests/config/test_config_page.py"


if __name__ == "__main__":
    _ = PAGE.write_text(with_table(PAGE.read_text()))
