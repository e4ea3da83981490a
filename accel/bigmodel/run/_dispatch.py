# SPDX-License-Identifier: Apache-2.0
"""`dispatch_model`: weights move to their homes, and the model runs from there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accel.bigmodel._devices import device_of
from accel.bigmodel._model import check_model
from accel.bigmodel._source import WeightSource
from accel.bigmodel.load import open_weights
from accel.bigmodel.plan import DeviceMap, check_map
from accel.bigmodel.run._absent import refuse_load
from accel.bigmodel.run._crossings import move_inputs
from accel.bigmodel.run._dispatched import Dispatched
from accel.bigmodel.run._install import Streaming, put_blocks, put_mapped, put_table, settle
from accel.bigmodel.run._origins import Fetches
from accel.bigmodel.run._parts import with_parts
from accel.bigmodel.run._places import check_undispatched, find_places
from accel.bigmodel.run._scratch import with_scratch
from accel.bigmodel.run._slots import Block, make_slots
from accel.bigmodel.run._supplies import Task, Way, check_tasks, list_tasks, make_supplies, read_residents
from accel.bigmodel.run._supply import TensorSource
from accel.errors import ConfigError

M = TypeVar("M", bound=nn.Module)

Weights = Mapping[str, torch.Tensor] | WeightSource | str | os.PathLike[str]


def dispatch_model(
    model: M,
    device_map: DeviceMap,
    *,
    source: Weights | None = None,
    scratch: str | os.PathLike[str] | None = None,
    prefetch: bool = True,
) -> Dispatched[M]:
    """Let a model run with its weights where a map says. Mutates the model until the result is closed.

    Segments at home on their computing device stay there, without hooks. The others stream: a block's weights are put
    into the model while it runs, and those of the next block are fetched meanwhile, in the order in which blocks ran
    last. Wherever else such a weight is used, it fetches itself. No forward is patched. With several devices, inputs go
    to the device of the segment that takes them, and outputs to that of the model's inputs.

    Args:
        model: the model; parameters on the meta device are taken from the source.
        device_map: homes and computing devices, such as `infer_device_map` gives.
        source: weights by name that the model has no values of, and those with the home "disk": tensors, what
            `open_weights` gives, or the path of a checkpoint. None for a model that has all of them.
        scratch: an existing folder on a local disk. Values that the model has, and that the map puts on "disk", are
            written to files there, count before those of the source, and are read back when the handle is closed.
            None to take all of "disk" from the source.
        prefetch: whether a thread fetches blocks ahead of their use.

    Returns:
        The handle; close it, or use it in a `with` block.

    Raises:
        CheckpointError: the source lacks weights or cannot be read, or the disk of `scratch` is full; the model is as
            before.
        ConfigError: no model, no source, a map of another model, weights without values and a source, or a weight
            cannot be stored in the map's storage dtype: its values are too large, or its files have another.
        DeviceError: the computing device is not there.
        StreamError: the model is dispatched already.
    """
    check_model(model, where="dispatch_model")
    check_map(device_map, where="dispatch_model")
    check_undispatched(model)
    with ExitStack() as opened, torch.inference_mode(False):
        if isinstance(source, str | os.PathLike):
            source = open_weights(source)
            opened.callback(source.close)
        elif isinstance(source, Mapping):
            source = TensorSource(source)
        elif source is not None and not isinstance(cast(object, source), WeightSource):
            raise ConfigError(
                "not a source of weights",
                expected="a path, a mapping of tensors, or what accel.open_weights returns",
                got=type(source).__name__,
                where="dispatch_model, source=",
            )
        devices = {name: device_of(name, where="dispatch_model") for name in device_map.devices}
        tasks = list_tasks(device_map, devices, find_places(model, device_map.skeleton))
        source = with_parts(tasks, source)
        if scratch is not None:
            source = with_scratch(tasks, source, scratch, opened)
        return _dispatch(model, device_map, tasks, devices, source, opened, prefetch)


def _dispatch(
    model: M,
    device_map: DeviceMap,
    tasks: list[Task],
    devices: Mapping[str, torch.device],
    source: WeightSource | None,
    opened: ExitStack,
    prefetch: bool,
) -> Dispatched[M]:
    check_tasks(tasks, source)
    supplies = make_supplies(tasks, source)
    read = read_residents(tasks, source)
    slots = {
        name: make_slots(device_map.slots, device_map.slot_bytes(name), device)
        for name, device in devices.items()
        if device_map.slot_bytes(name)
    }

    casts = {
        name: make_slots(1, device_map.cast_bytes(name), device, staged=False)
        for name, device in devices.items()
        if device_map.cast_bytes(name)
    }

    # the model changes from here on
    fetches = {task.segment.name: Fetches() for task in tasks if task.way in ("streamed", "rows")}
    for task in tasks:
        name = task.weight.name
        if task.way == "resident":
            settle(task, read.get(name), opened)
        elif task.way == "mapped":
            put_mapped(task, supplies[name], opened)
        elif task.way == "rows":
            put_table(task, supplies[name], fetches[task.segment.name], opened)
    blocks: dict[str, Block] = {}
    for runs, memory in slots.items():
        segments = _by_segment(device_map, tasks, runs, "streamed")
        streaming = Streaming(segments, supplies, fetches, memory, devices[runs], prefetch)
        blocks |= put_blocks(model, streaming, opened)
    for runs, memory in casts.items():
        segments = _by_segment(device_map, tasks, runs, "cast")
        uncounted = {name: Fetches() for name in segments}
        put_blocks(model, Streaming(segments, supplies, uncounted, memory, devices[runs], False, True), opened)
    opened.callback(cast(Any, model).register_load_state_dict_pre_hook(refuse_load).remove)
    move_inputs(model, device_map, opened)
    return Dispatched(model, device_map, blocks, fetches, opened.pop_all())


def _by_segment(device_map: DeviceMap, tasks: list[Task], runs: str, way: Way) -> dict[str, list[Task]]:
    """Return the tasks of one way on one device, by segment."""
    found: dict[str, list[Task]] = {}
    for task in tasks:
        if task.way == way and device_map.runs[task.segment.name] == runs:
            found.setdefault(task.segment.name, []).append(task)
    return found
