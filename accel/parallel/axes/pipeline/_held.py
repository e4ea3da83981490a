# SPDX-License-Identifier: Apache-2.0
"""The part of a model that a stage holds: its own parameters and buffers, and stand-ins without memory for others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accel.errors import PrepareError
from accel.mixins import Mixin, add_mixin
from accel.parallel._modules import FREED, named_modules, shallow_copy
from accel.parallel._private import without_subclasses, written_arguments

_ABSENT = "accel_absent"


class PartlyHeld(Mixin):
    """A module that lacks some of its parameters and buffers: they are None in its tables, and stand-ins as attributes.

    Attributes:
        accel_absent: the stand-ins by name.
    """

    accel_absent: Mapping[str, torch.Tensor]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module, or a stand-in."""
        found = self.__dict__.get(_ABSENT, {}).get(name)
        return cast(Any, super()).__getattr__(name) if found is None else found


class Elsewhere(Mixin):
    """A module of another stage: nothing of it is saved here."""

    def __repr__(self) -> str:
        """Return its class and place. Its own text may need the parameters."""
        return f"{type(self).__name__}(of another stage)"

    def state_dict(self, *_: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return nothing: the rank of its stage saves the module."""
        _ = prefix, keep_vars
        return {} if destination is None else destination


class StandIn(torch.Tensor):
    """A tensor of another stage, without its memory. Code that changes it, or a view of it, in place leaves it as it
    is: the stage with the tensor changes it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch; views stay stand-ins."""
        if not all(issubclass(each, StandIn) for each in types):
            return NotImplemented  # a subclass that computes with plain tensors decides
        with without_subclasses():
            given = pytree.tree_leaves((args, kwargs or {}))
            own = frozenset(_memory(each) for each in given if isinstance(each, StandIn))
            with _Unwritten(own):
                out = func(*args, **(kwargs or {}))
            return pytree.tree_map_only(torch.Tensor, lambda each: _again(each, own), out)

    def __deepcopy__(self, memo: object) -> StandIn:
        return self


class _Unwritten(TorchDispatchMode):
    """Leaves tensors in some memory as they are."""

    def __init__(self, memory: frozenset[int]) -> None:
        cast(Any, super()).__init__()
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, unless it would change such a tensor."""
        written = written_arguments(func, args, kwargs or {})
        if any(_memory(each) in self._memory for each in written):
            returned = len(func._schema.returns)
            return written[0] if returned == 1 else tuple(written[:returned]) or None
        return func(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _again(tensor: torch.Tensor, memory: frozenset[int]) -> torch.Tensor:
    is_view = not isinstance(tensor, StandIn) and _memory(tensor) in memory
    return tensor.as_subclass(StandIn) if is_view else tensor


def stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the same shape and dtype in the memory of one element: NaN, or 0 for integers."""
    one = placeholder(tensor.dtype, tensor.shape, device).as_subclass(StandIn)
    return nn.Parameter(one, requires_grad=False) if isinstance(tensor, nn.Parameter) else one


def placeholder(dtype: torch.dtype, shape: Sequence[int], device: torch.device, *, dense: bool = False) -> torch.Tensor:
    """Return a tensor of NaN, or of 0 for integers, in the memory of one element; `dense` in memory of its own."""
    is_number = dtype.is_floating_point or dtype.is_complex
    one = torch.full((), float("nan") if is_number else 0, dtype=dtype, device=device).expand(tuple(shape))
    return one.clone() if dense else one


def drop_others(
    model: nn.Module, kept: Collection[str], units: Collection[str], device: torch.device
) -> list[nn.Parameter]:
    """Take all tensors but some out of a model, and mark the units without any as of another stage. Mutates the model.

    Args:
        kept: names of the tensors that stay.
        units: paths of the modules whose calls stages answer.
        device: of the stand-ins.

    Returns:
        The parameters that no stage of this rank holds, in order.
    """
    before = list(model.parameters())
    for path, module in list(named_modules(model)):
        absent: dict[str, torch.Tensor] = {}
        for name, each in _own_tensors(module).items():
            if _joined(path, name) not in kept:
                absent[name] = stand_in(each, device)
                setattr(module, name, None)
        if absent:
            _lack(module, absent)
    for path in units:
        unit = model.get_submodule(path)
        if not any(True for _ in (*unit.parameters(), *unit.buffers())):
            _mark_elsewhere(path, unit)
    live = {id(each) for each in model.parameters()}
    return [each for each in before if id(each) not in live]


def view_of(
    model: nn.Module, kept: Collection[str], units: Collection[str], device: torch.device, *, shards: bool
) -> nn.Module:
    """Return a copy of a model with the tensors of one stage, which it shares; it is not pipelined itself.

    A module with parameters inside and outside of `kept` is whole; a `PrepareError` where stages are sharded apart.
    """

    def view(path: str, module: nn.Module) -> nn.Module:
        inside = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        if path and all(_joined(path, name) in kept for name, _ in inside):
            return module
        found: Any = shallow_copy(module)
        children = cast("Mapping[str, nn.Module | None]", found._modules)
        found._parameters, absent = _part(found._parameters, path, kept, device, shards=shards)
        found._buffers, others = _part(found._buffers, path, kept, device, shards=False)
        found._modules = {
            key: None if child is None else view(_joined(path, key), child) for key, child in children.items()
        }
        if absent or others:
            _lack(found, {**absent, **others})
        if path in units and not any(True for _ in found.parameters()):
            _mark_elsewhere(path, found)
        return found

    return view("", model)


def _part(
    tensors: dict[str, torch.Tensor | None], path: str, kept: Collection[str], device: torch.device, *, shards: bool
) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    """The tensors of a module where all are kept, else nothing and stand-ins; whatever replaces a tensor of the first
    table replaces it in the model."""
    held = {name: each for name, each in tensors.items() if each is not None}
    own = [name for name in held if _joined(path, name) in kept]
    if len(own) == len(held) or (own and not shards):
        return tensors, {}
    if not own:
        return {}, {name: stand_in(each, device) for name, each in held.items()}
    other = next(name for name in held if name not in own)
    raise PrepareError(
        "two stages of one rank read different parameters of one module, and cannot be sharded apart",
        expected="stages of one rank without modules in common",
        got=f"{path or 'the model'}: {', '.join(sorted(own))} and {other}",
        where="prepare_model, plan=, stages",
        fix="Leave stages_per_rank out, or begin the stages at other modules: Plan(stages=[[...], [...]]).",
    )


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    return parameters | dict(module.named_buffers(recurse=False, remove_duplicate=False))


def _lack(module: nn.Module, absent: Mapping[str, torch.Tensor]) -> None:
    vars(module)[_ABSENT] = {**vars(module).get(_ABSENT, {}), **absent}
    add_mixin([module], PartlyHeld)


def _mark_elsewhere(path: str, unit: nn.Module) -> None:
    for below, each in named_modules(unit):
        vars(each)[FREED] = {name: _joined(_joined(path, below), name) for name in vars(each).get(_ABSENT, {})}
        add_mixin([each], Elsewhere)


def _joined(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))
