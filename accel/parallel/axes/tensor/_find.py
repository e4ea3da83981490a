# SPDX-License-Identifier: Apache-2.0
"""Candidates for tensor-parallel styles in a recorded forward: projections of attention, and pairs of layers. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from accel.parallel.axes.tensor._trace import ForwardTrace, Node
from accel.topology import TensorStyle

_LAYER, _EMBEDDING, _ATTENTION = "linear layer", "embedding", "scaled_dot_product_attention"
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "__matmul__", "__rmatmul__", "einsum", "addbmm"})
# Functions that mix elements: no path of a hidden value from one layer of a pair to the other.
_MIXING = _PRODUCTS | {
    "softmax", "layer_norm", "rms_norm", "group_norm", "batch_norm", "mean", "sum", "var", "std", "norm", "cumsum",
    "conv1d", "conv2d", "conv3d", "topk", "max", "amax", "multi_head_attention_forward", "argmax", "sort", _ATTENTION,
}  # fmt: skip


class Candidate(NamedTuple):
    """Styles that may divide some layers of a module.

    Attributes:
        unit: path of the module that calls all of them, directly or not.
        layers: their paths.
        options: styles by path, in the order in which to try them.
        at: number of the last layer's node.
    """

    unit: str
    layers: tuple[str, ...]
    options: tuple[Mapping[str, TensorStyle], ...]
    at: int


def candidates(trace: ForwardTrace, outputs: Mapping[str, int], inputs: Mapping[str, int]) -> list[Candidate]:
    """Return what may be divided, in the order of the forward. `outputs` and `inputs` are the numbers of features of
    each layer, by path."""
    graph = _Graph(trace)
    found = [*_attentions(graph, outputs), *_pairs(graph, outputs, inputs)]
    return sorted(found, key=lambda each: each.at)


def common(paths: Iterable[str]) -> str:
    """Return the path of the module around all of these."""
    split = [path.split(".")[:-1] for path in paths]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*split, strict=False))
    return ".".join(parts[0] for parts in shared)


class _Graph:
    """A trace with ways back and forth."""

    def __init__(self, trace: ForwardTrace) -> None:
        self.nodes = trace.nodes
        self.called = {call.path for call in trace.calls}
        self._writers: dict[int, list[int]] = defaultdict(list)
        self._readers: dict[int, list[int]] = defaultdict(list)
        for at, node in enumerate(trace.nodes):
            for value in node.outputs:
                self._writers[value].append(at)
            for value in node.inputs:
                self._readers[value].append(at)

    def back(self, values: Iterable[int], before: int, stop: Callable[[Node], bool]) -> set[int]:
        """Nodes at which the ways back from values end; -1 for a value that no node made."""
        found: set[int] = set()
        seen: set[int] = set()
        todo = [(value, before) for value in values]
        while todo:
            value, end = todo.pop()
            at = max((each for each in self._writers[value] if each < end), default=-1)
            if at < 0 or stop(self.nodes[at]):
                found.add(at)
            elif at not in seen:
                seen.add(at)
                todo += [(each, at) for each in self.nodes[at].inputs]
        return found

    def on(self, at: int, stop: Callable[[Node], bool]) -> set[int]:
        """Nodes at which the ways on from a node end."""
        found: set[int] = set()
        seen: set[int] = set()
        todo = [at]
        while todo:
            now = todo.pop()
            for value in self.nodes[now].outputs:
                for each in self._readers[value]:
                    if each <= now or each in seen:
                        continue
                    seen.add(each)
                    if stop(self.nodes[each]):
                        found.add(each)
                    else:
                        todo.append(each)
        return found

    def unit(self, paths: Iterable[str]) -> str:
        """The innermost module around layers that is called."""
        path = common(paths)
        while path and path not in self.called:
            path = path.rpartition(".")[0]
        return path


def _is_end(node: Node) -> bool:
    return bool(node.path)


def _is_layer(node: Node) -> bool:
    return node.name == _LAYER


class _Sources(NamedTuple):
    query: set[int]
    key: set[int]
    value: set[int]
    product: int
    biases: set[int]


def _attentions(graph: _Graph, outputs: Mapping[str, int]) -> Iterator[Candidate]:
    for at, node in enumerate(graph.nodes):
        found = _fused(graph, at) if node.name == _ATTENTION else _written_out(graph, at)
        if found is None:
            continue
        sinks = graph.on(found.product, _is_layer)
        roles = [found.query, found.key, found.value]
        if len(sinks) == 1 and all(roles):
            sink = next(iter(sinks))
            options = tuple(_options(graph, found, sink, outputs))
            layers = tuple(dict.fromkeys(path for each in options for path, style in each.items() if style in _DIVIDED))
            yield Candidate(graph.unit(options[0]), layers, options, sink)


_DIVIDED = ("colwise", "packed_colwise_2", "packed_colwise_3", "multi_query_colwise", "rowwise")


def _fused(graph: _Graph, at: int) -> _Sources:
    node = graph.nodes[at]
    query, key, value = (_layers(graph, [each], at) for each in node.inputs[:3])
    return _Sources(query, key, value, at, _embeddings(graph, node.inputs[3:], at))


def _written_out(graph: _Graph, at: int) -> _Sources | None:
    """Attention as a product, a softmax, and another product."""
    node = graph.nodes[at]
    if node.name not in ("softmax", "_softmax"):
        return None

    def ends(each: Node) -> bool:
        return each.name in _PRODUCTS or _is_end(each)

    scores = [each for each in graph.back(node.inputs, at, ends) if each >= 0 and graph.nodes[each].name in _PRODUCTS]
    after = [each for each in graph.on(at, ends) if graph.nodes[each].name in _PRODUCTS]
    if not scores or len(after) != 1:
        return None
    product = after[0]
    operands = [(graph.nodes[each].inputs[-2:], each) for each in scores]
    query = set[int]().union(*(_layers(graph, pair[:1], each) for pair, each in operands))
    key = set[int]().union(*(_layers(graph, pair[1:], each) for pair, each in operands))
    values = [each for each in graph.nodes[product].inputs if not _comes_from(graph, each, product, at)]
    return _Sources(query, key, _layers(graph, values, product), product, _embeddings(graph, node.inputs, at))


def _comes_from(graph: _Graph, value: int, before: int, at: int) -> bool:
    node = graph.nodes[at]
    return at in graph.back([value], before, lambda each: each is node or _is_end(each))


def _layers(graph: _Graph, values: Sequence[int], before: int) -> set[int]:
    return {at for at in graph.back(values, before, _is_end) if at >= 0 and _is_layer(graph.nodes[at])}


def _embeddings(graph: _Graph, values: Sequence[int], before: int) -> set[int]:
    ends = graph.back(values, before, _is_end)
    return {at for at in ends if at >= 0 and graph.nodes[at].name == _EMBEDDING}


def _options(
    graph: _Graph, found: _Sources, sink: int, outputs: Mapping[str, int]
) -> Iterator[Mapping[str, TensorStyle]]:
    """Styles of the projections of an attention, those of fewest messages first."""
    nodes = graph.nodes
    sources = sorted(found.query | found.key | found.value)
    above = {
        each for at in sources for each in _layers(graph, nodes[at].inputs, at) if each in sources
    }  # as latents of DeepSeek-V2, which every rank computes
    paths = {nodes[at].path: _styles_of(at, found) for at in sources if at not in above}
    row = nodes[sink].path
    holder = graph.unit([nodes[at].path for at in sources])
    width = min((outputs.get(path, 0) for path in paths), default=0)
    inside = {nodes[at].path for at in found.biases if nodes[at].path.startswith(f"{holder}.")}
    of_heads = sorted(each for each in inside if 0 < outputs.get(each, 0) < width)
    biases: dict[str, TensorStyle] = dict.fromkeys(of_heads, "embedding_colwise")
    for styles in itertools.product(*paths.values()):
        own: dict[str, TensorStyle] = {**dict(zip(paths, styles, strict=True)), **biases, row: "rowwise"}
        if holder and (len(paths) > 1 or above):
            yield {holder: "copy_input", **own}
        yield own


def _styles_of(at: int, found: _Sources) -> tuple[TensorStyle, ...]:
    roles = (at in found.query, at in found.key, at in found.value)
    if all(roles):
        return "colwise", "packed_colwise_3", "multi_query_colwise"
    return ("colwise", "packed_colwise_2") if roles[1] and roles[2] else ("colwise",)


def _pairs(graph: _Graph, outputs: Mapping[str, int], inputs: Mapping[str, int]) -> Iterator[Candidate]:
    """Layers whose outputs another one takes, element by element."""
    for at, node in enumerate(graph.nodes):
        if not _is_layer(node) or node.path not in inputs:
            continue
        ends = graph.back(node.inputs[:1], at, lambda each: _is_end(each) or each.name in _MIXING)
        firsts = {graph.nodes[each].path for each in ends if each >= 0}
        if not firsts or not all(each < 0 or _is_layer(graph.nodes[each]) for each in ends):
            continue
        wide = {outputs.get(path, 0) for path in firsts}
        width = inputs[node.path]
        if node.path in firsts or wide not in ({width}, {2 * width}):
            continue
        styles: Sequence[TensorStyle] = ("colwise",) if wide == {width} else ("packed_colwise_2", "colwise")
        holder = graph.unit(firsts)
        options: list[Mapping[str, TensorStyle]] = []
        for style in styles:
            own: dict[str, TensorStyle] = {**dict.fromkeys(sorted(firsts), style), node.path: "rowwise"}
            if holder and len(firsts) > 1:
                options.append({holder: "copy_input", **own})
            options.append(own)
        yield Candidate(graph.unit(options[-1]), (*sorted(firsts), node.path), tuple(options), at)
