# SPDX-License-Identifier: Apache-2.0
"""Blocks of a traced stage whose operators run again in backward, as torch's export does not keep checkpoints."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from accel.errors import StageError
from accel.mixins import remove_mixin
from accel.parallel._compile import Recomputed, recomputed_call
from accel.parallel.axes.tensor import Division

Kept = tuple[str, ...]  # names of the operators whose outputs are kept


class RecomputedBlock(nn.Module):
    """The operators of one block, computed again in backward.

    Args:
        graph: of the block.
        kept: names of the operators whose outputs are kept.
        division: of the model among ranks along tp; None without tp.
    """

    def __init__(self, graph: fx.GraphModule, kept: Kept, division: Division | None) -> None:
        super().__init__()
        self.graph = graph
        self.kept = kept
        self._division = division

    def forward(self, *values: Any) -> Any:
        """Run the graph, remembering its inputs and kept outputs only."""
        return recomputed_call(self._run, self.kept, *values)

    def _run(self, *values: Any) -> Any:
        if self._division is None:
            return self.graph(*values)
        with self._division.running():  # torch stops a recomputed forward early
            return self.graph(*values)


def with_blocks(
    stage: fx.GraphModule, blocks: Mapping[str, Kept], fresh: frozenset[str], division: Division | None = None
) -> fx.GraphModule:
    """Return a stage's graph in which each block is one call that runs again in backward.

    `blocks`: paths of modules. `fresh`: names of nodes that depend on inputs alone, which stay outside. `division`: of
    the stage's ranks along tp.
    """
    runs = _runs(stage.graph, blocks, fresh)
    if not runs:
        return stage
    graph = fx.Graph()
    held: dict[str, Any] = {
        str(node.target): getattr(stage, str(node.target)) for node in stage.graph.nodes if node.op == "get_attr"
    }
    run_of = {node: at for at, (_, nodes) in enumerate(runs) for node in nodes}
    copies: dict[fx.Node, fx.Node] = {}

    def emit(node: fx.Node) -> fx.Node:
        if node not in copies:
            for source in node.all_input_nodes:
                _ = emit(source)
            if node in run_of:
                path, nodes = runs[run_of[node]]
                wrap = partial(RecomputedBlock, kept=blocks[path.partition("@")[0]], division=division)
                _call(graph, copies, held, stage, nodes, wrap, emit)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    for node in stage.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
    for node in stage.graph.nodes:
        _ = emit(node)
    return fx.GraphModule(held, graph)


def _runs(graph: fx.Graph, blocks: Mapping[str, Kept], fresh: frozenset[str]) -> list[tuple[str, list[fx.Node]]]:
    """Neighbouring operators of one block, fresh ones left out."""
    runs: list[tuple[str, list[fx.Node]]] = []
    latest = ""
    outside: set[fx.Node] = set()
    for node in graph.nodes:
        # sizes of a block's own values are fresh too, and stay inside
        if node.name in fresh and all(each.op != "call_function" or each in outside for each in node.all_input_nodes):
            outside.add(node)
        if node.op != "call_function" or node in outside:
            continue
        path = _block_of(node, blocks)
        if path and path == latest:
            runs[-1][1].append(node)
        elif path:
            runs.append((path, [node]))
        latest = path
    return runs


def recomputed(module: nn.Module) -> Kept | None:
    """Return the operators whose outputs a checkpointed module keeps in training; None for another module."""
    if isinstance(module, Recomputed):
        return module.kept
    return () if _of_transformers(module) and module.training else None


def leave_whole(module: nn.Module) -> None:
    """Take a module's checkpoint away. Mutates it."""
    if isinstance(module, Recomputed):
        remove_mixin([module], Recomputed)
    if _of_transformers(module):
        cast(Any, module).gradient_checkpointing = False


def _of_transformers(module: nn.Module) -> bool:
    """Whether a module is a layer of transformers that checkpoints its own call."""
    is_layer = any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
    return is_layer and bool(getattr(module, "gradient_checkpointing", False))


def _block_of(node: fx.Node, blocks: Mapping[str, Kept]) -> str:
    """The path of the outermost block of an operator, with the number of the call; nothing outside of blocks."""
    stack = cast("Mapping[str, tuple[str, Any]]", node.meta.get("nn_module_stack") or {})
    return next((path for path, _ in stack.values() if path.partition("@")[0] in blocks), "")


def _call(
    graph: fx.Graph,
    copies: dict[fx.Node, fx.Node],
    held: dict[str, Any],
    stage: fx.GraphModule,
    nodes: Sequence[fx.Node],
    wrap: Callable[[fx.GraphModule], RecomputedBlock],
    emit: Any,
) -> None:
    """Put one call in the place of some nodes."""
    own = set(nodes)
    sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in own)
    inner_graphs = [each for each in sources if each.op == "get_attr"]
    values = [each for each in sources if each.op != "get_attr"]
    results = [node for node in nodes if any(user not in own for user in node.users)]
    inside = fx.Graph()
    local: dict[fx.Node, fx.Node] = {each: inside.placeholder(each.name) for each in values}
    for node in (*inner_graphs, *nodes):
        local[node] = inside.node_copy(node, local.__getitem__)
    _ = inside.output(tuple(local[node] for node in results))
    owned = {str(each.target): getattr(stage, str(each.target)) for each in inner_graphs}
    name = f"block_{len(held)}"
    held[name] = wrap(fx.GraphModule(owned, inside))
    call = graph.call_module(name, tuple(emit(each) for each in values))
    for at, node in enumerate(results):
        copies[node] = graph.call_function(operator.getitem, (call, at))
    for node in nodes:
        _ = copies.setdefault(node, call)  # read inside of the block alone


class OwnBackwards(TorchFunctionMode):
    """Notes functions with a backward of their own, which a graph would replace by the derivative of their forward."""

    def __init__(self) -> None:
        super().__init__()
        self._names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        result = func(*args, **(kwargs or {}))
        self.look((args, kwargs, result))
        return result

    def look(self, tree: object) -> None:
        """Note the functions that have made tensors of a nesting."""
        for each in pytree.tree_leaves(tree):
            if isinstance(each, torch.Tensor) and isinstance(each.grad_fn, torch.autograd.function.BackwardCFunction):
                self._names.add(type(each.grad_fn).__name__)

    def check(self) -> None:
        """Raise `StageError` for a function whose backward is another one than a graph's."""
        for kind in _below(torch.autograd.Function):
            if f"{kind.__name__}Backward" not in self._names or kind.__module__.partition(".")[0] in ("torch", "accel"):
                continue
            if not _is_derivative(kind):
                raise StageError(
                    "the forward calls a function with a backward of its own, which a graph would lose",
                    expected="operators of torch, whose derivatives are the gradients",
                    got=f"{kind.__name__} of {kind.__module__}",
                    where='Plan(cut="trace")',
                    fix="Write it by torch's operators, such as x + (value - x).detach() for a gradient that passes "
                    "straight through. Or leave pp out: the strategy fsdp along dp trains it.",
                )


def _below(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


class _NoContext:
    """Stands for what a function keeps for its backward."""

    def __getattr__(self, _name: str) -> Any:
        return _nothing


def _nothing(*_values: object) -> None:
    return None


def _is_derivative(kind: Any) -> bool:
    """Whether the backward of a function of one tensor is the derivative of its forward."""
    own, plain = (torch.linspace(-2, 2, 9, dtype=torch.float64, device="cpu").requires_grad_() for _ in range(2))
    try:
        with torch.enable_grad():
            kind.apply(own).sum().backward()
            kind.forward(_NoContext(), plain).sum().backward()
    except Exception:  # of other arguments, or without a gradient
        return False
    return own.grad is not None and plain.grad is not None and torch.allclose(own.grad, plain.grad, rtol=0, atol=1e-6)
