# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel plan for a model that declares none: found in a recorded forward, and proved unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from accel.parallel._modules import example_of, named_modules
from accel.parallel.axes.tensor._find import Candidate, candidates
from accel.parallel.axes.tensor._prove import Verdict, prove
from accel.parallel.axes.tensor._styles import is_adapted, is_linear, output_dim, problems_of
from accel.parallel.axes.tensor._trace import ForwardTrace, ModuleCall, trace
from accel.topology import TensorStyle

Styles = Mapping[str, TensorStyle]


class FoundPlan(NamedTuple):
    """A plan that is found and proved.

    Attributes:
        styles: by path.
        left: why candidates stay whole, by the path of their unit.
    """

    styles: Styles
    left: Mapping[str, str]


def found_plan(model: nn.Module, size: int, example: Mapping[str, Any] | Sequence[Any] | None = None) -> FoundPlan:
    """Return the plan by which so many ranks compute what the model does. No communication; the model and torch's
    streams are unchanged.

    `example` are arguments of the model's forward; None for small ones by the config of a model of transformers.
    """
    inputs = example_of(model) if example is None else example
    if inputs is None:
        return FoundPlan({}, {"": "no example of its inputs"})
    try:
        recorded = trace(model, inputs)
    except Exception as error:  # whatever a forward raises without values
        return FoundPlan({}, {"": f"its forward needs values: {type(error).__name__}: {_short(error)}"})
    search = _Search(model, recorded, size)
    styles, left = search.blocks()
    return FoundPlan(styles | search.ends(), left)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


class _Proved(NamedTuple):
    candidate: Candidate
    styles: Styles
    calls: Sequence[ModuleCall]
    outputs: frozenset[int]


class _Search:
    def __init__(self, model: nn.Module, recorded: ForwardTrace, size: int) -> None:
        self._modules = dict(named_modules(model))
        self._model = model
        self._trace = recorded
        self._size = size
        self._verdicts: dict[str, Verdict] = {}
        self._linear = {path: each for path, each in self._modules.items() if is_linear(_layer(each))}

    def blocks(self) -> tuple[dict[str, TensorStyle], dict[str, str]]:
        """Styles of what is proved, and problems of what is not, by unit."""
        outputs = {path: self._features(path, 0) for path in self._linear}
        embeddings = {path: each for path, each in self._modules.items() if isinstance(each, nn.Embedding)}
        outputs |= {path: each.embedding_dim for path, each in embeddings.items()}
        found = candidates(self._trace, outputs, {path: self._features(path, 1) for path in self._linear})
        found = [each for each in found if self._trace.read.isdisjoint(each.layers)]
        banned: set[str] = set()
        while True:
            proved, left = self._proved([each for each in found if each.unit not in banned])
            loose = [each.candidate.unit for each in proved if not self._is_closed(each, proved)]
            if not loose:
                break
            banned.update(loose)
        left |= dict.fromkeys(banned, "ranks would hold parts of what modules outside of it read")
        styles: dict[str, TensorStyle] = {}
        for each in proved:
            styles |= each.styles
        read: Styles = dict.fromkeys(sorted(self._trace.read - {""}), "replicated_local")
        return {**read, **styles}, left

    def _features(self, path: str, which: int) -> int:
        layer = _layer(self._modules[path])
        return layer.get_parameter("weight").shape[output_dim(layer) if which == 0 else 1 - output_dim(layer)]

    def _proved(self, found: Sequence[Candidate]) -> tuple[list[_Proved], dict[str, str]]:
        proved: list[_Proved] = []
        left: dict[str, str] = {}
        taken: set[str] = set()
        parts: dict[int, int] = {}  # dimensions of divided tensors, by number
        for each in found:
            if taken.isdisjoint(each.layers):
                problems: list[str] = []
                for styles in each.options:
                    problem, one = self._tried(each, styles, parts)
                    problems.append(problem)
                    if one is not None:
                        proved.append(one)
                        taken.update(each.layers)
                        break
                else:
                    left[each.unit] = problems[0]
        return proved, left

    def _tried(self, candidate: Candidate, styles: Styles, parts: dict[int, int]) -> tuple[str, _Proved | None]:
        """Prove one option in every call of its unit; `parts` gets what ranks hold parts of behind it."""
        unit = candidate.unit
        prefix = f"{unit}." if unit else ""
        own: Styles = {path[len(prefix) :] if path != unit else "": style for path, style in styles.items()}
        calls = [each for each in self._trace.calls if each.path == unit]
        outputs: dict[int, int] = {}
        for call in calls:
            verdict = self._verdict(unit, call, own, parts)
            if verdict.problem:
                return verdict.problem, None
            own = verdict.styles
            outputs |= {call.outputs[place]: dim for place, dim in verdict.outputs.items()}
        if not calls:
            return "it is not called", None
        parts |= outputs
        whole: Styles = {f"{prefix}{path}" if path else unit: style for path, style in own.items()}
        return "", _Proved(candidate, whole, calls, frozenset(outputs))

    def _verdict(self, unit: str, call: ModuleCall, styles: Styles, parts: Mapping[int, int]) -> Verdict:
        """A proof, or that of an equal module."""
        module = self._modules[unit]
        divided = {number: parts[number] for number in call.inputs if number in parts}
        places = [(place, parts[number]) for place, number in enumerate(call.inputs) if number in parts]
        facts = [
            (path, type(each).__name__, [list(p.shape) for p in each.parameters(recurse=False)], _settings(each))
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

    def ends(self) -> dict[str, TensorStyle]:
        """Styles of the embedding of words and of the head, and of all that is tied to them."""
        head = self._named("get_output_embeddings")
        words = self._named("get_input_embeddings")
        heads = [each for each in self._linear.values() if each is head]
        first = [each for each in self._modules.values() if each is words and isinstance(each, nn.Embedding)]
        found: dict[str, TensorStyle] = {}
        for weight in {id(each.weight): each.weight for each in (*heads, *first) if not is_adapted(each)}.values():
            found |= self._with_weight(weight)
        return found

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
        return all(not self._verdict(path, call, {"": style}, {}).problem for call in calls)


_INDEX = ("layer_idx", "layer_id", "layer_number", "block_idx", "idx", "index")


def _settings(module: nn.Module) -> list[tuple[str, object]]:
    """Plain attributes of a module, without its place among others."""
    return [
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, int | float | str | None) and name not in _INDEX and name != "training"
    ]


def _layer(module: nn.Module) -> nn.Module:
    return module.get_submodule("base_layer") if is_adapted(module) else module


def lines_of(left: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each unit that stays whole."""
    for path, problem in left.items():
        yield f"{path or 'the model'}: {problem}"
