# SPDX-License-Identifier: Apache-2.0
"""`accel docs`: entries of names, errors, commands and pages; their place on the site; pages in a wheel."""

from __future__ import annotations

import re
import webbrowser
from email.message import Message
from pathlib import Path

import pytest
from catching import assert_raises

import accel
from accel.cli import _docs, main

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["prepare"],
            ["accel.prepare\n", "def prepare(ctx: DistContext,", "Raises:", "Pages: ", "Also: accel docs prepare.md"],
        ),
        (["accel.bigmodel.describe"], ["def describe(\n", "Return the skeleton of a model"]),
        (["seeding.seeded"], ["accel.seeding.seeded", "def seeded("]),
        (["describe"], ["accel.bigmodel.describe"]),
        (["TrainState"], ["class TrainState(", "  next_epoch "]),
        (["StepError"], ["class StepError(AccelError, RuntimeError)", "Raised for: calls of a training step"]),
        (["accel.schedules"], ["  Cosine       Half a cosine."]),
        (["accel", "launch"], ["accel launch: run a script", "`accel launch --help`", "Pages: launch"]),
        (["migrate"], ["accel migrate: rewrite scripts", "Also: accel docs migrate.md"]),
        (["train"], ["# Training\n"]),
        (["prepare.md"], ["# Prepare\n"]),
        (["concepts/weights.md"], ["# Weights\n"]),
    ],
    ids=lambda each: " ".join(each) if len(each) < 3 else "",
)
def test_an_entry_is_printed(words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", *words]) == 0
    text = capsys.readouterr().out
    assert not [each for each in expected if each not in text], text


@pytest.mark.parametrize(
    ("name", "near"), [("prepaer", "`prepare`"), ("steperrror", "`StepError`"), ("lanch", "`launch`")]
)
def test_an_unknown_name_gets_the_nearest_ones(name: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", name]) == 2
    assert near in capsys.readouterr().err.partition("Did you mean")[2]


def test_each_public_name_has_an_entry() -> None:
    entries = {each.name for each in _docs._entries(ROOT / "docs")}
    assert {f"accel.{name}" for name in accel.__all__} <= entries
    assert {f"accel.errors.{name}" for name in accel.errors.__all__} <= entries


def test_the_site_is_opened_once_its_address_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = list[str]()
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    facts = Message()
    monkeypatch.setattr(_docs, "metadata", lambda name: facts)
    assert main(["docs", "prepare", "--web"]) == 2
    assert 'Add `Documentation = "https://..."` there' in capsys.readouterr().err
    facts["Project-URL"] = "Documentation, https://docs.example/"
    assert main(["docs", "prepare", "--web"]) == 0
    assert main(["docs", "concepts/weights.md", "--web"]) == 0
    root = "https://docs.example"
    assert opened == [f"{root}/api/accel-training/#accel.prepare", f"{root}/concepts/weights/"]


def test_an_installation_reads_the_pages_of_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _docs._pages() == ROOT / "docs"
    monkeypatch.setattr(accel, "__path__", [str(tmp_path / "accel")])
    with assert_raises(accel.errors.ConfigError, fix="Install accel-torch again"):
        _docs._pages()
    (tmp_path / "accel" / "pages").mkdir(parents=True)
    (tmp_path / "accel" / "pages" / "index.md").write_text("# accel\n")
    assert _docs._pages() == tmp_path / "accel" / "pages"


def test_a_search_of_the_pages_finds_the_right_one_first() -> None:
    rows = [line.partition(": ") for line in (ROOT / "tests/search_queries.txt").read_text().splitlines()[1:]]
    wrong: dict[str, str] = {}
    for query, _, pages in rows:
        first = re.search(r"^  accel docs (\S+)", _docs._search(ROOT / "docs", query), flags=re.M)
        assert first
        if _docs._short(f"{first[1].removesuffix('.md')}.md") not in {
            _docs._short(f"{page[:-1]}.md") for page in pages.split()
        }:
            wrong[query] = first[1]
        assert _docs._text(ROOT / "docs", _docs._found(ROOT / "docs", first[1])[0]).startswith("# ")  # the page itself
    assert len(wrong) <= 3, wrong


def test_a_word_that_is_no_name_is_searched_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "gradient", "acumulation"]) == 2  # on no page
    assert "Did you mean `Accumulation`" in capsys.readouterr().err
    assert main(["docs", "graddient"]) == 2  # no entry, but a word of headings, is near
    assert "Did you mean `gradient" in capsys.readouterr().err
    assert main(["docs", "gradient", "accumulation"]) == 0
    assert "  accel docs train " in capsys.readouterr().out


def test_a_page_is_printed_without_what_the_site_hides(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "index", "from-accelerate", "lora"):
        assert main(["docs", name]) == 0
        text = capsys.readouterr().out
        assert text.startswith("# ")
        assert "<!--" not in text
        assert "hidden" not in text.partition("\n\n")[2][:200]
