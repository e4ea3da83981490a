# SPDX-License-Identifier: Apache-2.0
"""Build the documentation's site, strictly: `python docs/build.py [--with zensical] [--to FOLDER]`.

`mkdocs.yml` at the root is the one configuration; the extra `docs` installs the builder. Each build has a temporary
folder, so several can run at the same time. The site of this version is written into FOLDER/VERSION (by default
`build/site`), and FOLDER/versions.json lists the versions for the chooser.
A dead link, a page outside the navigation, a public name without its entry, or a resource of another host is an error.

`python docs/build.py --record` writes the pages of the API reference, `docs/api/`, from `tests/public_names.txt`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "api"
MODULES = ROOT / "docs" / "modules.md"
NAMES = ROOT / "tests" / "public_names.txt"
BUILDERS = {"mkdocs": ("mkdocs", "build", "--strict"), "zensical": ("zensical", "build", "--strict")}
_TOP = ROOT / "accel" / "__init__.py"
_GROUPS = {  # of the names in `accel`, by the packages that define them: a page, its title, the packages
    "accel-contexts": ("Contexts, launch and errors", ("context", "env", "launching", "errors")),
    "accel-data": ("Data", ("data",)),
    "accel-training": ("Training", ("training", "optim", "precision", "loop_state")),
    "accel-models": ("Models on several ranks", ("parallel", "formats")),
    "accel-checkpoints": ("Checkpoints and weights", ("checkpoint", "items")),
    "accel-memory": ("Memory and large models", ("memory", "bigmodel")),
    "accel-collectives": ("Collectives and processes", ("collectives", "process")),
    "accel-trackers": ("Trackers, logs and profiles", ("trackers",)),
}
_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"  # docs/modules.md has the names and first sentences
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
_KEPT_LINKS = {"canonical", "next", "prev", "alternate"}  # links that a browser does not load


def public_names() -> dict[str, list[str]]:
    """Return the recorded public names of each module, in their order."""
    found: dict[str, list[str]] = {}
    for dotted in re.findall(r"^(?:class )?(accel[\w.]+)\(", NAMES.read_text(), flags=re.M):
        module, _, name = dotted.rpartition(".")
        found.setdefault(module, []).append(name)
    return found


def api_pages() -> dict[str, str]:
    """Return the text of each page of the reference, by its file name.

    A public module has one page; the names of `accel` have one page a group, and a page of links to these.
    """
    modules = public_names()
    groups = _groups(modules["accel"])
    pages = {f"{module}.md": _page(module, names) for module, names in modules.items() if module != "accel"}
    pages |= {f"{page}.md": _group_page(page, names) for page, names in groups.items()}
    return pages | {"accel.md": _first_page(groups)}


def _page(module: str, names: Sequence[str]) -> str:
    return f"{_UNSEARCHED}# {module}\n\n{_summary(module)}\n\n{_index(module, names)}\n\n{_entries(module, names)}\n"


def _group_page(page: str, names: Sequence[str]) -> str:
    title = _GROUPS[page][0]
    return f"{_UNSEARCHED}# accel: {title}\n\n{_index('accel', names)}\n\n{_entries('accel', names)}\n"


def _first_page(groups: Mapping[str, Sequence[str]]) -> str:
    sections = [f"## {_GROUPS[page][0]}\n\n{_index('accel', names, f'{page}.md')}" for page, names in groups.items()]
    return f"{_UNSEARCHED}# accel\n\n{_summary('accel')}\n\n" + "\n\n".join(sections) + "\n"


def _groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of `accel` by the pages that have them, each in the group of the package that defines it."""
    imports = [node for node in ast.walk(ast.parse(_TOP.read_text())) if isinstance(node, ast.ImportFrom)]
    homes = {each.name: node.module or "" for node in imports for each in node.names}
    packages = {name: home.split(".")[1] for name, home in homes.items() if home.startswith("accel.")}
    found: dict[str, list[str]] = {page: [] for page in _GROUPS}
    for name in names:
        page = next(page for page, (_, of) in _GROUPS.items() if packages[name] in of)
        found[page].append(name)
    return found


def _summary(module: str) -> str:
    source = ROOT.joinpath(*module.split("."))
    file = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def _entries(module: str, names: Sequence[str]) -> str:
    return "\n\n".join(f"::: {module}.{name}" for name in names)


def _index(module: str, names: Sequence[str], page: str = "") -> str:
    """Return a table of the names, a line and a link each, to a page or to this one."""
    sections = re.split(r"^## ", MODULES.read_text(), flags=re.M)
    section = next(each for each in sections if each.startswith(f"`{module}`\n"))
    rows = [(name, does) for name, does in re.findall(r"^\| `(\w+)` \| (.*) \|$", section, flags=re.M) if name in names]
    return "\n".join(
        ["| name | |", "|---|---|", *(f"| [`{name}`]({page}#{module}.{name}) | {does} |" for name, does in rows)]
    )


def record() -> None:
    """Write the pages of the reference anew."""
    pages = api_pages()
    PAGES.mkdir(exist_ok=True)
    for old in PAGES.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        _ = (PAGES / name).write_text(text)


class Resources(HTMLParser):
    """The addresses that a page makes a browser load, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        """Note the address of a tag that loads one, and its id."""
        values: Mapping[str, str | None] = dict(attrs)
        self.anchors.add(values.get("id") or "")
        address = values.get(_LOADED.get(tag, ""))
        if address and not (tag == "link" and _KEPT_LINKS & set((values.get("rel") or "").split())):
            self.loaded.append(address)


def problems(site: Path) -> Iterator[str]:
    """Yield public names without an entry, and resources that a browser would load from another host."""
    anchors: set[str] = set()
    for page in sorted(site.rglob("*.html")):
        read = Resources()
        read.feed(page.read_text())
        anchors |= read.anchors
        foreign = [each for each in read.loaded if re.match(r"(https?:)?//", each)]
        yield from (f"{page.relative_to(site)}: loads {each} from another host" for each in foreign)
    for sheet in sorted(site.rglob("*.css")):
        found = re.findall(r"""(?:url\(|@import )["']?((?:https?:)?//[^"')]+)""", sheet.read_text())
        yield from (f"{sheet.relative_to(site)}: loads {each} from another host" for each in found)
    for module, names in public_names().items():
        yield from (f"{module}.{name} has no entry" for name in names if f"{module}.{name}" not in anchors)


_NARROW = re.compile(r'<td[ >].*?</td>|<span class="doc doc-object-name[^>]*>[^<]*', flags=re.S)
_NAME = re.compile(r"(?<=<code>)[^<]+|(?<=-name\">)[^<]+")
_SEAM = re.compile(r"(?<=\w)([_.(=])(?=[A-Za-z])")


def with_breaks(page: str) -> str:
    """Return a page whose names in cells and headings break after `_`, `.`, `(` and `=` before they break a word."""
    return _NARROW.sub(lambda cell: _NAME.sub(lambda name: _SEAM.sub(r"\1<wbr>", name[0]), cell[0]), page)


def list_version(folder: Path, version: str) -> None:
    """Add a version to the list that the chooser of each version reads, the newest first."""
    file = folder / "versions.json"
    known = {each["version"] for each in json.loads(file.read_text())} if file.exists() else set()
    newest = sorted(known | {version}, key=lambda each: [int(part) for part in re.findall(r"\d+", each)], reverse=True)
    rows = [{"version": each, "title": each, "aliases": list[str]()} for each in newest]
    _ = file.write_text(json.dumps(rows, indent=2) + "\n")
    _ = (folder / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={newest[0]}/">\n')


def version_of_source() -> str:
    """Return the version that `accel/__init__.py` has."""
    found = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "accel" / "__init__.py").read_text(), flags=re.M)
    assert found
    return found[1]


def build(builder: str, folder: Path) -> int:
    """Build, check and place the site of this version; return 1 where something is missing."""
    pages = api_pages()
    if old := [name for name in pages if not (PAGES / name).exists() or (PAGES / name).read_text() != pages[name]]:
        print(f"docs/api: {', '.join(old)}: record them by python docs/build.py --record", file=sys.stderr)
        return 1
    version = version_of_source()
    with tempfile.TemporaryDirectory() as own:
        _ = shutil.copytree(ROOT / "docs", Path(own, "docs"))  # Zensical follows no link to a folder of pages
        _ = shutil.copy(ROOT / "mkdocs.yml", own)
        Path(own, "accel").symlink_to(ROOT / "accel")
        if status := subprocess.run([sys.executable, "-m", *BUILDERS[builder]], cwd=own).returncode:
            return status
        built = Path(own, "site")  # `site_dir` of mkdocs.yml
        if found := [*problems(built)]:
            print("\n".join(found), file=sys.stderr)
            return 1
        for page in built.rglob("*.html"):
            _ = page.write_text(with_breaks(page.read_text()))
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / version, ignore_errors=True)
        _ = shutil.move(built, folder / version)
    list_version(folder, version)
    print(f"{folder / version}: {sum(1 for _ in (folder / version).rglob('*.html'))} pages")
    return 0


def main() -> int:
    """Build the site, or record the reference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    _ = parser.add_argument("--with", dest="builder", choices=BUILDERS, default="mkdocs")
    _ = parser.add_argument("--to", type=Path, default=ROOT / "build" / "site", help="folder of all versions")
    _ = parser.add_argument("--record", action="store_true", help="write docs/api/ anew, and build nothing")
    asked = parser.parse_args()
    if asked.record:
        record()
        return 0
    return build(asked.builder, asked.to)


if __name__ == "__main__":
    sys.exit(main())
