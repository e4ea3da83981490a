# SPDX-License-Identifier: Apache-2.0
"""Modules that compute with parts: parts become plain tensors at the borders of a graph of torch.compile, and in
buffers."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from accel.compiling import compiled
from accel.errors import ConfigError
from accel.mixins import Mixin, add_mixin
from accel.parallel._modules import RANKS, written_class
from accel.parallel._private import (
    REGION,
    alike,
    call_in_one_graph,
    is_compiled,
    run_eagerly,
    subclasses_are_on,
    tensors_of,
    user_hooks,
    without_subclasses,
)
from accel.parallel.parts._layout import RowLayout
from accel.parallel.parts._part import Args, Named, PartTensor, Ranks, plain_of
from accel.tree._walk import leaves

_UNCOMPILED = "%s: a module that computes with parts of tensors stays uncompiled: %s"


def leave_uncompiled(module: nn.Module, problem: str) -> None:
    """Let a module that torch compiles run as it is from now on, and log why. Mutates it."""
    logging.getLogger("accel.parallel").warning(_UNCOMPILED, written_class(module).__name__, problem)
    run_eagerly(module)


class PartsInGraph(TorchFunctionMode):
    """Calls the rules of all functions of parts, in a trace of torch.compile, which would leave subclasses off in the
    `__torch_function__` of one: functions of parts that gather others call further ones."""

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Named | None = None) -> Any:
        if subclasses_are_on() and any(isinstance(each, PartTensor) for each in tensors_of((args, kwargs or {}))):
            with self:
                return PartTensor.__torch_function__(func, (), args, kwargs)
        if func is Tensor.unflatten:  # a function in Python, which torch.compile only traces as a method
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Rows(NamedTuple):
    """A part, as torch takes it into a graph and out of it."""

    rows: Tensor  # this rank's, plain
    layout: RowLayout | None
    is_own: bool  # whether the region's ranks divide it, and not its ranks of tokens

    @classmethod
    def all_in(cls, tree: Any) -> Any:
        """Return a tree with these in the place of parts."""

        def taken(part: PartTensor) -> _Rows:
            return cls(_own_tensor(part), part.division, part.ranks is part.ranks.of_region)

        return pytree.tree_map_only(PartTensor, taken, tree)


class PartRegion(Mixin):
    """A module whose inputs and outputs are parts. If torch compiles it, they are tensors at the borders of its graph.

    Attributes:
        accel_ranks: the ranks of these parts.
    """

    accel_ranks: Ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with this rank's rows in the place of parts if torch compiles the call."""
        own: Any = super()
        if is_dynamo_compiling() or not is_compiled(cast(nn.Module, self)):
            return own.__call__(*args, **kwargs)
        ranks = self.accel_ranks
        region = vars(self).get(REGION)
        problem = self._problem_with(args, kwargs)
        if not problem:
            outer = ranks.begin()  # a graph would look at what has entered
            try:
                given, named = self._rows_of(args, kwargs)
                with compiled(), ranks.in_region():
                    if region is not None and region.fullgraph:
                        return self._parts_in(own.__call__(*given, **named))
                    found, end = call_in_one_graph(own.__call__, *given, **named)
            finally:
                ranks.given = None
                ranks.end(outer)
            if end is None:
                return self._parts_in(found)
            problem = end.problem
        leave_uncompiled(cast(nn.Module, self), problem)
        return own.__call__(*args, **kwargs)

    def _problem_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the reason for which a graph would not do what the module does; "" for none."""
        if user_hooks(cast(nn.Module, self)):
            return "hooks, which would not get parts"
        is_changeable = any(isinstance(each, list | dict) for each in (*args, *kwargs.values()))
        return "a list or a dict among its inputs, in which the caller may look for new items" if is_changeable else ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, on parts."""
        ranks: Ranks | None = getattr(self, RANKS, None)
        if ranks is None:  # a slice of an nn.Sequential, which its class makes
            return super().forward(*args, **kwargs)
        layouts, ranks.given = ranks.given, None
        if layouts is None:
            return ranks.from_module(super().forward(*args, **kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for at, layout, is_own in layouts:
            leaves[at] = ranks.in_graph(leaves[at], layout, is_own=is_own)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        try:
            return _Rows.all_in(super().forward(*args, **kwargs))
        finally:
            _ = ranks.begin()  # parts do not leave the graph

    def _rows_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Arguments with this rank's rows in the place of parts; notes the layouts by the number of the leaf."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        parts = [(at, each) for at, each in enumerate(leaves) if isinstance(each, PartTensor)]
        self.accel_ranks.given = tuple((at, each.division, each.ranks is each.ranks.of_region) for at, each in parts)
        for at, each in parts:
            leaves[at] = _own_tensor(each)
        return pytree.tree_unflatten(leaves, spec)

    def _parts_in(self, tree: Any) -> Any:
        def part(each: Any) -> Any:
            if not isinstance(each, _Rows):
                return each
            return self.accel_ranks.in_graph(each.rows, each.layout, is_own=each.is_own)

        return pytree.tree_map(part, tree, is_leaf=lambda each: isinstance(each, _Rows))


class WholeBuffers(Mixin):
    """A module with buffers. A part that its forward assigns to a buffer becomes whole, as later forwards, saves and
    the other ranks read it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, PartTensor) and name in vars(self)["_buffers"]:
            value = value.ranks.kept(value)
        super().__setattr__(name, value)


def keep_buffers_whole(model: nn.Module) -> None:
    """Let modules of a model that computes with parts keep whole tensors in their buffers. Mutates their classes."""
    add_mixin([each for each in model.modules() if vars(each).get("_buffers")], WholeBuffers)  # also one of None


def refuse_hidden(output: Any) -> None:
    """Raise `ConfigError` for an output with parts in an object that is no container, or that an iterator makes later:
    nothing would make them this rank's tensors."""
    for _, each in leaves(output):
        held = () if isinstance(each, Tensor) else tuple(getattr(each, "__dict__", {}).values())
        if hasattr(each, "__next__") or any(isinstance(inner, PartTensor) for inner in tensors_of(held)):
            raise ConfigError(
                "an output of the model holds tensors where nothing gives each rank its part of them",
                expected="tensors in tuples, lists, dicts and dataclasses",
                got=f"an object of the class {type(each).__name__}",
                where="forward of a model on a mesh with cp",
                fix="Return a dict, or list(...) of a generator; or write @dataclasses.dataclass before the class.",
            )


def _own_tensor(part: PartTensor) -> Tensor:
    """This rank's rows as a plain tensor that is no view, as torch.compile looks at what it is a view of."""
    if is_dynamo_compiling():
        return plain_of(part)
    with without_subclasses():
        return alike(part, part.size())
