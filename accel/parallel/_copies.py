# SPDX-License-Identifier: Apache-2.0
"""Copies of modules: shallow ones, and deep ones with functions and hooks that hold what the copy has; wide values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree

from accel.errors import PrepareError
from accel.mixins import Mixin
from accel.parallel._modules import wrapped_name, written_class
from accel.parallel.parts._contractions import operands_first
from accel.parallel.parts._elementwise import writes


class NotPickled(Mixin, nn.Module):
    """Base of mixins of models that hold groups of ranks: copies share these, and no file can have them."""

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        raise PrepareError(
            "a model that ranks share cannot be pickled",
            expected="its weights, or the state of the run",
            got=f"torch.save or pickle of the prepared {written_class(self).__name__}",
            where="pickle",
            fix="Save its weights by accel.save_model(ctx, model, path), and a run to resume by"
            " accel.save_state(ctx, path, items). For a file of torch, rank 0 saves what"
            " accel.get_state_dict(ctx, model) returns.",
        )

    def __copy__(self) -> Any:
        own = getattr(super(), "__copy__", None)
        if own is not None:
            return own()
        return _sharing(self) if is_parametrized(self) else self._restored(lambda each: each, {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = getattr(super(), "__deepcopy__", None)  # of a parametrized module, or the user's
        return self._restored(lambda each: copy.deepcopy(each, memo), memo) if own is None else own(memo)

    def _restored(self, copied: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
        """Make a copy from the state that pickle would write, changed by a function."""
        make, given, state, *_ = cast("tuple[Any, ...]", super().__reduce_ex__(4))
        found = make(*copied(given))
        memo[id(self)] = found
        found.__setstate__(copied(state))
        return found


def shallow_copy(module: nn.Module) -> nn.Module:
    """Copy a module and share its attributes. A parametrized module, which `copy.copy` refuses, is copied too. A
    compiled one gets a new forward."""
    if not is_parametrized(module) and wrapped_name(module) is None:
        return copy.copy(module)
    return _sharing(module)


def _sharing(module: nn.Module) -> nn.Module:
    """Make a module of a module's class that shares its attributes."""
    found = nn.Module.__new__(type(module))  # `__new__` of a sharded module's class makes a module of another class
    vars(found).update(vars(module))
    return found


def copied_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a model, with a `memo` of `copy.deepcopy`. Functions among its attributes that hold
    modules or lists of the model, as `self.mlp = lambda x: self.down(self.up(x))` and hooks do, hold the copy's modules
    and lists. A tensor that a forward left among the attributes or in containers of them, such as a loss, has no
    autograd graph there. Attributes that cannot be copied, such as a function of `torch.jit.script`, are shared."""
    for each in _values_kept(model):
        if isinstance(each, Tensor) and not each.is_leaf:
            _ = memo.setdefault(id(each), each.detach().clone())
    before = dict(memo)
    try:
        found = copy.deepcopy(model, memo)
    except Exception:  # whatever an attribute says of a copy
        memo.clear()
        memo.update(before)
        found = _copied_in_part(model, memo)
    for module in found.modules():
        vars(module).update({name: _rebound(value, memo) for name, value in vars(module).items()})
    return found


def _copied_in_part(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy that shares the attributes that cannot be copied. Modules of a class that makes its objects with
    arguments are copied without these."""
    _share_uncopied(_values_kept(model), memo, {id(module): module for module in model.modules()}, set())
    made = {each: nn.Module.__new__(type(each)) for each in model.modules() if type(each).__new__ is not object.__new__}
    memo.update({id(each): found for each, found in made.items()})
    for each, found in made.items():
        vars(found).update(copy.deepcopy(vars(each), memo))
    return copy.deepcopy(model, memo)


def _share_uncopied(values: Iterable[Any], memo: dict[int, Any], modules: dict[int, Any], seen: set[int]) -> None:
    """Note values that cannot be copied in a memo, so that copies share them. Of objects with attributes, such as a
    queue of tensors with a lock, only the attributes are shared that cannot be copied."""

    def is_copied(value: Any) -> bool:
        try:
            _ = copy.deepcopy(value, memo | modules)
        except Exception:  # whatever a value says of a copy
            return False
        return True

    for each in values:
        if id(each) in memo or id(each) in seen or is_copied(each):
            continue
        seen.add(id(each))
        held = None if isinstance(each, type | FunctionType | ModuleType) else getattr(each, "__dict__", None)
        if isinstance(held, dict):
            _share_uncopied(_values_in([held]), memo, modules, seen)
        if held is None or not is_copied(each):
            memo[id(each)] = each


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """An attribute of a copied module, where functions hold what the copy has in the place of what they held."""
    if type(value) in (list, tuple) and any(isinstance(each, FunctionType) for each in value):
        return type(value)(_rebound(each, memo) for each in value)
    if isinstance(value, dict):  # such as a dict of hooks
        held_by_name = cast("dict[Any, Any]", value)
        for key, each in held_by_name.items():
            if isinstance(each, FunctionType):
                held_by_name[key] = _rebound(each, memo)
        return held_by_name
    if not isinstance(value, FunctionType) or not (value.__closure__ or value.__defaults__):
        return value

    def of_copy(each: Any) -> Any:
        return copy.deepcopy(each, memo) if id(each) in memo or _holds_modules(each) else each

    cells = tuple(CellType(of_copy(cell.cell_contents)) for cell in value.__closure__ or ())
    defaults = tuple(map(of_copy, value.__defaults__ or ()))
    made = FunctionType(value.__code__, value.__globals__, value.__name__, defaults or None, cells or None)
    made.__dict__.update(vars(value))
    made.__kwdefaults__ = value.__kwdefaults__
    return made


def _holds_modules(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = [*cast("Mapping[Any, Any]", value).values()]
    return isinstance(value, nn.Module) or (
        isinstance(value, list | tuple) and any(isinstance(each, nn.Module) for each in cast("list[Any]", value))
    )


def _values_kept(model: nn.Module) -> Iterator[Any]:
    """The values among the attributes of modules and in containers there, which may hold themselves; no modules."""
    return _values_in([vars(module) for module in model.modules()])


def _values_in(todo: list[Any]) -> Iterator[Any]:
    """The values in containers, which may hold themselves; no modules."""
    seen = set[int]()
    while todo:
        value = todo.pop()
        if not isinstance(value, dict | list | tuple):
            if not isinstance(value, nn.Module):
                yield value
        elif id(cast(object, value)) not in seen:
            seen.add(id(cast(object, value)))
            todo += cast("dict[Any, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)


class WideMode(TorchFunctionMode):
    """Lets a forward compute in a wide dtype, whatever dtypes it asks for. Its parameters stay as they are.

    Attributes:
        dtype: the wide dtype.
        copies: of the parameters, by their `id`; a forward uses these, so gradients are theirs.
        draws: the generator of random numbers that name none; None for torch's.
    """

    def __init__(
        self, dtype: torch.dtype, parameters: Iterable[Tensor] = (), draws: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.draws = draws
        self.copies: dict[int, Tensor] = {}
        for each in parameters:
            copied = each.detach().to(self._dtype_for(each.dtype))
            self.copies[id(each)] = copied.requires_grad_(each.requires_grad)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("float", "half", "bfloat16"):
            return self._wide(args[0]).to(self.dtype)
        kept = 1 if writes(name) else 0  # what a function changes stays itself
        given, named = self._mapped((tuple(args[kept:]), kwargs or {}))
        if self.draws is not None and name in _OF_STREAMS and not named.get("generator"):
            named["generator"] = self.draws
        if self.draws is not None and name == "gumbel_softmax":
            return self._mapped(_gumbel_softmax(self.draws, *given, **named))
        found = _compute(func, (*args[:kept], *given), named)
        return found if kept else self._mapped(found)  # new tensors are narrow

    def _mapped(self, tree: Any) -> Any:
        return pytree.tree_map(self._wide, tree, is_leaf=lambda each: isinstance(each, torch.Size))

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self._dtype_for(value)
        if not isinstance(value, Tensor) or type(value).__module__ == "torch.nn.attention.bias":  # of no values
            return value
        copied = self.copies.get(id(value))
        return value.to(self._dtype_for(value.dtype)) if copied is None else copied

    def _dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        if dtype.is_complex:
            return self.dtype.to_complex()
        return self.dtype if dtype.is_floating_point else dtype


_OF_STREAMS = (
    "rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "rand_like", "randn_like", "poisson",
    "exponential_", "uniform_", "normal_", "bernoulli_", "random_", "cauchy_", "log_normal_", "geometric_",
)  # fmt: skip


def _gumbel_softmax(
    draws: torch.Generator, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 0, dim: int = -1
) -> Tensor:
    """`functional.gumbel_softmax`, which takes no generator."""
    del eps  # torch makes no use of it
    noise = torch.empty_like(logits).exponential_(generator=draws).log()
    soft = ((logits - noise) / tau).softmax(dim)
    if not hard:
        return soft
    chosen = torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return chosen - soft.detach() + soft


def _compute(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Call a function of torch, or the one that does the same in a wide dtype."""
    if getattr(func, "__name__", "") == "_grouped_mm":
        args, named = operands_first(args, named)
        func = grouped_mm if [each.dim() for each in args[:2]] == [2, 3] else func
    return func(*args, **named)


def grouped_mm(rows: Tensor, weights: Tensor, offs: Tensor, bias: None = None, **_dtypes: Any) -> Tensor:
    """The matmul of each group of rows with its weight, as `functional.grouped_mm`, which has no wide dtype. Parts and
    modes take it for that function."""
    del bias  # torch takes none
    if has_torch_function((rows, weights, offs)):
        return handle_torch_function(grouped_mm, (rows, weights, offs), rows, weights, offs)
    ends = [int(each) for each in offs]
    groups = [rows[begin:end] @ weight for begin, end, weight in zip([0, *ends], ends, weights, strict=False)]
    return torch.cat([*groups, rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])])


def gradients_of(total: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients, by edges: torch would leave a mode for a call with tensors, and blocks are recomputed in it."""
    edges = [get_gradient_edge(each) for each in parameters]
    seed = [torch.ones_like(total)]
    found: Any = torch.autograd.grad([get_gradient_edge(total)], edges, seed, allow_unused=True)
    pairs = zip(found, parameters, strict=True)
    return [torch.zeros_like(like) if each is None else each for each, like in pairs]
