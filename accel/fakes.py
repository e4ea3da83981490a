# SPDX-License-Identifier: Apache-2.0
"""Fake tensors, which have no memory, and caches of functions that would keep them."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any, cast

import torch

from accel.compiling import uncompiled

_CACHE = type(functools.lru_cache(lambda: None))
_EMPTY = CellType()
_CONTAINERS = (dict, list, tuple)
_WITHOUT_VALUES = ("FakeTensor", "FunctionalTensor")
_NO_MODELS = frozenset({"torch", "sympy", "numpy", "hypothesis", *sys.stdlib_module_names})


def fake_mode() -> Any:
    """Return a mode in which new tensors have no memory; real ones may be constants among them."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports sympy

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: object) -> bool:
    """Return whether a tensor is one of a fake mode."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # its import takes long, and makes the first fake one
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


@contextmanager
def emptied_caches() -> Generator[None]:
    """Empty the `functools` caches of functions that hold fake tensors, such as positions or masks, behind a block that
    runs models on them: a later forward would get them. In the block, functions that torch compiles run as they are."""
    try:
        with uncompiled():
            yield
    finally:
        for each in _caches():
            if _holds_fakes(each):
                each.cache_clear()


def _caches() -> list[Any]:
    """The caches of functions in imported modules, and of methods of their classes."""
    found: dict[int, Any] = {}  # not from gc.get_objects, which lists none after gc.freeze
    for name, module in list(sys.modules.items()):
        names: dict[str, Any] = getattr(module, "__dict__", {})
        package = name.partition(".")[0]
        if package in _NO_MODELS and name != "__main__":
            continue
        # Thousands of modules of packages keep their functions: each is read once, and again when it has other names or
        # is imported anew.
        if package == "accel" or "-packages" in str(names.get("__file__")):
            caches, _ = _caches_of_package(name, len(names), id(names.get("__spec__")))
        else:
            caches = _caches_of(name, names)
        for each in caches:
            found[id(each)] = each
    return list(found.values())


def _caches_of(name: str, names: Mapping[str, Any]) -> list[Any]:
    """The caches of functions in a module, and of methods of its classes."""
    values: list[Any] = list(names.values())
    for value in tuple(values):
        if isinstance(value, type) and value.__module__ == name:
            values.extend(vars(value).values())
    found: list[Any] = []
    for each in values:
        kind = cast(Any, type(each))  # compared by identity: a class may have no hash
        function = each.__func__ if kind is staticmethod or kind is classmethod else each
        if type(function) is _CACHE:
            found.append(function)
        elif type(function) is FunctionType and function.__closure__ is not None:
            held = [cell.cell_contents for cell in function.__closure__ if cell != _EMPTY]
            found.extend(one for one in held if type(one) is _CACHE)
    return found


@functools.cache
def _caches_of_package(name: str, names: int, spec: int) -> tuple[list[Any], object]:
    """The caches of an installed package's module, while it has so many names and that spec, which a reload replaces.
    The spec comes too: while it lives, no other has its id."""
    held: dict[str, Any] = getattr(sys.modules.get(name), "__dict__", {})
    caches = [each for each in _caches_of(name, held) if each is not _caches_of_package]
    return caches, held.get("__spec__")


def _holds_fakes(cache: object) -> bool:
    """Whether a cache has a tensor without values, also in containers.

    Caches of files that are parsed, for example, hold many thousands of objects, so their types are looked at.
    """
    held: list[Any] = [cache]
    for _ in range(4):
        held = gc.get_referents(*held)
        kinds: dict[int, type] = {id(kind): kind for kind in map(type, held)}  # a class may have no hash
        if any(kind.__name__ in _WITHOUT_VALUES and issubclass(kind, torch.Tensor) for kind in kinds.values()):
            return True
        held = [each for each in held if isinstance(each, _CONTAINERS)]
    return False
