# SPDX-License-Identifier: Apache-2.0
"""Blocks of the main process that make calls of every rank: what stays under the condition, and what leaves it."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from accel.migrate._script import Script
from accel.migrate._tree import (
    block,
    called,
    calls,
    full_name,
    leading,
    led_by,
    loads,
    method_of,
    targets,
    text_of,
    walk,
    with_block,
)

# methods that have collective counterparts, which every rank calls
EVERY = ("init_trackers", "save_state", "log", "save", "save_model", "get_state_dict")


def calls_all(script: Script, node: cst.CSTNode) -> bool:
    """Whether a node has calls that every rank makes."""
    return any(script.method(call) in EVERY for call in calls(node))


def opened(script: Script, node: cst.If) -> list[cst.BaseStatement]:
    """Return a block of the main process as lines: calls of every rank without the condition, others under it."""
    guard, other = _parts(script, node.test)
    lines = _split(script, block(node), guard)
    if other is not None:
        return [with_block(node, lines).with_changes(test=other)]
    return [led_by(lines[0], [*leading(node), *leading(lines[0])]), *lines[1:]]


def _parts(script: Script, test: cst.BaseExpression) -> tuple[cst.BaseExpression, cst.BaseExpression | None]:
    """Return the part of a condition that asks for the main process, and the other part."""
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        for part, other in ((test.left, test.right), (test.right, test.left)):
            if script.is_attribute(part, "is_main_process"):
                return part, other
    return test, None


def _split(script: Script, body: Sequence[cst.BaseStatement], guard: cst.BaseExpression) -> list[cst.BaseStatement]:
    free = _free(script, body)
    lines: list[cst.BaseStatement] = []
    held: list[cst.BaseStatement] = []
    for node, leaves in zip(body, free, strict=True):
        if not leaves:
            held.append(node)
            continue
        lines += _guarded(held, guard)
        held = []
        inner = isinstance(node, cst.If) and node.orelse is None and calls_all(script, node)
        lines.append(with_block(node, _split(script, block(node), guard)) if inner else node)
    return [*lines, *_guarded(held, guard)]


def _guarded(held: Sequence[cst.BaseStatement], guard: cst.BaseExpression) -> list[cst.BaseStatement]:
    if not held:
        return []
    built = cst.If(test=guard, body=cst.IndentedBlock([led_by(held[0], []), *held[1:]]))
    return [led_by(built, leading(held[0]))]


def _free(script: Script, body: Sequence[cst.BaseStatement]) -> list[bool]:
    """Return which lines leave the condition: calls of every rank, what they read, and messages next to them."""
    found: list[bool] = []
    wanted: set[str] = set()
    for node in reversed(body):
        call = called(node)
        owner = full_name(method_of(call)[0] or call.func) if call is not None else ""
        feeds = set(targets(node)) & wanted or (not targets(node) and owner in wanted)
        leaves = calls_all(script, node) or bool(feeds) or _rotates(node)
        wanted |= loads(node) if leaves else set()
        found.insert(0, leaves)
    for at, node in enumerate(body):
        found[at] = found[at] or (at > 0 and found[at - 1] and _speaks(script, node))
    return found


def _rotates(node: cst.BaseStatement) -> bool:
    """Whether a line deletes older checkpoints, which a limit of `save_state` replaces."""
    return (
        isinstance(node, cst.If)
        and text_of(node.test).endswith(" is not None")
        and any(full_name(call.func) == "shutil.rmtree" for call in calls(node))
    )


def _speaks(script: Script, node: cst.BaseStatement) -> bool:
    """Whether a line is a message of a logger that speaks on rank 0 alone."""
    call = called(node)
    return call is not None and not targets(node) and full_name(call.func).partition(".")[0] in script.loggers


def asks_main(script: Script, test: cst.CSTNode) -> bool:
    """Whether a condition asks for the main process."""
    return any(script.is_attribute(each, "is_main_process") for each in walk(test))
