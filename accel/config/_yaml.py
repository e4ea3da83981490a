# SPDX-License-Identifier: Apache-2.0
"""YAML files as mappings: by PyYAML's safe loader where it is installed, else by a reader of the plain part."""

from __future__ import annotations

import importlib
from typing import Any, cast

from accel.config._yaml_plain import MOST_DEPTH, decode_plain, malformed
from accel.errors import ConfigError

_MOST_NODES = 100_000  # with each alias counted as all that it stands for


def decode_yaml(text: str, path: str) -> dict[str, Any]:
    """Return the keys and values of a document.

    Args:
        text: the document.
        path: for errors.

    Raises:
        ConfigError: the document is malformed, is no mapping, has a key twice with different values, or is nested or
            repeated by aliases beyond reason; without PyYAML also if it is more than the plain reader knows.
            The message has line and column.
    """
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        return decode_plain(text, path)
    try:
        _check_events(yaml, text, path)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check_keys(yaml, node, path, set())
        values: object = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise malformed(str(error.problem or error.context), path, mark.line + 1, mark.column + 1) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise malformed(f"a character that YAML does not allow: U+{error.character:04X}", path, line, 1) from None
    except (ValueError, OverflowError) as error:  # such as a date that no calendar has
        raise malformed(str(error), path, 1, 1) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError("not a mapping", expected="key: value", got=type(values).__name__, where=path)
    for key in cast("dict[object, object]", values):
        if not isinstance(key, str):
            raise ConfigError("a key that is no text", expected="a name", got=repr(key), where=path, fix="Quote it.")
    return cast("dict[str, Any]", values)


def _check_events(yaml: Any, text: str, path: str) -> None:
    """Refuse what would exhaust a reader: deep nesting, and aliases of aliases."""
    sizes, total = dict[str, int](), 0
    opened: list[tuple[str | None, int]] = []  # anchor of each open collection, and how many nodes came before it
    problem = ""
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, total))
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = total - before
        if isinstance(event, yaml.NodeEvent):
            anchor = event.anchor if isinstance(event, yaml.AliasEvent) else None
            total += sizes.get(anchor, 1) if anchor is not None else 1
            if anchor is not None and anchor in (name for name, _ in opened):
                problem = "a value that contains itself"
        if len(opened) > MOST_DEPTH:
            problem = f"nested more than {MOST_DEPTH} deep"
        if total > _MOST_NODES:
            problem = f"more than {_MOST_NODES} values"
        if problem:
            mark = event.start_mark
            raise malformed(problem, path, mark.line + 1, mark.column + 1)


def _check_keys(yaml: Any, node: Any, path: str, seen: set[int]) -> None:
    """Refuse a key that stands twice in a mapping with different values; the loader would take the last."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_keys(yaml, value, path, seen)
        return
    found = dict[str, Any]()
    for key, value in node.value:
        first = found.setdefault(key.value, value) if isinstance(key, yaml.ScalarNode) else value
        if first is not value and _plain(yaml, first) != _plain(yaml, value):
            mark = key.start_mark
            raise malformed(f"{key.value} stands twice, with different values", path, mark.line + 1, mark.column + 1)
        _check_keys(yaml, value, path, seen)


def _plain(yaml: Any, node: Any) -> Any:
    """Return a node as values that can be compared."""
    if isinstance(node, yaml.MappingNode):
        return node.tag, [(_plain(yaml, key), _plain(yaml, value)) for key, value in node.value]
    return node.tag, [_plain(yaml, each) for each in node.value] if isinstance(node, yaml.SequenceNode) else node.value
