# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel plan for a model that declares none: candidates in a recorded forward, projections of attention and
pairs of layers, proved unit by unit."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from accel.parallel._modules import named_modules
from accel.parallel.axes.tensor._prove import Verdict, prove
from accel.parallel.axes.tensor._rules import clashes, is_in
from accel.parallel.axes.tensor._styles import COLWISE, is_adapted, is_linear, output_dim, problems_of
from accel.parallel.axes.tensor._trace import ForwardTrace, ModuleCall, Node, settings_of
from accel.topology import TensorStyle

_LEAST_ROWS = 32  # of a table that is worth dividing
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
        self.calls = trace.calls
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
        return self.ways(values, before, stop)[0]

    def ways(self, values: Iterable[int], before: int, stop: Callable[[Node], bool]) -> tuple[set[int], set[int]]:
        """Nodes at which the ways back from values end, and those on the ways."""
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
        return found, seen

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


def _is_product_or_end(node: Node) -> bool:
    return node.name in _PRODUCTS or _is_end(node)


def _is_layer(node: Node) -> bool:
    return node.name == _LAYER


class _Sources(NamedTuple):
    query: set[int]
    key: set[int]
    value: set[int]
    product: int
    biases: set[int]
    added: set[int]  # nodes between what is added to scores and the scores


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
            yield Candidate(graph.unit(options[-1]), layers, options, sink)


_DIVIDED = COLWISE | {"rowwise"}


def _fused(graph: _Graph, at: int) -> _Sources:
    node = graph.nodes[at]
    query, key, value = (_layers(graph, [each], at) for each in node.inputs[:3])
    ends, added = graph.ways(node.inputs[3:], at, _is_end)
    return _Sources(query, key, value, at, _embeddings(graph, ends), added)


def _written_out(graph: _Graph, at: int) -> _Sources | None:
    """Attention as a product, a softmax, and another product."""
    node = graph.nodes[at]
    if node.name not in ("softmax", "_softmax"):
        return None
    ends, added = graph.ways(node.inputs, at, _is_product_or_end)
    scores = [each for each in ends if each >= 0 and graph.nodes[each].name in _PRODUCTS]
    after = [each for each in graph.on(at, _is_product_or_end) if graph.nodes[each].name in _PRODUCTS]
    if not scores or len(after) != 1:
        return None
    product = after[0]
    operands = [(graph.nodes[each].inputs[-2:], each) for each in scores]
    query = set[int]().union(*(_layers(graph, pair[:1], each) for pair, each in operands))
    key = set[int]().union(*(_layers(graph, pair[1:], each) for pair, each in operands))
    values = [each for each in graph.nodes[product].inputs if not _comes_from(graph, each, product, at)]
    return _Sources(query, key, _layers(graph, values, product), product, _embeddings(graph, ends), added)


def _comes_from(graph: _Graph, value: int, before: int, at: int) -> bool:
    node = graph.nodes[at]
    return at in graph.back([value], before, lambda each: each is node or _is_end(each))


def _layers(graph: _Graph, values: Sequence[int], before: int) -> set[int]:
    return {at for at in graph.back(values, before, _is_end) if at >= 0 and _is_layer(graph.nodes[at])}


def _embeddings(graph: _Graph, ends: set[int]) -> set[int]:
    return {at for at in ends if at >= 0 and graph.nodes[at].name == _EMBEDDING}


def _of_heads(graph: _Graph, found: _Sources, holder: str) -> list[str]:
    """Paths of the outermost modules in an attention, without layers, that make what is added to scores."""
    layers = {at for at, node in enumerate(graph.nodes) if node.path}
    inside = [each for each in graph.calls if each.path.startswith(f"{holder}." if holder else "") and each.path]
    calls = [each for each in inside if found.added & {*each.nodes} and not layers & {*each.nodes}]
    behind = {each.path: graph.back(each.inputs, each.nodes.start, _is_product_or_end) for each in calls}
    paths = {path for path, nodes in behind.items() if nodes <= {-1}}  # of no scores
    return sorted(each for each in paths if not any(each.startswith(f"{other}.") for other in paths))


def _options(
    graph: _Graph, found: _Sources, sink: int, outputs: Mapping[str, int]
) -> Iterator[Mapping[str, TensorStyle]]:
    """Styles of the projections of an attention, those of fewest messages first."""
    nodes = graph.nodes
    sources = sorted(found.query | found.key | found.value)
    above = {
        each for at in sources for each in _layers(graph, nodes[at].inputs, at) if each in sources
    }  # as latents of DeepSeek-V2, which every rank computes
    queries = max((outputs.get(nodes[at].path, 0) for at in found.query), default=0)
    paths: dict[str, Sequence[TensorStyle]] = {}
    for at in sources:
        if at not in above:
            is_small = at not in found.query and outputs.get(nodes[at].path, 0) < queries
            paths[nodes[at].path] = _styles_of(at, found, is_small=is_small)
    row = nodes[sink].path
    holder = graph.unit([nodes[at].path for at in sources])
    width = min((outputs.get(path, 0) for path in paths), default=0)
    inside = {nodes[at].path for at in found.biases if nodes[at].path.startswith(f"{holder}.")}
    of_heads = sorted(each for each in inside if 0 < outputs.get(each, 0) < width)
    biases: dict[str, TensorStyle] = dict.fromkeys(of_heads, "embedding_colwise")
    made: dict[str, TensorStyle] = dict.fromkeys(_of_heads(graph, found, holder), "split_heads")
    for added in (biases | made, biases) if made else (biases,):
        for styles in itertools.product(*paths.values()):
            own: dict[str, TensorStyle] = {**dict(zip(paths, styles, strict=True)), **added, row: "rowwise"}
            if holder and (len(paths) > 1 or above):
                yield {holder: "copy_input", **own}
            yield own


def _styles_of(at: int, found: _Sources, *, is_small: bool) -> tuple[TensorStyle, ...]:
    """Styles to try for a layer; `is_small` of keys or values narrower than queries, which ranks may hold whole."""
    roles = (at in found.query, at in found.key, at in found.value)
    if all(roles):
        return "colwise", "packed_colwise_3", "multi_query_colwise", "grouped_query_colwise", "packed_colwise_4x3"
    divided: tuple[TensorStyle, ...] = ("colwise", "packed_colwise_2") if roles[1] and roles[2] else ("colwise",)
    return (*divided, "replicated_with_grad_allreduce") if is_small else divided


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


Styles = Mapping[str, TensorStyle]


class _Proved(NamedTuple):
    candidate: Candidate
    styles: Styles
    calls: Sequence[ModuleCall]
    outputs: frozenset[int]


class StyleSearch:
    """A search for styles in a recorded forward."""

    def __init__(self, model: nn.Module, recorded: ForwardTrace, size: int) -> None:
        self._modules = dict(named_modules(model))
        self._model = model
        self._trace = recorded
        self._size = size
        self._verdicts: dict[str, Verdict] = {}
        self._linear = {path: each for path, each in self._modules.items() if is_linear(_layer(each))}

    def blocks(self, within: Sequence[str]) -> tuple[dict[str, TensorStyle], dict[str, str]]:
        """Styles of what is proved in some modules, and problems of what is not, by unit."""
        outputs = {path: self._features(path, 0) for path in self._linear}
        outputs |= {path: each.embedding_dim for path, each in self._modules.items() if isinstance(each, nn.Embedding)}
        found = candidates(self._trace, outputs, {path: self._features(path, 1) for path in self._linear})
        read_here = {each.unit: sorted(self._trace.read.intersection(each.layers)) for each in found}
        found = [each for each in found if self._trace.read.isdisjoint(each.layers)]
        found = sorted([*found, *self._torch_attentions()], key=lambda each: each.at)
        found = [each for each in found if any(is_in(each.unit, path) for path in within)]
        banned: dict[str, str] = {}
        plain: set[str] = set()  # modules that sum no gradients of their input
        while True:
            proved, left, parts = self._proved([each for each in found if each.unit not in banned], plain)
            more = clashes([each.styles for each in proved])
            loose = [each.candidate.unit for each in proved if not self._is_closed(each, proved)]
            wrong = dict.fromkeys(loose, "ranks would hold parts of what modules outside of it read")
            if not more and not wrong:
                wrong = self._wrong_together(proved, parts)
            if not more and not wrong:
                break
            plain |= more
            banned |= wrong
        left |= banned
        left |= {unit: f"{read[0]}: its weight is read without a call" for unit, read in read_here.items() if read}
        return {path: style for each in proved for path, style in each.styles.items()}, left

    def read(self, within: Sequence[str]) -> dict[str, TensorStyle]:
        """Styles of modules, inside of others, whose parameters others read."""
        own = sorted(each for each in self._trace.read - {""} if any(is_in(each, path) for path in within))
        return dict.fromkeys(own, "replicated_local")

    def _torch_attentions(self) -> Iterator[Candidate]:
        """torch's own attentions, whose forward reads the last projection."""
        for path in dict.fromkeys(call.path for call in self._trace.calls):
            if isinstance(self._modules[path], nn.MultiheadAttention):
                last = max(call.nodes.stop for call in self._trace.calls if call.path == path)
                styles: Styles = {path: "multihead_attention", f"{path}.out_proj".lstrip("."): "rowwise"}
                yield Candidate(path, (path,), (styles,), last)

    def _features(self, path: str, which: int) -> int:
        layer = _layer(self._modules[path])
        return layer.get_parameter("weight").shape[output_dim(layer) if which == 0 else 1 - output_dim(layer)]

    def _wrong_together(self, proved: Sequence[_Proved], parts: dict[int, int]) -> dict[str, str]:
        """Units in which several candidates, each proved alone, are not what the whole module computes."""
        wrong: dict[str, str] = {}
        units = {each.candidate.unit for each in proved}
        for unit in units:
            inside = [each for each in proved if is_in(each.candidate.unit, unit)]
            if len(inside) > 1 and not any(is_in(unit, other) for other in units - {unit}):
                styles: Styles = {path: style for each in inside for path, style in each.styles.items()}
                layers = tuple(path for each in inside for path in each.candidate.layers)
                problem, _ = self._tried(Candidate(unit, layers, (styles,), 0), styles, {**parts})
                wrong |= dict.fromkeys((each.candidate.unit for each in inside), problem) if problem else {}
        return wrong

    def _proved(
        self, found: Sequence[Candidate], plain: set[str]
    ) -> tuple[list[_Proved], dict[str, str], dict[int, int]]:
        proved: list[_Proved] = []
        left: dict[str, str] = {}
        taken: set[str] = set()
        parts: dict[int, int] = {}  # dimensions of divided tensors, by number
        for each in found:
            if taken.isdisjoint(each.layers):
                problems: list[str] = []
                for styles in each.options:
                    if any(style == "copy_input" and path in plain for path, style in styles.items()):
                        continue
                    problem, one = self._tried(each, styles, parts)
                    problems.append(problem)
                    if one is not None:
                        proved.append(one)
                        taken.update(each.layers)
                        break
                else:
                    left[each.unit] = problems[0]
        return proved, left, parts

    def _tried(self, candidate: Candidate, styles: Styles, parts: dict[int, int]) -> tuple[str, _Proved | None]:
        """Prove one option in every call of its unit; `parts` gets what ranks hold parts of behind it."""
        unit = candidate.unit
        prefix = f"{unit}." if unit else ""
        own: Styles = {path[len(prefix) :] if path != unit else "": style for path, style in styles.items()}
        calls = [each for each in self._trace.calls if each.path == unit]
        outputs: dict[int, int] = {}
        for call in calls:
            verdict = self.verdict(unit, call, own, parts)
            if verdict.problem:
                return verdict.problem, None
            own = verdict.styles
            outputs |= {call.outputs[place]: dim for place, dim in verdict.outputs.items()}
        if not calls:
            return "it is not called", None
        parts |= outputs
        whole: Styles = {f"{prefix}{path}" if path else unit: style for path, style in own.items()}
        return "", _Proved(candidate, whole, calls, frozenset(outputs))

    def verdict(self, unit: str, call: ModuleCall, styles: Styles, parts: Mapping[int, int]) -> Verdict:
        """A proof, or that of an equal module."""
        module = self._modules[unit]
        divided = {number: parts[number] for number in call.inputs if number in parts}
        places = [(place, parts[number]) for place, number in enumerate(call.inputs) if number in parts]
        facts = [
            (path, type(each).__name__, [list(p.shape) for p in each.parameters(recurse=False)], settings_of(each))
            for path, each in named_modules(module)
        ]
        key = repr((self._trace.signature(call), facts, styles, places))
        if key not in self._verdicts:
            self._verdicts[key] = prove(module, call, styles, self._size, divided=divided)
        return self._verdicts[key]

    def _is_closed(self, one: _Proved, proved: Sequence[_Proved]) -> bool:
        """Whether all that reads a part which a unit returns is a unit that was proved with it."""
        inside = {at for each in proved for call in each.calls for at in call.nodes}
        if one.outputs & set(self._trace.outputs):
            return False
        own = {at for call in one.calls for at in call.nodes}
        readers = {at for at, node in enumerate(self._trace.nodes) if at not in own and one.outputs & {*node.inputs}}
        return readers <= inside

    def ends(self, styles: Styles) -> dict[str, TensorStyle]:
        """Styles of the embedding of words and of the head, and of all that is tied to them."""
        head = self._named("get_output_embeddings")
        words = self._named("get_input_embeddings")
        heads = [each for each in self._linear.values() if each is head]
        first = [each for each in self._modules.values() if each is words and isinstance(each, nn.Embedding)]
        if not hasattr(self._model, "get_input_embeddings"):
            first = self._tables(styles)
            heads = [self._linear[path] for path in self._heads(first) if path not in styles]
        found: dict[str, TensorStyle] = {}
        for weight in {id(each.weight): each.weight for each in (*heads, *first) if not is_adapted(each)}.values():
            found |= self._with_weight(weight)
        return found

    def _tables(self, styles: Styles) -> list[nn.Embedding]:
        """Embeddings that were called, without small ones, as of positions, and those with a style."""
        total = sum(each.numel() for each in self._model.parameters())
        paths = dict.fromkeys(call.path for call in self._trace.calls if call.path not in styles)
        called = (self._modules[path] for path in paths)
        tables = [each for each in called if isinstance(each, nn.Embedding)]
        return [each for each in tables if len(each.weight) >= _LEAST_ROWS and each.weight.numel() * 100 >= total]

    def _heads(self, tables: Sequence[nn.Embedding]) -> list[str]:
        """Paths of layers with as many outputs as a table has rows, which the model returns or ties to the table."""
        rows = {len(each.weight) for each in tables}
        tied = {id(each.weight) for each in tables}
        returned = {
            node.path
            for node in self._trace.nodes
            if node.path in self._linear and not set(node.outputs).isdisjoint(self._trace.outputs)
        }
        return [
            path
            for path, each in self._linear.items()
            if self._features(path, 0) in rows and (path in returned or id(each.weight) in tied)
        ]

    def _named(self, name: str) -> object:
        """The layer that a model of transformers names; None for none."""
        ask: Any = getattr(self._model, name, None)
        try:
            return ask() if callable(ask) else None
        except NotImplementedError:
            return None

    def _with_weight(self, weight: Any) -> dict[str, TensorStyle]:
        """Styles of all modules with a weight; none where one of them cannot be divided."""
        called = {call.path for call in self._trace.calls}
        found: dict[str, TensorStyle] = {}
        for path, each in self._modules.items():
            if not any(own is weight for own in each.parameters(recurse=False)):
                continue
            if path in self._trace.read:
                return {}
            style: TensorStyle = "embedding_rowwise" if isinstance(each, nn.Embedding) else "colwise_gather_output"
            if next(iter(problems_of(each, style, self._size)), None) is not None:
                return {}
            if path in called and not self._is_known(path, each, style):
                return {}
            found[path] = style
        return found

    def _is_known(self, path: str, module: nn.Module, style: TensorStyle) -> bool:
        """Whether a layer has torch's own forward, or is proved."""
        own: Any = type(module)
        if own.forward in (nn.Embedding.forward, nn.Linear.forward):
            return True
        calls = [each for each in self._trace.calls if each.path == path]
        return all(not self.verdict(path, call, {"": style}, {}).problem for call in calls)


def _layer(module: nn.Module) -> nn.Module:
    return module.get_submodule("base_layer") if is_adapted(module) else module
