# SPDX-License-Identifier: Apache-2.0
"""Calls of a model's modules that something else may answer: which modules, how to intercept them, what they return."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accel.mixins import Mixin, add_mixin, remove_mixin
from accel.parallel._blocks import block_groups, is_called
from accel.parallel._modules import NOTES, forget, named_modules, note_module, notes_of
from accel.parallel._private import forward_hooks, forward_pre_hooks, written_arguments
from accel.random import set_stream_state, stream_state
from accel.tensors import is_absent, is_dtensor
from accel.tree._walk import Container, Containers

# --- which calls ------------------------------------------------------------------------------------------------------


def units_of(
    model: nn.Module, within: Collection[str] = (), largest: float = 1.0, whole: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the paths of the modules that are recorded as one call each, in the order of registration.

    Units have parameters and do not overlap: the entries of lists, and the modules around lists. A module without
    parameters, such as dropout, is a part of the code between calls.

    Args:
        model: on any device.
        within: paths of modules to open, so that the modules with these paths are units, or are made of units.
        largest: share of all parameters from which a unit is opened, where it has modules with parameters.
        whole: paths of further units, without parameters.
    """
    total = sum(each.numel() for each in model.parameters()) or 1
    entries = {path for group in block_groups(model) for path, _ in group.entries}
    opened = {path[:at] for path in within for at, letter in enumerate(path) if letter == "."}
    found: list[str] = []

    def visit(path: str, module: nn.Module) -> None:
        size = sum(each.numel() for each in module.parameters())
        children = [(f"{path}.{key}" if path else key, child) for key, child in module.named_children()]
        if path in whole and is_called(module):
            found.append(path)
            return
        if not size:
            return
        can_open = any(_has_parameters(child) for _, child in children) and not _has_own(module)
        is_open = path in opened or size / total > largest or not path
        holds_units = path not in entries and any(each.startswith(f"{path}.") for each in entries)
        if path and is_called(module) and not (can_open and (is_open or holds_units)):
            found.append(path)
            return
        for below, child in children:
            visit(below, child)

    visit("", model)
    return tuple(dict.fromkeys(found))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_own(module: nn.Module) -> bool:
    """Whether a module is whole as it has been rewritten, such as a parametrized one."""
    return hasattr(module, "parametrizations")


# --- interception -----------------------------------------------------------------------------------------------------

Plain = Callable[..., Any]
Answer = Callable[[nn.Module, Plain, tuple[Any, ...], dict[str, Any]], Any]


class Answered(Mixin):
    """Stands before the class of a module: `answer(module, plain, args, kwargs)` may answer its calls."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ask for an answer, or call the module with its hooks, wrappers and compiled forward."""
        plain = cast(Any, super()).__call__
        answer: Answer | None = notes_of(cast(nn.Module, self)).get("answer")
        return plain(*args, **kwargs) if answer is None else answer(cast(nn.Module, self), plain, args, kwargs)


def answer_of(module: nn.Module) -> Answer | None:
    """Return what answers the calls of a module; None for its own forward."""
    return notes_of(module).get("answer")


def let_answer(module: nn.Module, answer: Answer | None) -> None:
    """Let calls of a module be answered; None for its own forward. Mutates the module; deep copies share the answer."""
    if answer is not None:
        add_mixin([module], Answered)
        note_module(module, answer=answer)
    elif "answer" in notes_of(module):
        forget(module, "answer")
        remove_mixin([module], Answered)


Watch = Callable[[nn.Module, str, bool], None]
NUMBERS = (int, float, bool)


class AttributesWatched(Mixin):
    """Stands before the class of a module with watched attributes: each read or write of one, and of a buffer,
    calls `watch(module, name, is_write)`."""

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute of the module."""
        value = super().__getattribute__(name)
        own = super().__getattribute__("__dict__")
        if (name in own or type(value) in NUMBERS) and (watch := _watch_in(own)) is not None:  # a class has first ones
            watch(cast(Any, self), name, False)
        return value

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, buffer or module."""
        value = cast(Any, super()).__getattr__(name)
        own = super().__getattribute__("__dict__")
        if name in own["_buffers"] and (watch := _watch_in(own)) is not None:
            watch(cast(Any, self), name, False)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, parameter, buffer or module."""
        watch = _watch_in(super().__getattribute__("__dict__"))
        super().__setattr__(name, value)
        if watch is not None:
            watch(cast(Any, self), name, True)


def _watch_in(attributes: Mapping[str, Any]) -> Watch | None:
    """The watch that a module's attributes note. `vars(module)` would be watched itself."""
    return attributes.get(NOTES, {}).get("watch")


def let_watch(module: nn.Module, watch: Watch | None) -> None:
    """Let reads and writes of a module's attributes be watched; None for no more. Mutates the module."""
    if watch is not None:
        add_mixin([module], AttributesWatched)
        note_module(module, watch=watch)
    elif "watch" in notes_of(module):
        forget(module, "watch")
        remove_mixin([module], AttributesWatched)


class State(NamedTuple):
    """An attribute or buffer that code between calls changes, of a module that is in no unit."""

    name: str  # with the path of the module
    read: int  # number of the calls before its first read, of what the forward before has left
    change: int  # number of the calls before its last change
    is_buffer: bool  # whether it is one


class ChangedStates:
    """Attributes and buffers of modules that code between calls reads and changes.

    Attributes:
        modules: their paths; none within a recorded module.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = {each: path for path, each in modules.items()}
        self._before = {key: _items(value) for key, value in self._values()}
        self._first: dict[tuple[str, str], int] = {}  # reads of what the forward before has left
        self._last: dict[tuple[str, str], int] = {}
        self._changes: dict[tuple[str, str], int] = {}

    def note(self, calls: int, module: nn.Module, name: str, is_write: bool) -> None:
        """Note a read or write behind a number of calls."""
        key = self.modules[module], name
        if is_write:
            self._changes[key] = calls
        elif key not in self._changes:
            _ = self._first.setdefault(key, calls)
            self._last[key] = calls

    def note_change(self, calls: int, name: str) -> None:
        """Note a change in place of a buffer."""
        path, _, key = name.rpartition(".")
        self._changes[path, key] = calls

    def found(self) -> tuple[State, ...]:
        """Return what the forward has changed, sorted by name; lists and dictionaries at their last read."""
        for key, value in self._values():
            if key in self._last and key not in self._changes and _items(value) != self._before.get(key):
                self._changes[key] = self._last[key]
        buffers = {(path, name) for each, path in self.modules.items() for name, _ in each.named_buffers(recurse=False)}
        return tuple(
            State(".".join(filter(None, key)), self._first.get(key, at), at, key in buffers)
            for key, at in sorted(self._changes.items())
            if not key[1].startswith("accel_")
        )

    def _values(self) -> Iterator[tuple[tuple[str, str], object]]:
        """The values of plain attributes, without those that each module has, by path and name."""
        for module, path in self.modules.items():
            for name, value in vars(module).items():
                if name not in _OF_EACH and not name.startswith("accel_"):
                    yield (path, name), value


_OF_EACH = frozenset(vars(nn.Module())) - {"training"}


def _items(value: object) -> object:
    """The identities of a container's items; the state of a generator."""
    if not isinstance(value, list | tuple | dict):
        return (state := stream_state(value)) and repr(state)
    items = cast("dict[Any, Any]", value).values() if isinstance(value, dict) else cast("Sequence[Any]", value)
    return [id(each) for each in items]


def attributes_of(module: nn.Module) -> dict[tuple[str, str], object]:
    """Return the identities of the plain attributes of modules, by path and name."""
    return {
        (path, name): identity_of(value) for path, each in named_modules(module) for name, value in vars(each).items()
    }


def identity_of(value: object) -> object:
    """Return the identity of an attribute's value: a number itself, or the object."""
    return (type(value), value) if type(value) in NUMBERS else id(value)


@contextlib.contextmanager
def tapped(modules: Mapping[str, nn.Module]) -> Generator[list[tuple[str, Any]]]:
    """Note what modules return, by path and before their hooks see it, in the order of the calls."""
    taps: list[tuple[str, Any]] = []

    def tap(path: str) -> Callable[..., None]:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            taps.append((path, output))

        return note

    handles = [each.register_forward_hook(tap(path), prepend=True) for path, each in modules.items()]
    try:
        yield taps
    finally:
        for each in handles:
            each.remove()


_VALUES = (int, float, str, type(None), torch.Tensor)


@contextlib.contextmanager
def unchanged(model: nn.Module, *, is_seen: bool = True) -> Generator[None]:
    """Put parameters, buffers, and attributes of modules with what they hold, back behind a forward that is none of
    the user's.

    `is_seen`: whether a mode of operators sees the forward, and copies what it changes; else all tensors but parameters
    are copied before. Under a mode, functions of torch.jit keep the class of parts of tensors, which they lose.
    """
    modules = [(each, dict(vars(each)), dict(each.named_buffers(recurse=False))) for each in model.modules()]
    hooked = _hooks_of(model)
    values = [value for _, held, _ in modules for value in held.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    present = [each for each in (*model.parameters(), *model.buffers(), *tensors) if not is_absent(each)]
    streams = [(each, state) for each in values if (state := stream_state(each)) is not None]
    kept = _KeptValues(present)
    writable = [] if is_seen else [each for each in present if _can_be_written(each)]
    copies = [(each, each.detach().clone(), _version(each)) for each in writable]
    public = [value for _, held, _ in modules for name, value in held.items() if name[0] != "_"]
    containers: list[Any] = [(value, value.copy()) for value in public if type(value) in (list, dict, set)]
    try:
        with kept if is_seen else contextlib.nullcontext():
            yield
    finally:
        installed = not _hooks_of(model) <= hooked  # hooks stay, and so does a flag that notes them, as in transformers
        for each, attributes, buffers in modules:
            # new objects stay, as they note hooks and gathered parameters
            for name in [name for name, value in vars(each).items() if isinstance(value, _VALUES)]:
                if name not in attributes and not installed:
                    del vars(each)[name]
            vars(each).update({name: value for name, value in attributes.items() if name != NOTES})
            for name, buffer in buffers.items():
                if each.get_buffer(name) is not buffer:
                    setattr(each, name, buffer)
        for container, before in containers:
            container.clear()
            getattr(container, "extend" if isinstance(container, list) else "update")(before)
        for generator, state in streams:
            set_stream_state(generator, state)
        # a graph may have saved one that has not changed
        kept.before += [(each, before) for each, before, version in copies if _version(each) != version]
        with torch.no_grad():
            for tensor, before in kept.before:
                if is_dtensor(tensor) or tensor.untyped_storage().size():  # a unit of `fully_shard` frees some
                    _ = tensor.copy_(before)


def _can_be_written(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no parameter, and each of its elements has separate memory."""
    if isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _version(tensor: torch.Tensor) -> float:
    return math.nan if tensor.is_inference() else tensor._version  # NaN is unlike itself


def _hooks_of(model: nn.Module) -> frozenset[int]:
    """Return the numbers of the hooks that see calls of a model's modules. torch gives each hook its own."""
    return frozenset(
        number
        for each in model.modules()
        for hooks in (forward_hooks(each), forward_pre_hooks(each))
        for number in hooks
    )


class _KeptValues(TorchDispatchMode):
    """Copies tensors before an operator changes them in place.

    Attributes:
        before: the changed tensors with their values before.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        cast(Any, super()).__init__()
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._storages = [each.untyped_storage() for each in tensors]  # alive, so that no `id` is used twice
        self._whole: dict[int, list[torch.Tensor]] = {}
        for each, storage in zip(tensors, self._storages, strict=True):
            self._whole.setdefault(id(storage), []).append(each)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, behind copies of what it changes."""
        for each in written_arguments(func, args, kwargs or {}):
            for tensor in self._whole.pop(id(each.untyped_storage()), ()):
                self.before.append((tensor, tensor.detach().clone()))
        return func(*args, **(kwargs or {}))


# --- trees of arguments and results -----------------------------------------------------------------------------------


class Tree(NamedTuple):
    """A flattened tree."""

    leaves: list[Any]  # its tensors and other values
    rebuild: Callable[[Sequence[Any]], Any]  # returns a tree of the same structure with as many other leaves


_Build = Callable[[Iterator[Any]], Any]


def take_apart(tree: Any, containers: Containers = ()) -> Tree:
    """Flatten a tree of any kind: mappings, sequences, dataclasses, what torch's pytree knows, and `containers`.

    Objects of other kinds are leaves.
    """
    found: list[Any] = []

    def walk(node: Any) -> _Build:
        if isinstance(node, torch.Tensor) or node is None:
            found.append(node)
            return next
        kind = next((each for each in containers if isinstance(node, each.kind)), None)
        if kind is not None:
            return _of_container(node, kind, walk)
        if dataclasses.is_dataclass(node) and not isinstance(node, type | dict):
            return _of_dataclass(node, walk)
        children, spec = pytree.tree_flatten(node, is_leaf=lambda each: each is not node)
        if len(children) == 1 and children[0] is node:
            found.append(node)
            return next
        parts = [walk(each) for each in children]
        return lambda new: pytree.tree_unflatten([part(new) for part in parts], spec)

    build = walk(tree)

    def rebuild(new: Sequence[Any]) -> Any:
        return build(iter(new))

    return Tree(found, rebuild)


def _of_container(node: Any, kind: Container, walk: Callable[[Any], _Build]) -> _Build:
    parts = {name: walk(each) for name, each in kind.take_apart(node).items()}
    return lambda new: kind.put_together(node, {name: part(new) for name, part in parts.items()})


def _of_dataclass(node: Any, walk: Callable[[Any], _Build]) -> _Build:
    fields = [each for each in dataclasses.fields(node) if each.init]
    parts = {each.name: walk(getattr(node, each.name)) for each in fields}
    return lambda new: dataclasses.replace(node, **{name: part(new) for name, part in parts.items()})


def tensors_in(tree: Any, containers: Containers = ()) -> list[torch.Tensor]:
    """Return the tensors of a tree of any kind."""
    return [each for each in take_apart(tree, containers).leaves if isinstance(each, torch.Tensor)]


# --- caches of keys and values ----------------------------------------------------------------------------------------


class CacheGrowth(NamedTuple):
    """Growth, by a call, of a layer of a cache of transformers."""

    argument: int  # number of the cache among the leaves of (args, kwargs)
    layer: int  # number of the layer
    positions: int  # number of positions that it adds keys and values for
    states: tuple[int, ...]  # numbers of the states of convolutions that it sets


class GivenCaches:
    """The caches among the leaves of a call's arguments, as they are before the call."""

    def __init__(self, given: Sequence[Any]) -> None:
        self._caches = {at: each for at, each in enumerate(given) if _is_cache(each)}
        self._before = {at: [_copied(layer) for layer in each.layers] for at, each in self._caches.items()}
        self._held = {at: list(map(_held, each.layers)) for at, each in self._caches.items()}

    def undo(self) -> None:
        """Let the caches be as they were before the call. Mutates them."""
        for at, cache in self._caches.items():
            del cache.layers[len(self._before[at]) :]
            for layer, before in zip(cache.layers, self._before[at], strict=True):
                attributes = cast("dict[str, Any]", vars(layer))
                attributes.clear()
                attributes.update(before)

    def growths(self) -> list[CacheGrowth]:
        """Return what the call has added to each layer."""
        found: list[CacheGrowth] = []
        for at, cache in self._caches.items():
            for number, layer in enumerate(cache.layers):
                known = self._held[at]
                length, states = known[number] if number < len(known) else (0, frozenset[int]())
                now, now_states = _held(layer)
                if now != length or now_states != states:
                    found.append(CacheGrowth(at, number, now - length, tuple(sorted(now_states - states))))
        return found


def grow_cache(cache: Any, growth: CacheGrowth, device: torch.device) -> None:
    """Let a layer of a cache grow as by a call: by keys and values of one row, head and feature, as code outside of the
    layer only reads their length. Mutates the cache."""
    if growth.positions:
        new = torch.zeros(1, 1, growth.positions, 1, device=device)
        cache.update(new, new, growth.layer)
    for each in growth.states:
        cache.update_conv_state(torch.zeros(1, 1, 1, device=device), growth.layer, each)


def _is_cache(value: object) -> bool:
    is_list = isinstance(getattr(value, "layers", None), list)
    return is_list and not isinstance(value, nn.Module) and callable(getattr(value, "get_seq_length", None))


def _copied(layer: Any) -> dict[str, Any]:
    attributes = cast("dict[str, Any]", vars(layer))
    copied = {name: cast("dict[Any, Any]", each).copy() for name, each in attributes.items() if isinstance(each, dict)}
    return attributes | copied


def _held(layer: Any) -> tuple[int, frozenset[int]]:
    """The number of positions in a layer of a cache, and the numbers of the states that are set."""
    length: int = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
    found: object = getattr(layer, "has_previous_state", None)
    states = cast("dict[int, bool]", found) if isinstance(found, dict) else {}
    return length, frozenset(at for at, is_set in states.items() if is_set)
