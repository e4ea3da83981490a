# SPDX-License-Identifier: Apache-2.0
"""The search for a plan of a model that declares none: candidates by gradients, as styles or as layouts, proved unit by
unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel.errors import PrepareError
from accel.parallel._modules import is_in, named_modules
from accel.parallel.axes.tensor._dependence import Candidate, Layouts, NeededRows, dependent_layouts, pattern_of
from accel.parallel.axes.tensor._prove import drawn_inputs, prove, redrawn, run_valued, short
from accel.parallel.axes.tensor._rules import rules_of
from accel.parallel.axes.tensor._styles import Regions, is_linear, output_dim
from accel.parallel.axes.tensor._trace import ForwardTrace, ModuleCall, facts_of
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
    """The plan of one module: layouts, and why there are none, or no more."""

    layouts: Layouts  # by the parameter's name in it
    problem: str  # why what is left stays whole
    # Layouts by which ranks would compute something else.
    wrong: frozenset[tuple[str, RowLayout | NeededRows]] = frozenset()


_NOTHING = _Found({}, "")


class PlanSearch:
    """A search from the innermost modules outwards.

    Attributes:
        styles: that are known, by path.
        regions: layouts that are proved, by the module that returns full tensors again.
    """

    def __init__(self, model: nn.Module, recorded: ForwardTrace, size: int) -> None:
        self._model = model
        self._trace = recorded
        self._size = size
        self._parameters = dict(model.named_parameters())
        self._names = {id(each): name for name, each in self._parameters.items()}
        self._divided: set[str] = set()
        self._candidates: dict[str, tuple[list[Candidate], str]] = {}
        self._known: dict[str, _Found] = {}
        self._wrong: set[tuple[str, RowLayout | NeededRows]] = set()
        self.styles: dict[str, TensorStyle] = {}
        self.regions: dict[str, Layouts] = {}
        self._left: dict[str, str] = {}
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

    def add(self, regions: Regions) -> None:
        """Take layouts that are proved."""
        for path, layouts in regions.items():
            self.regions[path] = {**self.regions.get(path, {}), **layouts}

    def look(self, within: Sequence[str]) -> None:
        """Search in some modules for layouts of what is whole."""
        inner_first = sorted(self._units, key=_inner_first)
        for least in (0.5, 0.0):  # a single low-rank correction must not keep an attention around it undivided
            for path in inner_first:
                if any(is_in(path, around) for around in within):
                    self._look_in(path, least)

    def _open(self, path: str) -> list[str]:
        """Names of a module's matrices that are whole."""
        whole: list[str] = []
        divided = self._divided.union(*self.regions.values())
        for each in self._model.get_submodule(path).parameters():
            name = self._names[id(each)]
            if each.dim() > 1 and each.is_floating_point() and name not in divided:
                whole.append(name)
        return whole

    def _look_in(self, path: str, least: float) -> None:
        """Search in a module, where enough of it is whole; `least` is the share of that which must be divided."""
        module = self._model.get_submodule(path)
        whole = self._open(path)
        total = sum(each.numel() for each in module.parameters())
        share = sum(self._parameters[name].numel() for name in whole)
        is_around = any(other != path and is_in(other, path) for other in self._units)
        if len(whole) < 2 or share < _LEAST_SHARE * total or (is_around and total > LARGEST):
            return
        around = {name for other, layouts in self.regions.items() if is_in(path, other) for name in layouts}
        if path not in self.regions and not around.isdisjoint(self._names[id(each)] for each in module.parameters()):
            return  # what it computes with its own layouts is not proved with those of a module around it
        found = self._of_equal(path)
        prefix = f"{path}." if path else ""
        self._wrong |= {(prefix + name, layout) for name, layout in found.wrong}
        divided = {self._names[id(module.get_parameter(name))] for name in found.layouts}
        if divided and sum(self._parameters[name].numel() for name in divided if name in whole) >= least * share:
            self._divided |= divided
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
            whole = self._open(path)
            names = [name.removeprefix(prefix) for name in whole if name not in inner]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            about = prefix + problem.partition(":")[0]  # a parameter, which styles may have divided since
            if problem != _ALL_WHOLE and whole and (about in whole or about not in self._parameters):
                found[path] = problem
            elif names:
                found[path] = f"no division was found for {', '.join(names[:_SHOWN])}{more}"
        return found

    def _of_equal(self, path: str) -> _Found:
        """The plan that is found in a module, or was before in an equal one."""
        module = self._model.get_submodule(path)
        calls = {self._trace.signature(call): call for call in self._units[path]}
        facts = facts_of(module)
        prefix = f"{path}." if path else ""
        styles, inner = inside(path, self.styles, self.regions)
        readers = {owner.removeprefix(prefix): by for owner, by in self._trace.readers.items() if is_in(owner, path)}
        outside = sorted(owner for owner, by in readers.items() if not all(is_in(each, path) for each in by))
        signatures = sorted(calls)
        key = repr((signatures, facts, styles, inner, outside))
        if key not in self._known:
            unit = _Unit(module, [*calls.values()], styles, inner, self._size)
            candidates, problem = self._candidates_of(repr((signatures, facts)), unit)
            candidates = [
                each
                for each in candidates
                if any((prefix + name, own) not in self._wrong for name, own in each.items())
            ]
            whole = {name.removeprefix(prefix) for name in self._open(path)}
            found = unit.layouts(candidates, whole, {*outside})
            if self._is_more(path, found.layouts):
                others, _ = self._candidates_of(repr((signatures, facts)), unit, passes_norms=True)
                found = unit.layouts(others, whole - {*found.layouts}, {*outside}, found)
            self._known[key] = found._replace(problem=found.problem or problem or _ALL_WHOLE)
        return self._known[key]

    def _is_more(self, path: str, layouts: Layouts) -> bool:
        """Whether enough of a module is whole with these layouts for a search that passes norms."""
        prefix = f"{path}." if path else ""
        whole = [name for name in self._open(path) if name.removeprefix(prefix) not in layouts]
        total = sum(each.numel() for each in self._model.get_submodule(path).parameters())
        return len(whole) > 1 and sum(self._parameters[name].numel() for name in whole) >= _MUCH * total

    def _candidates_of(self, key: str, unit: _Unit, *, passes_norms: bool = False) -> tuple[list[Candidate], str]:
        """Candidates of a module or an equal one, and why there are no more."""
        key = f"{key} {passes_norms}"
        if key not in self._candidates:
            try:
                self._candidates[key] = unit.candidates(passes_norms=passes_norms), ""
            except Exception as error:  # whatever a forward says of values that are drawn
                self._candidates[key] = [], short(error)
        return self._candidates[key]


def inside(unit: str, styles: Styles, regions: Regions) -> tuple[Styles, Regions]:
    """Return the styles and layouts in a module, by paths and names in it."""
    prefix = f"{unit}." if unit else ""

    def own(path: str) -> str:
        return f"{path}."[len(prefix) :].rstrip(".")

    inner = {
        own(path): {name[len(prefix) :]: each for name, each in layouts.items()}
        for path, layouts in regions.items()
        if is_in(path, unit)
    }
    return {own(path): style for path, style in styles.items() if is_in(path, unit)}, inner


def _inner_first(path: str) -> int:
    """A key that sorts the paths of submodules before the paths of the modules around them."""
    return -(path.count(".") + bool(path))


class _Unit:
    """A module, its distinct calls, and what is divided in it already."""

    def __init__(
        self,
        module: nn.Module,
        calls: Sequence[ModuleCall],
        styles: Styles,
        inner: Regions,
        size: int,
    ) -> None:
        self._module = module
        self._calls = calls
        self._styles = styles
        self._inner = inner
        self._size = size
        self._shapes = {name: each.shape for name, each in module.named_parameters()}

    def candidates(self, *, passes_norms: bool) -> list[Candidate]:
        """Return the layouts that the module's gradients show, those with most elements first."""
        with cast(Any, torch.random).fork_rng(devices=[]):
            call = self._calls[0]
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

    def layouts(
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
        for candidate in sorted(fitting, key=self._elements, reverse=True):
            layouts = {name: each for name, each in candidate.items() if name not in taken}
            has_pair = sum(len(self._shapes[name]) > 1 for name in layouts) > 1
            if (
                not has_pair
                or next(iter(candidate)) in taken
                or any(chosen.get(name, each) != each for name, each in layouts.items())
            ):
                continue
            for each in (cast(Layouts, self._with_equal(layouts)), layouts):
                own = {**self._inner.get("", {}), **chosen, **each}
                wrong = self._problem({**self._inner, "": own})
                if not wrong:
                    chosen |= each
                    break
                problem = problem or wrong
                wrongs.update(each.items())
        return _Found(chosen, problem, frozenset(wrongs))

    def _styled(self) -> set[str]:
        """Paths of modules that styles divide."""
        return {path for path, style in self._styles.items() if style != "replicated_local"}

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

    def _problem(self, regions: Regions) -> str:
        """The difference in a call of the module; "" for none."""
        for call in self._calls:
            try:
                verdict = prove(self._module, call, self._styles, self._size, regions=regions, gathers_inputs=False)
            except PrepareError as error:
                return error.got
            if verdict.problem:
                return verdict.problem
        return ""


def _misfit(candidate: Candidate) -> str:
    """Why some rows of a candidate have no layout; "" where all have one."""
    others = (f"{name}: {each.problem}" for name, each in candidate.items() if isinstance(each, NeededRows))
    return next(others, "")


def words_of(module: nn.Module, layouts: Candidate, size: int) -> dict[str, TensorStyle]:
    """Return the styles of layers that divide the same rows of their parameters; none of a layer without one."""
    own: dict[str, dict[str, RowLayout | NeededRows]] = {}
    for name, layout in layouts.items():
        path, _, short_name = name.rpartition(".")
        own.setdefault(path, {})[short_name] = layout
    found: dict[str, TensorStyle] = {}
    for path, each in own.items():
        word = _word(module, path, each, size)
        if word is not None:
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
