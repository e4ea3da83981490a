# SPDX-License-Identifier: Apache-2.0
"""The questions of `accel config`: a menu for the arrow keys, or numbers and names where there is none."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from accel.config import LaunchConfig
from accel.config._schema import Field, from_text, to_text
from accel.config._settings import FIELDS
from accel.errors import AccelError, ConfigError
from accel.formats import PrecisionName
from accel.launching.local._machine import Machine

_UP, _DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j")
_ESCAPE_S = 0.05  # what follows an escape comes at once, or it was the key of that name


class Option(NamedTuple):
    """One line of a menu: a name and its meaning."""

    name: str
    meaning: str = ""


def has_arrow_keys(environ: Mapping[str, str]) -> bool:
    """Return True if input and output are a terminal that can move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and environ.get("TERM", "dumb") != "dumb"


def choose(question: str, options: Sequence[Option], default: str, *, arrows: bool) -> str:
    """Let the user choose an option, by arrow keys or by a line; raise `ConfigError` if the input ends."""
    at = next(place for place, option in enumerate(options) if option.name == default)
    print(f"\n{question}")
    if arrows:
        return options[_move(options, at)].name
    for number, line in enumerate(_lines(options), 1):
        print(f"  {number}) {line}")
    names = {option.name: option.name for option in options}
    numbers = {str(number): option.name for number, option in enumerate(options, 1)}
    while (answer := _read_line(f"Number or name [{default}]: ")) not in {"", *names, *numbers}:
        print(f"  {answer!r} is not in the list.")
    return (names | numbers).get(answer, default)


def ask(question: str, default: str, check: Callable[[str], object]) -> str:
    """Ask for a line of text until it passes a check; raise `ConfigError` if the input ends."""
    print(f"\n{question}")
    while True:
        answer = _read_line(f"[{default or 'none'}]: ") or default
        try:
            _ = check(answer)
        except AccelError as error:
            print(f"  {error}")
        else:
            return answer


def _move(options: Sequence[Option], at: int) -> int:
    lines = _lines(options)
    with _keys() as read_key:
        _print_menu(lines, at)
        while (key := read_key()) not in ("\r", "\n"):
            if key == "\x04":
                raise _ended()
            at = (at + (key in _DOWN) - (key in _UP)) % len(options)
            print(f"\x1b[{len(lines)}A", end="")
            _print_menu(lines, at)
    return at


def _lines(options: Sequence[Option]) -> list[str]:
    width = max(len(option.name) for option in options)
    return [f"{option.name:{width}}  {option.meaning}".rstrip() for option in options]


def _print_menu(lines: Sequence[str], at: int) -> None:
    room = shutil.get_terminal_size().columns - 3  # a line that wraps would be two
    for place, line in enumerate(lines):
        shown = f"\x1b[1m> {line[:room]}\x1b[0m" if place == at else f"  {line[:room]}"
        print(f"\r\x1b[2K{shown}")
    sys.stdout.flush()


@contextmanager
def _keys() -> Generator[Callable[[], str]]:
    """Read single keys in the block, unseen; afterwards the terminal is as it was."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    plain = termios.tcgetattr(fd)
    plain[3] &= ~(termios.ICANON | termios.ECHO)
    plain[6][termios.VMIN], plain[6][termios.VTIME] = 1, 0
    print("\x1b[?25l", end="", flush=True)
    try:
        termios.tcsetattr(fd, termios.TCSADRAIN, plain)
        yield lambda: _read_key(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        print("\x1b[?25h", end="", flush=True)


def _read_key(fd: int) -> str:
    key = os.read(fd, 1)
    if not key:
        raise _ended()
    while key.startswith(b"\x1b") and len(key) < 3 and select.select([fd], [], [], _ESCAPE_S)[0]:
        key += os.read(fd, 1)
    return key.decode(errors="replace")


def _read_line(prompt: str) -> str:
    try:
        return input(prompt).strip()
    except EOFError:
        print()
        raise _ended() from None


def _ended() -> ConfigError:
    return ConfigError("the input ended before the last answer", fix="Nothing has been written.")


_FIRST = ("device", "gpu_ids", "nproc_per_node", "precision")  # the others are asked for on demand
_OTHER = "other"


def describe_machine(machine: Machine) -> str:
    """Return one line about the cores and GPUs that processes would share."""
    cores = f"{machine.cores} CPU core{'s' if machine.cores != 1 else ''}"
    names = [gpu.name for gpu in machine.gpus or ()]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"This machine: {cores}, {gpus or 'no GPU'}."


def suggest(machine: Machine) -> dict[str, Any]:
    """Return the fields for which another value than the default suits this machine."""
    if not machine.gpus:
        return {}
    precision: PrecisionName = "bf16" if min(gpu.generation for gpu in machine.gpus) >= 8 else "fp16"
    return {"nproc_per_node": "auto", "precision": precision}


def interview(machine: Machine, present: Mapping[str, Any], *, arrows: bool) -> dict[str, Any]:
    """Ask for the fields one by one; return the answers, with the fields that were set already and not asked for.

    Raises `ConfigError` if the input ends.
    """
    answers = {name: value for name, value in present.items() if name not in _FIRST}
    suggested = suggest(machine) | dict(present)
    fields = {field.name: field for field in FIELDS}
    for name in _FIRST:
        if name == "gpu_ids" and answers["device"] == "cpu":
            continue
        if name == "gpu_ids" and len(machine.gpus or ()) < 2:  # nothing to choose here; a file may be for elsewhere
            answers |= {name: present[name]} if name in present else {}
            continue
        default = suggested.get(name, fields[name].default)
        if name == "nproc_per_node" and answers["device"] == "cpu" and name not in present:
            default = fields[name].default
        answers[name] = _answer(fields[name], default, answers, arrows=arrows)
    more = [
        Option("no", "keep the other settings"),
        Option("yes", "hosts, accumulation, strategy, mesh, time-outs, output"),
    ]
    if choose("Change other settings too?", more, "no", arrows=arrows) == "yes":
        for field in FIELDS:
            if field.name not in _FIRST and (not field.section or answers["strategy"] == field.name):
                default = suggested.get(field.name, field.default)
                answers[field.name] = _answer(field, default, answers, arrows=arrows)
    return answers


def _answer(field: Field, default: Any, answers: Mapping[str, Any], *, arrows: bool) -> Any:
    def check(answer: str) -> LaunchConfig:
        return LaunchConfig(**{**answers, field.name: from_text(field, answer, where=field.name)})

    spelled = to_text(default)
    about = f"{field.doc.partition(';')[0].rstrip('.')}."
    options = [Option(name, meaning) for name, meaning in field.choices.items()]
    if not field.metavar:
        options = [Option("true"), Option("false")]
    elif options:
        if spelled not in field.choices:
            options.append(Option(spelled, "the current value"))
        if field.is_open:
            options.append(Option(_OTHER, field.expects))
    text = choose(about, options, spelled, arrows=arrows) if options else _OTHER
    if text == _OTHER:
        text = ask(f"{about if options else field.doc} Takes {field.expects}.", spelled, check)
    return from_text(field, text, where=field.name)
