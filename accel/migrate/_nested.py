# SPDX-License-Identifier: Apache-2.0
"""Scripts with deep nesting, rewritten in a child process: a parser that runs out of stack ends the child alone."""

from __future__ import annotations

import ast
import sys
import threading

import msgspec

from accel.errors import ConfigError
from accel.migrate._shared import Migrated, Shared
from accel.system import run_helper

_DEEP = 60  # blocks and expressions in each other; scripts have about 20
_STACK = 512 * 2**20
_LIMIT = 100_000
_SECONDS = 600.0
_MOST_BYTES = 2**28
TOO_DEEP = "an expression of too many parts, or too many blocks in each other"
_CODE = "from accel.migrate._nested import answer; answer()"


class Asked(msgspec.Struct, frozen=True):
    """Request to a child: a script to rewrite."""

    text: str
    where: str
    cells: bool
    shared: Shared


def is_deep(text: str, where: str) -> bool:
    """Whether a script is too deep for this process; raise `ConfigError` for one that Python itself refuses so."""
    try:
        waiting: list[tuple[ast.AST, int]] = [(ast.parse(text), 0)]
    except SyntaxError as error:
        if "too many" not in str(error):
            return False  # the parser of the rewriting names line and column
        raise ConfigError("the file is not valid Python", got=str(error.msg), where=f"{where}:{error.lineno}") from None
    except (RecursionError, MemoryError):
        raise ConfigError("the file is not valid Python", got=TOO_DEEP, where=where) from None
    while waiting:
        node, depth = waiting.pop()
        if depth > _DEEP:
            return True
        waiting += [(child, depth + 1) for child in ast.iter_child_nodes(node)]
    return False


def in_child(asked: Asked) -> Migrated:
    """Return what a child process makes of a script; raise `ConfigError` where it ends without an answer."""
    command = [sys.executable, "-c", _CODE]
    try:
        ended = run_helper(command, limit_s=_SECONDS, stdin=msgspec.json.encode(asked), most_out=_MOST_BYTES)
        answer = msgspec.json.decode(ended.out, type=Migrated | str)  # a text is an error
    except (OSError, msgspec.DecodeError):
        raise ConfigError("the file cannot be rewritten", got=TOO_DEEP, where=asked.where) from None
    if isinstance(answer, str):
        raise ConfigError("the file cannot be rewritten", got=answer, where=asked.where)
    return answer


def answer() -> None:
    """Rewrite the script that standard input asks for, on a thread with a large stack. The child's whole work."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
    sys.setrecursionlimit(_LIMIT)
    _ = threading.stack_size(_STACK)
    thread = threading.Thread(target=_answer, args=(asked,))
    thread.start()
    thread.join()


def _answer(asked: Asked) -> None:
    from accel.migrate._rewrite import rewrite_here

    try:
        found = rewrite_here(asked.text, asked.where, cells=asked.cells, shared=asked.shared)
    except BaseException as error:  # a parser in Rust panics by one that is no Exception
        found = f"{type(error).__name__}: {error}".partition("\n")[0]
    _ = sys.stdout.buffer.write(msgspec.json.encode(found))
    sys.stdout.flush()
