# SPDX-License-Identifier: Apache-2.0
"""Files and notebooks in and out: text and back, folders, atomic writes that keep the original."""

from __future__ import annotations

import difflib
import functools
import io
import json
import os
import re
import tempfile
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from accel.errors import ConfigError, MissingExtraError
from accel.errors._checks import import_extra
from accel.migrate._shared import ALONE, Migrated, Shared, shared_in
from accel.opening import read_regular

_CELL = "#@accel-cell {}"
_MAGIC = "#@accel-magic "
_NEXT = " #@accel-line "  # between the lines of a magic
_FOUND = re.compile(r"^#@accel-cell (\d+)$")
_WHOLE = re.compile(r"^\s*%%(?!time\b|timeit\b|capture\b)")  # a cell of another language
_LINE = re.compile(r"^\s*(%|!|\?)|\?\s*$|^\s*[\w, ]+=\s*[%!]")


def migrate_notebook(text: str, where: str, rewrite: Callable[..., Migrated]) -> Migrated:
    """Rewrite the code cells of a notebook; everything else keeps its place, cell ids and outputs too."""
    try:
        book = json.loads(text)
        cells = cast("list[dict[str, Any]]", book["cells"])
        sources = {at: _source(cell) for at, cell in enumerate(cells) if cell["cell_type"] == "code"}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError("the file is not a notebook", got=f"{type(error).__name__}: {error}", where=where) from None
    code = {at: source for at, source in sources.items() if not _WHOLE.match(source) and source.strip()}
    joined = "".join(f"{_CELL.format(at)}\n{_hidden(source)}\n" for at, source in code.items())
    found = rewrite(joined, where, cells=True)
    if found.text == joined:
        return Migrated(text, found.notes)
    for at, source in _cells(found.text).items():
        shown = _shown(source)
        if shown != code[at]:
            lines = shown.splitlines(keepends=True)
            cells[at]["source"] = lines if isinstance(cells[at]["source"], list) else shown
    return found._replace(text=_dumped(book, text))


def _source(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(cast("list[str]", source))


def _hidden(source: str) -> str:
    """Return a cell with its magics as comments, a `pass` in the place of each; one of several lines is one."""
    lines: list[str] = []
    open_lines: list[str] = []  # of a statement that is not closed
    waiting = source.split("\n")
    while waiting:
        line = waiting.pop(0)
        if not open_lines and _LINE.search(line) and not line.lstrip().startswith("#"):
            blank = line[: len(line) - len(line.lstrip())]
            magic = [line.strip()]
            while magic[-1].endswith("\\") and waiting:
                magic.append(waiting.pop(0))
            lines.append(f"{blank}pass  {_MAGIC}{_NEXT.join(magic)}")
        else:
            open_lines = [*open_lines, line] if _is_open([*open_lines, line]) else []
            lines.append(line)
    return "\n".join(lines)


def _is_open(lines: Sequence[str]) -> bool:
    """Whether lines end within brackets, a string or a continued line."""
    try:
        for _ in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline):
            pass
    except tokenize.TokenError:
        return True
    except SyntaxError:
        return False
    return lines[-1].endswith("\\")


def _shown(source: str) -> str:
    lines: list[str] = []
    for line in source.split("\n"):
        head, mark, magic = line.partition(f"pass  {_MAGIC}")
        lines.append(f"{head}{magic}".replace(_NEXT, "\n") if mark else line)
    return "\n".join(lines)


def _cells(text: str) -> dict[int, str]:
    found: dict[int, list[str]] = {}
    current: list[str] = []
    for line in text.split("\n"):
        if match := _FOUND.match(line.strip()):
            current = found.setdefault(int(match[1]), [])
        else:
            current.append(line)
    return {at: "\n".join(lines).strip("\n") if lines else "" for at, lines in found.items()}


def _dumped(book: object, text: str) -> str:
    """Write JSON as the file has it: its indentation, its last line, its other letters as they are."""
    indent = re.search(r"^\{\r?\n([ \t]+)", text)
    ascii_only = text.isascii()
    end = "\n" if text.endswith("\n") else ""
    written = json.dumps(book, indent=indent[1] if indent else None, ensure_ascii=ascii_only)
    return written.replace("\n", "\r\n") + end if "\r\n" in text else written + end


ORIGINAL = ".orig"
_LARGEST = 100_000_000  # bytes of a notebook with its outputs
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}
_SUFFIXES = (".py", ".ipynb")
_CONFIG = re.compile(r"^(compute_environment|distributed_type|num_processes)\s*:", flags=re.M)


class Remark(NamedTuple):
    """A note or a change in meaning: the line of the written script, and one sentence."""

    line: int
    text: str


class FileResult(NamedTuple):
    """The migration of a file."""

    path: Path  # the file
    old: bytes  # its bytes
    new: bytes  # the bytes to write; the old ones where nothing changes
    encoding: str  # encoding of both
    notes: tuple[Remark, ...]  # decisions left to the user, with lines
    changes: tuple[Remark, ...]  # changes in meaning, with lines

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return self.old != self.new

    def diff(self) -> str:
        """Return the unified diff of both texts."""
        old, new = (each.decode(self.encoding).splitlines(keepends=True) for each in (self.old, self.new))
        found = difflib.unified_diff(old, new, f"a/{self.path}", f"b/{self.path}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in found)


REMARKS = ".remarks"
_CHANGED = "Changed in meaning:"
_LEFT = "Left to you:"
_REMARK = re.compile(r"^  (\d+(?:,\d+)*): (.*)$")
# what matters most in a remark, first; others follow, and options that are left out come last
_WEIGHTS = ("loss", "gradient", "clip", "schedule", "seed", "batch", "output", "checkpoint", "step")


def in_order(changes: Sequence[Remark]) -> list[tuple[str, list[int]]]:
    """Return changes in meaning with their lines, the most important first."""
    lines: dict[str, list[int]] = {}
    for change in changes:
        lines.setdefault(change.text, []).append(change.line)

    def weight(text: str) -> int:
        found = [at for at, word in enumerate(_WEIGHTS) if word in text]
        return len(_WEIGHTS) + 1 if "left out" in text else min(found, default=len(_WEIGHTS))

    return sorted(lines.items(), key=lambda each: weight(each[0]))


def _remarks(result: FileResult) -> str:
    notes = [f"  {note.line}: {note.text}" for note in result.notes]
    changes = [f"  {','.join(map(str, lines))}: {text}" for text, lines in in_order(result.changes)]
    parts = [*([_LEFT, *notes] if notes else []), *([_CHANGED, *changes] if changes else [])]
    return "\n".join(parts) + "\n" if parts else ""


def _earlier_remarks(path: Path) -> tuple[Remark, ...]:
    """Return the changes in meaning that an earlier run wrote next to a script."""
    try:
        text = read_regular(path.with_name(path.name + REMARKS)).decode()
    except (OSError, UnicodeDecodeError):
        return ()
    found = [match for line in text.partition(_CHANGED)[2].splitlines() if (match := _REMARK.match(line))]
    return tuple(Remark(int(line), match[2]) for match in found for line in match[1].split(","))


def find_scripts(paths: Sequence[str]) -> Iterator[Path]:
    """Yield the files that paths name: a file itself, the scripts and notebooks of a folder."""
    for text in paths:
        path = Path(text)
        if path.is_dir():
            found = list(_below(path))
            if not found:
                raise ConfigError("no script or notebook in the folder", got=repr(text), fix="Name another folder.")
            yield from found
        elif path.exists():
            yield path
        else:
            raise ConfigError(
                "there is no such file or folder", got=repr(text), fix="Name scripts, notebooks or folders."
            )


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith(".") and each not in _SKIPPED)
        if "pyvenv.cfg" in files:
            folders[:] = []
            continue
        for name in sorted(files):
            if name.endswith(_SUFFIXES):
                yield Path(place, name)


def launch_files(paths: Sequence[str]) -> list[Path]:
    """Return files of settings for `accelerate launch` next to scripts, which `accel config import` reads."""
    folders = {Path(text) if Path(text).is_dir() else Path(text).parent for text in paths}
    found: list[Path] = []
    for folder in sorted(folders):
        for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
            try:
                text = read_regular(path).decode()
            except (OSError, UnicodeDecodeError):
                continue
            if len(set(_CONFIG.findall(text))) > 1:
                found.append(path)
    return found


def read_shared(paths: Sequence[Path]) -> Shared:
    """Return what scripts know of each other; files that cannot be read have nothing to say."""
    texts: list[str] = []
    for path in paths:
        try:
            data = read_regular(path, _LARGEST) if path.suffix == ".py" else b""
            encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
            texts += [data.decode(encoding)] if b"ccelerat" in data else []
        except (OSError, SyntaxError, ValueError):
            continue
    return shared_in(texts)


def migrate_file(path: Path, shared: Shared = ALONE) -> FileResult:
    """Read a file and return what it becomes; nothing is written.

    Raises `ConfigError` for a file that cannot be read, is not Python, or cannot be rewritten.
    """
    try:
        old = read_regular(path, _LARGEST)
    except OSError as error:
        raise ConfigError("the file cannot be read", got=str(error.strerror), where=str(path)) from None
    try:
        found = migrate_bytes(old, path, shared)
        return found if found.changed else found._replace(changes=_earlier_remarks(path))
    except (ConfigError, MissingExtraError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a parser in Rust panics by one that is no Exception
        got = f"{type(error).__name__}: {error}".partition("\n")[0]
        fix = "Migrate this file by hand, or report it as a bug; the other files are rewritten."
        raise ConfigError("the file cannot be rewritten", got=got, where=str(path), fix=fix) from error


def migrate_bytes(old: bytes, path: Path, shared: Shared = ALONE) -> FileResult:
    """Return what the bytes of a script or a notebook become; raise as `migrate_file`."""
    encoding, text = _decoded(old, path)
    if "\x00" in text:
        raise ConfigError("the file is not text", got="a NUL character", where=str(path))
    if path.suffix == ".ipynb":
        found = migrate_notebook(text, str(path), functools.partial(rewriter(path), shared=shared))
    elif "accelerat" not in text and "# accel: " not in text:
        return FileResult(path, old, old, encoding, (), ())
    else:
        found = rewriter(path)(text, str(path), shared=shared)
    new = old if found.text == text else found.text.encode(encoding)
    notes = tuple(Remark(line, what) for line, what in found.notes)
    changes = tuple(Remark(line, what) for line, what in found.changes)
    return FileResult(path, old, new, encoding, notes, changes)


def _decoded(old: bytes, path: Path) -> tuple[str, str]:
    """Return a file's encoding and text; raise `ConfigError` for one that is in another encoding than it says."""
    named = ""
    try:
        named = "utf-8" if path.suffix == ".ipynb" else tokenize.detect_encoding(io.BytesIO(old).readline)[0]
    except SyntaxError as error:
        if "invalid or missing" not in str(error):
            raise ConfigError("the file is not text", got=str(error).partition(":")[0], where=str(path)) from None
    try:
        return named, old.decode(named or "utf-8")
    except UnicodeDecodeError as error:
        line = old.count(b"\n", 0, error.start) + 1
        got = f"byte {old[error.start]:#04x} in line {line}, which is not {error.encoding}"
        fix = "Save it as UTF-8, or write its encoding into the first line: `# coding: latin-1`."
        raise ConfigError("the file is not text", got=got, where=str(path), fix=fix) from None


def rewriter(path: Path):
    """Return the function that rewrites a text; raise `MissingExtraError` where libcst does not import."""
    _ = import_extra("libcst", "the command that rewrites scripts", extra="migrate", where=str(path))
    from accel.migrate._rewrite import rewrite

    return rewrite


def write(result: FileResult) -> Path:
    """Write a file by one rename, and keep the original next to it; return the original's path.

    Notes and changes in meaning go into a file next to it, from which a later run reports the changes again.

    Raises `ConfigError` where there is an original already, or the file has changed since it was read.
    """
    # Not by accel.storage: its files are new, have plain names, and lie in a folder that is renamed as a whole. It is
    # above this room, too.
    target = Path(os.path.realpath(result.path))  # a link stays a link
    kept = target.with_name(target.name + ORIGINAL)
    partial: str | None = None
    try:
        if target.read_bytes() != result.old:
            raise ConfigError(
                "the file changed while it was read", where=str(result.path), fix="Run the command again."
            )
        if not target.stat().st_mode & 0o222 or not os.access(target, os.W_OK):
            raise ConfigError("the file cannot be written", got="it is read-only", where=str(result.path))
        handle, partial = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            _ = file.write(result.new)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, target.stat().st_mode & 0o7777)
        os.link(target, kept)  # fails where there is one, and never leaves the file without a name
        os.replace(partial, target)
        if remarks := _remarks(result):
            _ = target.with_name(target.name + REMARKS).write_text(remarks)
    except FileExistsError:
        fix = "Move it away, or migrate that one."
        raise ConfigError("there is an original already", got=str(kept), where=str(result.path), fix=fix) from None
    except OSError as error:
        raise ConfigError("the file cannot be written", got=str(error.strerror), where=str(result.path)) from None
    finally:
        if partial is not None and os.path.exists(partial):
            os.unlink(partial)
    return kept
