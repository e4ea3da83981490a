# SPDX-License-Identifier: Apache-2.0
"""Layout of a written script: lines that became too long, and comments that none carried on."""

from __future__ import annotations

import io
import re
import tokenize
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence, Set
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NamedTuple

import libcst as cst

from accel.migrate._tree import PRAGMA, changed_at, text_of

_WIDTHS = (79, 88, 100, 120)  # that formatters know
_MOST_LONGER = 0.01  # of the lines with code, as a long text may be


def width_of(text: str) -> int:
    """Return the width that a script keeps: the least usual one that nearly all of its lines fit."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    longer = {width: sum(len(line) > width for line in lines) for width in _WIDTHS}
    return next((width for width in _WIDTHS if longer[width] <= len(lines) * _MOST_LONGER), _WIDTHS[-1])


def fitted(before: str, after: str, indent: str) -> str:
    """Return a written script with new lines that fit its width; outer brackets are broken first."""
    width = width_of(before)
    old = {line.strip() for line in before.splitlines()}
    while True:
        lines = after.split("\n")
        wide = {at for at, line in enumerate(lines) if len(line.rstrip("\r")) > width and line.strip() not in old}
        broken = {
            at: made for at, pair in _widest(after, wide).items() if (made := _broken(lines[at], pair, indent, width))
        }
        if not broken:
            return after
        after = "\n".join("\n".join(broken.get(at, [line])) for at, line in enumerate(lines))


class _Brackets(NamedTuple):
    """Brackets on one line: their columns, the columns of commas between parts, and whether it is a comprehension."""

    begin: int
    end: int
    commas: tuple[int, ...]
    whole: bool


def _widest(text: str, lines: Set[int]) -> dict[int, _Brackets]:
    """Return the outermost brackets that begin and end on each of the lines, the widest ones."""
    found: dict[int, _Brackets] = {}
    open_pairs: list[tuple[int, int, list[int], list[str]]] = []  # line, column, commas, words
    for token in tokenize.generate_tokens(io.StringIO(text).readline) if lines else ():
        at, column = token.start[0] - 1, token.start[1]
        if token.type == tokenize.OP and token.string in "([{":
            open_pairs.append((at, column, [], []))
        elif token.type == tokenize.OP and token.string in ")]}" and open_pairs:
            begun, begin, commas, words = open_pairs.pop()
            pair = _Brackets(begin, column, tuple(commas), "for" in words)
            if begun == at and at in lines and column - begin > 1 and words[-1:] != ["lambda"]:
                best = found.get(at)
                found[at] = pair if best is None or pair.end - pair.begin > best.end - best.begin else best
        elif open_pairs and token.string == "," and "lambda" not in open_pairs[-1][3][-1:]:
            open_pairs[-1][2].append(column)
        elif open_pairs and token.string == ":" and open_pairs[-1][3][-1:] == ["lambda"]:
            _ = open_pairs[-1][3].pop()
        elif open_pairs and token.string in ("for", "lambda"):
            open_pairs[-1][3].append(token.string)
    return found


def _broken(line: str, pair: _Brackets, indent: str, width: int) -> list[str]:
    """Return a line with the content of the brackets on separate lines; empty if that makes no line shorter."""
    blank = line[: len(line) - len(line.lstrip())]
    end = "\r" if line.endswith("\r") else ""
    inside = line[pair.begin + 1 : pair.end].strip()
    parts = [f"{blank}{indent}{inside.rstrip(',') if pair.whole else inside}"]
    if len(parts[0]) > width and pair.commas and not pair.whole:
        places = [pair.begin, *pair.commas, pair.end]
        texts = [line[one + 1 : other].strip() for one, other in pairwise(places)]
        parts = [f"{blank}{indent}{text}," for text in texts if text]
    made = [line[: pair.begin + 1], *parts, f"{blank}{line[pair.end :]}".removesuffix("\r")]
    return [f"{each}{end}" for each in made] if max(map(len, made)) < len(line) else []


_NO_CODE = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)


class _Source:
    """A script's comments by line, its lines without comments behind code, and the lines where statements begin."""

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
    """Return a written script with all comments of its source, each as often as there, except the ones in `gone`.

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
    lost = Counter(text for text in texts if not PRAGMA.match(text)) - Counter(others) - Counter(gone)
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


def unannotated(module: cst.Module) -> cst.Module:
    """Drop the annotation of a variable if its class is removed: `accelerator: Accelerator = Accelerator()`."""
    return changed_at(module, cst.AnnAssign, _unannotated)


def _unannotated(original: cst.AnnAssign, node: cst.AnnAssign) -> cst.AnnAssign | cst.Assign:
    if node.value is None or "Accelerator" not in text_of(node.annotation):
        return node
    return cst.Assign([cst.AssignTarget(node.target)], node.value)


_JOINED = re.compile(r"\b(accelerator|Accelerator|backward|step|zero_grad)\b")


def unjoined(module: cst.Module) -> cst.Module:
    """Give each statement of `loss = f(x); accelerator.backward(loss)` a separate line."""
    return changed_at(module, cst.SimpleStatementLine, _unjoined)


def _unjoined(
    original: cst.SimpleStatementLine, node: cst.SimpleStatementLine
) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
    if len(node.body) < 2 or not _JOINED.search(text_of(node)):
        return node
    parts = [each.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for each in node.body]
    lines = [cst.SimpleStatementLine([each]) for each in parts]
    lines[0] = lines[0].with_changes(leading_lines=node.leading_lines)
    lines[-1] = lines[-1].with_changes(trailing_whitespace=node.trailing_whitespace)
    return cst.FlattenSentinel(lines)
