# SPDX-License-Identifier: Apache-2.0
"""`accel migrate`: scripts written for Accelerate, rewritten on accel."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from accel.cli._parser import Parser
from accel.errors import ConfigError, MissingExtraError
from accel.migrate import FileResult, find_scripts, in_order, launch_files, migrate_file, read_shared, write
from accel.terminal import show_text

_USAGE = "accel migrate [--write | --check] PATH [PATH ...]"
_ABOUT = (
    "Rewrite scripts and notebooks written for Accelerate, and print the diff. Comments, layout, line ends and "
    "encoding stay. The exit status is 0 if nothing is left to do, 1 if notes are left or --check finds a file to "
    "rewrite, and 2 if a file cannot be read, parsed or written."
)


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Migrate files; return the exit status."""
    known = parser().read(words)
    if known.write and known.check:
        raise ConfigError("two flags exclude each other", got="--write and --check", fix="Pass one of them.")
    left = failed = False
    results: list[FileResult] = []
    paths = list(find_scripts(known.paths))
    shared = read_shared(paths)
    for number, path in enumerate(paths, 1):
        if len(paths) > 1:
            print(show_text(f"[{number}/{len(paths)}] {path}"), file=sys.stderr, flush=True)
        try:
            result = migrate_file(path, shared)
            if known.write and result.changed:
                kept = write(result)
                print(show_text(f"{path}: written; the original is {kept}"))
        except MissingExtraError:
            raise
        except ConfigError as error:
            print(show_text(f"accel: error: {error}"), file=sys.stderr)
            failed = True
            continue
        results.append(result)
        left = left or bool(result.notes) or (known.check and result.changed)
        if not known.write:
            _show(result, check=known.check)
    _summary(results, known.paths, wrote=known.write)
    return 2 if failed else int(left)


def _show(result: FileResult, *, check: bool) -> None:
    if check and result.changed:
        print(show_text(f"{result.path}: would be rewritten"))
    elif result.changed:
        print("\n".join(map(show_text, result.diff().split("\n"))), end="")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _summary(results: Sequence[FileResult], paths: Sequence[str], *, wrote: bool) -> None:
    if any(result.changes for result in results):
        print("\nChanged in meaning:")
    for result in results:
        for text, lines in in_order(result.changes):
            print(show_text(f"  {result.path}:{','.join(map(str, lines))}: {text}"))
    notes = [(result, note) for result in results for note in result.notes]
    if notes:
        print("\nLeft to you:")
    for result, note in notes:
        print(show_text(f"  {result.path}:{note.line}: {note.text}"))
    touched = sum(result.changed for result in results)
    read = _counted(len(results), "file")
    print(f"\n{read} read, {touched} {'rewritten' if wrote else 'to rewrite'}, {_counted(len(notes), 'note')}.")
    for path in launch_files(paths):
        print(show_text(f"{path} has settings of accelerate launch: accel config import {path}"))


def parser() -> Parser:
    """Return the parser of the command's words."""
    built = Parser("accel migrate", usage=_USAGE, description=_ABOUT)
    built.value("paths", "PATH", "a script, a notebook, or a folder of them", nargs="+")
    built.switch("--write", "replace the files, and keep each as FILE.orig")
    built.switch("--check", "name the files that would be rewritten")
    return built
