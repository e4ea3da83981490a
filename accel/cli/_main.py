# SPDX-License-Identifier: Apache-2.0
"""Find the command that was asked for and run it. A command's module is imported only when it is the one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from accel import __version__
from accel.errors import AccelError, ConfigError
from accel.errors._checks import did_you_mean
from accel.system import open_streams, write_error
from accel.terminal import show_text


class Command(NamedTuple):
    """A command: its name, its summary, and the module and function that take its words and the environment."""

    name: str
    summary: str
    module: str
    function: str = "run"


COMMANDS = (
    Command("launch", "run a script on several processes or hosts", "accel.cli._launch"),
    Command("config", "write launch settings to a file", "accel.cli._config"),
    Command("test", "check devices, collectives, data order, gradients, checkpoints", "accel.cli._setup", "run_test"),
    Command("env", "print versions, devices and settings for a bug report", "accel.cli._setup", "run_env"),
    Command("estimate", "estimate the memory for training a model", "accel.cli._estimate"),
    Command("plan", "list the meshes on which a model can be trained", "accel.cli._plan"),
    Command("report", "write an HTML page that shows one or more runs", "accel.cli._runs", "run_report"),
    Command("compare", "print the differences between two runs", "accel.cli._runs", "run_compare"),
    Command("watch", "follow a run: curves, throughput, ranks, checkpoints", "accel.cli._runs", "run_watch"),
    Command("profile", "print how each rank spent its time, from traces", "accel.cli._runs", "run_profile"),
    Command("migrate", "rewrite scripts written for Accelerate", "accel.cli._migrate"),
    Command("docs", "print the documentation of a name, an error, a command or a page", "accel.cli._docs"),
    Command("examples", "list the example scripts, or copy one to a folder", "accel.cli._examples"),
    Command("completion", "print the completion script of bash, zsh or fish", "accel.cli._setup", "run_completion"),
    Command("checkpoint", "list, check, compare, convert and delete checkpoints", "accel.cli._checkpoint"),
)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that the words name; by default they come from the command line. Return the exit status, 2 for
    invalid words."""
    words = sys.argv[1:] if words is None else words
    open_streams()
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - Python has none if it was closed at the start
    try:
        status = _dispatch(words)
        sys.stdout.flush()
    except AccelError as error:
        write_error("".join(f"{show_text(line)}\n" for line in f"accel: error: {error}".split("\n")))
        return 2
    except BrokenPipeError:  # the reader has seen enough, and Python would flush the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    return status


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"accel {__version__}")
        return 0
    for command in COMMANDS:
        if command.name == words[0]:
            return getattr(import_module(command.module), command.function)(words[1:], os.environ)
    names = ["--help", "--version", *(command.name for command in COMMANDS)]
    raise ConfigError("unknown command", got=repr(words[0]), fix=did_you_mean(words[0], names))


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    listing = "\n".join(f"  {command.name:{width}}  {command.summary}" for command in COMMANDS)
    return f"""usage: accel COMMAND ...

commands:
{listing}

`accel COMMAND --help` lists its flags; `accel --version` prints the version."""
