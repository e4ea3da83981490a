# SPDX-License-Identifier: Apache-2.0
"""Supplies of weights: a tensor in host memory, a mapped file, or bytes that a source reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import nn

from accel.bigmodel._arguments import copy_in_range, dtype_of, name_of
from accel.bigmodel._describe import StoredTensor, WeightSource
from accel.bigmodel.plan import STORES, DeviceMap, Segment, Weight
from accel.bigmodel.run._absent import AbsentTensor
from accel.bigmodel.run._places import WeightPlace, has_values, held
from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import did_you_mean
from accel.terminal import show_names


@runtime_checkable
class Mappable(Protocol):
    """A source that gives tensors as mapped files."""

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor on the host, with pages that are read when touched; raise `ConfigError` if there is none."""
        ...


@runtime_checkable
class Watched(Protocol):
    """A source that knows whether the files of its weights have been rewritten."""

    def watch(self, names: Iterable[str]) -> None:
        """Note some bytes of weights that stay in files; raise `CheckpointError` if a file has changed already."""
        ...

    def check(self, names: Iterable[str]) -> None:
        """Raise `CheckpointError` if files of weights have changed since they were opened."""
        ...


def _check_has_values(name: str, tensor: object) -> None:
    if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
        return
    got = "one on the meta device" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    raise ConfigError("a source without values", expected="a tensor for each name", got=got, where=f"source[{name!r}]")


class TensorSource:
    """A mapping of tensors as a `WeightSource`; each tensor is looked up when it is read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Look at shapes and dtypes; raise `ConfigError` for a value without memory."""
        for name, tensor in tensors.items():
            _check_has_values(name, tensor)
        self._tensors = tensors
        self._entries = {
            name: StoredTensor(shape=tuple(tensor.shape), dtype=name_of(tensor.dtype), nbytes=tensor.nbytes)
            for name, tensor in tensors.items()
        }

    @property
    def entries(self) -> Mapping[str, StoredTensor]:
        """Shapes and dtypes by name."""
        return self._entries

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors to the targets."""
        for name, target in targets:
            target.copy_(self._tensors[name].detach())

    def mapped(self, name: str) -> torch.Tensor:
        """Return the tensor itself."""
        return self._tensors[name].detach()

    def close(self) -> None:
        """Do nothing: the mapping is the caller's."""


@dataclass(frozen=True, eq=False, slots=True)
class Supply:
    """Place of a weight's bytes between uses."""

    name: str  # name of the weight in the source
    shape: tuple[int, ...]  # sizes of the weight
    dtype: torch.dtype  # dtype in which the model computes
    # The values, in host memory, a mapped file, or on the computing device; None where the source reads them.
    tensor: torch.Tensor | None
    source: WeightSource | None  # reads the values where `tensor` is None
    # The source of a mapped `tensor`, which knows whether its file has been rewritten; None for other tensors.
    files: Watched | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a fetch moves."""
        if self.tensor is not None:
            return self.tensor.nbytes
        assert self.source is not None
        return self.source.entries[self.name].nbytes

    def stored_dtype(self) -> torch.dtype:
        """Return the dtype of the stored values."""
        if self.tensor is not None:
            return self.tensor.dtype
        assert self.source is not None
        return dtype_of(self.source.entries[self.name].dtype)

    def mapped(self) -> torch.Tensor | None:
        """Return the values in a mapped file; None where the source maps none, or not this one."""
        if not isinstance(self.source, Mappable):
            return None
        try:
            return self.source.mapped(self.name)
        except ConfigError:  # in several parts, or in a store
            return None

    def check(self) -> None:
        """Raise `CheckpointError` if the values are in a mapped file that has been rewritten."""
        if self.files is not None:
            self.files.check((self.name,))

    def fetch(self, device: torch.device) -> torch.Tensor:
        """Return the values in new memory of a device."""
        if self.tensor is not None and self.tensor.device.type != "cpu":
            return self.tensor.to(device, self.dtype, copy=True)
        target = torch.empty(self.shape, dtype=self.dtype)
        fill([(self, target)])
        return target.to(device)


def check_mapped(supplies: Sequence[Supply]) -> None:
    """Raise `CheckpointError` if values that were just used are in mapped files that have been rewritten."""
    names: dict[int, tuple[Watched, list[str]]] = {}
    for supply in supplies:
        if supply.files is not None:
            names.setdefault(id(supply.files), (supply.files, []))[1].append(supply.name)
    for files, each in names.values():
        files.check(each)


def fill(targets: Sequence[tuple[Supply, torch.Tensor]]) -> None:
    """Fill contiguous CPU tensors, of any dtype; each source reads its own ones together."""
    reads: dict[int, tuple[WeightSource, list[tuple[str, torch.Tensor]]]] = {}
    casts: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for supply, target in targets:
        if supply.tensor is not None:
            held.append((target, supply.tensor))
            continue
        assert supply.source is not None
        stored = supply.stored_dtype()
        # Sources read only their own dtype; a cast needs separate memory.
        read = target if stored == target.dtype else torch.empty(supply.shape, dtype=stored)
        if read is not target:
            casts.append((supply.name, target, read))
        reads.setdefault(id(supply.source), (supply.source, []))[1].append((supply.name, read))
    if held:  # by one call of torch's, for which the thread lets the interpreter go once
        cast(Any, torch)._foreach_copy_([target for target, _ in held], [tensor for _, tensor in held])
        check_mapped([supply for supply, _ in targets])
    for source, each in reads.values():
        source.read(each)
    for name, target, read in casts:
        copy_in_range(target, read, name=name)


Way = Literal["resident", "cast", "mapped", "streamed", "rows"]

_SHOWN = 5


class Task(NamedTuple):
    """A weight, and how the model gets it."""

    weight: Weight  # the weight
    segment: Segment  # its segment
    # "resident" on the computing device, "cast" there for each call, "mapped" in place, "streamed" through slots,
    # or "rows" looked up.
    way: Way
    home: str  # place of its bytes between uses
    device: torch.device  # the computing device
    places: tuple[WeightPlace, ...]  # its places in the model

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes with it."""
        return dtype_of(self.weight.dtype)

    @property
    def home_dtype(self) -> torch.dtype:
        """The dtype that it has in its home."""
        return dtype_of(self.weight.storage_dtype or self.weight.dtype)


def list_tasks(
    device_map: DeviceMap, devices: Mapping[str, torch.device], places: Mapping[str, tuple[WeightPlace, ...]]
) -> list[Task]:
    """Return the tasks of all weights of a map, in its order."""
    tasks: list[Task] = []
    streamed = set(device_map.order)
    for segment in device_map.skeleton.segments:
        home = device_map.home[segment.name]
        runs = device_map.runs[segment.name]
        for weight in segment.weights:
            moves = segment.movable and weight.moves and home != runs
            way: Way = "cast" if home == runs and segment.casts(weight) else "resident"
            if moves and segment.rows:
                way = "rows"
            elif moves:
                way = "streamed" if segment.name in streamed else "mapped"
            place = home if moves else runs
            tasks.append(Task(weight, segment, way, place, devices[runs], places[weight.name]))
    return tasks


def stored_name(weight: Weight, source: WeightSource | None) -> str | None:
    """Return the name under which a source has a weight; None if it has not."""
    if source is None:
        return None
    return next((name for name in (weight.name, *weight.tied) if name in source.entries), None)


def check_tasks(tasks: list[Task], source: WeightSource | None) -> None:
    """Refuse weights that neither the model nor the source has, or that the source has in another form."""
    for task in tasks:
        _check_is_plain(task)
    wanted = [task for task in tasks if needs_source(task)]
    unsaved = [task.weight.name for task in wanted if not task.weight.stored and not stored_name(task.weight, source)]
    if unsaved:
        raise ConfigError(
            f"{len(unsaved)} buffers have no values, and no checkpoint holds them",
            expected="a model that computes its non-persistent buffers when it is built",
            got=show_names([*map(repr, unsaved)], _SHOWN),
            where="dispatch_model",
            fix="Build the model by accel.init_empty_weights(make), which computes such buffers as "
            "torch.device('meta') does not.",
        )
    if wanted and source is None:
        empty = [task for task in wanted if not has_values(task.places[0].tensor)]
        raise ConfigError(
            f"{len(empty)} weights have no values" if empty else f"{len(wanted)} weights have their home on a disk",
            expected="" if empty else "files that have them",
            got=show_names([repr(task.weight.name) for task in empty or wanted], _SHOWN),
            where="dispatch_model, source=",
            fix="Give the checkpoint that has them: source=path, or a mapping of tensors."
            + ("" if empty else " Or scratch=folder, where the model's values are written for the time of the run."),
        )
    problems: list[str] = []
    for task in wanted:
        assert source is not None
        # A tied weight may be stored under any of its names.
        name = stored_name(task.weight, source)
        entry = source.entries[name] if name is not None else None
        if name is None or entry is None:
            hint = did_you_mean(task.weight.name, source.entries)
            problems.append(f"missing {task.weight.name!r}" + (f" ({hint})" if hint else ""))
        elif difference := _difference(task.weight, entry):
            problems.append(f"{name!r}: {difference} in {entry.where or 'the source'}")
        elif (dtype := _file_dtype(task)) is not None and entry.dtype != dtype:
            field = "storage_dtype" if task.weight.is_cast else "dtype"
            raise ConfigError(
                "a file has a weight in another dtype than the map",
                expected=dtype,
                got=f"{entry.dtype} in {entry.where or 'the source'}",
                where=f"{name!r}, {field}",
                fix="Save it in that dtype, or use the home 'cpu'.",
            )
        elif task.home == "mmap" and not isinstance(source, Mappable):
            raise ConfigError("a source that maps no files", where=name, fix="Use the home 'disk' or 'cpu'.")
    if problems:
        raise CheckpointError(
            f"{len(problems)} weights of the model are not in the source",
            got=show_names(problems, _SHOWN, "; "),
            where="dispatch_model, source=",
            fix="Give source= all of them, or scratch=folder for values that the model has; or dispatch first, and add "
            "modules such as adapters after that.",
        )


def _difference(weight: Weight, entry: StoredTensor) -> str:
    """Return what keeps a stored tensor from being a weight's values; floating-point numbers are cast, others never."""
    if entry.shape != weight.shape:
        return f"expected {weight.shape}, got {entry.shape}"
    floats = dtype_of(entry.dtype).is_floating_point and dtype_of(weight.dtype).is_floating_point
    return "" if floats or entry.dtype == weight.dtype else f"expected {weight.dtype}, got {entry.dtype}"


def _file_dtype(task: Task) -> str | None:
    """Return the dtype that a weight's file must have; None where a read casts it."""
    if task.way == "mapped":  # the host computes from the file in place
        return task.weight.dtype
    return task.weight.storage_dtype if task.weight.is_cast and task.home in STORES else None


def _check_is_plain(task: Task) -> None:
    """Refuse a weight away from its device that is more than its elements, such as one with a quantizer's scales."""
    kind = type(held(task.places[0].tensor))
    if task.way != "resident" and kind not in (torch.Tensor, nn.Parameter, AbsentTensor):
        raise ConfigError(
            "a weight of a special class, as quantizers have, stays on its device",
            expected="a plain parameter or buffer",
            got=kind.__name__,
            where=f"dispatch_model, {task.weight.name!r}",
            fix="Give its segment its computing device as home, or describe(model, storage_dtype=) for smaller bytes.",
        )


def needs_source(task: Task) -> bool:
    """Return whether a weight's values must come from the source."""
    return task.home == "disk" or not has_values(task.places[0].tensor)


def make_supplies(tasks: list[Task], source: WeightSource | None) -> dict[str, Supply]:
    """Return the supply of each weight that is away, by name; reads those that the map keeps in host memory."""
    supplies: dict[str, Supply] = {}
    reads: list[tuple[Supply, torch.Tensor]] = []
    _watch(tasks, source)
    for task in tasks:
        if task.way == "resident":
            continue
        name = task.weight.name
        if not needs_source(task):
            here = held(task.places[0].tensor).detach()
            here = here if task.way == "cast" else here.to("cpu")
            supplies[name] = Supply(name, task.weight.shape, task.dtype, stored_as(task, here), None)
            continue
        from_file = _from_source(task, source)
        if isinstance(source, Mappable) and (
            task.home == "mmap" or task.way == "rows" or isinstance(source, TensorSource)
        ):
            mapped = source.mapped(from_file.name)
            here = stored_as(task, mapped)
            files = source if here is mapped and isinstance(source, Watched) else None
            supplies[name] = replace(from_file, tensor=here, source=None, files=files)
        elif task.home not in STORES:
            device = task.device if task.way == "cast" else torch.device("cpu")
            values = _read(from_file, task.home_dtype, device, reads)
            supplies[name] = replace(from_file, tensor=values, source=None)
        else:
            supplies[name] = from_file
    # Together at the end: neighbours in a file are read by one request.
    fill(reads)
    return supplies


def read_residents(tasks: list[Task], source: WeightSource | None) -> dict[str, torch.Tensor]:
    """Return the values, by name, of weights that stay on their device and that the model lacks."""
    reads: list[tuple[Supply, torch.Tensor]] = []
    found = {
        task.weight.name: _read(_from_source(task, source), task.dtype, task.device, reads)
        for task in tasks
        if task.way == "resident" and needs_source(task)
    }
    fill(reads)
    return found


def _from_source(task: Task, source: WeightSource | None) -> Supply:
    """Return the supply of a weight that a source reads."""
    stored = stored_name(task.weight, source)
    assert stored is not None
    return Supply(stored, task.weight.shape, task.dtype, None, source)


def _read(
    supply: Supply, dtype: torch.dtype, device: torch.device, reads: list[tuple[Supply, torch.Tensor]]
) -> torch.Tensor:
    """Return memory for a weight: filled, or to be filled by what is appended to `reads`."""
    target = torch.empty(supply.shape, dtype=dtype)
    if device.type == "cpu" and supply.stored_dtype() == dtype:
        reads.append((supply, target))
        return target
    fill([(supply, target)])  # one at a time, so that the host holds one before it is cast or sent
    return target.to(device)


def _watch(tasks: Sequence[Task], source: WeightSource | None) -> None:
    """Let a source note bytes of the weights that stay in its files, before any of them is used."""
    if not isinstance(source, Watched):
        return
    # Resident weights are read once, now; only those that are read again can meet another file.
    staying = [task for task in tasks if task.way != "resident" and needs_source(task)]
    names = [stored_name(task.weight, source) for task in staying if task.home in STORES or task.way == "rows"]
    source.watch(name for name in names if name is not None)


def stored_as(task: Task, tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight's values in the dtype of its home: cast, if the map casts it."""
    if task.weight.is_cast and tensor.dtype != task.home_dtype:
        made = torch.empty(tensor.shape, dtype=task.home_dtype, device=tensor.device)
        copy_in_range(made, tensor, name=task.weight.name)
        tensor = made
    return tensor.to(task.device) if task.way == "cast" else tensor
