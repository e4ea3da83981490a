# SPDX-License-Identifier: Apache-2.0
"""The blocks of a model: the one finder that shards, stages, device maps, compilation and recomputation ask."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from torch import nn

from accel.errors import ConfigError
from accel.parallel._modules import is_elsewhere, named_modules, written_class

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # torch gives them no forward


class ModelBlock(NamedTuple):
    """A module that a model repeats."""

    path: str  # its first path in the model
    module: nn.Module  # the module
    holder: str  # path of the outermost list that holds it, or of the module with the numbered attribute
    kind: type[nn.Module]  # its class, as written by its author


class ModuleGroup(NamedTuple):
    """Sibling modules: the entries of a list, or attributes with names that differ in a number."""

    holder: str  # path of the list, or of the module with the attributes
    # Modules by path, in the order of registration. Lists within a list are one with it.
    entries: tuple[tuple[str, nn.Module], ...]
    # "list" for a ModuleList, a Sequential and a ModuleDict with numbered keys; "named" for a ModuleDict with other
    # keys; "attributes" for numbered attributes.
    kind: Literal["list", "named", "attributes"]

    @property
    def around(self) -> str:
        """Path of the module that has the list, or the attributes."""
        return self.holder if self.kind == "attributes" else self.holder.rpartition(".")[0]

    def repeated(self) -> list[tuple[str, nn.Module]]:
        """Return the entries with modules inside, of classes that the group has more than once."""
        found = [(path, each) for path, each in self.entries if any(True for _ in each.children())]
        counts = Counter(written_class(each) for _, each in found)
        return [(path, each) for path, each in found if counts[written_class(each)] > 1]


def is_container(module: nn.Module) -> bool:
    """Return whether a module is a ModuleList or a ModuleDict without a forward, which only its entries have."""
    if not isinstance(module, _CONTAINERS):
        return False
    classes = written_class(module).__mro__  # a class of accel's, put before theirs, does not make them callable
    return not any("forward" in vars(cls) for cls in classes if issubclass(cls, _CONTAINERS))


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward."""
    if isinstance(module, _CONTAINERS):
        return not is_container(module)
    return "forward" in vars(module) or written_class(module).forward is not nn.Module.forward  # its author's


def blocks_of(model: nn.Module | Mapping[str, nn.Module], *, nested: bool = False) -> tuple[ModelBlock, ...]:
    """Return the blocks of a model in the order of registration, each once. No communication.

    A block contains modules, and has a sibling of its class: in a ModuleList, a ModuleDict, a Sequential,
    a list of lists, or under numbered attributes. Entries of None are skipped. A list is stronger evidence than the
    keys of a ModuleDict or the names of attributes: if a module under such a name contains a list of blocks, as each of
    two towers does, the blocks are the entries of the list. Blocks of other pipeline stages count but are not returned.

    Args:
        model: on any device; or its modules by path.
        nested: whether blocks within other blocks, such as experts, are returned too.
    """
    model = dict(named_modules(model))
    repeated = [(group, path, module) for group in groups_of(model) for path, module in group.repeated()]
    listed = [path for group, path, _ in repeated if group.kind == "list"]
    holders: dict[int, str] = {}
    for group, path, module in repeated:
        holds_list = any(each.startswith(f"{path}.") for each in listed)
        if (group.kind == "list" or not holds_list) and not is_elsewhere(module):
            _ = holders.setdefault(id(module), group.holder)
    modules = [(path, module) for path, module in model.items() if id(module) in holders]
    paths = {path for path, _ in modules}
    return tuple(
        ModelBlock(path, module, holders[id(module)], written_class(module))
        for path, module in modules
        if nested or not _is_within(path, paths)
    )


def groups_of(model: nn.Module | Mapping[str, nn.Module]) -> list[ModuleGroup]:
    """Return the groups of a model's modules, outer ones before those in their entries. No communication."""
    found: list[ModuleGroup] = []
    merged: set[str] = set()  # lists that are one with the list around them
    for path, module in named_modules(model):
        if path in merged:
            continue
        if isinstance(module, nn.ModuleList | nn.Sequential) or (_is_numbered(module) and not is_called(module)):
            lists: list[str] = []
            entries = tuple(_entries(module, path, lists))
            merged.update(lists)
            found.append(ModuleGroup(path, entries, "list"))
        elif isinstance(module, nn.ModuleDict):
            entries = tuple((name, each) for name, each in _children(module, path) if not is_container(each))
            found.append(ModuleGroup(path, entries, "named"))
        else:
            found += [ModuleGroup(path, each, "attributes") for each in _numbered(module, path)]
    return [group for group in found if group.entries]


def block_groups(model: nn.Module | Mapping[str, nn.Module]) -> list[ModuleGroup]:
    """Return the groups that may be a model's layers, one block or more: each list, and what has repeated blocks under
    the names of a ModuleDict or of attributes. Outer ones come first. No communication."""
    model = dict(named_modules(model))
    known = {block.path for block in blocks_of(model, nested=True)}
    return [
        group for group in groups_of(model) if group.kind == "list" or any(path in known for path, _ in group.entries)
    ]


def outermost_groups(groups: Iterable[ModuleGroup]) -> list[ModuleGroup]:
    """Return the groups that stand in no entry of another one, from groups with outer ones first."""
    found: list[ModuleGroup] = []
    for group in groups:
        entries = {path for outer in found for path, _ in outer.entries}
        if group.holder not in entries and not _is_within(group.holder, entries):
            found.append(group)
    return found


def _children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    # torch's named_children leaves out the second place of a module, and a block that is called twice is repeated
    for key, child in module._modules.items():  # pyright: ignore[reportPrivateUsage]
        if child is not None:
            yield f"{path}.{key}" if path else key, child


def _entries(module: nn.Module, path: str, lists: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the entries of a list and of lists within it. Appends the paths of these to `lists`."""
    for name, child in _children(module, path):
        if is_container(child):
            lists.append(name)
            yield from _entries(child, name, lists)
        else:
            yield name, child


def _is_numbered(module: nn.Module) -> bool:
    """Whether the keys of a ModuleDict differ only in a number, as keys of layers do."""
    if not isinstance(module, nn.ModuleDict):
        return False
    stems = {_stem(key) for key in module}
    return len(stems) == 1 and "" not in stems


def _stem(key: str) -> str:
    """The name around the numbers in a key; "" for one without a number."""
    return re.sub(r"\d+", "#", key) if re.search(r"\d", key) else ""


def _numbered(module: nn.Module, path: str) -> list[tuple[tuple[str, nn.Module], ...]]:
    """The attributes of a module with names that only differ in a number, by name."""
    found: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, child in _children(module, path):
        if (stem := _stem(name.rpartition(".")[2])) and not is_container(child):
            found.setdefault(stem, []).append((name, child))
    return [tuple(each) for each in found.values() if len(each) > 1]


def _is_within(path: str, paths: Collection[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:end]) in paths for end in range(1, len(parts)))


Select = Literal["repeated"] | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]


def selected(model: nn.Module, select: Select, where: str) -> dict[str, nn.Module]:
    """Return the chosen modules by name, outermost ones only; the model itself has the name "".

    `select` is a class, several, a function of name and module, or "repeated"; an empty choice is a `ConfigError`.
    """
    if select == "repeated":
        chosen = {block.path: block.module for block in blocks_of(model)}
    elif isinstance(select, type | tuple):
        chosen = dict(_outermost(model, lambda _name, module: isinstance(module, select)))
    elif callable(select):
        chosen = dict(_outermost(model, select))
    else:
        raise ConfigError(
            "cannot choose by this", expected="'repeated', a class or a function", got=f"{select!r}", where=where
        )
    if not chosen:
        raise ConfigError(
            "no part of the model is chosen",
            expected="at least one of " + ", ".join(sorted({type(each).__name__ for each in model.modules()})),
            got=f"{select!r}",
            where=where,
            fix="Name a class of blocks, or give a function of (name, module).",
        )
    return chosen


def _outermost(
    module: nn.Module, matches: Callable[[str, nn.Module], bool], name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    if matches(name, module):
        yield name, module
        return
    for key, child in module.named_children():
        yield from _outermost(child, matches, f"{name}.{key}" if name else key)
