# SPDX-License-Identifier: Apache-2.0
"""Maps for those who change the library: each room's `__init__`, and pages that name files, name ones that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tables import rows

ROOT = Path(__file__).parent.parent
ROOMS = [
    path
    for path in sorted((ROOT / "accel").rglob("__init__.py"))
    if path.parent != ROOT / "accel" and len([each for each in path.parent.iterdir() if each.suffix == ".py"]) > 2
]
PAGES = {"docs/design.md": ROOT, "CONTRIBUTING.md": ROOT, "tests/README.md": ROOT / "tests"}
TOP = ("README.md", "CONTRIBUTING.md", "tests/README.md")
MOST_LINES = 8
MOST_LISTED = 50  # lines of a listing: a screen
WIDTH = 120  # of a line, where Markdown does not need it longer
_FIRST = re.compile(r"\b[Bb]egin with|\bRead `\w+\.py` first")


def named_files(text: str) -> Iterator[str]:
    """Files in a text: `_file.py`, `folder/_file.py`, `folder/`."""
    for code in re.findall(r"`(?!accel )([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)):
        yield from re.findall(
            r"(?:^|(?<= ))(?:[\w.-]+/)+(?:\w+\.\w+)?(?=$|[ :])|(?:^|(?<= ))\w+\.(?:py|md|txt)\b", code
        )


@rows("path", ROOMS)
def test_a_room_begins_with_the_file_to_read_first(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert len(doc.splitlines()) <= MOST_LINES
    assert _FIRST.search(doc), "say which file to begin with"
    names = [name for name in named_files(doc) if name.endswith(".py")]
    lost = [name for name in names if not any((base / name).exists() for base in (path.parent, ROOT))]
    assert not lost, f"no such files: {', '.join(lost)}"


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_files_that_exist(page: str) -> None:
    names = [*named_files((ROOT / page).read_text())]
    assert names
    bases = (PAGES[page], ROOT, ROOT / "accel")
    lost = [name for name in names if not any((base / name).exists() for base in bases)]
    assert not lost, f"{page} names {', '.join(lost)}"


def test_the_window_written_out_names_files_that_exist() -> None:
    listing = re.search(r"## A window's life.*?```python\n(.*?)```", (ROOT / "docs/design.md").read_text(), flags=re.S)
    assert listing
    assert len(listing[1].splitlines()) <= MOST_LISTED
    names = re.findall(r"(?<=# )(?:\w+/)+(?:\w+\.py)?(?=:)", listing[1])
    assert len(names) > 5
    lost = [name for name in names if not (ROOT / "accel" / name).exists()]
    assert not lost, f"docs/design.md names {', '.join(lost)}"


def test_the_path_of_a_save_names_files_of_its_rooms() -> None:
    diagram = re.search(r"```text\n( accel\.items.*?)```", (ROOT / "docs/design.md").read_text(), flags=re.S)
    assert diagram
    room = ""
    for line in diagram[1].splitlines():
        room = found[1] if (found := re.match(r" accel\.(\w+)", line)) else room
        for name in re.findall(r"(?<!\w)_[a-z_]+\b", line):
            assert (ROOT / "accel" / room / f"{name}.py").exists(), f"{room}/{name}"


@rows("page", [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in TOP)])
def test_pages_keep_their_width(page: Path) -> None:
    """Tables and code may be wider: a line break would end them."""
    text = re.sub(r"^ *```.*?^ *```$", lambda found: "\n" * found[0].count("\n"), page.read_text(), flags=re.S | re.M)
    wide = [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > WIDTH and not line.lstrip().startswith("|")
    ]
    assert not wide, f"{page.name}: lines {wide}"
