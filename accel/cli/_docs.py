# SPDX-License-Identifier: Apache-2.0
"""`accel docs`: entries of public names, errors, commands and pages in the terminal, or their place on the site.

A word that names no entry is searched for in the text of the pages.

A wheel has the pages in `accel/pages/`, copied when it is built; in a checkout they are read from `docs/`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
import webbrowser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import msgspec

import accel
from accel.cli._main import COMMANDS
from accel.cli._parser import Parser
from accel.errors import ConfigError
from accel.terminal import show_text

_USAGE = "accel docs NAME [--web]"
_ABOUT = (
    "Print the documentation of a public name, an error, a command or a page, such as prepare, bigmodel.describe, "
    'StepError, "accel launch" or train. If a page and another entry share a name, add .md to get the page. Other '
    "words are searched in the text of the pages."
)
_TITLE = 10  # weight of a word in a heading
_HITS = 6  # pages that a search shows
_LISTS = ("modules", "benchmarks", "from-accelerate", "design", "configuration")  # they name everything: last
_URL = "Documentation"  # among the project's URLs


class DocsEntry(msgspec.Struct, frozen=True):
    """An entry of the documentation."""

    name: str  # its full name: a dotted one, a command with `accel`, a page with `.md`
    page: str = ""  # the page of the reference with a name; empty for commands and pages


def run(words: Sequence[str], _environ: Mapping[str, str]) -> int:
    """Print an entry, or open it on the site; return the exit status."""
    known = parser().read(words)
    folder = _pages()
    asked = " ".join(known.name)
    entries = _found(folder, asked)
    if not entries:
        print(_search(folder, asked))
        return 0
    first, *others = entries
    if known.web:
        address = f"{_site()}/{_place(folder, first)}"
        print(address)
        _ = webbrowser.open(address)
        return 0
    print(_text(folder, first))
    if others:
        print(f"\nAlso: {', '.join(f'accel docs {each.name}' for each in others)}")
    return 0


def parser() -> Parser:
    """Return the parser of the command's flags."""
    built = Parser("accel docs", usage=_USAGE, description=_ABOUT)
    built.value("name", "NAME", "a name, an error, a command or a page", nargs="+")
    built.switch("--web", "open the entry on the site, in a browser")
    return built


def names() -> list[str]:
    """Return short names of all entries, for completion."""
    return sorted({_short(each.name) for each in _entries(_pages())})


def _pages() -> Path:
    return shipped_folder("pages", "docs", "index.md")


def shipped_folder(name: str, here: str, known: str) -> Path:
    """Return a folder of the package, or its original in the repository; both have the file `known`."""
    package = Path(accel.__path__[0])
    for folder in (package / name, package.parent / here):
        if (folder / known).is_file():
            return folder
    expected = f"files in {package / name}"
    raise ConfigError(f"the {name} are missing", expected=expected, fix="Install accel-torch again.")


def _entries(folder: Path) -> Iterator[DocsEntry]:
    """Yield entries: names by the pages of the reference, then commands, then pages."""
    for page in sorted(folder.glob("api/*.md")):
        if "-" not in page.stem:  # a group of names of a module
            yield DocsEntry(page.stem, page.stem)
        for name in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.M):
            yield DocsEntry(name, page.stem)
    for command in COMMANDS:
        yield DocsEntry(f"accel {command.name}")
    for page in _page_files(folder):
        yield DocsEntry(page.relative_to(folder).as_posix())


def _page_files(folder: Path) -> list[Path]:
    """Return the pages, without the reference."""
    return sorted([*folder.glob("*.md"), *folder.glob("concepts/*.md"), *folder.glob("recipes/*.md")])


def _place(folder: Path, entry: DocsEntry) -> str:
    """Return an entry's place on the site; the place of a command is a page that mentions it."""
    if entry.page:
        return f"api/{entry.page}/" + (f"#{entry.name}" if entry.name != entry.page else "")
    if entry.name.endswith(".md"):
        return f"{entry.name.removesuffix('.md')}/" if entry.name != "index.md" else ""
    return f"{next(iter(sorted(_pages_of(folder, entry.name))), 'launch')}/"


def _found(folder: Path, asked: str) -> list[DocsEntry]:
    """Return entries of that name, the best first."""
    entries = [*_entries(folder)]
    exact = [each for each in entries if each.name in (asked, f"accel.{asked}")]
    return [*exact, *(each for each in entries if each not in exact and _short(each.name) == asked)]


def _near(folder: Path, asked: str, others: Iterable[str] = ()) -> str:
    """Return the question for the nearest names of entries, and of other words; empty if none is near."""
    entries = [*_entries(folder)]
    known = {each.name for each in entries} | {_short(each.name) for each in entries} | {*others}
    low = {each.lower(): each for each in sorted(known)}
    near = [low[each] for each in difflib.get_close_matches(asked.lower(), low, n=5, cutoff=0.6)]
    return f"Did you mean {', '.join(f'`{each}`' for each in near)}?" if near else ""


def _search(folder: Path, asked: str) -> str:
    """Return the pages with a section that has all words, the best first; raise `ConfigError` if there are none."""
    words = [re.compile(rf"(?<![a-z0-9]){re.escape(word)}", re.I) for word in re.split(r"[\s_-]+", asked) if word]
    scores: dict[str, int] = {}
    headings: dict[str, list[str]] = {}
    titles: set[str] = set()
    for page in _page_files(folder):
        name = page.relative_to(folder).as_posix()
        for heading, text in _sections(page.read_text()):
            titles.update(re.findall(r"[a-z]{4,}", heading.lower()))
            counts = [len(word.findall(text)) + _TITLE * len(word.findall(heading)) for word in words]
            if all(counts):
                scores[name] = scores.get(name, 0) + sum(counts)
                headings.setdefault(name, []).append(heading)
    if not scores:
        advice = _near(folder, asked, titles) or "`accel docs modules` lists the names."
        raise ConfigError("no entry and no page has this word", got=repr(asked), where="accel docs", fix=advice)
    near = _near(folder, asked)
    best = sorted(scores, key=lambda name: (_short(name) in _LISTS, -scores[name]))[:_HITS]
    typed = {name: _short(name) if len(_found(folder, _short(name))) == 1 else name for name in best}
    width = max(map(len, typed.values()))
    lines = [f"  accel docs {typed[name]:{width}}  {', '.join(headings[name][:3])}" for name in best]
    return "\n".join([f"No entry is named {asked!r}. {near}".rstrip(), "", "Pages with this text:", *lines])


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield headings and texts of a page's sections, without code; words that only a search reads count tenfold."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"<p hidden[^>]*>(.*?)</p>", lambda found: found[1] * _TITLE, text, flags=re.S)
    for part in re.split(r"^#{1,2} (?=\S)", text, flags=re.M)[1:]:
        heading, _, body = part.partition("\n")
        yield heading.partition(" {")[0], body


def _shown(text: str) -> str:
    """Return a page without its front matter, and without words and code that the site hides."""
    text = re.sub(r"\A---\n.*?\n---\n+", "", text, flags=re.S)
    return re.sub(r"<p hidden[^>]*>.*?</p>\n+|<!--.*?-->\n", "", text, flags=re.S).rstrip()


def _short(name: str) -> str:
    """Return `prepare` of `accel.prepare`, `launch` of `accel launch`, `train` of `train.md`."""
    if name.endswith(".md"):
        return name.removesuffix(".md").rpartition("/")[2]
    return re.split(r"[. ]", name)[-1]


def _text(folder: Path, entry: DocsEntry) -> str:
    if entry.name.endswith(".md"):
        return _shown((folder / entry.name).read_text())
    if entry.name.startswith("accel "):
        return _command(folder, entry.name)
    if (folder / "api" / f"{entry.name}.md").is_file():
        return _module(folder, entry.name)
    module, _, name = entry.name.rpartition(".")
    found: Any = getattr(import_module(module), name)
    parts = [f"{entry.name}\n\n{_head(found)}", inspect.getdoc(found) or ""]
    if inspect.isclass(found):
        parts.append(_members(found))
    if row := re.search(rf"^\| `{name}` \| `\w+` \| (.+) \|$", (folder / "errors.md").read_text(), flags=re.M):
        parts.append(f"Raised for: {row[1]}.")
    return "\n\n".join(filter(None, [*parts, _mentions(folder, name)]))


def _command(folder: Path, words: str) -> str:
    command = next(each for each in COMMANDS if f"accel {each.name}" == words)
    parts = [f"{words}: {command.summary}", f"`{words} --help` lists its flags.", _mentions(folder, words)]
    return "\n\n".join(filter(None, parts))


def _mentions(folder: Path, name: str) -> str:
    pages = _pages_of(folder, name)
    return f"Pages: {', '.join(pages)}" if pages else ""


def _module(folder: Path, name: str) -> str:
    module = import_module(name)
    pages = [folder / "api" / f"{name}.md", *sorted(folder.glob(f"api/{name}-*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    listed = sorted(re.findall(rf"^::: {re.escape(name)}\.(\w+)$", text, flags=re.M))
    return "\n".join([name, "", _first_line(module), "", _listing({each: getattr(module, each) for each in listed})])


def _head(found: Any) -> str:
    """Return the lines of a function or class before its docstring, as in the source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(found)))
    except (OSError, TypeError):
        return ""
    node = ast.parse(source).body[0]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return source.rstrip()
    return "\n".join(source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]).rstrip().removesuffix(":")


def _members(found: type) -> str:
    """Return public methods and properties of a class, one line each."""
    shown = {name: each for name, each in vars(found).items() if inspect.isroutine(each) or isinstance(each, property)}
    return _listing({name: getattr(found, name) for name in shown if not name.startswith("_")})


def _listing(members: Mapping[str, Any]) -> str:
    width = max(map(len, members), default=0)
    return "\n".join(f"  {name:{width}}  {_first_line(each)}" for name, each in members.items())


def _first_line(found: Any) -> str:
    return (inspect.getdoc(found) or "").partition("\n")[0]


def _pages_of(folder: Path, name: str) -> list[str]:
    """Return pages that mention a name in code, those that do so most often first; five at most."""
    pattern = re.compile(rf"(?:\baccel\.(?:\w+\.)*|`){re.escape(name)}\b")
    pages = {page.relative_to(folder).as_posix()[:-3]: page.read_text() for page in _page_files(folder)}
    counts = {name: len(pattern.findall(text)) for name, text in pages.items()}
    counts.pop("modules", None)  # which lists all names
    return sorted((page for page, count in counts.items() if count), key=lambda page: (-counts[page], page))[:5]


def _site() -> str:
    """Return the site's address, as the project's metadata have it; raise `ConfigError` where they have none."""
    try:
        urls = metadata("accel-torch").get_all("Project-URL") or []
    except PackageNotFoundError:
        urls = list[str]()
    for url in urls:
        label, _, address = url.partition(", ")
        if label == _URL:
            return show_text(address).rstrip("/")
    raise ConfigError(
        "the site has no address yet",
        expected=f"a URL with the label {_URL}",
        where="[project.urls] in pyproject.toml",
        fix=f'Add `{_URL} = "https://..."` there, and install accel-torch again.',
    )
