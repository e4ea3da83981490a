# SPDX-License-Identifier: Apache-2.0
"""Models without the values of their weights, on the meta device; and first values, made part by part on each rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from accel.checkpoint._live_tensors import held_box
from accel.comm import all_reduce_flat
from accel.context import DistContext, context_first
from accel.errors import ConfigError, DeviceError, PrepareError
from accel.parallel._empty import is_unknown
from accel.parallel._modules import check_module, unwrap_model, written_class
from accel.parallel.axes.pipeline import is_tied_copy, pipeline_of
from accel.random import Key
from accel.seeding import seeded
from accel.tensors import local_part

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")

_MOST_ASKED = 1 << 20  # bytes of a tensor that a constructor copies to the CPU to look at, as `tolist` does
_META = torch.device("meta")
_CPU = torch.device("cpu")
_MASKS = (torch.bool, torch.uint8)
_FACTS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
_PLAIN = frozenset((int, float, bool, type(None), torch.dtype, torch.device))  # most arguments; none holds a tensor


def init_empty_weights(make: Callable[[], M]) -> M:
    """Build a model without memory for parameters and persistent buffers.

    They are on the meta device. Buffers that no checkpoint holds, and tensors that modules keep as attributes, have
    their values, on the device that the constructor names. A constructor may look at values, as by `.item()`.
    Nothing is patched; other threads build as ever.

    Args:
        make: builds the model.

    Returns:
        The model that `make` returns.

    Raises:
        ConfigError: a needed value depends on the value of a parameter, or `make` is a model or returns none.
    """
    _check_function(make, "init_empty_weights")
    tape = _Tape()
    with tape:
        model = make()
    check_module(model, where="init_empty_weights, what make() returns")
    found: dict[int, torch.Tensor] = {}  # what is one tensor stays one
    for module, name, tensor in list(_without_weights(model)):
        if tensor.is_meta and tape.knows(tensor):
            setattr(module, name, found.setdefault(id(tensor), tape.value(tensor)))
    return model


def init_on_device(make: Callable[[], M], device: str | torch.device) -> M:
    """Build a model with its parameters and buffers on a device, without a copy on the CPU.

    Tensors for which the constructor names a device are made there. Nothing is patched; other threads build as ever.

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
    check_module(model, where="init_on_device, what make() returns")
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


class _NotedStep(NamedTuple):
    """A noted operation."""

    operation: Any  # the operator
    args: Any  # its positional arguments, tensors by number
    kwargs: Any  # its keyword arguments, likewise
    outputs: Sequence[int]  # numbers of its results
    changed: Sequence[int]  # numbers of the tensors that it writes to


class _Facts(NamedTuple):
    """Facts of an operator's schema."""

    has_device: bool
    is_mutable: bool
    gives_views: bool


class _Tape(TorchDispatchMode):
    """Runs operations on the meta device, and notes them down to compute a value that is asked for later."""

    def __init__(self) -> None:
        cast(Any, super()).__init__()
        self._steps: list[_NotedStep] = []
        self._numbers: Any = WeakIdKeyDictionary()
        self._facts: dict[Any, _Facts] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._count = 0
        self._bases: dict[int, int] = {}  # tensor that shares its memory, by number of the view

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
        self._steps.append(_NotedStep(func, noted, noted_options, outputs, [*outputs, *changed]))
        if inputs and facts.gives_views:
            base = self._root(self._number(inputs[0]).at)
            self._bases.update((at, base) for at in outputs if at != base)
        return result

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was made under the tape."""
        return tensor in self._numbers

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Compute a tensor by the notes that it depends on, in order; a parameter among them is a `ConfigError`."""
        if not tensor.is_meta:
            return tensor
        number = self._number(tensor).at
        wanted = {self._root(number)}
        needed: list[_NotedStep] = []
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


def _run(step: _NotedStep, values: dict[int, torch.Tensor]) -> None:
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
    """Return an operator's arguments, arguments of a kind changed; faster than pytree, which knows more containers."""
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
        fix="Build the model by accel.bigmodel.init_on_device, or compute the value after the load.",
    )


_OWN = ("reset_parameters", "_reset_parameters")  # of torch's layers; the second of attention and transformers
_WHERE = "initialize_weights"


@context_first
def initialize_weights(
    ctx: DistContext, model: nn.Module, key: Key, *, init: Callable[[nn.Module], object] | None = None
) -> nn.Module:
    """Give a model that was built empty its first values, and return it. Mutates it.

    Module after module is made whole on the context's device, initialised, and cut to what this rank holds, so a rank
    needs memory for its part and for one module's own tensors. Random numbers come from the key and the module's path
    alone: values are the same on any mesh, and on one process, for one kind of device. What has values stays.

    Args:
        ctx: the context.
        model: from `prepare` or `prepare_model`, built on the meta device; perhaps filled in part by a load.
        key: the source of random numbers; equal on every rank.
        init: fills the parameters and buffers of the module that it is given, not of modules below it, such
            as `_init_weights` of a model of transformers. None for the module's own `reset_parameters`.

    Returns:
        The model that was passed. Communicates along `pp` where stages share a tied parameter, and else not at all.

    Raises:
        PrepareError: modules without `reset_parameters`, or values that the function did not give; named.

    Examples:
        >>> with torch.device("meta"):
        ...     net = nn.Linear(4, 2)
        >>> net = accel.bigmodel.initialize_weights(ctx, accel.prepare_model(ctx, net), accel.seeding.Key(0))
        >>> bool(net.weight.isfinite().all())
        True
    """
    ctx.comm.check_open()
    inner = unwrap_model(model)
    modules = dict(_children_first(inner, ""))
    waiting = {path: module for path, module in modules.items() if any(map(is_unknown, _own(module).values()))}
    if init is None:
        _check_initialisers(waiting)
    for path, module in waiting.items():
        empty = {name: each for name, each in _own(module).items() if is_unknown(each) or not each.is_floating_point()}
        if not any(map(is_unknown, empty.values())):
            continue  # tied to a parameter of a module before
        made = _stand_in(module, ctx.device)
        with seeded(ctx, key.fold_in("weights", path)), torch.no_grad():
            _ = _initialise(made) if init is None else init(made)
        _fill(path, empty, _own(made))
    _follow_first_stage(inner)
    return model


def _children_first(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules in the order in which a constructor ends: those below a module before it."""
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, module


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module itself."""
    return dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])


def _own_initialiser(kind: type[nn.Module]) -> Callable[[nn.Module], object] | None:
    return next((getattr(kind, name) for name in _OWN if hasattr(kind, name)), None)


def _initialise(module: nn.Module) -> object:
    own = _own_initialiser(type(module))
    assert own is not None  # checked before
    return own(module)


def _check_initialisers(modules: Mapping[str, nn.Module]) -> None:
    missing = [path or "the model" for path, each in modules.items() if _own_initialiser(written_class(each)) is None]
    if missing:
        raise PrepareError(
            "modules do not know their first values",
            expected="reset_parameters in each module with parameters",
            got=", ".join(missing),
            where=_WHERE,
            fix="Give their classes one, or pass init=, a function of a module that fills its parameters.",
        )


def _stand_in(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a module, of its class, with full plain tensors of NaN instead of its parameters."""
    kind = written_class(module)
    made = object.__new__(kind)
    own = vars(made)
    own.update(vars(module))
    for held, wrap in (("_parameters", True), ("_buffers", False)):
        tensors = cast("Mapping[str, Tensor | None]", own[held])
        own[held] = {name: None if each is None else _whole(each, device, wrap=wrap) for name, each in tensors.items()}
    return made


def _whole(tensor: Tensor, device: torch.device, *, wrap: bool) -> Tensor:
    made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    if made.is_floating_point():
        _ = made.fill_(float("nan"))
    return nn.Parameter(made, tensor.requires_grad) if wrap else made


def _fill(path: str, empty: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> None:
    """Copy this rank's parts of initialised tensors. Mutates the empty ones."""
    for name, tensor in empty.items():
        where = f"{path}.{name}" if path else name
        if is_unknown(made[name]):
            raise PrepareError(
                "an initialisation left values out", got=where, where=_WHERE, fix="Let init fill all of the module."
            )
        box = held_box(tensor, where)
        if box is not None:
            at = tuple(slice(start, start + extent) for start, extent in zip(box.offset, box.shape, strict=True))
            _ = local_part(tensor).copy_(made[name].detach()[at])


def _follow_first_stage(model: nn.Module) -> None:
    """Give copies of a tied parameter in other stages the values of its first module's. A collective of their ranks."""
    pipeline = pipeline_of(model)
    if pipeline is None:
        return
    held = dict(model.named_parameters(remove_duplicate=False))
    for tie in pipeline.ties:
        part = local_part(held[tie.name])
        mine = torch.zeros_like(part) if is_tied_copy(held[tie.name]) else part
        _ = part.copy_(all_reduce_flat(tie.comm, mine.contiguous(), "sum").view_as(part))
