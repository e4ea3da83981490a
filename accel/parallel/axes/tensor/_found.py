# SPDX-License-Identifier: Apache-2.0
"""The search for a plan of a model that declares none: candidates by gradients, as styles or as layouts, proved unit by
unit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel.errors import PrepareError
from accel.parallel._modules import named_modules
from accel.parallel.axes.tensor._dependence import Candidate, Layouts, NeededRows, dependent_layouts, pattern_of
from accel.parallel.axes.tensor._prove import drawn_inputs, prove, redrawn, run_valued, short
from accel.parallel.axes.tensor._rules import is_in, rules_of
from accel.parallel.axes.tensor._styles import COLWISE, Regions, is_adapted, is_linear, output_dim
from accel.parallel.axes.tensor._trace import ForwardTrace, ModuleCall, settings_of
from accel.parallel.parts import RowLayout
from accel.parallel.parts._layout import even
from accel.topology import TensorStyle

Styles = Mapping[str, TensorStyle]
_LEAST_SHARE = 0.01  # of a module's parameters that are whole, for it to be searched
_MUCH = 0.1  # for it to be searched once more
LARGEST = 2**28  # parameters of a module around others that is searched with values in float64
_ALL_WHOLE = "no division was found for its parameters"
_SHOWN = 3  # names in a reason


class _Found(NamedTuple):
    """The plan of one module: styles, layouts, and why there are none, or no more."""

    styles: Styles  # by path in the module
    layouts: Layouts  # by the parameter's name in it
    problem: str  # why what is left stays whole
    # Layouts by which ranks would compute something else.
    wrong: frozenset[tuple[str, RowLayout | NeededRows]] = frozenset()


_NOTHING = _Found({}, {}, "")


class PlanSearch:
    """A search from the innermost modules outwards.

    Attributes:
        styles: that are proved, by path.
        regions: layouts that are proved, by the module that returns full tensors again.
    """

    def __init__(self, model: nn.Module, recorded: ForwardTrace, size: int) -> None:
        self._model = model
        self._trace = recorded
        self._size = size
        self._parameters = dict(model.named_parameters())
        self._names = {id(each): name for name, each in self._parameters.items()}
        layers = [
            each for _, each in named_modules(model) if is_linear(each) or isinstance(each, nn.MultiheadAttention)
        ]
        self._of_layers = {self._names[id(each)] for layer in layers for each in layer.parameters(recurse=False)}
        self._divided: set[str] = set()
        self._candidates: dict[str, tuple[list[Candidate], str]] = {}
        self._known: dict[str, _Found] = {}
        self._wrong: dict[bool, set[tuple[str, RowLayout | NeededRows]]] = {True: set(), False: set()}
        self.styles: dict[str, TensorStyle] = {}
        self.regions: dict[str, Layouts] = {}
        self._left: dict[str, str] = {}
        self._readers: dict[int, list[int]] = {}
        for at, node in enumerate(recorded.nodes):
            for number in node.inputs:
                self._readers.setdefault(number, []).append(at)
        self._units: dict[str, list[ModuleCall]] = {}
        for call in recorded.calls:
            if len(self._open(call.path)) > 1:
                self._units.setdefault(call.path, []).append(call)

    def take(self, styles: Styles) -> None:
        """Take styles that are known."""
        self.styles |= styles
        rules = rules_of(self._model, self.styles, self._size)
        modules = dict(named_modules(self._model))
        owned = ((modules[path], name) for path, rule in rules.items() for name in rule.dims)
        self._divided |= {self._names[id(module.get_parameter(name))] for module, name in owned}

    def look(self, within: Sequence[str], *, in_words: bool) -> None:
        """Search in some modules, for styles or for layouts of what styles leave whole."""
        inner_first = sorted(self._units, key=_inner_first)
        for least in (0.5, 0.0):  # a single low-rank correction must not keep an attention around it undivided
            for path in inner_first:
                if any(is_in(path, around) for around in within):
                    self._look_in(path, least, in_words=in_words)

    def _open(self, path: str) -> list[str]:
        """Names of a module's matrices that are whole."""
        whole: list[str] = []
        divided = self._divided.union(*self.regions.values())
        for each in self._model.get_submodule(path).parameters():
            name = self._names[id(each)]
            if each.dim() > 1 and each.is_floating_point() and name not in divided:
                whole.append(name)
        return whole

    def _look_in(self, path: str, least: float, *, in_words: bool) -> None:
        """Search in a module, where enough of it is whole; `least` is the share of that which must be divided."""
        module = self._model.get_submodule(path)
        whole = [name for name in self._open(path) if not in_words or name in self._of_layers]
        total = sum(each.numel() for each in module.parameters())
        share = sum(self._parameters[name].numel() for name in whole)
        is_around = any(other != path and is_in(other, path) for other in self._units)
        if len(whole) < 2 or share < _LEAST_SHARE * total or (is_around and total > LARGEST):
            return
        if in_words and (is_adapted(module) or self._is_copied(path) or any(map(self._is_left, self._units[path]))):
            return
        around = {name for other, layouts in self.regions.items() if is_in(path, other) for name in layouts}
        if path not in self.regions and not around.isdisjoint(self._names[id(each)] for each in module.parameters()):
            return  # what it computes with its own layouts is not proved with those of a module around it
        found = self._of_equal(path, in_words=in_words)
        prefix = f"{path}." if path else ""
        self._wrong[in_words] |= {(prefix + name, layout) for name, layout in found.wrong}
        rules = rules_of(module, found.styles, self._size)
        named = [f"{owner}.{name}".strip(".") for owner, rule in rules.items() for name in rule.dims]
        divided = {self._names[id(module.get_parameter(name))] for name in (*named, *found.layouts)}
        if divided and sum(self._parameters[name].numel() for name in divided if name in whole) >= least * share:
            self.styles |= {(prefix + own).strip("."): style for own, style in found.styles.items()}
            self._divided |= divided
            if found.layouts:
                layouts = {prefix + name: layout for name, layout in found.layouts.items()}
                self.regions[path] = {**self.regions.get(path, {}), **layouts}
            self._left = {other: problem for other, problem in self._left.items() if len(self._open(other)) > 1}
            if found.problem == _ALL_WHOLE:  # reasons of looks before, also around it, do not hold for the rest
                self._left = {other: problem for other, problem in self._left.items() if not is_in(path, other)}
        if found.problem and len(self._open(path)) > 1 and not (path in self._left and found.problem == _ALL_WHOLE):
            self._left[path] = found.problem

    @property
    def left(self) -> Mapping[str, str]:
        """Reasons why modules are not fully divided, by path. A module is left out if its listed submodules hold all of
        its matrices."""
        found: dict[str, str] = {}
        for path, problem in sorted(self._left.items(), key=lambda each: _inner_first(each[0])):
            prefix = f"{path}." if path else ""
            inner = {name for other in found if other != path and is_in(other, path) for name in self._open(other)}
            names = [name.removeprefix(prefix) for name in self._open(path) if name not in inner]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            if problem != _ALL_WHOLE and self._open(path):
                found[path] = problem
            elif names:
                found[path] = f"no division was found for {', '.join(names[:_SHOWN])}{more}"
        return found

    def _is_copied(self, path: str) -> bool:
        """Whether a module around it sums gradients of its input for all in it."""
        return any(style == "copy_input" and is_in(path, around) for around, style in self.styles.items())

    def _of_equal(self, path: str, *, in_words: bool) -> _Found:
        """The plan that is found in a module, or was before in an equal one."""
        module = self._model.get_submodule(path)
        calls = {(self._trace.signature(call), self._read_outputs(call)): call for call in self._units[path]}
        facts = [
            (own, type(each).__name__, [list(p.shape) for p in each.parameters(recurse=False)], settings_of(each))
            for own, each in named_modules(module)
        ]
        prefix = f"{path}." if path else ""
        styles: dict[str, TensorStyle] = {
            "" if own == path else own.removeprefix(prefix): style
            for own, style in self.styles.items()
            if is_in(own, path)
        }
        inner = {
            ("" if own == path else own.removeprefix(prefix)): {
                name.removeprefix(prefix): each for name, each in layouts.items()
            }
            for own, layouts in self.regions.items()
            if is_in(own, path)
        }
        readers = {owner.removeprefix(prefix): by for owner, by in self._trace.readers.items() if is_in(owner, path)}
        outside = sorted(owner for owner, by in readers.items() if not all(is_in(each, path) for each in by))
        signatures = sorted(calls)
        key = repr((signatures, facts, styles, inner, sorted(readers), outside, in_words))
        if key not in self._known:
            called = {each.path for each in self._trace.calls}
            proofs = [(call, read) for (_, read), call in calls.items()]
            unit = _Unit(module, proofs, styles, inner, self._size, called, path)
            candidates, problem = self._candidates_of(repr((signatures, facts)), unit)
            wrong = self._wrong[in_words]
            candidates = [
                each for each in candidates if any((prefix + name, own) not in wrong for name, own in each.items())
            ]
            whole = {name.removeprefix(prefix) for name in self._open(path)}
            if in_words:
                found = unit.in_words(candidates, {*readers})
            else:
                found = unit.in_layouts(candidates, whole, {*outside})
                if self._is_more(path, found.layouts):
                    others, _ = self._candidates_of(repr((signatures, facts)), unit, passes_norms=True)
                    found = unit.in_layouts(others, whole - {*found.layouts}, {*outside}, found)
            self._known[key] = found._replace(problem=found.problem or problem or _ALL_WHOLE)
        return self._known[key]

    def _is_more(self, path: str, layouts: Layouts) -> bool:
        """Whether enough of a module is whole with these layouts for a search that passes norms."""
        prefix = f"{path}." if path else ""
        whole = [name for name in self._open(path) if name.removeprefix(prefix) not in layouts]
        total = sum(each.numel() for each in self._model.get_submodule(path).parameters())
        return len(whole) > 1 and sum(self._parameters[name].numel() for name in whole) >= _MUCH * total

    def _is_left(self, call: ModuleCall) -> bool:
        """Whether others read what a module does not return, as from a mapping that it fills, where ranks would have
        rows."""
        made = {number for at in call.nodes for number in self._trace.nodes[at].outputs}
        made -= {*call.inputs, *call.outputs}
        return any(
            number in self._trace.outputs or any(at not in call.nodes for at in self._readers.get(number, ()))
            for number in made
        )

    def _read_outputs(self, call: ModuleCall) -> tuple[int, ...]:
        """Places of outputs that anyone outside of the module reads."""
        return tuple(
            place
            for place, number in enumerate(call.outputs)
            if number in self._trace.outputs or any(at not in call.nodes for at in self._readers.get(number, ()))
        )

    def _candidates_of(self, key: str, unit: _Unit, *, passes_norms: bool = False) -> tuple[list[Candidate], str]:
        """Candidates of a module or an equal one, and why there are no more."""
        key = f"{key} {passes_norms}"
        if key not in self._candidates:
            try:
                self._candidates[key] = unit.candidates(passes_norms=passes_norms), ""
            except Exception as error:  # whatever a forward says of values that are drawn
                self._candidates[key] = [], short(error)
        return self._candidates[key]


def _inner_first(path: str) -> int:
    """A key that sorts the paths of submodules before the paths of the modules around them."""
    return -(path.count(".") + bool(path))


class _Unit:
    """A module, its distinct calls with the places of outputs that are read, and what is divided in it already."""

    def __init__(
        self,
        module: nn.Module,
        calls: Sequence[tuple[ModuleCall, tuple[int, ...]]],
        styles: Styles,
        inner: Regions,
        size: int,
        called: set[str],
        path: str,
    ) -> None:
        self._module = module
        self._calls = calls
        self._styles = styles
        self._inner = inner
        self._size = size
        self._shapes = {name: each.shape for name, each in module.named_parameters()}
        prefix = f"{path}." if path else ""
        self._called = {each.removeprefix(prefix) for each in called if each.startswith(prefix) and each != path}
        if path:  # the model's own input is not copied
            self._called.add("")

    def candidates(self, *, passes_norms: bool) -> list[Candidate]:
        """Return the layouts that the module's gradients show, those with most elements first."""
        with cast(Any, torch.random).fork_rng(devices=[]):
            call, _ = self._calls[0]
            values = drawn_inputs(call)
            found = dependent_layouts(
                redrawn(self._module),
                lambda whole: run_valued(whole, call, values),
                self._size,
                passes_norms=passes_norms,
            )
        return sorted(found, key=self._elements, reverse=True)

    def _elements(self, layouts: Candidate) -> int:
        return sum(self._shapes[name].numel() for name in layouts)

    def in_words(self, candidates: Sequence[Candidate], read: set[str]) -> _Found:
        """Styles for layers that have none, where styles mean the same rows; none of layers that are not called."""
        chosen: dict[str, TensorStyle] = {**self._styles}
        problem = ""
        wrongs: set[tuple[str, RowLayout | NeededRows]] = set()
        for layouts in candidates:
            for each in (self._with_equal(layouts), layouts):
                words = words_of(self._module, each, self._size)
                problem = problem or _misfit(each)
                is_called = read.isdisjoint(path for path in words if not self._is_last(path, words))
                if not words or not is_called or not chosen.keys().isdisjoint(words):
                    continue
                wrong, proved = self._with_words(chosen, words)
                if not wrong:
                    chosen = {**proved}
                    break
                problem = problem or wrong
                wrongs.update(each.items())
        own: Styles = {path: style for path, style in chosen.items() if self._styles.get(path) != style}
        return _Found(own, {}, problem, frozenset(wrongs))

    def _is_last(self, path: str, words: Styles) -> bool:
        """Whether a layer ends an nn.MultiheadAttention, which reads its weight."""
        return words.get(path.rpartition(".")[0]) == "multihead_attention" and path.endswith("out_proj")

    def _with_words(self, chosen: Styles, words: Styles) -> tuple[str, Styles]:
        """Why no option is right, or the styles of the first that is."""
        bare: Styles = {path: style for path, style in chosen.items() if style != "copy_input" or path in self._styles}
        problem = ""
        for option in self._options(words):
            for others in (chosen, bare) if bare != chosen else (chosen,):
                tried: Styles = {**others, **option}
                wrong, proved = self._problem(tried, self._inner)
                if not wrong:
                    return "", proved
                problem = wrong  # the problem of styles without a copy is the most precise
        return problem, {}

    def _options(self, words: Styles) -> Iterator[Styles]:
        """Styles with one sum of gradients for all layers of one input, and without."""
        starts = [path for path, style in words.items() if style in COLWISE]
        holder = common(starts)
        while holder and holder not in self._called:
            holder = holder.rpartition(".")[0]
        options: list[Styles] = [words]
        if holder in self._called and holder not in words:
            options.insert(0 if len(starts) > 1 else 1, {holder: "copy_input", **words})
        yield from options

    def in_layouts(
        self, candidates: Sequence[Candidate], whole: set[str], outside: set[str], before: _Found = _NOTHING
    ) -> _Found:
        """Layouts of whole parameters, with those that were found before; none of modules that others read
        `outside`."""
        styled = self._styled()
        problem = before.problem
        fitting: list[Layouts] = []
        for layouts in candidates:
            own = {name: each for name, each in layouts.items() if name.rpartition(".")[0] not in styled}
            if whole.isdisjoint(own) or any(name.rpartition(".")[0] in outside for name in own):
                continue
            problem = problem or _misfit(own)
            if not _misfit(own):
                fitting.append(cast(Layouts, own))
        chosen: dict[str, RowLayout] = {**before.layouts}
        wrongs: set[tuple[str, RowLayout | NeededRows]] = {*before.wrong}
        taken = {name for layouts in self._inner.values() for name in layouts}
        for layouts in sorted(fitting, key=self._elements, reverse=True):
            if not taken.isdisjoint(layouts) or any(chosen.get(name, each) != each for name, each in layouts.items()):
                continue
            for each in (cast(Layouts, self._with_equal(layouts)), layouts):
                own = {**self._inner.get("", {}), **chosen, **each}
                wrong, styles = self._problem(self._styles, {**self._inner, "": own})
                if not wrong and styles == self._styles:
                    chosen |= each
                    break
                problem = problem or wrong or "gradients of what is whole differ"
                wrongs.update(each.items())
        return _Found({}, chosen, problem, frozenset(wrongs))

    def _styled(self) -> set[str]:
        """Paths of modules that styles divide."""
        return {path for path, style in self._styles.items() if style not in ("replicated_local", "copy_input")}

    def _with_equal(self, layouts: Candidate) -> Candidate:
        """The layouts, and the same layouts for equal modules that this forward did not call, such as experts that no
        token chose."""
        patterns = {(pattern_of(name), self._shapes[name]): layout for name, layout in layouts.items()}
        called = {name.rpartition(".")[0] for name in layouts}
        more = {
            name: patterns[key]
            for name, shape in self._shapes.items()
            if name.rpartition(".")[0] not in called and (key := (pattern_of(name), shape)) in patterns
        }
        return {**more, **layouts}

    def _problem(self, styles: Styles, regions: Regions) -> tuple[str, Styles]:
        """The difference in a call of the module; "" with the styles, which include styles of summands of gradients."""
        for call, read in self._calls:
            try:
                verdict = prove(self._module, call, styles, self._size, regions=regions)
            except PrepareError as error:
                return error.got, styles
            if verdict.problem or not verdict.outputs.keys().isdisjoint(read):
                return verdict.problem or "ranks would hold parts of what it returns", styles
            styles = verdict.styles
        return "", styles


def _misfit(candidate: Candidate) -> str:
    """Why some rows of a candidate have no layout; "" where all have one."""
    others = (f"{name}: {each.problem}" for name, each in candidate.items() if isinstance(each, NeededRows))
    return next(others, "")


def words_of(module: nn.Module, layouts: Candidate, size: int) -> dict[str, TensorStyle]:
    """Return the styles that divide the same rows of the same parameters; none where a parameter has no such style."""
    own: dict[str, dict[str, RowLayout | NeededRows]] = {}
    for name, layout in layouts.items():
        path, _, short_name = name.rpartition(".")
        own.setdefault(path, {})[short_name] = layout
    found: dict[str, TensorStyle] = {}
    for path, each in own.items():
        word = _word(module, path, each, size)
        if word is None:
            return {}
        found[path] = word
    around = {path: path.rpartition(".base_layer")[0] for path in found if path.endswith(".base_layer")}
    corrections = {path for path in found for holder in around.values() if is_in(path, holder)}
    for path, holder in around.items():
        found[holder] = found[path]
    return {path: style for path, style in found.items() if path not in corrections}


def _word(module: nn.Module, path: str, layouts: Candidate, size: int) -> TensorStyle | None:
    """The style of a layer that divides these rows; None for none."""
    layer = module.get_submodule(path)
    weight = layouts.get("weight")
    if isinstance(layer, nn.MultiheadAttention):
        return "multihead_attention"
    if weight is None or not is_linear(layer):
        return None
    if weight.dim == output_dim(layer):
        bias = layouts.get("bias", weight)
        return _colwise(weight, size) if bias == weight._replace(dim=0) or bias is weight else None
    is_even = isinstance(weight, RowLayout) and weight.cut == even(weight.cut.total, size)
    return "rowwise" if is_even and "bias" not in layouts else None


def _colwise(weight: RowLayout | NeededRows, size: int) -> TensorStyle | None:
    """The style of a layer with divided outputs; None for none."""
    if not isinstance(weight, RowLayout):
        return None
    repeat = weight.cut.repeat
    if len(weight.cut.segments) > 1 or (repeat > 1 and weight.cut.local * size != weight.cut.total):
        return None
    packs: Mapping[int, TensorStyle] = {1: "colwise", 2: "packed_colwise_2", 3: "packed_colwise_3"}
    return packs.get(repeat)  # one segment of fewer ways than ranks is of heads that neighbours share


def common(paths: Iterable[str]) -> str:
    """Return the path of the module around all of these."""
    split = [path.split(".")[:-1] for path in paths]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*split, strict=False))
    return ".".join(parts[0] for parts in shared)
