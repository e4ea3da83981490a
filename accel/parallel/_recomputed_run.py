# SPDX-License-Identifier: Apache-2.0
"""Calls of recomputed blocks: the run in backward sees the arguments of the forward as they were.

A cache of transformers that is empty stays so: each run fills a copy and drops it. One with entries is filled by the
forward, and copied for the run in backward, without its tensors, which its layers replace and do not change. Any other
argument that the forward changes is an error.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel.errors import ConfigError
from accel.parallel._modules import forward_names, written_class
from accel.parallel._private import compiled_as, stance

_CACHES = "transformers.cache_utils"
_DEEPEST = 4  # of containers in containers
_PLAIN = (str, bytes, int, float, complex, type(None), torch.device, torch.dtype, torch.Size)
_LEAVES = (*_PLAIN, type, FunctionType, ModuleType, Enum, nn.Module, torch.Generator)  # what holds no values of a call


def _left_empty(*_args: Any, **_kwargs: Any) -> int:
    """Replace `get_seq_length` of a cache that was left empty, so that nobody continues without its tokens."""
    raise ConfigError(
        "recomputed blocks keep no keys and values in a forward with gradients, so this cache is empty",
        expected="a cache that was filled without gradients",
        got="one that a training forward of recomputed blocks has returned, or was given",
        where="checkpoint_activations, past_key_values",
        fix="Fill it first: with torch.no_grad(): cache = model(ids, use_cache=True).past_key_values",
    )


class _Mutable(NamedTuple):
    """A mutable part of an argument, and what it was before the forward."""

    path: str  # of the part in its argument, as ".items[0]"
    value: Any  # the part itself
    before: Any  # its version, if it is a tensor; else a shallow copy of what it holds


class RecomputedRun:
    """A call of a recomputed block, run once in forward, and for each backward.

    Args:
        block: the block, for errors.
        run: its forward.
        args, kwargs: arguments of the call.

    """

    def __init__(
        self, block: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._block = block
        self._run = run
        self._has_run = False
        self._stance: object = None  # of torch.compile, in forward
        self._empty: dict[int | str, Callable[[], Any]] = {}
        self._filled: dict[int | str, Callable[[], Any]] = {}
        # Of parts of tensors: hooks of saved tensors, such as of `offload_activations`, see their rows alone.
        self._remakes = {at: each.remake() for at, each in enumerate(args) if hasattr(type(each), "remake")}
        for name, each in _named(args, kwargs):
            if not _is_cache(each):
                continue
            if _is_left(each):
                self._empty[name] = functools.partial(_unfilled, each)
            else:
                self._filled[name] = functools.partial(_copied, _copied(each))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, in forward and then in backward, as `torch.utils.checkpoint` does."""
        if self._has_run:
            with compiled_as(self._stance):
                return self._run_with(self._empty | self._filled, self._as_parts(args), kwargs)
        self._has_run = True
        self._stance = stance()
        watched = ((name, each) for name, each in _named(args, kwargs) if name not in self._empty)
        before = {name: list(_parts(each, "", _DEEPEST)) for name, each in watched}
        outputs = self._run_with(self._empty, args, kwargs)
        for name, parts in before.items():
            for part in parts:
                if _is_changed(part) and (name not in self._filled or isinstance(part.value, torch.Tensor)):
                    raise self._error(name, part)
        return outputs

    def _as_parts(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the run in backward, parts of tensors in the place of their rows."""
        remakes = {at: remake for at, remake in self._remakes.items() if type(args[at]) is torch.Tensor}
        return tuple(remakes[at](each) if at in remakes else each for at, each in enumerate(args))

    def _run_with(
        self, caches: Mapping[int | str, Callable[[], Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the block with copies of caches in the place of arguments."""
        if not caches:
            return self._run(*args, **kwargs)
        listed = (caches[at]() if at in caches else each for at, each in enumerate(args))
        return self._run(*listed, **{name: caches[name]() if name in caches else each for name, each in kwargs.items()})

    def _error(self, name: int | str, part: _Mutable) -> ConfigError:
        names = forward_names(self._block)
        named = names[name] if isinstance(name, int) and name < len(names) else name
        kind = written_class(self._block).__name__
        inner = next((written_class(each).__name__ for each in self._block.children()), "a class inside of it")
        how = "a tensor, in place" if isinstance(part.value, torch.Tensor) else f"a {type(part.value).__name__}"
        return ConfigError(
            "a recomputed block changes one of its arguments, and would see the change when it runs again in backward",
            expected="arguments that the block leaves as they are, and outputs that it returns",
            got=f"{named}{part.path}, {how}",
            where=f"checkpoint_activations, forward of {kind}",
            fix="Return what the block adds; or recompute parts of it: accel.checkpoint_activations(model, "
            f'lambda name, module: type(module).__name__ == "{inner}").',
        )


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()


def _held(value: Any) -> dict[str, Any]:
    """Return the attributes of an object."""
    return cast("dict[str, Any]", vars(value))


def _is_cache(value: object) -> bool:
    if isinstance(value, torch.Tensor) or value is None:
        return False
    module = sys.modules.get(_CACHES)
    return module is not None and isinstance(value, cast(Any, module).Cache)


def _is_left(cache: Any) -> bool:
    """Return whether a cache stays as it is, empty; it says so to who asks for its length later."""
    if _held(cache).get("get_seq_length") is _left_empty:
        return True
    if not _is_empty(cache):
        return False
    cache.get_seq_length = _left_empty
    return True


def _is_empty(cache: Any) -> bool:
    inner = [each for each in _held(cache).values() if _is_cache(each)]
    if inner:  # of an encoder-decoder
        return all(map(_is_empty, inner))
    layers = cast("list[Any]", cache.layers)
    return not any(map(_has_begun, layers))


def _has_begun(layer: Any) -> bool:
    """Return whether a layer of a cache has states, of attention or of a recurrence."""
    flags = [each for name, each in _held(layer).items() if "initialized" in name]
    return any(any(cast("dict[int, bool]", each).values()) if isinstance(each, dict) else each for each in flags)


class _Layers(list[Any]):
    """Layers of a cache, each copied when it is read: a block reads its own of many."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers)
        self._is_copied = [False] * len(layers)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        at = cast(int, range(len(self))[place])
        if at < len(self._is_copied) and not self._is_copied[at]:
            self._is_copied[at] = True
            self[at] = _copied(super().__getitem__(at))
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))


def _unfilled(cache: Any) -> Any:
    """Copy an empty cache for one run of a block."""
    made = copy.copy(cache)
    own = _held(made)
    own.pop("get_seq_length", None)
    for name, each in own.items():
        if _is_cache(each):
            own[name] = _unfilled(each)
        elif isinstance(each, list):
            own[name] = _Layers(cast("list[Any]", each))
        else:
            own[name] = _copied(each)
    return made


def _copied(value: Any) -> Any:
    """Copy a cache, its layers and their containers; tensors stay the same."""
    if isinstance(value, list):
        return [_copied(each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in cast("dict[Any, Any]", value).items()}
    if not any(each.__module__ == _CACHES for each in type(value).__mro__):
        return value
    made = copy.copy(value)
    _held(made).update({name: _copied(each) for name, each in _held(value).items()})
    return made


def _parts(value: Any, path: str, deepest: int) -> Iterator[_Mutable]:
    """Yield the mutable parts of an argument."""
    if isinstance(value, torch.Tensor):
        if not value.is_inference():
            yield _Mutable(path, value, value._version)
        return
    if isinstance(value, _LEAVES) or deepest == 0:
        return
    if isinstance(value, tuple):
        items: Any = enumerate(cast("tuple[Any, ...]", value))
    elif isinstance(value, list | deque):
        held = tuple(cast("list[Any]", value))
        yield _Mutable(path, value, held)
        items = enumerate(held)
    elif isinstance(value, set):
        yield _Mutable(path, value, frozenset(cast("set[Any]", value)))
        return
    else:
        own = _attributes(value)
        if own is None:
            return
        yield _Mutable(path, value, dict(own))
        is_object = not isinstance(value, dict)
        items = ((f".{name}" if is_object else name, each) for name, each in own.items())
    for name, each in items:
        shown = name if isinstance(name, str) and name.startswith(".") else f"[{name!r}]"
        yield from _parts(each, path + shown, deepest - 1)


def _attributes(value: Any) -> dict[Any, Any] | None:
    """Return what a dict or an object holds by name; None for an object that holds nothing so."""
    if isinstance(value, dict):
        return cast("dict[Any, Any]", value)
    return cast("dict[Any, Any] | None", getattr(value, "__dict__", None))


def _is_changed(part: _Mutable) -> bool:
    value, before = part.value, part.before
    if isinstance(value, torch.Tensor):
        return value._version != before
    if isinstance(value, list | deque):
        now = cast("list[Any]", value)
        return len(now) != len(before) or any(new is not old for new, old in zip(now, before, strict=True))
    if isinstance(value, set):
        return value != before
    own: dict[Any, Any] = _attributes(value) or {}
    if len(own) == len(before) and all(name in own and own[name] is each for name, each in before.items()):
        return False
    added = [name for name in own if name not in before]
    if not isinstance(value, dict):
        added = [name for name in added if not _is_computed_once(value, name)]
    return bool(added) or any(name not in own or own[name] is not each for name, each in before.items())


def _is_computed_once(value: object, name: str) -> bool:
    """Return whether an attribute is the kept value of a property."""
    return isinstance(inspect.getattr_static(type(value), name, None), functools.cached_property)
