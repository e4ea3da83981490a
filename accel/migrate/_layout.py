# SPDX-License-Identifier: Apache-2.0
"""Layout of a written script: lines that became too long, and comments that none carried on."""

from __future__ import annotations

import io
import tokenize
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import cast

import libcst as cst
from typing_extensions import override

from accel.migrate._tree import loads, text_of, value_of

_WIDTHS = (79, 88, 100, 120)  # that formatters know
_MOST_LONGER = 0.01  # of the lines with code, as a long text may be


def width_of(text: str) -> int:
    """Return the width that a script keeps: the least usual one that nearly all of its lines fit."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    longer = {width: sum(len(line) > width for line in lines) for width in _WIDTHS}
    return next((width for width in _WIDTHS if longer[width] <= len(lines) * _MOST_LONGER), _WIDTHS[-1])


class Fit(cst.CSTTransformer):
    """Break lines that passes made too long: the arguments of the outermost call go to a line of their own."""

    def __init__(self, text: str, indent: int, state: str) -> None:
        super().__init__()
        self._most = width_of(text)
        self._indent = indent
        self._words = ("accel.", f"{state}, ")
        self._written = {"accel", state}
        self._depth = 0

    @override
    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self._depth += 1

    @override
    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        self._depth -= 1
        return updated_node

    @override
    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        value = value_of(updated_node)
        if value is None or not self._written & loads(value):
            return updated_node
        text = text_of(updated_node.with_changes(leading_lines=[]))
        call = value.value if isinstance(value, cst.Subscript) else value
        if (
            "\n" in text
            or not any(word in text for word in self._words)
            or not self._is_long(text)
            or not isinstance(call, cst.Call)
            or not call.args
        ):
            return updated_node
        inner = cast(cst.Assign, updated_node.body[0])
        broken: cst.BaseExpression = self._broken(call, text)
        broken = value.with_changes(value=broken) if isinstance(value, cst.Subscript) else broken
        return updated_node.with_changes(body=[inner.with_changes(value=broken)])

    @override
    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> cst.With:
        text = text_of(updated_node.with_changes(leading_lines=[], body=cst.IndentedBlock([]))).partition(":\n")[0]
        call = updated_node.items[0].item
        if (
            "\n" in text
            or not text.startswith("with accel.")
            or not self._is_long(text)
            or not isinstance(call, cst.Call)
        ):
            return updated_node
        first = updated_node.items[0].with_changes(item=self._broken(call, text))
        return updated_node.with_changes(items=[first, *updated_node.items[1:]])

    @override
    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:
        text = text_of(updated_node.with_changes(leading_lines=[], body=cst.IndentedBlock([]))).partition(":\n")[0]
        call = updated_node.iter
        if "\n" in text or " accel." not in text.replace("(accel.", " accel.") or not self._is_long(text):
            return updated_node
        if not isinstance(call, cst.Call) or not call.args:
            return updated_node
        return updated_node.with_changes(iter=self._broken(call, text))

    def _is_long(self, text: str) -> bool:
        return self._depth * self._indent + len(text) > self._most

    def _broken(self, call: cst.Call, text: str) -> cst.Call:
        """Return a call with its arguments on one line, or on a line each where one is too short."""
        space = " " * self._indent
        inside = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(space))
        after = cst.ParenthesizedWhitespace(indent=True)
        args = list(call.args)
        plain = [text_of(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for arg in args]
        short = len(", ".join(plain)) + (self._depth + 1) * self._indent <= self._most
        if short:
            args[-1] = args[-1].with_changes(whitespace_after_arg=after)
        else:
            args = [arg.with_changes(comma=cst.Comma(whitespace_after=inside)) for arg in args[:-1]] + args[-1:]
            args[-1] = args[-1].with_changes(comma=cst.Comma(whitespace_after=after))
        return call.with_changes(args=args, whitespace_before_args=inside)


_NO_CODE = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)


class _Source:
    """A script's comments by line, its lines without those beside code, and the lines where statements begin."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines(keepends=True)
        self.comments: list[tuple[int, str]] = []
        self.code = [line.strip() for line in self.lines]
        self.starts: list[int] = []
        fresh = True
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            at = token.start[0] - 1
            if token.type == tokenize.COMMENT:
                self.comments.append((at, token.string))
                self.code[at] = self.lines[at][: token.start[1]].strip() or token.string
                if fresh and self.code[at] == token.string:
                    self.starts.append(at)
            elif fresh and token.type not in (*_NO_CODE, tokenize.ENDMARKER):
                self.starts.append(at)
            if token.type not in _NO_CODE:
                fresh = token.type == tokenize.NEWLINE

    def statement_at(self, line: int) -> int:
        """Return the first line of the statement that a line belongs to; the text's end behind the last."""
        if line >= len(self.lines):
            return len(self.lines)
        found = bisect_left(self.starts, line + 1) - 1
        return self.starts[max(found, 0)] if self.starts else len(self.lines)


def with_comments(before: str, after: str, mark: str, gone: Sequence[str] = ()) -> str:
    """Return a written script with all comments of its source, each as often as there, but for those of `gone`.

    Lines that begin with `mark` stay right before the line that they are of.
    """
    old = _Source(before)
    new = _Source(after)
    missing = _missing(old.comments, new.comments, gone)
    if not missing:
        return after
    pairs = _pairs(old.code, new.code)
    added: dict[int, list[str]] = {}
    for line, comment in missing:
        at = new.statement_at(_place(pairs, line, new))
        while at and new.lines[at - 1].strip().startswith(mark):
            at -= 1
        added.setdefault(at, []).append(comment)
    return _inserted(new, added)


def _missing(
    old: Sequence[tuple[int, str]], new: Sequence[tuple[int, str]], gone: Sequence[str]
) -> list[tuple[int, str]]:
    """Return the comments that are fewer in the new text, by those that are not in line with it."""
    texts = [text for _, text in old]
    others = [text for _, text in new]
    lost = Counter(texts) - Counter(others) - Counter(gone)
    if not lost:
        return []
    kept = {at for at, _ in _pairs(texts, others)}
    found: list[tuple[int, str]] = []
    for at, (line, text) in enumerate(old):
        if at not in kept and lost[text]:
            lost[text] -= 1
            found.append((line, text))
    return found


def _pairs(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Return places of equal entries, empty ones left out, in order."""
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    found = [(block.a + at, block.b + at) for block in blocks for at in range(block.size)]
    return [(one, other) for one, other in found if old[one]]


def _place(pairs: Sequence[tuple[int, int]], line: int, new: _Source) -> int:
    """Return the line of the new text that follows what preceded a line of the old one."""
    at = bisect_left(pairs, (line, -1))
    begin = pairs[at - 1][1] + 1 if at else 0
    return next((each for each in range(begin, len(new.lines)) if new.code[each]), len(new.lines))


def _inserted(new: _Source, added: dict[int, list[str]]) -> str:
    written: list[str] = []
    newline = "\r\n" if new.lines and new.lines[0].endswith("\r\n") else "\n"
    for at, line in enumerate([*new.lines, ""]):
        held = added.get(at, [])
        blank = line[: len(line) - len(line.lstrip())] if line.strip() else ""
        if held and written and not written[-1].endswith(newline):
            written[-1] += newline
        written += [f"{blank}{comment}{newline}" for comment in held]
        written.append(line)
    return "".join(written)


class Unannotated(cst.CSTTransformer):
    """Drops the annotation of a variable whose class goes: `accelerator: Accelerator = Accelerator()`."""

    @override
    def leave_AnnAssign(self, original_node: cst.AnnAssign, updated_node: cst.AnnAssign) -> cst.AnnAssign | cst.Assign:
        if updated_node.value is None or "Accelerator" not in text_of(updated_node.annotation):
            return updated_node
        return cst.Assign([cst.AssignTarget(updated_node.target)], updated_node.value)
