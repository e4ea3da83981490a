# SPDX-License-Identifier: Apache-2.0
"""`accel config`: write, show, update and import a launch's configuration."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from accel.cli._parser import Parser, add_fields, resolve_flags
from accel.cli._questions import Option, choose, describe_machine, has_arrow_keys, interview, suggest
from accel.config import ConfigFile, LaunchConfig, encode, read_config, resolve
from accel.config._accelerate import import_accelerate
from accel.config._files import DEFAULT_FILE, decode_values, read_text, refuse_yaml
from accel.config._resolve import update_values
from accel.config._schema import to_text
from accel.config._settings import FIELDS
from accel.errors import ConfigError
from accel.errors._checks import did_you_mean
from accel.launching.local._machine import read_machine
from accel.run_folder import hide_in_text
from accel.terminal import show_text


def update(path: str) -> None:
    """Rewrite a file, TOML or JSON, in the present format, print the changes, and keep a copy of the old one; an error
    changes nothing."""
    refuse_yaml(path, fix=f"Turn one of Accelerate's into ours with `accel config import {path}`.")
    updated = update_values(decode_values(read_text(path), path), path)
    if not updated.changes:
        print(f"{path} is up to date.")
        return
    config = resolve({}, {}, ConfigFile(path=path, values=updated.values)).config  # refuses contradictions
    text = encode(config, path, only=updated.values)
    for line in updated.changes:
        print(show_text(f"  {line}"))
    print(f"Wrote {path}; the old file is {_replace(Path(path), text)}.")


def _replace(path: Path, text: str) -> Path:
    """Replace a file by one rename; return the copy of the old one, next to it."""
    target = Path(os.path.realpath(path))  # a link stays a link
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in itertools.count())
    kept = next(each for each in names if not os.path.lexists(each))
    partial = target.with_name(f"{target.name}.partial")
    try:
        _ = shutil.copy2(target, kept)
        _ = partial.write_text(text, encoding="utf-8")
        shutil.copymode(target, partial)
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError("the file cannot be written", got=str(error.strerror), where=str(path)) from None
    return kept


class _Subcommand(NamedTuple):
    """A subcommand's words in the usage line, and its summary."""

    words: str
    summary: str


_SUBCOMMANDS = {
    "default": _Subcommand("[--output FILE] [--force]", "write settings that suit this machine, without asking"),
    "show": _Subcommand("[--config FILE] [flags of accel launch]", "print each setting, its value and its source"),
    "import": _Subcommand("FILE [--output FILE] [--force]", "convert a configuration of Accelerate"),
    "update": _Subcommand("[FILE]", "rewrite an older file in the current format"),
}
SUBCOMMANDS = tuple(_SUBCOMMANDS)
_USAGE = "\n       ".join(
    ["accel config [--output FILE]", *(f"accel config {name} {each.words}" for name, each in _SUBCOMMANDS.items())]
)
_ABOUT = "\n".join(
    [
        f"Ask for the settings of `accel launch`, and write them to {DEFAULT_FILE}.",
        "",
        "commands:",
        *(f"  {name:7}  {each.summary}" for name, each in _SUBCOMMANDS.items()),
    ]
)


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one of the commands of `accel config`; return the exit status."""
    commands = dict(zip(SUBCOMMANDS, (_default, _show, _import, _update), strict=True))
    if not words or words[0].startswith("-"):
        return _interactive(words, environ)
    if words[0] not in commands:
        raise ConfigError("unknown command", got=repr(words[0]), fix=did_you_mean(words[0], commands))
    return commands[words[0]](words[1:], environ)


def _interactive(words: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = Parser("accel config", usage=_USAGE, description=_ABOUT)
    _add_output(parser)
    path: str = parser.read(words).output
    machine = read_machine()
    arrows = has_arrow_keys(environ)
    replaces = os.path.lexists(path)
    file = read_config(path) if replaces else ConfigFile(path=path, values={})
    known = resolve({}, {}, file).config
    present = {name: getattr(known, name) for name in file.values}
    print(describe_machine(machine))
    print("Arrow keys move, Enter selects, Ctrl-C quits." if arrows else "An empty line selects the value in brackets.")
    try:
        answers = interview(machine, present, arrows=arrows)
        text = encode(LaunchConfig(**answers), path, only=answers)
        print(f"\n{_only_set(text)}")
        options = [Option("yes", f"{path} is replaced" if replaces else f"to {path}"), Option("no")]
        if choose("Write this?", options, "yes", arrows=arrows) == "no":
            print("Nothing has been written.")
            return 1
    except KeyboardInterrupt:
        print("\nNothing has been written.")
        return 130
    _write(path, text, force=True)
    return 0


def _default(words: Sequence[str], _environ: Mapping[str, str]) -> int:
    known = _writer("default").read(words)
    suggested = suggest(read_machine())
    _write(known.output, encode(LaunchConfig(**suggested), known.output, only=suggested), force=known.force)
    return 0


def _show(words: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = _parser("show")
    _ = add_fields(parser)
    resolved = resolve_flags(parser.read(words), environ)
    values = {field.name: hide_in_text(to_text(getattr(resolved.config, field.name))) for field in FIELDS}
    values |= {field.name: f"[{field.name}]" for field in FIELDS if field.section and values[field.name][:1] == "{"}
    rows = [(name, value, str(resolved.sources[name])) for name, value in values.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, value, source in rows:
        print(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}")
    return 0


def _import(words: Sequence[str], _environ: Mapping[str, str]) -> int:
    parser = _writer("import")
    parser.value("file", "FILE", "a file of Accelerate, YAML or JSON")
    known = parser.read(words)
    imported = import_accelerate(known.file)
    text = encode(imported.config, known.output, only=imported.fields)
    for name in imported.fields:
        print(f"{name} = {to_text(getattr(imported.config, name))}")
    if imported.left_out:
        print("\nLeft out:")
    for key, value, why in imported.left_out:
        print(show_text(f"  {key}: {_short(value)} - {why}"))
    _write(known.output, text, force=known.force)
    return 0


def _update(words: Sequence[str], _environ: Mapping[str, str]) -> int:
    parser = _parser("update")
    _ = parser.add_argument(
        "file", nargs="?", default=DEFAULT_FILE, help=f"a file of accel, TOML or .json (default: {DEFAULT_FILE})"
    )
    update(parser.read(words).file)
    return 0


def _parser(name: str) -> Parser:
    words, summary = _SUBCOMMANDS[name]
    prog = f"accel config {name}"
    return Parser(prog, usage=f"{prog} {words}", description=f"{summary[0].upper()}{summary[1:]}.")


def _writer(name: str) -> Parser:
    """Return the parser of a subcommand that writes a file, and replaces none unless asked to."""
    parser = _parser(name)
    _add_output(parser)
    parser.switch("--force", "replace an existing file")
    return parser


def _add_output(parser: Parser) -> None:
    parser.value("--output", "FILE", f"file to write, TOML or .json (default: {DEFAULT_FILE})", default=DEFAULT_FILE)


def _write(path: str, text: str, *, force: bool) -> None:
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as file:
            _ = file.write(text)
    except FileExistsError:
        raise ConfigError("the file exists", got=repr(path), fix="Pass --force to replace it.") from None
    except OSError as error:
        raise ConfigError("the file cannot be written", got=str(error.strerror), where=path) from None
    print(f"Wrote {path}.")


def _only_set(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(f"  {line}" for line in lines if line and not line.startswith(("#", "format = ")))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
