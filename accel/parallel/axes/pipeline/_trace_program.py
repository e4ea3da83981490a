# SPDX-License-Identifier: Apache-2.0
"""An exported program read: its operators, the memory that they share, and values that any stage computes again. Pure.

An exported graph is flat: parameters, buffers and constants are inputs with the model's own names.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from accel.parallel._private import is_operator

_RANDOM = ("dropout", "rand", "bernoulli", "normal", "multinomial", "exponential", "uniform", "accel.draw")


class Program(NamedTuple):
    """An exported graph, read.

    Attributes:
        owner: module of the graph, with the graphs of its blocks without gradient.
        body: operators in order.
        held: name of each input that is the model's own.
        trained: those of them that are parameters.
        bare: those of them that are the `data` of a parameter, whose name they have.
        inputs: the call's flat inputs.
        output: the node of the results.
        memory: number of the memory of each node, the same for views of one another.
        changed: memories that an operator changes, by operator.
        fresh: nodes that any stage computes again from the call's inputs.
    """

    owner: fx.GraphModule
    body: tuple[fx.Node, ...]
    held: Mapping[fx.Node, str]
    trained: frozenset[fx.Node]
    inputs: tuple[fx.Node, ...]
    output: fx.Node
    memory: Mapping[fx.Node, int]
    changed: Mapping[fx.Node, frozenset[int]]
    fresh: frozenset[fx.Node]
    bare: frozenset[fx.Node] = frozenset()


def read_program(program: ExportedProgram, data: Mapping[str, str] = {}) -> Program:
    """Read an exported program. Its graph stays as it is.

    `data`: the parameter of each constant that is the `data` of one, by name.
    """
    graph = program.graph_module.graph
    held: dict[fx.Node, str] = {}
    trained: set[fx.Node] = set()
    bare: set[fx.Node] = set()
    inputs: list[fx.Node] = []
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(node)
            continue
        name = str(spec.target)
        held[node] = data.get(name, name)
        if name in data:
            bare.add(node)
        if spec.kind is InputKind.PARAMETER:
            trained.add(node)
    body = tuple(node for node in graph.nodes if node.op not in ("placeholder", "output") and not _copies_itself(node))
    memory = _memories(placeholders, body, held)
    changed = {node: frozenset(memory[each] for each in _changed_by(node)) for node in body}
    output = next(node for node in graph.nodes if node.op == "output")
    fresh = _fresh(body, trained | bare, memory, frozenset[int]().union(*changed.values()))
    return Program(
        program.graph_module,
        body,
        held,
        frozenset(trained),
        tuple(inputs),
        output,
        memory,
        changed,
        fresh,
        frozenset(bare),
    )


def first_operators(body: Sequence[fx.Node]) -> dict[str, int]:
    """Return the place of the first operator of each module that has one, by path."""
    found: dict[str, int] = {}
    for at, node in enumerate(body):
        for path in _paths(node):
            parts = path.split(".")
            for depth in range(len(parts)):
                _ = found.setdefault(".".join(parts[: depth + 1]), at)
    return found


def _paths(node: fx.Node) -> list[str]:
    stack = cast("Mapping[str, tuple[str, Any]]", node.meta.get("nn_module_stack") or {})
    # a module that is called twice is named with "@1" the second time
    paths = [path.partition("@")[0] for path, _ in stack.values() if path]
    # torch's word for an operator that it saw in no module
    return [path for path in paths if not path.startswith("_") or "empty_nn_module_stack" not in path]


def _schema(node: fx.Node) -> Any:
    return cast(Any, node.target)._schema if is_operator(node.target) else None


def _changes(node: fx.Node) -> bool:
    schema = _schema(node)
    return schema is not None and schema.is_mutable


def _changed_by(node: fx.Node) -> list[fx.Node]:
    """The values that an operator changes in place. The schema of aten.batch_norm does not name its statistics."""
    if "batch_norm" in str(node.target):
        return [each for each in node.args[3:5] if isinstance(each, fx.Node)]
    schema = _schema(node)
    found: list[fx.Node] = []
    if schema is not None and schema.is_mutable:
        for at, argument in enumerate(schema.arguments):
            given = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += _nodes(given)
    for inner in _inner_graphs(node):
        names = [each for each in inner.graph.nodes if each.op == "placeholder"]
        inside = {written for each in inner.graph.nodes for written in _changed_by(each)}
        given = node.args[-len(names) :] if names else ()
        found += [each for name, each in zip(names, given, strict=True) if name in inside and isinstance(each, fx.Node)]
    return found


def _nodes(given: object) -> list[fx.Node]:
    found: list[fx.Node] = []
    _ = fx.map_arg(cast(Any, given), lambda node: found.append(node))
    return found


def _inner_graphs(node: fx.Node) -> Iterator[fx.GraphModule]:
    """The graphs of a block without gradient or autocast, which torch makes one operator."""
    owner = node.graph.owning_module
    for each in node.args:
        if isinstance(each, fx.Node) and each.op == "get_attr" and owner is not None:
            inner = getattr(owner, str(each.target), None)
            if isinstance(inner, fx.GraphModule):
                yield inner


def _draws(node: fx.Node) -> bool:
    if any(word in str(node.target) for word in _RANDOM):
        return True
    if "scaled_dot_product" in str(node.target):
        given = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return not isinstance(given, float) or given != 0.0
    return any(_draws(each) for inner in _inner_graphs(node) for each in inner.graph.nodes)


def _copies_itself(node: fx.Node) -> bool:
    """Whether a node is `buffer.copy_(buffer.add_(1))`, as `self.buffer += 1` leaves it: it has no effect, but autograd
    sees a change."""
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return False
    source = node.args[1]
    while isinstance(source, fx.Node) and source is not node.args[0] and _changes(source):
        source = source.args[0]
    return source is node.args[0]


def _memories(
    placeholders: Iterable[fx.Node], body: Iterable[fx.Node], held: Mapping[fx.Node, str]
) -> dict[fx.Node, int]:
    """Number the memory of each node: views and results of changes in place have that of their source, and a parameter
    that of its `data`."""
    parent: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while parent.setdefault(node, node) is not node:
            node = parent[node]
        return node

    named: dict[str, fx.Node] = {}
    for node in placeholders:
        _ = root(node)
        if node in held:
            parent[root(node)] = root(named.setdefault(held[node], node))
    for node in body:
        for source in _shared_with(node):
            parent[root(node)] = root(source)
    numbers: dict[fx.Node, int] = {}
    return {node: numbers.setdefault(root(node), len(numbers)) for node in (*placeholders, *body)}


def _shared_with(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory a node's result may be in."""
    if node.target is operator.getitem:
        return node.all_input_nodes
    schema = _schema(node)
    if schema is None:
        return [each for each in node.all_input_nodes if each.op != "get_attr"] if node.op == "call_function" else []
    found: list[fx.Node] = []
    given = [*node.args, *node.kwargs.values()]
    names = [*schema.arguments[: len(node.args)], *(each for each in schema.arguments if each.name in node.kwargs)]
    # without training, dropout returns its input
    may = "dropout" in str(node.target)
    for argument, value in zip(names, given, strict=False):
        if argument.alias_info is not None or may:
            found += _nodes(value)
    return found


def _fresh(
    body: Iterable[fx.Node], trained: set[fx.Node], memory: Mapping[fx.Node, int], changed: frozenset[int]
) -> frozenset[fx.Node]:
    """Nodes that depend on no parameter, draw nothing and share no memory with what is changed; and numbers, which
    their tensors give again."""
    found: set[fx.Node] = set()
    for node in body:
        sources = [each for each in node.all_input_nodes if each.op != "get_attr"]
        known = all(
            each not in trained and memory[each] not in changed if each.op == "placeholder" else each in found
            for each in sources
        )
        pure = not _changes(node) and memory[node] not in changed and not _draws(node)
        is_number = node.op == "call_function" and isinstance(
            node.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool
        )
        if node.op == "get_attr" or (pure and (known or is_number)):
            found.add(node)
    return frozenset(found)
