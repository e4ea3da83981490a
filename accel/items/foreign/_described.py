# SPDX-License-Identifier: Apache-2.0
"""Contents of a pickle, read without running it: values, and objects as class names with arguments.

Nothing is imported and nothing is called. Only pickles of plain values and dataclasses are supported.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from accel.errors import CheckpointError


@dataclass(eq=False, slots=True)
class Described:
    """Description of an object."""

    name: str  # its class or function, with the module: "torch.Size"; for a class, its own name
    args: tuple[Any, ...] | None = None  # arguments of the call that would make it; None for a class
    state: Any = None  # state that it would then get


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "INT", "LONG"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"),
}
_IGNORED = {"PROTO", "FRAME"}


def describe_pickle(data: bytes, where: str) -> Any:
    """Return the value of a pickle, from anywhere, with `Described` in place of objects."""
    machine = _PickleReader()
    try:
        for code, argument, _ in pickletools.genops(data):
            if code.name == "STOP":
                return machine.stack.pop()
            machine.step(code.name, argument)
    except (ValueError, TypeError, LookupError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"the pickle does not hold plain values only: {error}", where=where) from error
    raise CheckpointError("a pickle that does not end", where=where)


class _PickleReader:
    """A pickle's stack and memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._steps: dict[str, Callable[[], None]] = {
            "MARK": lambda: self._marks.append(len(self.stack)),
            "EMPTY_DICT": lambda: self.stack.append({}),
            "EMPTY_LIST": lambda: self.stack.append([]),
            "EMPTY_TUPLE": lambda: self.stack.append(()),
            "EMPTY_SET": lambda: self.stack.append([]),
            "TUPLE": lambda: self.stack.append(tuple(self._marked())),
            "TUPLE1": lambda: self.stack.append(tuple(self._last(1))),
            "TUPLE2": lambda: self.stack.append(tuple(self._last(2))),
            "TUPLE3": lambda: self.stack.append(tuple(self._last(3))),
            "APPEND": lambda: self._extend(self._last(1)),
            "APPENDS": lambda: self._extend(self._marked()),
            "ADDITEMS": lambda: self._extend(self._marked()),
            "SETITEM": lambda: self._set(self._last(2)),
            "SETITEMS": lambda: self._set(self._marked()),
            "MEMOIZE": lambda: self._memo.update({len(self._memo): self.stack[-1]}),
            "STACK_GLOBAL": lambda: self.stack.append(Described(".".join(self._last(2)))),
            "REDUCE": self._call,
            "NEWOBJ": self._call,
            "BUILD": self._build,
        }

    def step(self, code: str, argument: Any) -> None:
        """Run one instruction on values; refuse one that needs an object."""
        if code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code])
        elif code in _LITERALS:
            self.stack.append(argument)
        elif code in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = self.stack[-1]
        elif code in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self._memo[argument])
        elif code == "GLOBAL":
            self.stack.append(Described(argument.replace(" ", ".")))
        elif code in self._steps:
            self._steps[code]()
        elif code not in _IGNORED:
            raise ValueError(f"the instruction {code}")

    def _last(self, count: int) -> list[Any]:
        taken = self.stack[-count:]
        if len(taken) < count:
            raise ValueError("an empty stack")
        del self.stack[-count:]
        return taken

    def _marked(self) -> list[Any]:
        start = self._marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def _extend(self, values: list[Any]) -> None:
        self.stack[-1].extend(values)

    def _set(self, pairs: list[Any]) -> None:
        self.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    def _call(self) -> None:
        made, args = self._last(2)
        if not isinstance(made, Described) or made.args is not None or not isinstance(args, tuple):
            raise ValueError("a call of something other than a class")
        self.stack.append(Described(made.name, cast("tuple[Any, ...]", args)))

    def _build(self) -> None:
        (state,) = self._last(1)
        if not isinstance(self.stack[-1], Described):
            raise ValueError("a state without an object")
        self.stack[-1].state = state
