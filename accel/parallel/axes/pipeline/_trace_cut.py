# SPDX-License-Identifier: Apache-2.0
"""An exported program cut into stages: runs of neighbouring operators, and the values that pass between them. Pure.

A stage begins at the first operator of a module. A value that a later stage reads is passed on, through the stages
between too. One that depends on the call's inputs alone, such as a mask, is computed again in each stage that reads it.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from accel.errors import StageError
from accel.parallel.axes.pipeline._trace_program import Program, first_operators
from accel.topology import divide

_FIX = "Begin the stage at another module: Plan(stages=[[...], [...]])."


class Crossing(NamedTuple):
    """A tensor that a stage passes on.

    Attributes:
        name: of its operator in the graph.
        value: a tensor without memory, whose sizes may be symbols.
        differentiable: whether a gradient travels back.
    """

    name: str
    value: torch.Tensor
    differentiable: bool


class TracedStage(NamedTuple):
    """One stage of a program.

    Attributes:
        graph: computes the stage, from the tensors that it holds, the call's inputs and what it takes, in this order.
        held: names of the parameters, buffers and constants that it reads.
        inputs: numbers of the call's flat inputs that it reads.
        takes, gives: passed from the stage before and to the next one; the last one gives the call's outputs.
        bare: places in `held` of what is the `data` of a parameter.
    """

    graph: fx.GraphModule
    held: tuple[str, ...]
    inputs: tuple[int, ...]
    takes: tuple[Crossing, ...]
    gives: tuple[Crossing, ...]
    bare: frozenset[int]


def begins_of(program: Program, stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return the place at which each stage begins, from paths of its modules, or raise `StageError`."""
    places = first_operators(program.body)
    begins = [0]
    for number, paths in enumerate(stages):
        known = [places[path] for path in paths if path in places]
        if not known:
            raise StageError(
                "no operator of a stage's modules is in the exported graph",
                expected=f"one of stage {number}'s modules that the forward calls",
                got=", ".join(paths) or "no module",
                where=f'Plan(cut="trace"), stage {number}',
                fix=_FIX,
            )
        if number:
            begins.append(min(known))
    if any(later <= earlier for earlier, later in itertools.pairwise(begins)):
        order = ", ".join(f"stage {number} at operator {begin}" for number, begin in enumerate(begins))
        raise StageError(
            "the stages are not in the order in which the forward calls their modules",
            expected="stages that begin one behind the other",
            got=order,
            where='Plan(cut="trace")',
            fix=_FIX,
        )
    return tuple(begins)


def cut_program(program: Program, begins: Sequence[int]) -> tuple[TracedStage, ...]:
    """Cut a program at the places where stages begin, or raise `StageError` for one that this would change."""
    homes = _homes(program, begins)
    count = len(begins)
    _check_buffers(program, homes)
    results = dict.fromkeys(program.output.all_input_nodes)
    own = [[node for node in program.body if homes[node] == number] for number in range(count)]
    reads = [
        _reads(program, homes, number, own[number], results if number == count - 1 else ()) for number in range(count)
    ]
    alive = [_alive(program, homes, reads, number) for number in range(count - 1)]
    for number, nodes in enumerate(alive):
        _check_memory(program, homes, number, nodes)
    differentiable = _differentiable(program)
    passed = [tuple(_passed(node, node in differentiable) for node in nodes) for nodes in alive]
    stages: list[TracedStage] = []
    for number in range(count):
        takes = alive[number - 1] if number else []
        gives = alive[number] if number < count - 1 else None
        graph, held, inputs = _build(program, homes, number, reads[number], takes, gives)
        names = tuple(program.held[node] for node in held)
        bare = frozenset(at for at, node in enumerate(held) if node in program.bare)
        before = passed[number - 1] if number else ()
        behind = passed[number] if number < count - 1 else ()
        stages.append(TracedStage(graph, names, inputs, before, behind, bare))
    return tuple(stages)


def choose_stages(program: Program, count: int, blocks: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Return a path for each stage, so that the costliest stage costs least: stages begin at blocks if there are
    enough, else at any module. Costs are estimated numbers of operations."""
    places = first_operators(program.body)
    sums = [0.0]
    for node in program.body:
        sums.append(sums[-1] + _operations(node))
    starts = _starts(places, blocks)
    if len(starts) < count:
        starts = _starts(places, places)
    if len(starts) < count:
        raise StageError(
            "fewer modules than stages",
            expected=f"at least {count}",
            got=str(len(starts)),
            where='Plan(cut="trace")',
            fix="Take fewer ranks along pp or fewer stages_per_rank.",
        )
    at = sorted(starts)
    ends = [*at[1:], len(program.body)]
    costs = [sums[end] - sums[begin] for begin, end in zip([0, *at[1:]], ends, strict=True)]
    begins = [0, *divide(costs, count)[:-1]]
    return tuple((starts[at[begin]],) for begin in begins)


def _starts(places: Mapping[str, int], paths: Iterable[str]) -> dict[int, str]:
    """The outermost module that begins at each place."""
    found: dict[int, str] = {}
    for path in sorted((path for path in paths if path in places), key=lambda path: path.count(".")):
        _ = found.setdefault(places[path], path)
    return found


_PRODUCTS = ("linear", "matmul", "mm.", "addmm", "bmm", "conv", "attention", "einsum")


def _operations(node: fx.Node) -> float:
    """The estimated number of operations of a node: products by their inner size, others by their results."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0.0
    results = float(math.prod(_hinted(size) for size in value.shape))
    if not any(word in str(node.target) for word in _PRODUCTS):
        return results
    sources = [each.meta.get("val") for each in node.all_input_nodes]
    weights = [each for each in sources if isinstance(each, torch.Tensor) and each.ndim > 1]
    if not weights:
        return results
    second = weights[min(1, len(weights) - 1)]
    inner = (
        math.prod(_hinted(size) for size in second.shape[1:])
        if "conv" in str(node.target)
        else _hinted(second.shape[-1])
    )
    return 2 * results * inner


def _hinted(size: Any) -> int:
    """A size, with 4 in the place of the number of rows."""
    return size if isinstance(size, int) else int(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, 4)))


def model_line(text: str) -> str:
    """Return the last line of a model's code that an error of torch's export names; nothing if it names none."""
    found = [line.strip() for line in text.splitlines() if re.match(r'\s*File ".*", line \d+', line)]
    own = [line for line in found if "site-packages/torch/" not in line]
    return (own or found or [""])[-1]


def _homes(program: Program, begins: Sequence[int]) -> dict[fx.Node, int]:
    """The stage that computes each operator."""
    homes: dict[fx.Node, int] = {}
    number = 0
    places = {node: at for at, node in enumerate(program.body)}
    for node in program.body:
        while number + 1 < len(begins) and places[node] >= begins[number + 1]:
            number += 1
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if node.target is operator.getitem and source in homes:  # several values do not pass as one
            homes[node] = homes[source]
        elif node.target is torch.ops.aten.copy_.default and not node.users and node.args[0] in program.held:
            # export writes buffers that are assigned at the end; the value's stage has the buffer
            value = cast(fx.Node, node.args[1])
            homes[node] = homes.get(value, number)
        else:
            homes[node] = number
    return homes


def _check_buffers(program: Program, homes: Mapping[fx.Node, int]) -> None:
    """Raise `StageError` for a buffer that one stage changes and another reads, or an input that is changed."""
    changed = frozenset[int]().union(*program.changed.values())
    for node in (*program.held, *program.inputs):
        if program.memory[node] not in changed:
            continue
        shared = [each for each, number in program.memory.items() if number == program.memory[node]]
        stages = {homes[user] for each in shared for user in each.users if user in homes}
        if len(stages) > 1:
            name = program.held.get(node, f"the input {node.name}")
            raise StageError(
                "a tensor that one stage changes is read in another",
                expected="stages that share no tensor that the forward changes",
                got=f"{name}, in the stages {', '.join(map(str, sorted(stages)))}",
                where='Plan(cut="trace")',
                fix=_FIX,
            )


def _reads(
    program: Program,
    homes: Mapping[fx.Node, int],
    number: int,
    own: Sequence[fx.Node],
    results: Iterable[fx.Node],
) -> dict[fx.Node, None]:
    """The nodes that a stage computes or takes: its own operators, and fresh ones that it needs."""
    found: dict[fx.Node, None] = {}
    waiting = [node for node in own if node not in program.fresh] + [*results]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found[node] = None
        if node in program.fresh or homes.get(node) == number:
            waiting += node.all_input_nodes
    return found


def _alive(
    program: Program, homes: Mapping[fx.Node, int], reads: Sequence[Mapping[fx.Node, None]], number: int
) -> list[fx.Node]:
    """The nodes that pass from a stage to the next one, in the order of the graph."""
    later = {node for each in reads[number + 1 :] for node in each}
    found = [node for node in program.body if node in later and homes[node] <= number and node not in program.fresh]
    several = [node.name for node in found if not isinstance(node.meta.get("val"), torch.Tensor)]
    if several or not found:
        raise StageError(
            f"stage {number} passes no tensors on",
            expected="one tensor or more that the stages behind it read",
            got=", ".join(several) or "nothing",
            where='Plan(cut="trace")',
            fix=_FIX,
        )
    return found


def _check_memory(program: Program, homes: Mapping[fx.Node, int], number: int, alive: Sequence[fx.Node]) -> None:
    """Raise `StageError` where two views of a memory pass on that a later stage changes: they would be copies."""
    later = frozenset[int]().union(*(program.changed[node] for node in program.body if homes[node] > number))
    seen: dict[int, fx.Node] = {}
    for node in alive:
        memory = program.memory[node]
        if memory in later and memory in seen:
            raise StageError(
                "a stage changes a tensor in place that another stage has a view of",
                expected="changes in place of a stage's own tensors",
                got=f"{seen[memory].name} and {node.name}, which pass from stage {number} to stage {number + 1}",
                where='Plan(cut="trace")',
                fix=_FIX,
            )
        seen[memory] = node


def _differentiable(program: Program) -> set[fx.Node]:
    """Nodes with a gradient: of floating point, and computed from a parameter."""
    found: set[fx.Node] = set(program.trained)
    for node in program.body:
        value = node.meta.get("val")
        floats = not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
        if (
            floats
            and node.target is not torch.ops.aten.detach.default
            and any(s in found for s in node.all_input_nodes)
        ):
            found.add(node)
    return found


def _passed(node: fx.Node, differentiable: bool) -> Crossing:
    return Crossing(node.name, cast(torch.Tensor, node.meta["val"]), differentiable)


def _build(
    program: Program,
    homes: Mapping[fx.Node, int],
    number: int,
    reads: Mapping[fx.Node, None],
    takes: Sequence[fx.Node],
    gives: Sequence[fx.Node] | None,
) -> tuple[fx.GraphModule, list[fx.Node], tuple[int, ...]]:
    """The graph of a stage, what it holds, and the numbers of the inputs that it reads."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    held = [node for node in program.held if node in reads]
    inputs = [at for at, node in enumerate(program.inputs) if node in reads]
    for node in (*held, *(program.inputs[at] for at in inputs), *takes):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    own = [node for node in program.body if homes[node] == number]
    changed = frozenset[int]().union(*(program.changed[node] for node in own))
    for node in takes:
        if program.memory[node] in changed:  # a leaf that needs a gradient cannot be changed
            copies[node] = graph.call_function(torch.ops.aten.clone.default, (copies[node],))
    for node in program.body:
        if node in reads and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    if gives is None:
        _ = graph.output(fx.map_arg(program.output.args[0], copies.__getitem__))
    else:
        outer = [
            graph.call_function(torch.ops.aten.clone.default, (copies[node],)) if node in takes else copies[node]
            for node in gives
        ]
        _ = graph.output(tuple(outer))
    inner = {str(node.target): getattr(program.owner, str(node.target)) for node in reads if node.op == "get_attr"}
    module = fx.GraphModule(inner, graph)
    return module, held, tuple(inputs)
