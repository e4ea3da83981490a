# SPDX-License-Identifier: Apache-2.0
"""`accel migrate` on scripts: pairs of a script and what is written for it.

`python tests/migrate/test_migrate_scripts.py` records what is written anew.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import accel
from accel.migrate import FileResult, migrate_bytes

PAIRS = sorted((Path(__file__).parent / "pairs").glob("*.before"))
SOURCES = sorted((Path(accel.__file__).parent / "migrate").glob("*.py"))


def migrated(text: str, name: str = "script.py") -> FileResult:
    return migrate_bytes(text.encode(), Path(name))


def comments_of(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


@pytest.mark.parametrize("path", PAIRS, ids=lambda path: path.stem)
def test_a_script_is_written_as_recorded_and_its_comments_survive(path: Path) -> None:
    before = path.read_text()
    after = migrated(before)
    assert after.new.decode() == path.with_suffix(".after").read_text()
    assert set(comments_of(before)) <= set(comments_of(after.new.decode()))
    for note in (*after.notes, *after.changes):
        assert 1 <= note.line <= after.new.decode().count("\n")


@pytest.mark.parametrize("path", PAIRS, ids=lambda path: path.stem)
def test_migrating_twice_changes_nothing(path: Path) -> None:
    first = migrated(path.read_text())
    again = migrated(first.new.decode())
    assert not again.changed
    assert again.notes == first.notes


def test_a_written_script_trains(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["plain.py"])
    text = PAIRS[[path.stem for path in PAIRS].index("plain")].with_suffix(".after").read_text()
    exec(compile(text, "plain.py", "exec"), {"__name__": "__main__"})
    assert re.search(r"epoch 2: \d+ right\ndone\n", capsys.readouterr().out)


@given(
    lines=st.lists(st.sampled_from(["import torch", "x = 1  # one", "", "    ", "def f():\n\treturn 'a'", "# é"])),
    end=st.sampled_from(["\n", "\r\n"]),
    marks=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_what_has_no_accelerate_stays_byte_for_byte(lines: list[str], end: str, marks: bool) -> None:
    old = end.join(["# accelerated" if marks else "", *lines]).encode()
    result = migrate_bytes(old, Path("script.py"))
    assert result.new == old
    assert not result.notes


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_and_encoding_survive(encoding: str, end: str) -> None:
    cookie = "# coding: latin-1" if encoding == "latin-1" else "# plain"
    text = f"{cookie}\nfrom accelerate import Accelerator\n\n\ndef f(accelerator):\n    accelerator.print('é')\n"
    result = migrate_bytes(text.replace("\n", end).encode(encoding), Path("script.py"))
    written = result.new.decode(encoding)
    assert result.new.startswith(b"\xef\xbb\xbf") == (encoding == "utf-8-sig")
    assert written.replace("\r\n", "\n").count("\n") == written.count(end)
    assert f"accel.print(ctx, 'é'){end}" in written


def test_every_name_that_is_written_exists() -> None:
    names = {name for path in SOURCES for name in re.findall(r"\baccel((?:\.[A-Za-z_]+)+)", path.read_text())}
    public = {name for name in names if name.split(".")[1] not in ("migrate", "errors", "py")}
    assert len(public) > 50
    for name in public:
        found: object = accel
        for part in name.strip(".").split("."):
            found = getattr(found, part)


def test_every_page_that_a_note_names_exists() -> None:
    root = Path(accel.__file__).parent.parent
    pages = {page for path in SOURCES for page in re.findall(r'"(docs/[\w-]+\.md)"', path.read_text())}
    assert len(pages) > 10
    assert all((root / page).exists() for page in pages)


if __name__ == "__main__":
    for pair in PAIRS:
        _ = pair.with_suffix(".after").write_bytes(migrated(pair.read_text()).new)
