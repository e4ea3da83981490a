# SPDX-License-Identifier: Apache-2.0
"""The site of the documentation: its navigation, the pages of its reference, and the checks of a built site."""

from __future__ import annotations

import json
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
BUILD: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "build.py"))


def leaves(nav: object) -> Iterator[str]:
    """Pages of a navigation, in their order."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        yield from (page for each in nav.values() for page in leaves(each))
    elif isinstance(nav, list):
        yield from (page for each in nav for page in leaves(each))


def test_the_navigation_has_each_page_once() -> None:
    named = sorted(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert named == pages, "give each page of docs/ a line under `nav:` in mkdocs.yml"


def test_the_reference_has_the_pages_as_recorded() -> None:
    pages = {path.name: path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")}
    assert pages == BUILD["api_pages"](), "record it: python tests/test_public_names.py"


def test_a_built_site_has_an_entry_of_each_public_name(tmp_path: Path) -> None:
    names = [f"{module}.{name}" for module, each in BUILD["public_names"]().items() for name in each]
    (tmp_path / "api.html").write_text("".join(f'<h2 id="{name}">' for name in names))
    assert [*BUILD["problems"](tmp_path)] == []
    (tmp_path / "api.html").write_text("".join(f'<h2 id="{name}">' for name in names[1:]))
    assert [*BUILD["problems"](tmp_path)] == [f"{names[0]} has no entry"]


@pytest.mark.parametrize(
    ("file", "text", "foreign"),
    [
        ("index.html", '<script src="https://cdn.example/x.js">', True),
        ("index.html", '<link rel="stylesheet" href="//fonts.example/css">', True),
        ("index.html", '<link rel="canonical" href="https://docs.example/">', False),
        ("index.html", '<a href="https://pytorch.org">', False),
        ("index.html", '<script src="assets/x.js">', False),
        ("main.css", "@import 'https://fonts.example/css'", True),
        ("main.css", "a{background:url(//cdn.example/a.png)}", True),
        ("main.css", "a{background:url(data:image/svg+xml,a)}", False),
    ],
)
def test_a_resource_of_another_host_is_found(tmp_path: Path, file: str, text: str, foreign: bool) -> None:
    (tmp_path / file).write_text(text)
    found = [each for each in BUILD["problems"](tmp_path) if "from another host" in each]
    assert bool(found) == foreign


_HEADING = '<span class="doc doc-object-name doc-class-name">'


@pytest.mark.parametrize(
    ("page", "broken"),
    [
        ("<td><code>no_sync_in_backward</code></td>", "<td><code>no_<wbr>sync_<wbr>in_<wbr>backward</code></td>"),
        ("<td>\n<code>accel.save(path=out)</code></td>", "<td>\n<code>accel.<wbr>save(<wbr>path=<wbr>out)</code></td>"),
        (f"{_HEADING}accel.Ema</span>", f"{_HEADING}accel.<wbr>Ema</span>"),
        ("<td>1.09x of a_b</td><td><code>1.09x</code></td>", "<td>1.09x of a_b</td><td><code>1.09x</code></td>"),
        ("<p><code>a_b</code></p><table><thead>", "<p><code>a_b</code></p><table><thead>"),
        ('<td><a href="train_step.html">a_b</a></td>', '<td><a href="train_step.html">a_b</a></td>'),
    ],
)
def test_long_names_break_between_words(page: str, broken: str) -> None:
    assert BUILD["with_breaks"](page) == broken


def test_the_chooser_lists_versions_the_newest_first(tmp_path: Path) -> None:
    for version in ("0.9.1", "0.10.0", "0.2.0", "0.10.0"):
        BUILD["list_version"](tmp_path, version)
    listed = [each["version"] for each in json.loads((tmp_path / "versions.json").read_text())]
    assert listed == ["0.10.0", "0.9.1", "0.2.0"]
    assert "url=0.10.0/" in (tmp_path / "index.html").read_text()


def test_a_build_during_another_one_leaves_both_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "".join(f'<h2 id="{module}.{name}">' for module, each in BUILD["public_names"]().items() for name in each)
    build = BUILD["build"]

    def run(command: list[str], *, cwd: str) -> subprocess.CompletedProcess[str]:
        builder = command[2]
        if builder == "mkdocs":  # the other builder begins and ends meanwhile
            assert build("zensical", tmp_path / "zensical") == 0
        assert all(Path(cwd, each).exists() for each in ("mkdocs.yml", "docs/index.md", "accel/__init__.py"))
        site = Path(cwd, "site")
        site.mkdir()
        (site / "index.html").write_text(names + builder)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setitem(build.__globals__, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setitem(build.__globals__, "api_pages", dict)  # as recorded
    assert build("mkdocs", tmp_path / "mkdocs") == 0
    for builder in ("mkdocs", "zensical"):
        (page,) = (tmp_path / builder).glob("*/index.html")
        assert page.read_text().endswith(builder)
