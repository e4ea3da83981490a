# SPDX-License-Identifier: Apache-2.0
"""Models without the values of their weights, which lie on the meta device; all else is as the constructor says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from accel.bigmodel._model import check_model
from accel.errors import ConfigError, DeviceError

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")

_MOST_ASKED = 1 << 20  # bytes of a tensor that a constructor copies to the CPU to look at, as `tolist` does
_META = torch.device("meta")
_CPU = torch.device("cpu")
_MASKS = (torch.bool, torch.uint8)
_FACTS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
_PLAIN = frozenset((int, float, bool, type(None), torch.dtype, torch.device))  # most arguments; none holds a tensor


def init_empty_weights(make: Callable[[], M]) -> M:
    """Build a model whose parameters and persistent buffers have no memory.

    They lie on the meta device. Buffers that no checkpoint holds, and tensors that modules keep as attributes, have
    their values, on the device that the constructor names. A constructor may look at values, as by `.item()`.
    Nothing is patched, and other threads build as ever.

    Args:
        make: builds the model.

    Returns:
        The model that `make` returns.

    Raises:
        ConfigError: a value that is needed depends on that of a parameter, or `make` is a model or returns none.
    """
    _check_function(make, "init_empty_weights")
    tape = _Tape()
    with tape:
        model = make()
    check_model(model, where="init_empty_weights, what make() returns")
    found: dict[int, torch.Tensor] = {}  # what is one tensor stays one
    for module, name, tensor in list(_without_weights(model)):
        if tensor.is_meta and tape.knows(tensor):
            setattr(module, name, found.setdefault(id(tensor), tape.value(tensor)))
    return model


def init_on_device(make: Callable[[], M], device: str | torch.device) -> M:
    """Build a model with its parameters and buffers on a device, without a copy on the CPU.

    Tensors for which the constructor names a device lie there. Nothing is patched, and other threads build as ever.

    Args:
        make: builds the model.
        device: any device of torch.

    Returns:
        The model that `make` returns.

    Raises:
        ConfigError: `make` is a model, or returns none.
        DeviceError: torch knows no such device.
    """
    _check_function(make, "init_on_device")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        fix = f"torch: {str(error).partition(chr(10))[0]}"
        raise DeviceError("no such device", got=repr(device), where="init_on_device", fix=fix) from error
    with place:
        model = make()
    check_model(model, where="init_on_device, what make() returns")
    return model


def _check_function(make: object, where: str) -> None:
    if isinstance(make, nn.Module):
        raise ConfigError(
            "the model exists already",
            expected="a function that builds it",
            got=type(make).__name__,
            where=where,
            fix=f"Pass the function: {where}(lambda: {type(make).__name__}(...)).",
        )


def _without_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield the tensors that no checkpoint holds: buffers that are not persistent, and attributes."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        stored = module.state_dict(keep_vars=True).keys() if buffers else ()
        yield from ((module, name, each) for name, each in buffers.items() if name not in stored)
        for name, held in vars(module).items():
            if isinstance(held, torch.Tensor):
                yield module, name, held


class _Number(NamedTuple):
    """A tensor in a note, by its number."""

    at: int


class _Step(NamedTuple):
    """A noted operation.

    Attributes:
        operation: the operator.
        args, kwargs: its arguments, tensors by number.
        outputs: numbers of its results.
        changed: numbers of the tensors whose memory it writes.
    """

    operation: Any
    args: Any
    kwargs: Any
    outputs: Sequence[int]
    changed: Sequence[int]


class _Facts(NamedTuple):
    """Facts of an operator's schema."""

    has_device: bool
    is_mutable: bool
    gives_views: bool


class _Tape(TorchDispatchMode):
    """Runs operations on the meta device, and notes them down to compute a value that is asked for later."""

    def __init__(self) -> None:
        cast(Any, super()).__init__()
        self._steps: list[_Step] = []
        self._numbers: Any = WeakIdKeyDictionary()
        self._facts: dict[Any, _Facts] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._count = 0
        self._bases: dict[int, int] = {}  # of a view, the tensor whose memory it shares

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options: dict[str, Any] = dict(kwargs or {})
        if _asks(func, args, options):
            return func(*_mapped(args, torch.Tensor, self.value), **_mapped(options, torch.Tensor, self.value))
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor([...]) has its values already
            made = args[0].to(_META)
            self._values[self._number(made).at] = args[0]
            return made
        inputs = list[torch.Tensor]()
        noted = _mapped(args, torch.Tensor, lambda tensor: self._noted(tensor, inputs))
        noted_options = _mapped(options, torch.Tensor, lambda tensor: self._noted(tensor, inputs))
        facts = self._facts.get(func) or self._facts.setdefault(func, _facts_of(func))
        if facts.has_device:
            named = options.get("device")
            noted_options["device"] = _CPU if named is None or torch.device(named).type == "meta" else named
            options["device"] = _META
            _ = options.pop("pin_memory", None)
        if not all(each.is_meta for each in inputs):
            args, options = _mapped((args, options), torch.Tensor, _emptied)
        result = func(*args, **options)
        outputs = [self._number(each).at for each in _found(result, torch.Tensor)]
        changed = [self._number(each).at for each in inputs] if facts.is_mutable else []
        self._steps.append(_Step(func, noted, noted_options, outputs, [*outputs, *changed]))
        if inputs and facts.gives_views:
            base = self._root(self._number(inputs[0]).at)
            self._bases.update((at, base) for at in outputs if at != base)
        return result

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was made under the tape."""
        return tensor in self._numbers

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Compute a tensor by the notes that it depends on, in their order.

        Raises:
            ConfigError: it depends on a parameter.
        """
        if not tensor.is_meta:
            return tensor
        number = self._number(tensor).at
        wanted = {self._root(number)}
        needed: list[_Step] = []
        for step in reversed(self._steps):
            if not wanted.isdisjoint(map(self._root, step.changed)):
                needed.append(step)
                read = (each.at for each in _found((step.args, step.kwargs), _Number))
                wanted.update(map(self._root, read), map(self._root, step.outputs))
        values = {at: each.clone() for at, each in self._values.items() if self._root(at) in wanted}
        for step in reversed(needed):
            _run(step, values)
        if number not in values:
            raise _unknown()
        return values[number]

    def _root(self, number: int) -> int:
        while number in self._bases:
            number = self._bases[number]
        return number

    def _number(self, tensor: torch.Tensor) -> _Number:
        known = self._numbers.get(tensor)
        if known is None:
            self._count += 1
            known = self._numbers[tensor] = _Number(self._count)
            if not tensor.is_meta:
                self._values[known.at] = tensor
        return known

    def _noted(self, tensor: torch.Tensor, inputs: list[torch.Tensor]) -> _Number:
        inputs.append(tensor)
        return self._number(tensor)


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to(_META)


def _facts_of(operation: Any) -> _Facts:
    schema = operation._schema
    return _Facts(
        has_device=any(argument.name == "device" for argument in schema.arguments),
        is_mutable=schema.is_mutable,
        gives_views=any(each.alias_info is not None for each in schema.returns),
    )


def _run(step: _Step, values: dict[int, torch.Tensor]) -> None:
    """Carry out a step on values, and keep its results."""

    def known(number: _Number) -> torch.Tensor:
        if number.at not in values:
            raise _unknown()
        return values[number.at]

    made = step.operation(*_mapped(step.args, _Number, known), **_mapped(step.kwargs, _Number, known))
    values.update(zip(step.outputs, _found(made, torch.Tensor), strict=True))


def _asks(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether an operation needs values at once."""
    aten = torch.ops.aten
    if func is aten.index.Tensor:  # a mask chooses as many as it likes; numbers do not
        return any(mask.dtype in _MASKS for mask in _found(args[1], torch.Tensor))
    if func is aten._to_copy.default:
        copies = torch.device(options.get("device") or _META).type == "cpu"
        return copies and args[0].is_meta and args[0].nbytes <= _MOST_ASKED
    return _gives_facts(func)


@functools.lru_cache(maxsize=1024)
def _gives_facts(func: Any) -> bool:
    """Return whether an operator's result is a number of Python's, or has a shape that depends on values."""
    aten = torch.ops.aten
    no_shape = (aten.bincount.default, aten.repeat_interleave.Tensor)
    return func in no_shape or not _FACTS.isdisjoint(func.tags)


def _mapped(value: Any, kind: type[T], change: Callable[[T], object]) -> Any:
    """Return an operator's arguments with those of a kind changed; faster than pytree, which knows more containers."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple | list):
        return [_mapped(each, kind, change) for each in cast("Sequence[Any]", value)]
    if isinstance(value, dict):
        return {name: _mapped(each, kind, change) for name, each in cast("dict[str, Any]", value).items()}
    return value


def _found(value: Any, kind: type[T]) -> list[T]:
    """Return the values of a kind in an operator's arguments or results."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, tuple | list):
        return [found for each in cast("Sequence[Any]", value) for found in _found(each, kind)]
    return []


def _unknown() -> ConfigError:
    return ConfigError(
        "a value that the constructor needs depends on a parameter, which has none",
        where="init_empty_weights",
        fix="Build the model by accel.init_on_device, or compute the value after the load.",
    )
