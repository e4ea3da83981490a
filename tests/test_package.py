# SPDX-License-Identifier: Apache-2.0
"""The distribution is accel-torch: the name `accel` on the package index belongs to somebody else."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import patience
from tables import rows

import accel
from accel import __version__
from accel.cli import main
from accel.run_folder import conflicting_package

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(path for folder in ("accel", "examples") for path in (ROOT / folder).rglob("*.py")),
]
# `accel[rich]`, "accel[rich]", pip install accel: but not `accel launch`, accel-torch, or a path
STRANGER = re.compile(r"(?<![\w./-])accel\[[a-z{]|pip install(?: -[-\w]+)* ['\"]?accel(?![-\w/.])")


def test_no_text_installs_the_distribution_of_somebody_else() -> None:
    assert STRANGER.search("pip install accel[rich]")
    assert STRANGER.search("pip install --no-deps accel`")
    assert not STRANGER.search("pip install -e '.[tests]', accel launch, pip install 'accel-torch[rich]'")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if STRANGER.search(line) and "`pip uninstall accel`" not in line
    ]
    assert not found, "the distribution is accel-torch:\n" + "\n".join(found)
    assert PROJECT["name"] == "accel-torch"


def test_a_stranger_is_found_in_the_same_folder_alone(tmp_path: Path) -> None:
    for name in ("accel_torch-0.2.0.dist-info", "accelerate-1.15.0.dist-info", "accel.egg-info", "accel"):
        (tmp_path / name).mkdir()
    assert conflicting_package(tmp_path) is None
    (tmp_path / "Accel-0.3.1.dist-info").mkdir()
    warning = conflicting_package(tmp_path) or ""
    assert "Accel-0.3.1.dist-info" in warning
    assert "`pip uninstall accel`, then `pip install --force-reinstall --no-deps accel-torch`" in warning


@pytest.mark.multiprocess
def test_commands_say_that_a_stranger_has_written_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "accel").symlink_to(ROOT / "accel")
    (tmp_path / "accel-0.3.1.dist-info").mkdir()
    (tmp_path / "script.py").write_text("")
    launch = [sys.executable, "-m", "accel.cli", "launch", "--nproc-per-node", "1", "script.py"]
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    assert "pip uninstall accel" in done.stderr
    monkeypatch.setattr(accel, "__path__", [str(tmp_path / "accel")])
    assert main(["env"]) == 0
    assert "pip uninstall accel" in capsys.readouterr().out


def test_one_version_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"accel {__version__}\n"
    assert "version" in PROJECT["dynamic"]  # of accel/__init__.py
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## (.+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])


LINK = re.compile(r"\]\(([^)\s]+)\)")


def index_page(text: str, site: str | None) -> str:
    """The README as setup.py hands it to the package index."""
    spec = importlib.util.spec_from_file_location("accel_setup", ROOT / "setup.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.index_page(text, site)


def links(text: str) -> list[str]:
    """Targets of a page's links, without those in its code."""
    return LINK.findall(re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S))


def sections(page: Path) -> set[str]:
    """Anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_the_readme_lead_somewhere_on_an_index_page() -> None:
    readme = (ROOT / "README.md").read_text()
    found = links(index_page(readme, "https://example.org/accel/"))
    assert "https://example.org/accel/tutorial/" in found
    assert not [link for link in found if not link.startswith(("https://", "#"))]
    without = index_page(readme, None)
    assert not [link for link in links(without) if not link.startswith(("https://", "#"))]
    assert "| begin | Tutorial: an hour on a CPU" in without
    page = "[a](docs/b-c.md#d-e), [f](#g), [h](docs/i/j.md), [k](L.md), [m](https://n)"
    assert index_page(page, "https://h") == "[a](https://h/b-c/#d-e), [f](#g), [h](https://h/i/j/), k, [m](https://n)"


@rows("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_lead_to_pages_and_sections(page: Path) -> None:
    """Those of docs/ to docs/ alone, so that they work in the repository and in a site made of docs/."""
    for link in links(page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, section = link.partition("#")
        target = page.parent / name if name else page
        assert target.is_file(), f"{page.name}: no file {link}"
        inside = page.parent == ROOT or target.resolve().is_relative_to(ROOT / "docs")
        assert inside, f"{page.name}: {link} is outside of docs/"
        assert not section or section in sections(target), f"{page.name}: no section {link}"


LAZY = sorted(path for path in (ROOT / "accel").rglob("*.py") if "exports(__name__, " in path.read_text())


@rows("path", LAZY)
def test_names_for_type_checkers_are_those_of_the_package(path: Path) -> None:
    """What type checkers import from a package that loads on first use is there, and is that of its module."""
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    [block] = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    imports = [each for each in block.body if isinstance(each, ast.ImportFrom)]
    assert len(imports) == len(block.body) > 0
    for each in imports:
        for name in (alias.name for alias in each.names):
            own = f"{each.module}.{name}"
            found = getattr(module, name)
            assert found is (sys.modules[own] if own in sys.modules else getattr(sys.modules[str(each.module)], name))
    with pytest.raises(AttributeError):
        _ = module.no_name_of_it
