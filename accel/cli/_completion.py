# SPDX-License-Identifier: Apache-2.0
"""`accel completion`: scripts that let a shell complete words of `accel`, and the words themselves.

The scripts call `accel completion words` with what has been typed, so that one function answers all shells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

from accel.cli._config import SUBCOMMANDS
from accel.cli._launch import parser, split_words
from accel.cli._main import COMMANDS
from accel.cli._parser import Parser, value_flags
from accel.config._settings import FIELDS
from accel.errors._checks import check_choice

_SCRIPTS = {
    "bash": """\
_accel() {
    local IFS=$'\\n'
    COMPREPLY=($(accel completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _accel accel
""",
    "zsh": """\
_accel() {
    local -a found
    found=(${(f)"$(accel completion words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -- $found; else _files; fi
}
compdef _accel accel
""",
    "fish": """\
complete -c accel -a '(accel completion words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
_HELP = """usage: accel completion SHELL

Print the script that lets a shell complete words of accel.

SHELL and its set-up:
  bash  eval "$(accel completion bash)" in ~/.bashrc
  zsh   eval "$(accel completion zsh)" in ~/.zshrc, after compinit
  fish  accel completion fish > ~/.config/fish/completions/accel.fish"""


def run(words: Sequence[str], _environ: Mapping[str, str]) -> int:
    """Print a shell's script, or after `words` what the last of them could become; return the exit status."""
    if words and words[0] == "words":
        print("\n".join(complete(words[1:])))
        return 0
    if words and words[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    shell = words[0] if words else ""
    check_choice(shell, list(_SCRIPTS), "no script for this shell", where="accel completion")
    print(_SCRIPTS[shell], end="")
    return 0


def complete(words: Sequence[str]) -> list[str]:
    """Return completions of the last word, which may be empty or half typed; none for a file or a word of the script's
    own."""
    *done, part = words or ("",)
    return [candidate for candidate in _candidates(done, part) if candidate.startswith(part)]


def _candidates(done: Sequence[str], part: str) -> list[str]:
    if not done:
        return [*(command.name for command in COMMANDS), "--help", "--version"]
    if done[0] == "completion":
        return list(_SCRIPTS) if len(done) == 1 else []
    if done[0] == "config" and len(done) == 1:
        return [*SUBCOMMANDS, "--output"]
    if done[0] == "launch":
        own, script = split_words(done[1:])
        return [] if script else _flags(parser(), own, part)
    if done[0] in ("test", "env"):
        return _flags(getattr(import_module("accel.cli._setup"), f"{done[0]}_parser")(), done[1:], part)
    if done[0] == "docs":
        return ["--web"] if part.startswith("-") else import_module("accel.cli._docs").names()
    if done[0] in ("report", "compare", "watch", "profile"):
        return _flags(getattr(import_module("accel.cli._runs"), f"{done[0]}_parser")(), done[1:], part)
    if done[0] == "migrate":
        return _flags(import_module("accel.cli._migrate").parser(), [], part)
    if done[0] in ("estimate", "plan"):
        command = import_module(f"accel.cli._{done[0]}")
        return list(command.NAMES.get(done[-1], ())) or _flags(command.parser(), [], part)
    return _flags(parser(), done[2:], part) if list(done[:2]) == ["config", "show"] else []


def _flags(known: Parser, own: Sequence[str], part: str) -> list[str]:
    flag = own[-1] if own else ""
    if flag in value_flags():
        return [name for field in FIELDS if field.flag == flag for name in field.names]
    return known.flags() if part.startswith("-") else []
