# SPDX-License-Identifier: Apache-2.0
"""A forward of a model's copy on fake tensors, watched module by module: shapes, calls and kept bytes."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from accel.errors import AccelError, ConfigError
from accel.estimate._build import Input, as_on_gpus, storage_of
from accel.random import isolated_rng
from accel.tree import map_tensors

Shape = tuple[int, ...]


class Forward(NamedTuple):
    """Facts of a forward, by paths of modules.

    Attributes:
        outputs: shapes in the output of the last call.
        calls: number of calls.
        kept: bytes of tensors kept for the backward, in the module and below.
        tensors: parameters and buffers after it, by their names.
    """

    outputs: dict[str, tuple[Shape, ...]]
    calls: dict[str, int]
    kept: dict[str, int]
    tensors: dict[str, torch.Tensor]


def run_fake(model: nn.Module, inputs: Any) -> Forward:
    """Call a copy of the model on fake tensors."""
    _check_inputs(inputs)
    mode = import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)
    entered: list[str] = []
    with isolated_rng(), warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")  # torch warns about copies of fake tensors
        if any(map(_is_lazy, model.modules())):
            model = _shaped(model, inputs, entered)
        with mode:
            twin = _copied(model, _empty)
            with _refused("the model cannot be called on these inputs without values", _HOW, entered):
                args, options = _arguments(inputs, _empty)
                return _observed(twin, args, options, entered)


def _shaped(model: nn.Module, inputs: Any, entered: list[str]) -> nn.Module:
    """Return a copy on the meta device whose lazy modules have their shapes; fake tensors cannot become theirs."""
    twin = _copied(model, _on_meta)
    with _refused("the model cannot be called on these inputs without values", _HOW, entered), torch.no_grad():
        args, options = _arguments(inputs, _on_meta)
        _ = twin(*args, **options)
    return twin


_HOW = (
    "Pass a tensor, a tuple of arguments or a mapping of keyword arguments; code that looks at a tensor's values cannot"
    " run."
)


def _observed(twin: nn.Module, args: Sequence[Any], options: Mapping[str, Any], entered: list[str]) -> Forward:
    """Call the copy, and note shapes and kept bytes; `entered` has the paths of the modules that are being called."""
    found = Forward({}, {}, {}, {})
    own = {storage_of(each)[0] for each in (*twin.parameters(), *twin.buffers()) if not is_lazy(each)}
    storages: dict[int, object] = {}  # kept alive, so that addresses stay unique

    def watch(path: str, module: nn.Module) -> None:
        def enter(_module: nn.Module, _inputs: Any) -> None:
            entered.append(path)

        def leave(_module: nn.Module, _inputs: Any, output: Any) -> None:
            while entered.pop() != path:  # modules that an error has left
                pass
            found.outputs[path] = tuple(_shapes(output))
            found.calls[path] = found.calls.get(path, 0) + 1

        _ = module.register_forward_pre_hook(enter)
        _ = module.register_forward_hook(leave)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        key, storage = storage_of(tensor)
        if key not in own and key not in storages:
            storages[key] = storage
            inside = [*entered, *_around(entered[-1])] if entered else []
            for path in dict.fromkeys(inside):
                found.kept[path] = found.kept.get(path, 0) + storage.nbytes()
        return tensor

    for path, module in modules_of(twin):
        watch(path, module)
    with torch.enable_grad(), as_on_gpus(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _ = twin(*args, **options)
    return found._replace(tensors=dict([*twin.named_parameters(), *twin.named_buffers()]))


def _copied(model: nn.Module, empty: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy of a model with empty tensors in the place of its own, and without its hooks."""
    with _refused("the model cannot be copied", "Leave inputs out, or pass the plain model, before accel.prepare."):
        known: dict[int, Any] = {}
        for _, module in modules_of(model):
            attributes = cast("dict[str, object]", vars(module))  # tables of parameters and buffers among them
            for tensor in _tensors_in(attributes.values()):
                known[id(tensor)] = empty(tensor)
        twin = copy.deepcopy(model, known)
    for _, module in modules_of(twin):
        if _is_lazy(module):
            continue  # a hook of its own makes its parameters
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return twin


def _empty(tensor: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """Return an empty tensor of the same form; a fake one inside of the fake mode."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if not is_lazy(tensor):
        return _empty(tensor, "meta")
    lazy: Any = UninitializedParameter if isinstance(tensor, nn.Parameter) else UninitializedBuffer
    return lazy(requires_grad=tensor.requires_grad, dtype=tensor.dtype, device="meta")


def _is_lazy(module: Any) -> bool:
    return isinstance(module, LazyModuleMixin) and cast(Any, module).has_uninitialized_params()


def _tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors in plain containers."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors_in(cast("dict[object, object]", value).values())
        elif isinstance(value, list | tuple):
            yield from _tensors_in(cast("Sequence[object]", value))


def _check_inputs(inputs: object) -> None:
    """Raise `ConfigError` for a shape in the place of a tensor."""
    shape = cast("tuple[object, ...]", inputs) if isinstance(inputs, tuple) and not isinstance(inputs, Input) else ()
    if shape and all(isinstance(each, int) for each in shape):
        raise ConfigError(
            "a shape is no input",
            expected="a tensor, or accel.estimate.Input(shape, dtype)",
            got=repr(shape),
            where="summary(inputs=)",
            fix=f'Write accel.estimate.Input({shape}, "float32").',
        )


def _arguments(inputs: Any, empty: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return arguments by position and by keyword, on empty tensors."""

    def emptied(value: Any) -> Any:
        if isinstance(value, Input):
            return empty(torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta"))
        is_tree = isinstance(value, torch.Tensor | Mapping | list | tuple)
        return map_tensors(empty, cast("object", value)) if is_tree else value

    if isinstance(inputs, Mapping):
        return (), {str(name): emptied(value) for name, value in cast("Mapping[Any, Any]", inputs).items()}
    if isinstance(inputs, tuple) and not isinstance(inputs, Input):
        return [emptied(each) for each in cast("tuple[Any, ...]", inputs)], {}
    return (emptied(inputs),), {}


def _shapes(output: object) -> Iterator[Shape]:
    """Yield the shapes of the tensors in an output."""
    values: Iterable[object] = cast(Any, output).values() if isinstance(output, Mapping) else [output]
    for tensor in _tensors_in(values):
        yield tuple(tensor.shape)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Keep torch from logging the traceback of an operation on fake tensors that fails; the error has its text."""
    here = threading.get_ident()

    def other_thread(record: logging.LogRecord) -> bool:
        return record.thread != here

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(other_thread)
    try:
        yield
    finally:
        logger.removeFilter(other_thread)


@contextlib.contextmanager
def _refused(problem: str, fix: str, entered: Sequence[str] = ()) -> Generator[None]:
    """Raise `ConfigError` in the place of whatever the user's code raises."""
    try:
        yield
    except AccelError:
        raise
    except Exception as error:
        path = next(reversed(entered), "")
        text = str(error).splitlines()[0] if str(error) else ""
        where = f"summary, module {path}" if path else "summary"
        raise ConfigError(problem, got=f"{type(error).__name__}: {text}", where=where, fix=fix) from error


def _around(path: str) -> Iterator[str]:
    """Yield the paths of the modules around one; containers such as ModuleList are not called."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def modules_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules by their paths, each once."""
    return cast("Iterator[tuple[str, Any]]", model.named_modules())
