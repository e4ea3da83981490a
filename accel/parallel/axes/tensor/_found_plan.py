# SPDX-License-Identifier: Apache-2.0
"""`found_plan`: styles and parts of a model that are found in its forward and proved; its embeddings and head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from accel.errors import PrepareError
from accel.parallel._blocks import block_groups, outermost_groups
from accel.parallel._fakes import MessageError
from accel.parallel._modules import example_of, is_in, named_modules, without_cache
from accel.parallel.axes.tensor._dependence import Layouts, pattern_of
from accel.parallel.axes.tensor._found import LARGEST, PlanSearch, Styles, inside, words_of
from accel.parallel.axes.tensor._prove import Verdict, prove, short, tokens_refused
from accel.parallel.axes.tensor._rules import rules_of, share_of
from accel.parallel.axes.tensor._styles import Regions, is_adapted, is_linear, output_dim, problems_of
from accel.parallel.axes.tensor._trace import (
    ForwardTrace,
    ModuleCall,
    ReplacedModulesError,
    facts_of,
    trace,
)
from accel.parallel.parts import RowLayout
from accel.parallel.parts._layout import RowCut, even
from accel.topology import TensorStyle

_LEAST_ROWS = 32  # of a table that is worth dividing
_LEAST_SHARE = 0.01  # of a model's parameters, for a layer or a table that is worth a message
_LEAST_TOGETHER = 0.05  # of a model's parameters, for layers with one pattern of paths, such as one for each head
_ENOUGH = 0.9  # of a model's parameters, for a plan that knows nothing of the inside of some modules
_LONGER = (1, 2, 4, 8, 16, 32, 64, 128)  # inputs tried in turn, as multiples of a short one
_CELLS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BY_OUTPUTS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED, *_CELLS)  # all of their parameters are divided


class FoundPlan(NamedTuple):
    """A plan that is found and proved."""

    styles: Styles  # of its embeddings and heads, and the styles of layouts if asked for, by path
    left: Mapping[str, str]  # why candidates stay whole, by the path of their unit
    is_seen: bool = True  # whether a forward was recorded, or is refused; else the model's known layers may be right
    regions: Mapping[str, Mapping[str, RowLayout]] = {}  # layouts of parameters
    gathers: Sequence[str] = ()  # names of functions for which ranks gather the tokens that they share


def found_plan(
    model: nn.Module,
    size: int,
    example: Mapping[str, Any] | Sequence[Any] | None = None,
    within: Sequence[str] = ("",),
    *,
    with_ends: bool = True,
    in_words: bool = False,
    shares_tokens: bool = False,
    heads: Collection[str] = (),
) -> FoundPlan:
    """Return the plan by which so many ranks compute what the model does. No communication; the model and torch's
    streams are unchanged.

    `example` are arguments of the model's forward; None for small ones by the config of a model of transformers.
    `within` are paths of the modules to look in; `with_ends` also divides the embedding and the head. The plan
    has layouts, and `in_words` also the styles that mean them, which are proved too. With `shares_tokens` the plan is
    proved with ranks that share the tokens; `PrepareError` where they cannot. `heads` are paths of layers that are
    divided by outputs, also where the forward passes their outputs to a loss.
    """
    try:
        recorded = _recorded(model, size if shares_tokens else 1, example)
    except MessageError as error:
        return FoundPlan({}, {"": str(error)}, is_seen=error.exchanges)
    except Exception as error:  # whatever a forward raises without values
        return FoundPlan({}, {"": f"its forward, run without values, failed: {short(error)}"}, is_seen=False)
    if recorded is None:
        return FoundPlan({}, {"": "no example of its inputs"}, is_seen=False)
    search = partial(_searched, model, size=size, within=within, with_ends=with_ends, heads=heads)
    found = search(recorded)
    if recorded.has_unseen and example is not None and "" in within and found.share < _ENOUGH:
        with suppress(Exception):  # whatever a forward says of small inputs
            valued = trace(model, without_cache(model, example), with_values=True)
            found = max(found, search(valued), key=lambda each: each.share)
    proofs, before, plan = found.proofs, found.before, found.plan
    if in_words:
        plan = plan._replace(styles={**proofs.words(plan.regions), **plan.styles})
    if not shares_tokens or not (plan.regions or plan.styles):
        return plan
    # layouts of a module around others may divide features of what ranks share by tokens
    around = {unit for unit in before.regions for each in before.regions if each != unit and is_in(each, unit)}
    inner = before._replace(regions={unit: own for unit, own in before.regions.items() if unit not in around})
    for each in (plan, before):
        with suppress(PrepareError):
            return proofs.with_tokens(each)
    return proofs.with_tokens(inner)


class _Searched(NamedTuple):
    """A plan that is found in a record of a forward."""

    proofs: _Proofs
    before: FoundPlan  # without tables, leaves and the rest
    plan: FoundPlan
    share: float  # of the model's parameters that ranks divide; 1 for a model too large to run with values


def _searched(
    model: nn.Module,
    recorded: ForwardTrace,
    size: int,
    within: Sequence[str],
    heads: Collection[str],
    *,
    with_ends: bool,
) -> _Searched:
    search = PlanSearch(model, recorded, size)
    proofs = _Proofs(model, recorded, size)
    if with_ends:
        search.take(proofs.ends(heads))
    search.look(within)
    before = FoundPlan({**search.styles}, search.left, regions={**search.regions})
    if with_ends and (search.regions or search.styles):
        search.add(proofs.tables(before, within))
        search.add(proofs.leaves(before._replace(regions=search.regions), within))
        search.take(proofs.rest(before._replace(regions=search.regions)))
    plan = FoundPlan({**search.styles}, search.left, regions=search.regions)
    share = 1.0 if proofs.is_large else share_of(model, rules_of(model, plan.styles, size, regions=plan.regions))
    return _Searched(proofs, before, plan, share)


def _recorded(model: nn.Module, times: int, example: Mapping[str, Any] | Sequence[Any] | None) -> ForwardTrace | None:
    """A forward on the example, or on the shortest inputs for which it replaces no module, as BigBird does for short
    ones; None without any."""
    if example is not None:
        return trace(model, without_cache(model, example))
    for longer in _LONGER:
        if (inputs := example_of(model, times * longer)) is None:
            return None
        try:
            return trace(model, inputs)
        except ReplacedModulesError:
            if longer == _LONGER[-1]:
                raise
    return None


class _Proofs:
    """Proofs of single modules in a recorded forward, and of the ends of the model."""

    def __init__(self, model: nn.Module, recorded: ForwardTrace, size: int) -> None:
        self._modules = dict(named_modules(model))
        self._model = model
        self._total = sum(each.numel() for each in model.parameters())
        self.is_large = self._total > LARGEST
        self._trace = recorded
        self._size = size
        self._verdicts: dict[str, Verdict] = {}
        self._linear = {path: each for path, each in self._modules.items() if is_linear(_layer(each))}

    def verdict(self, unit: str, call: ModuleCall, styles: Styles, **options: Any) -> Verdict:
        """A proof of the module, or of an equal module. `options`: of `prove`."""
        module = self._modules[unit]
        key = repr((self._trace.signature(call), facts_of(module), styles, options))
        if key not in self._verdicts:
            self._verdicts[key] = prove(module, call, styles, self._size, **options)
        return self._verdicts[key]

    def words(self, regions: Regions) -> dict[str, TensorStyle]:
        """Styles of layers that divide what layouts do, where they are proved without the other layouts."""
        found: dict[str, TensorStyle] = {}
        for unit, layouts in regions.items():
            words = words_of(self._model, layouts, self._size)
            own: Styles = {path[len(unit) :].removeprefix("."): style for path, style in words.items()}
            calls = [call for call in self._trace.calls if call.path == unit]
            if not any(self.verdict(unit, call, own).problem for call in calls):
                found |= words
        return found

    def with_tokens(self, plan: FoundPlan) -> FoundPlan:
        """A plan that is proved where ranks share the tokens: for the model, or for each block of a large one."""
        groups = outermost_groups(block_groups(self._model)) if self.is_large else ()
        units = [path for group in groups for path, _ in group.entries] or [""]
        styles: dict[str, TensorStyle] = {**plan.styles}
        gathers: dict[str, None] = {}
        scatters = 0
        for unit in units:
            prefix = f"{unit}." if unit else ""
            own, regions = inside(unit, styles, plan.regions)
            for call in (each for each in self._trace.calls if each.path == unit):
                verdict = self.verdict(unit, call, own, regions=regions, shares_tokens=True)
                if verdict.problem:
                    raise tokens_refused(f"{unit or 'the model'}: {verdict.problem}")
                styles |= {f"{prefix}{path}".rstrip("."): each for path, each in verdict.styles.items()}
                scatters += verdict.scatters
                gathers |= dict.fromkeys(verdict.gathers)
        if not scatters:
            raise tokens_refused("no layer that ranks divide returns [batch, tokens, features]")
        return plan._replace(styles=styles, gathers=(*gathers,))

    def tables(self, plan: FoundPlan, within: Sequence[str]) -> Regions:
        """Rows of large embeddings that styles cannot divide, by the module that returns full tensors: bags, and
        embeddings with a weight that other modules read, such as a head without a layer."""
        found: dict[str, Mapping[str, RowLayout]] = {}
        called = {call.path for call in self._trace.calls}
        divided = self._divided(plan)
        for path, module in self._modules.items():
            weight = _table_of(module)
            if weight is None or id(weight) in divided or not self._is_large_table(weight):
                continue
            divided.add(id(weight))  # tied ones once
            unit = self._around(weight, called)
            layouts = {f"{path}.weight".lstrip("."): RowLayout(0, even(len(weight), self._size))}
            now = plan._replace(regions={**plan.regions, **found})
            if any(is_in(unit, each) for each in within) and self._is_proved({unit: layouts}, now):
                found[unit] = {**now.regions.get(unit, {}), **layouts}
        return found

    def _is_proved(self, more: Regions, plan: FoundPlan, *, gathers_inputs: bool = True) -> bool:
        """Whether modules can have further layouts: by proofs of the outermost modules with layouts around them."""
        regions = {**plan.regions, **{unit: {**plan.regions.get(unit, {}), **own} for unit, own in more.items()}}
        for outer in {_outermost(unit, plan.regions) for unit in more}:
            if sum(each.numel() for each in self._modules[outer].parameters()) > LARGEST:
                return False
            styles, inner = inside(outer, plan.styles, regions)
            calls = [call for call in self._trace.calls if call.path == outer]
            verdicts = (
                self.verdict(outer, call, styles, regions=inner, gathers_inputs=gathers_inputs) for call in calls
            )
            if any(each.problem for each in verdicts):
                return False
        return True

    def leaves(self, plan: FoundPlan, within: Sequence[str]) -> Regions:
        """Rows of large parameters of convolutions, cells and the user's modules, such as a head that multiplies by a
        plain parameter: each rank computes with some, and gathers the results."""
        whole = {name: each for name, each in self._whole(plan).items() if _is_divisible(self._modules[_owner(name)])}
        called = {call.path for call in self._trace.calls}
        found: list[tuple[str, Layouts]] = []
        for name in self._large(whole):
            unit = self._around(whole[name], called)
            if not any(is_in(unit, each) for each in within):
                continue
            is_whole = not any(inside(unit, plan.styles, plan.regions))
            own_plan = FoundPlan({}, {}) if is_whole else plan  # alone, once for all that are equal
            # Without gathers inside: a table of positions must not make each block gather its input.
            for layouts in self._ways_of(name, whole[name]):
                if self._is_proved({unit: layouts}, own_plan, gathers_inputs=False):
                    found.append((unit, layouts))
                    break
        return self._proved(found, plan)

    def _ways_of(self, name: str, weight: Tensor) -> Iterator[Layouts]:
        """Layouts of a parameter, along its longest dimension first; of a convolution or a recurrent cell, outputs of
        all of its parameters."""
        module = self._modules[_owner(name)]
        if not isinstance(module, _BY_OUTPUTS):
            for dim in sorted(range(weight.dim()), key=lambda dim: weight.shape[dim], reverse=True):
                if weight.shape[dim] % self._size == 0:
                    yield {name: RowLayout(dim, even(weight.shape[dim], self._size))}
            return
        out = int(isinstance(module, _TRANSPOSED))
        rows = weight.shape[out]
        gates = rows // module.hidden_size if isinstance(module, _CELLS) else 1
        cut = RowCut(gates, ((rows // gates, self._size),))
        dims = {each: (own, min(out, own.dim() - 1)) for each, own in module.named_parameters(_owner(name))}
        if cut.is_equal:
            yield {each: RowLayout(dim, cut) for each, (own, dim) in dims.items() if own.shape[dim] == rows}

    def _proved(self, more: Sequence[tuple[str, Layouts]], plan: FoundPlan) -> Regions:
        """The further layouts that modules can have together, with the layouts before: halves are tried in turn where
        not all can, as a proof of a large module around many takes long."""
        regions: dict[str, Layouts] = {}
        for unit, own in more:
            regions[unit] = {**plan.regions.get(unit, {}), **regions.get(unit, {}), **own}
        if self._is_proved(regions, plan):
            return regions
        if len(more) == 1:
            return {}
        middle = len(more) // 2
        first = self._proved(more[:middle], plan)
        rest = self._proved(more[middle:], plan._replace(regions={**plan.regions, **first}))
        return {**first, **rest}

    def _is_large_table(self, weight: Tensor) -> bool:
        """Whether a table is worth dividing by rows, and each rank gets some of them."""
        cut = even(len(weight), self._size)
        has_rows = cut.local * (self._size - 1) < len(weight)
        return has_rows and len(weight) >= _LEAST_ROWS and weight.numel() >= _LEAST_SHARE * self._total

    def _around(self, weight: Tensor, called: Container[str]) -> str:
        """The innermost called module with all modules that hold a weight, or that read it."""
        owners = {path for path, each in self._modules.items() if any(own is weight for own in each.parameters(False))}
        users = owners.union(*(self._trace.readers.get(path, ()) for path in owners))
        unit = next(iter(owners)).partition(".parametrizations")[0]  # the layer, not what computes its weight
        while unit and (unit not in called or not all(is_in(each, unit) for each in users)):
            unit = unit.rpartition(".")[0]
        return unit

    def rest(self, plan: FoundPlan) -> Styles:
        """Styles of linear layers that a plan leaves whole, and that are a large part of the model, alone or with the
        layers of one pattern of paths: each rank computes some outputs, and gathers all."""
        called = {call.path for call in self._trace.calls}
        weights = {name: w for name, w in self._whole(plan).items() if _is_plain_linear(self._modules[_owner(name)])}
        found: dict[str, TensorStyle] = {}
        for name in self._large(weights):
            if len(weights[name]) >= self._size:
                found |= self._with_weight(weights[name])
        units = {self._unit_of(path, called, plan) for path in found}
        for unit in sorted(units, key=len, reverse=True):
            styles, regions = inside(unit, {**plan.styles, **found}, plan.regions)
            calls = [call for call in self._trace.calls if call.path == unit]
            is_large = sum(each.numel() for each in self._modules[unit].parameters()) > LARGEST
            verdicts = [self.verdict(unit, call, styles, regions=regions) for call in calls if not is_large]
            if is_large or any(each.problem for each in verdicts):
                found = {path: style for path, style in found.items() if self._unit_of(path, called, plan) != unit}
        return found

    def _divided(self, plan: FoundPlan) -> set[int]:
        """The `id` of each parameter that a plan divides."""
        layouts = {id(self._model.get_parameter(name)) for layouts in plan.regions.values() for name in layouts}
        return layouts | {id(each) for path in plan.styles for each in self._modules[path].parameters(recurse=False)}

    def _whole(self, plan: FoundPlan) -> dict[str, Tensor]:
        """Matrices that a plan leaves whole, by name, of called modules."""
        divided = self._divided(plan)
        found: dict[str, Tensor] = {}
        for path in dict.fromkeys(call.path for call in self._trace.calls):
            own = self._modules[path].named_parameters(path, recurse=False)
            found |= {name: each for name, each in own if each.dim() > 1 and id(each) not in divided}
        return found

    def _large(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Names of weights that are a large part of the model, alone or with all of their pattern of names."""
        together: Counter[str] = Counter()
        for name, weight in weights.items():
            together[pattern_of(name)] += weight.numel()
        return [
            name
            for name, weight in weights.items()
            if weight.numel() >= _LEAST_SHARE * self._total
            or together[pattern_of(name)] >= _LEAST_TOGETHER * self._total
        ]

    def _unit_of(self, path: str, called: set[str], plan: FoundPlan) -> str:
        """The module to prove for a layer in it: the outermost one with layouts, or the one that calls the layer."""
        unit = _outermost(path, plan.regions)
        if unit not in plan.regions:
            unit = _owner(path)
            while unit not in called:
                unit = _owner(unit)
        return unit

    def _features(self, path: str) -> int:
        layer = _layer(self._modules[path])
        return layer.get_parameter("weight").shape[output_dim(layer)]

    def ends(self, named: Collection[str]) -> dict[str, TensorStyle]:
        """Styles of the embedding of words, of the head and of named heads, and of all that is tied to them."""
        head = self._named("get_output_embeddings")
        words = self._named("get_input_embeddings")
        heads = [each for each in self._linear.values() if each is head]
        first = [each for each in self._modules.values() if each is words and isinstance(each, nn.Embedding)]
        if not hasattr(self._model, "get_input_embeddings"):
            first = self._tables()
            paths = dict.fromkeys([*self._heads(first), *named])
            heads = [self._linear[path] for path in paths if path in self._linear]
        found: dict[str, TensorStyle] = {}
        for weight in {id(each.weight): each.weight for each in (*heads, *first) if not is_adapted(each)}.values():
            found |= self._with_weight(weight)
        return found

    def _tables(self) -> list[nn.Embedding]:
        """Embeddings that were called, without small ones such as position embeddings."""
        called = (self._modules[path] for path in dict.fromkeys(call.path for call in self._trace.calls))
        tables = [each for each in called if isinstance(each, nn.Embedding)]
        large = (each for each in tables if each.weight.numel() >= _LEAST_SHARE * self._total)
        return [each for each in large if len(each.weight) >= _LEAST_ROWS]

    def _heads(self, tables: Sequence[nn.Embedding]) -> list[str]:
        """Paths of layers with as many outputs as a table has rows, which the model returns, also by functions such as
        a soft bound, or ties to the table."""
        rows = {len(each.weight) for each in tables}
        tied = {id(each.weight) for each in tables}
        returned: set[str] = set()
        numbers = {*self._trace.outputs}
        for node in reversed(self._trace.nodes):
            if numbers.isdisjoint(node.outputs):
                continue
            if node.path in self._linear:
                returned.add(node.path)
            else:
                numbers.update(node.inputs)
        return [
            path
            for path, each in self._linear.items()
            if self._features(path) in rows and (path in returned or id(each.weight) in tied)
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
        return all(not self.verdict(path, call, {"": style}).problem for call in calls)


def _table_of(module: nn.Module) -> Tensor | None:
    """The table of an embedding, also of bags; None for other modules, and for a table that is parametrized."""
    is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return dict(module.named_parameters(recurse=False)).get("weight") if is_table else None


def _is_plain_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward and not is_adapted(module)


def _outermost(path: str, regions: Regions) -> str:
    """The outermost module with layouts around a path, or the path."""
    return min((each for each in regions if is_in(path, each)), key=len, default=path)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _is_divisible(module: nn.Module) -> bool:
    """Whether a module divides all of its parameters by outputs, or is not torch's."""
    is_own = isinstance(module, ParametrizationList) or not type(module).__module__.startswith("torch.")
    return is_own or _is_by_outputs(module)


def _is_by_outputs(module: nn.Module) -> bool:
    return isinstance(module, _BY_OUTPUTS) and any(type(module).forward is each.forward for each in _BY_OUTPUTS)


def _layer(module: nn.Module) -> nn.Module:
    return module.get_submodule("base_layer") if is_adapted(module) else module
