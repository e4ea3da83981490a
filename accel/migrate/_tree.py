# SPDX-License-Identifier: Apache-2.0
"""Small tools over libcst's nodes, and the notes that passes leave in a tree."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import libcst as cst
from libcst.helpers import get_full_name_for_node, parse_template_expression, parse_template_statement

N = TypeVar("N", bound=cst.CSTNode)
K = TypeVar("K", bound=cst.CSTNode)
_NODES = frozenset(kind for kind in vars(cst).values() if isinstance(kind, type) and issubclass(kind, cst.CSTNode))
# fields of nodes that hold whitespace, comments and punctuation alone
_LAYOUT = frozenset(
    name
    for kind in _NODES
    if hasattr(kind, "__dataclass_fields__")
    for name in kind.__dataclass_fields__
    if name.startswith(("whitespace", "leading", "trailing", "lines_after", "lpar", "rpar", "lbr", "rbr"))
    or name in ("header", "footer", "indent", "comma", "semicolon", "equal", "first_line", "empty_lines")
)


def expression(text: str, **parts: cst.BaseExpression) -> cst.BaseExpression:
    """Parse an expression; `{name}` is a placeholder of a node."""
    return parse_template_expression(text, cst.PartialParserConfig(), **parts)


def statement(text: str, **parts: cst.BaseExpression) -> cst.BaseStatement:
    """Parse a statement; `{name}` is a placeholder of a node."""
    return parse_template_statement(text, cst.PartialParserConfig(), **parts)


def text_of(node: cst.CSTNode) -> str:
    """Return a node's code, without comments at its ends."""
    if isinstance(node, cst.SimpleStatementLine):
        node = node.with_changes(leading_lines=[], trailing_whitespace=cst.TrailingWhitespace())
    elif getattr(node, "leading_lines", None):
        node = node.with_changes(leading_lines=[])
    elif isinstance(node, cst.Annotation):  # its sign is a colon or an arrow
        node = node.annotation
    elif isinstance(node, cst.Param):
        node = node.name
    return cst.Module([]).code_for_node(node).strip()


def full_name(node: cst.CSTNode) -> str:
    """Return a dotted name, empty for other expressions."""
    return get_full_name_for_node(node) or "" if isinstance(node, (cst.Name, cst.Attribute)) else ""


SCOPES = (cst.FunctionDef, cst.ClassDef)
LOOPS = (cst.For, cst.While)


def walk(node: cst.CSTNode, closed: tuple[type[cst.CSTNode], ...] = ()) -> Iterator[cst.CSTNode]:
    """Yield a node and all below it, without whitespace, comments, and what is inside of `closed` kinds of nodes."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield each
        if not isinstance(each, closed):
            waiting += children(each)[::-1]


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Return the nodes right below a node, without whitespace and comments; libcst's `children` copies each node."""
    found: list[cst.CSTNode] = []
    for name in _parts(type(node)):
        value: Any = getattr(node, name)
        if type(value) in _NODES:
            found.append(value)
        elif type(value) is tuple or type(value) is list:
            found += [each for each in cast("Sequence[Any]", value) if type(each) in _NODES]
    return found


@functools.lru_cache(maxsize=512)
def _parts(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """Return the fields of a kind of node that hold nodes of code."""
    fields = dataclasses.fields(kind)
    return tuple(each.name for each in fields if each.name not in _LAYOUT and each.type not in (str, bool))


class Change:
    """Changes of nodes by their kinds.

    A subclass has methods such as `visit_for(node)`, called before the parts of a node change; False leaves these as
    they are. `leave_for(original, updated)` returns what takes the node's place. Unlike libcst's transformers, it does
    not see whitespace and comments.
    """

    skips: ClassVar[tuple[type[cst.CSTNode], ...]] = ()  # kinds of nodes that are not entered

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Return whether the parts of a node change too."""
        visit = getattr(self, _methods(type(node))[0], None)
        return not isinstance(node, self.skips) and (visit is None or visit(node) is not False)

    def on_leave(self, original: cst.CSTNode, updated: cst.CSTNode) -> object:
        """Return what takes the place of a node; its parts have changed."""
        leave = getattr(self, _methods(type(original))[1], None)
        return updated if leave is None else leave(original, updated)


@functools.lru_cache(maxsize=512)
def _methods(kind: type[cst.CSTNode]) -> tuple[str, str]:
    """Return the names of the methods of a `Change` for a kind of node."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
    return f"visit_{name}", f"leave_{name}"


def changed_by(node: N, change: Change) -> N:
    """Return a node as a `Change` makes it.

    A statement may become several: the result is then a sentinel of libcst, which the caller's list takes.
    """
    return cast("N", _changed(node, change))


def changed_at(node: N, kind: type[K], change: Callable[[K, K], object]) -> N:
    """Return a node in which a function has changed the nodes of a kind.

    The function gets a node before and after the changes inside of it.
    """
    return changed_by(node, _At(kind, change))


class _At(Change):
    def __init__(self, kind: type[cst.CSTNode], change: Callable[[Any, Any], object]) -> None:
        self._kind = kind
        self._change = change

    def on_leave(self, original: cst.CSTNode, updated: cst.CSTNode) -> object:
        return self._change(original, updated) if isinstance(original, self._kind) else updated


def _changed(node: cst.CSTNode, change: Change) -> object:
    updated = _with_changed_parts(node, change) if change.on_visit(node) else node
    return change.on_leave(node, updated)


def _with_changed_parts(node: cst.CSTNode, change: Change) -> cst.CSTNode:
    found: dict[str, object] = {}
    for name in _parts(type(node)):
        value: Any = getattr(node, name)
        if type(value) in _NODES:
            made = _changed(value, change)
            if made is not value:
                found[name] = None if isinstance(made, cst.RemovalSentinel) else made
        elif value and (type(value) is tuple or type(value) is list):
            new = _each_changed(cast("Sequence[Any]", value), change)
            if new is not value:
                found[name] = new
    return node.with_changes(**found) if found else node


def _each_changed(values: Sequence[Any], change: Change) -> Sequence[Any]:
    """Return the changed values; the same sequence if none has changed."""
    made = [_changed(each, change) if type(each) in _NODES else each for each in values]
    if all(map(operator.is_, made, values)):
        return values
    kept: list[Any] = []
    for each in made:
        if isinstance(each, cst.FlattenSentinel):
            kept += cast("cst.FlattenSentinel[cst.CSTNode]", each)
        elif not isinstance(each, cst.RemovalSentinel):
            kept.append(each)
    return kept


def _walk_all(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and all below it, layout too, in order of the text."""
    yield node
    for child in node.children:
        yield from _walk_all(child)


def calls(node: cst.CSTNode) -> Iterator[cst.Call]:
    """Yield the calls within a node."""
    return (each for each in walk(node) if isinstance(each, cst.Call))


def own_lines(node: cst.CSTNode) -> Iterator[cst.SimpleStatementLine]:
    """Yield the lines of a block, without the lines of functions and classes in it."""
    return (each for each in walk(node, SCOPES) if isinstance(each, cst.SimpleStatementLine))


def outer_loops(node: cst.CSTNode) -> Iterator[cst.For | cst.While]:
    """Yield the outermost loops below a node, without loops of functions and classes in it."""
    found = (each for child in children(node) for each in walk(child, (*LOOPS, *SCOPES)))
    return (each for each in found if isinstance(each, LOOPS))


def loads(node: cst.CSTNode) -> set[str]:
    """Return the variables that a node mentions, without attributes and keywords."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, cst.Name):
            found.add(each.value)
        elif isinstance(each, (cst.Attribute, cst.Arg)):
            waiting.append(each.value)
        else:
            waiting += children(each)
    return found


def small(node: cst.CSTNode) -> cst.BaseSmallStatement | None:
    """Return the one small statement of a line."""
    if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1:
        return node.body[0]
    return None


def value_of(node: cst.CSTNode) -> cst.BaseExpression | None:
    """Return the expression of a line, assigned or not."""
    inner = small(node)
    if isinstance(inner, (cst.Expr, cst.Assign, cst.AugAssign, cst.AnnAssign)):
        return inner.value
    return None


def called(node: cst.CSTNode) -> cst.Call | None:
    """Return the call that a line is, assigned or not."""
    value = value_of(node)
    return value if isinstance(value, cst.Call) else None


def targets(node: cst.CSTNode) -> list[str]:
    """Return the names that a line assigns."""
    inner = small(node)
    if isinstance(inner, cst.Assign):
        found = [each.target for each in inner.targets]
    elif isinstance(inner, (cst.AugAssign, cst.AnnAssign)):
        found = [inner.target]
    else:
        found = []
    return [name for target in found for name in names_in(target)]


def names_in(target: cst.BaseExpression) -> list[str]:
    """Return the names of a target, such as `(a, b)`."""
    if isinstance(target, (cst.Tuple, cst.List)):
        return [name for element in target.elements for name in names_in(element.value)]
    return [target.value] if isinstance(target, cst.Name) else []


def method_of(call: cst.Call) -> tuple[cst.BaseExpression | None, str]:
    """Return the object and the method's name of a call; the object is None for a plain function."""
    if isinstance(call.func, cst.Attribute):
        return call.func.value, call.func.attr.value
    return None, call.func.value if isinstance(call.func, cst.Name) else ""


def keyword_arg(name: str, value: cst.BaseExpression) -> cst.Arg:
    """Return the argument `name=value`."""
    return cast(cst.Call, expression(f"f({name}={{value}})", value=value)).args[0]


def argument(call: cst.Call, name: str, position: int | None = None) -> cst.BaseExpression | None:
    """Return an argument by its keyword, or by its position."""
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == name:
            return arg.value
    plain = [arg for arg in call.args if arg.keyword is None and not arg.star]
    if position is not None and position < len(plain) and call.args[position] is plain[position]:
        return plain[position].value
    return None


_TRAINED = ("step", "zero_grad", "parameters", "state_dict", "load_state_dict", "train", "eval")


def trained_in(loop: cst.For) -> set[str]:
    """Return the variables of a loop that hold models or optimizers, by the methods that the loop calls on them."""
    owners = [owner for owner, name in map(method_of, calls(loop)) if owner is not None and name in _TRAINED]
    return {full_name(owner) for owner in owners}


def bound(call: cst.Call, function: cst.FunctionDef) -> Iterator[tuple[str, cst.BaseExpression]]:
    """Yield the parameters that a call gives, with their values."""
    names = [param.name.value for param in (*function.params.posonly_params, *function.params.params)]
    if names[:1] == ["self"]:
        names = names[1:]
    for at, arg in enumerate(call.args):
        if arg.star:
            return
        if arg.keyword is not None:
            yield arg.keyword.value, arg.value
        elif at < len(names):
            yield names[at], arg.value


def block(node: cst.CSTNode) -> list[cst.BaseStatement]:
    """Return the statements of a body; a body on the line of its header becomes lines."""
    body: cst.CSTNode = node.body if hasattr(node, "body") and not isinstance(node, cst.IndentedBlock) else node  # type: ignore[assignment]
    if isinstance(body, cst.IndentedBlock):
        return list(body.body)
    if isinstance(body, cst.SimpleStatementSuite):
        return [cst.SimpleStatementLine([each]) for each in body.body]
    return []


def with_block(node: N, body: Sequence[cst.BaseStatement]) -> N:
    """Return a compound statement with another body; an empty one becomes `pass`."""
    lines: Sequence[cst.BaseStatement] = body or [cst.SimpleStatementLine([cst.Pass()])]
    old = cast("cst.For", node).body
    if isinstance(old, cst.IndentedBlock):
        return node.with_changes(body=old.with_changes(body=lines))
    return node.with_changes(body=cst.IndentedBlock(lines))


def leading(node: cst.BaseStatement) -> list[cst.EmptyLine]:
    """Return the blank lines and comments before a statement."""
    return list(getattr(node, "leading_lines", ()))


def led_by(node: cst.BaseStatement, lines: Sequence[cst.EmptyLine]) -> cst.BaseStatement:
    """Return a statement with other lines before it."""
    return node.with_changes(leading_lines=lines)


def comments(node: cst.CSTNode) -> list[cst.EmptyLine]:
    """Return all comments of a node, each on a separate line; comments for linters are left out."""
    found = (each for each in _walk_all(node) if isinstance(each, cst.Comment))
    return [cst.EmptyLine(comment=each) for each in found if not PRAGMA.match(each.value)]


class Lines:
    """A list of statements under construction: comments of what is dropped go to the next one."""

    def __init__(self) -> None:
        self.body: list[cst.BaseStatement] = []
        self._held: list[cst.EmptyLine] = []
        self._blank: list[cst.EmptyLine] = []

    def add(self, node: cst.BaseStatement) -> None:
        """Append a statement, after the comments that are held."""
        if self._held:
            node = led_by(node, [*self._held, *leading(node)])
            self._held = []
        elif self.body and isinstance(self.body[-1], (cst.FunctionDef, cst.ClassDef)) and not leading(node):
            node = led_by(node, self._blank)
        self._blank = []
        self.body.append(node)

    def drop(self, node: cst.BaseStatement) -> None:
        """Leave a statement out, and hold its comments; a blank line before them stays."""
        kept = comments(node)
        before = leading(node)
        self._blank = self._blank or [line for line in before[:1] if line.comment is None]
        if kept and before and before[0].comment is None:
            kept.insert(0, before[0])
        self._held += kept

    def hold(self, lines: Sequence[cst.EmptyLine]) -> None:
        """Put lines before the next statement."""
        self._held += lines

    def rest(self) -> list[cst.EmptyLine]:
        """Return what is held after the last statement."""
        return self._held


class OfVariables(Change):
    """Changes of variables: attributes, keywords and parameters keep their names."""

    def leave_attribute(self, original: cst.Attribute, updated: cst.Attribute) -> cst.BaseExpression:
        return updated.with_changes(attr=original.attr)

    def leave_arg(self, original: cst.Arg, updated: cst.Arg) -> cst.Arg:
        return updated.with_changes(keyword=original.keyword)

    def leave_param(self, original: cst.Param, updated: cst.Param) -> cst.Param:
        return updated.with_changes(name=original.name)


class _Renames(OfVariables):
    def __init__(self, change: Callable[[cst.Name], cst.BaseExpression]) -> None:
        self._change = change

    def leave_name(self, original: cst.Name, updated: cst.Name) -> cst.BaseExpression:
        return self._change(updated)


def replace_names(node: N, found: Mapping[str, cst.BaseExpression]) -> N:
    """Replace variables that are read; attributes, keywords and parameters keep their names."""
    return changed_by(node, _Renames(lambda name: found.get(name.value, name)))


def matches_code(one: cst.CSTNode | None, other: cst.CSTNode | None) -> bool:
    """Whether two expressions read alike."""
    return one is not None and other is not None and _bare(one) == _bare(other)


def _bare(node: cst.CSTNode) -> str:
    text = text_of(node)
    while text.startswith("(") and text.endswith(")") and text[1:-1].count("(") == text[1:-1].count(")"):
        inner = text[1:-1]
        depth = 0
        for letter in inner:
            depth += (letter == "(") - (letter == ")")
            if depth < 0:
                return text
        text = inner.strip()
    return text


PRAGMA = re.compile(r"#\s*(noqa\b|type:\s*ignore|pyright:\s*ignore|pylint:)")
DECIDE = "# accel: decide"
# pages that decide-notes name
PAGES: Mapping[str, str] = {
    "loop": "docs/train.md",
    "step": "docs/step.md",
    "parts": "docs/step-parts.md",
    "names": "docs/from-accelerate.md",
    "classes": "docs/migrate.md",
    "data": "docs/data.md",
    "contexts": "docs/contexts.md",
    "trackers": "docs/trackers.md",
    "checkpoints": "docs/checkpoints.md",
    "fsdp": "docs/fsdp.md",
    "deepspeed": "docs/deepspeed.md",
    "hooks": "docs/data-parallel.md",
    "memory": "docs/memory.md",
    "metrics": "docs/metrics.md",
    "models": "docs/models.md",
    "meshes": "docs/meshes.md",
    "big": "docs/big-models.md",
    "profile": "docs/profile.md",
    "precision": "docs/precision.md",
    "random": "docs/random.md",
    "notebooks": "docs/notebooks.md",
}

MARK = "#@accel-change"
_MARK = re.compile(rf"^\s*{MARK} (\d+)$")


class Remarks:
    """Comments that passes leave in the tree. Marks of changes in meaning are taken out of the text at the end."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.gone: list[str] = []  # comments of lines that are left out

    def decide(self, what: str, page: str) -> cst.EmptyLine:
        """Return the comment for what has no mechanical counterpart."""
        what = " ".join(what.replace("self__", "self.").split())  # an attribute, as the script has it
        return cst.EmptyLine(comment=cst.Comment(f"{DECIDE} {what} ({PAGES[page]})"))

    def change(self, text: str) -> cst.EmptyLine:
        """Return the mark for a change in meaning, a line before the statement."""
        if text not in self._texts:
            self._texts.append(text)
        return cst.EmptyLine(comment=cst.Comment(f"{MARK} {self._texts.index(text)}"))

    def leave_out(self, node: cst.CSTNode) -> None:
        """Leave the comments of a node out with it: nothing that stays needs them."""
        self.gone += [line.comment.value for line in comments(node) if line.comment]

    def finish(self, text: str) -> tuple[str, tuple[tuple[int, str], ...]]:
        """Take the marks out of a written script; return it, and the changes with their lines."""
        lines: list[str] = []
        changes: dict[tuple[int, str], None] = {}
        for line in text.splitlines(keepends=True):
            if found := _MARK.match(line.rstrip("\r\n")):
                changes[len(lines) + 1, self._texts[int(found[1])]] = None
            else:
                lines.append(line)
        return "".join(lines), tuple(changes)


def decisions(text: str) -> list[tuple[int, str]]:
    """Return the notes that a script holds, with their lines."""
    found: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith(DECIDE):
            found.append((number, line.strip().removeprefix("# accel: ")))
    return found
