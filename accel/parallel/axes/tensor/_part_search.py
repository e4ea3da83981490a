# SPDX-License-Identifier: Apache-2.0
"""A plan of parts for modules that styles leave whole: candidates by gradients, proved as styles are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel.errors import PrepareError
from accel.parallel._modules import named_modules
from accel.parallel.axes.tensor._dependence import Layouts, dependent_layouts, pattern_of
from accel.parallel.axes.tensor._prove import drawn_inputs, prove, redrawn, run_valued, short
from accel.parallel.axes.tensor._rules import is_in, rules_of
from accel.parallel.axes.tensor._styles import Regions
from accel.parallel.axes.tensor._trace import ForwardTrace, ModuleCall, settings_of
from accel.topology import TensorStyle

_LEAST_SHARE = 0.01  # of a module's parameters that are whole, for it to be searched
_LARGEST = 2**28  # parameters of a module that is searched with values in float64


class _Found(NamedTuple):
    """Layouts by parameter in a module, and why there are none, or no more."""

    layouts: Layouts
    problem: str


def found_regions(
    model: nn.Module,
    recorded: ForwardTrace,
    size: int,
    styles: Mapping[str, TensorStyle],
    within: Sequence[str] = ("",),
) -> tuple[dict[str, Layouts], dict[str, str]]:
    """Return layouts of parameters that styles leave whole, by the module at whose end tensors are whole again, and why
    the others stay whole, by module. No communication; the model and torch's streams are unchanged."""
    search = _PartSearch(model, recorded, size, styles)
    inner_first = sorted(search.units, key=lambda each: -(each.count(".") + bool(each)))
    for least in (0.5, 0.0):  # a low-rank correction alone must not keep an attention around it whole
        for path in inner_first:
            if any(is_in(path, around) for around in within):
                search.look_in(path, least)
    return search.regions, search.left


class _PartSearch:
    """A search from the innermost modules outwards.

    Attributes:
        units: a call of each module of several matrices, by path.
        regions: layouts that are proved.
        left: problems by path.
    """

    def __init__(self, model: nn.Module, recorded: ForwardTrace, size: int, styles: Mapping[str, TensorStyle]) -> None:
        self._model = model
        self._trace = recorded
        self._size = size
        self._styles = styles
        self._parameters = dict(model.named_parameters())
        self._names = {id(each): name for name, each in self._parameters.items()}
        self._divided = self._of_styles()
        self._known: dict[str, _Found] = {}
        self.regions: dict[str, Layouts] = {}
        self.left: dict[str, str] = {}
        self.units: dict[str, list[ModuleCall]] = {}
        for call in recorded.calls:
            if len(self._open(call.path)) > 1:
                self.units.setdefault(call.path, []).append(call)

    def _of_styles(self) -> set[str]:
        """Names of the parameters that styles divide."""
        rules = rules_of(self._model, self._styles, self._size)
        modules = dict(named_modules(self._model))
        owned = ((modules[path], name) for path, rule in rules.items() for name in rule.dims)
        return {self._names[id(module.get_parameter(name))] for module, name in owned}

    def _open(self, path: str) -> list[str]:
        """Names of a module's matrices that are whole."""
        whole: list[str] = []
        divided = self._divided.union(*self.regions.values())
        for each in self._model.get_submodule(path).parameters():
            name = self._names[id(each)]
            if each.dim() > 1 and each.is_floating_point() and name not in divided:
                whole.append(name)
        return whole

    def look_in(self, path: str, least: float) -> None:
        """Search in a module, where enough of it is whole; `least` is the share of that which must be divided."""
        whole = self._open(path)
        total = sum(each.numel() for each in self._model.get_submodule(path).parameters())
        share = sum(self._parameters[name].numel() for name in whole)
        if len(whole) < 2 or share < _LEAST_SHARE * total or total > _LARGEST:
            return
        found = self._of_equal(path)
        prefix = f"{path}." if path else ""
        layouts = {prefix + name: layout for name, layout in found.layouts.items()}
        divided = sum(self._parameters[name].numel() for name in layouts if name in whole)
        if layouts and divided >= least * share:
            self.regions[path] = {**self.regions.get(path, {}), **layouts}
            self.left = {other: problem for other, problem in self.left.items() if len(self._open(other)) > 1}
        if found.problem and len(self._open(path)) > 1:
            self.left[path] = found.problem

    def _of_equal(self, path: str) -> _Found:
        """Layouts found in a module, or before in an equal one."""
        module = self._model.get_submodule(path)
        calls = list({self._trace.signature(call): call for call in self.units[path]}.values())
        facts = [
            (own, type(each).__name__, [list(p.shape) for p in each.parameters(recurse=False)], settings_of(each))
            for own, each in named_modules(module)
        ]
        prefix = f"{path}." if path else ""
        styles: dict[str, TensorStyle] = {
            "" if own == path else own.removeprefix(prefix): style
            for own, style in self._styles.items()
            if is_in(own, path)
        }
        inner = {
            ("" if own == path else own.removeprefix(prefix)): {
                name.removeprefix(prefix): each for name, each in layouts.items()
            }
            for own, layouts in self.regions.items()
            if is_in(own, path)
        }
        key = repr((sorted(map(self._trace.signature, calls)), facts, styles, inner))
        if key not in self._known:
            whole = {name.removeprefix(prefix) for name in self._open(path)}
            outside = {
                owner.removeprefix(prefix)
                for owner, readers in self._trace.readers.items()
                if not all(is_in(reader, path) for reader in readers)
            }
            self._known[key] = _Unit(module, calls, styles, inner, self._size).found(whole, outside)
        return self._known[key]


class _Unit:
    """A module, its distinct calls, and what is divided in it already."""

    def __init__(
        self,
        module: nn.Module,
        calls: Sequence[ModuleCall],
        styles: Mapping[str, TensorStyle],
        inner: Regions,
        size: int,
    ) -> None:
        self._module = module
        self._calls = calls
        self._styles = styles
        self._inner = inner
        self._size = size
        self._shapes = {name: each.shape for name, each in module.named_parameters()}

    def found(self, whole: set[str], outside: set[str]) -> _Found:
        """Layouts of whole parameters, the largest candidates first; none of modules that others read `outside`."""
        try:
            given = self._candidates()
        except Exception as error:  # whatever a forward says of values that are drawn
            return _Found({}, short(error))
        listed = self._lists()
        candidates = [
            own
            for layouts in given
            if (own := {name: each for name, each in layouts.items() if name.rpartition(".")[0] not in listed})
            and any(name in whole for name in own)
            and not any(name.rpartition(".")[0] in outside for name in own)
        ]
        chosen: dict[str, Any] = {}
        problem = "" if candidates else "no rows of its parameters belong to one rank alone"
        taken = {name for layouts in self._inner.values() for name in layouts}
        for layouts in sorted(candidates, key=self._elements, reverse=True):
            if not taken.isdisjoint(layouts) or any(chosen.get(name, each) != each for name, each in layouts.items()):
                continue
            for each in (self._with_equal(layouts), layouts):
                wrong = self._problem({**chosen, **each})
                if not wrong:
                    chosen |= each
                    break
                problem = problem or wrong
        return _Found(chosen, problem)

    def _candidates(self) -> list[Layouts]:
        with cast(Any, torch.random).fork_rng(devices=[]):
            call = self._calls[0]
            values = drawn_inputs(call)
            return dependent_layouts(redrawn(self._module), lambda whole: run_valued(whole, call, values), self._size)

    def _lists(self) -> set[str]:
        """Paths of lists of parameters, which others read, and of modules that styles divide."""
        listed = {
            path for path, each in named_modules(self._module) if isinstance(each, nn.ParameterList | nn.ParameterDict)
        }
        return listed | {path for path, style in self._styles.items() if style != "replicated_local"}

    def _elements(self, layouts: Layouts) -> int:
        return sum(self._shapes[name].numel() for name in layouts)

    def _with_equal(self, layouts: Layouts) -> Layouts:
        """Layouts with those of equal modules that this forward did not call, as experts that no token chose."""
        patterns = {(pattern_of(name), self._shapes[name]): layout for name, layout in layouts.items()}
        more = {
            name: patterns[key]
            for name, shape in self._shapes.items()
            if name not in layouts and (key := (pattern_of(name), shape)) in patterns
        }
        return {**more, **layouts}

    def _problem(self, layouts: Layouts) -> str:
        regions: Regions = {**self._inner, "": {**self._inner.get("", {}), **layouts}}
        for call in self._calls:
            try:
                verdict = prove(self._module, call, self._styles, self._size, regions=regions)
            except PrepareError as error:
                return error.got
            if verdict.problem or verdict.outputs or verdict.styles != self._styles:
                return verdict.problem or "ranks would hold parts of what it returns"
        return ""
