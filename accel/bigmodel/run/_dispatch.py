# SPDX-License-Identifier: Apache-2.0
"""`dispatch_model` and its kin: weights move to their homes, and the model runs from there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, Generic, Literal, TypeVar, cast

import torch
from torch import nn

from accel.bigmodel._arguments import device_of, dtype_of
from accel.bigmodel._describe import WeightSource, describe
from accel.bigmodel.load import Patterns, Rename, load_checkpoint_in_model, open_weights
from accel.bigmodel.plan import STORES, DeviceMap, Skeleton, check_map
from accel.bigmodel.run._absent import refuse_load
from accel.bigmodel.run._auto import auto_map
from accel.bigmodel.run._crossings import move_inputs
from accel.bigmodel.run._install import Streaming, guard_casts, hook_mapped, put_blocks, put_mapped, put_table, settle
from accel.bigmodel.run._places import check_undispatched, find_places
from accel.bigmodel.run._slots import Block, make_slots
from accel.bigmodel.run._sources import with_parts, with_scratch
from accel.bigmodel.run._stats import Fetches, RunStats, SegmentStats
from accel.bigmodel.run._supplies import (
    Supply,
    Task,
    TensorSource,
    Way,
    check_tasks,
    list_tasks,
    make_supplies,
    read_residents,
)
from accel.comm import Call, agreed, call_site
from accel.comm._streams import DeviceStreams, streams_of
from accel.context import DistContext, context_first
from accel.errors import ConfigError
from accel.errors._checks import check_kind
from accel.parallel._modules import check_module
from accel.storage import RemotePath
from accel.tensors import is_absent, is_dtensor, state_tensors, stored_values

AutoMap = DeviceMap | Literal["auto"]

M = TypeVar("M", bound=nn.Module)
M_co = TypeVar("M_co", bound=nn.Module, covariant=True)

Weights = Mapping[str, torch.Tensor] | WeightSource | str | os.PathLike[str]


class Dispatched(Generic[M_co]):
    """A model with weights in the places of a device map. Made by `dispatch_model`; use it in a `with` block.

    Attributes:
        model: the model that was given; call it, generate with it, or use its modules as before.
        device_map: the map.
    """

    def __init__(
        self,
        model: M_co,
        device_map: DeviceMap,
        blocks: Mapping[str, Block],
        fetches: Mapping[str, Fetches],
        opened: ExitStack,
    ) -> None:
        """Take over what `dispatch_model` opened.

        Args:
            model: the model, as dispatched.
            device_map: the map.
            blocks: streamed blocks by segment.
            fetches: counts of fetches outside of calls, by segment.
            opened: gives the model back when it is closed.
        """
        self.model: Final = model  # read-only, so `Dispatched[Net]` is a `Dispatched[nn.Module]`
        self.device_map = device_map
        self._blocks = blocks
        self._fetches = fetches
        self._opened = opened
        self._began = time.perf_counter()

    def stats(self) -> RunStats:
        """Return the counts so far. `print(run.stats())` shows a table of them."""
        found: list[SegmentStats] = []
        for name, fetches in self._fetches.items():
            block = self._blocks.get(name)
            counts = (block.hits, block.waits, block.waited_s, block.moved_bytes) if block else (0, 0, 0.0, 0)
            found.append(
                SegmentStats(
                    name,
                    self.device_map.home[name],
                    *counts,
                    fetches.fetches,
                    fetches.fetched_bytes,
                    fetches.rows,
                    fetches.rows_bytes,
                )
            )
        return RunStats(tuple(found), self.device_map.slots, time.perf_counter() - self._began)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and values of `model.state_dict()`, one CPU tensor at a time.

        Values of weights in host memory are the tensors themselves; others are read for the moment.

        Raises:
            CheckpointError: a file cannot be read.
            StreamError: the model is closed.
        """
        for name, tensor in state_tensors(self.model).items():
            if isinstance(tensor, torch.Tensor) and is_absent(tensor):
                yield name, stored_values(tensor)
            elif isinstance(tensor, torch.Tensor):
                yield name, tensor.detach().cpu()

    def call_last(self, close: Callable[[], object]) -> None:
        """Call a function at the end of `close`, such as that which closes the source.

        Args:
            close: called once, without arguments.
        """
        # An ExitStack runs the newest first: the others are put on top of this one, as one.
        inner = self._opened.pop_all()
        self._opened.callback(close)
        self._opened.push(inner)

    def close(self) -> None:
        """Give the model back: hooks are removed, threads ended, files closed.

        Weights with a home in host memory are the model's again. Others stay absent, and raise where they are used.
        Idempotent.
        """
        with torch.inference_mode(False):  # or weights that move now could never train
            self._opened.close()

    def __enter__(self) -> Dispatched[M_co]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dispatch_model(
    model: M,
    device_map: AutoMap,
    *,
    source: Weights | None = None,
    scratch: str | os.PathLike[str] | None = None,
    prefetch: bool = True,
) -> Dispatched[M]:
    """Let a model run with its weights in the places of a map. Mutates the model until the result is closed.

    Segments at home on their computing device stay there, without hooks. The others stream: a block's weights are put
    into the model while it runs, and the next block's are fetched meanwhile, in the order in which blocks ran
    last. Wherever else such a weight is used, it fetches itself. No forward is patched. With several devices, inputs go
    to the device of the segment that takes them, and outputs to the device of the model's inputs.

    Args:
        model: the model; parameters on the meta device are taken from the source.
        device_map: homes and computing devices, such as `infer_device_map` gives. "auto" infers them from nine tenths
            of what all accelerators and the host have free, with files for the rest if there is a source or a
            `scratch`, and prints the map.
        source: weights by name that the model has no values of, and those with the home "disk": tensors, what
            `open_weights` gives, or the path of a checkpoint. None for a model that has all of them.
        scratch: an existing folder on a local disk. Values that the model has, and that the map puts on "disk", are
            written to files there, precede the source's values, and are read back when the handle is closed.
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
        PlacementError: "auto", and the model does not fit.
        StreamError: the model is dispatched already.
    """
    return _dispatch_by(streams_of, model, device_map, source, scratch, prefetch)


def _dispatch_by(
    door: Callable[[torch.device], DeviceStreams],
    model: M,
    device_map: AutoMap,
    source: Weights | None,
    scratch: str | os.PathLike[str] | None,
    prefetch: bool,
) -> Dispatched[M]:
    """Dispatch a model; `door` gives the streams of a device."""
    check_module(model, where="dispatch_model")
    check_undispatched(model)
    has_files = source is not None or scratch is not None
    if device_map == "auto":
        device_map = auto_map(model, has_files=has_files)
    else:
        check_map(device_map, where="dispatch_model")
    with ExitStack() as opened, torch.inference_mode(False):
        if isinstance(source, str | os.PathLike):
            source = open_weights(source)
            opened.callback(source.close)
        elif isinstance(source, Mapping):
            source = TensorSource(source)
        elif source is not None:
            check_kind(
                source,
                WeightSource,
                "the value is not a source of weights",
                expected="a path, a mapping of tensors, or what accel.bigmodel.open_weights returns",
                where="dispatch_model, source=",
            )
        devices = {name: device_of(name, where="dispatch_model") for name in device_map.devices}
        tasks = list_tasks(device_map, devices, find_places(model, device_map.skeleton))
        if any(is_dtensor(task.places[0].tensor) for task in tasks):
            source = with_parts(tasks, source)
        if scratch is not None:
            source = with_scratch(tasks, source, scratch, opened)
        streams = {name: door(device) for name, device in devices.items()}
        return _dispatch(model, device_map, tasks, streams, source, opened, prefetch)


def _dispatch(
    model: M,
    device_map: DeviceMap,
    tasks: list[Task],
    streams: Mapping[str, DeviceStreams],
    source: WeightSource | None,
    opened: ExitStack,
    prefetch: bool,
) -> Dispatched[M]:
    # All that may fail, reads and memory for slots, comes before the model changes.
    check_tasks(tasks, source)
    supplies = make_supplies(tasks, source)
    read = read_residents(tasks, source)
    slots = {
        name: make_slots(device_map.slots, device_map.slot_bytes(name), door)
        for name, door in streams.items()
        if device_map.slot_bytes(name)
    }

    casts = {
        name: make_slots(1, device_map.cast_bytes(name), door, staged=False)
        for name, door in streams.items()
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
    _check_calls(model, tasks, supplies, opened)
    blocks: dict[str, Block] = {}
    for runs, memory in slots.items():
        segments = _by_segment(device_map, tasks, runs, "streamed")
        streaming = Streaming(segments, supplies, fetches, memory, streams[runs], prefetch)
        blocks |= put_blocks(model, streaming, opened)
    for runs, memory in casts.items():
        segments = _by_segment(device_map, tasks, runs, "cast")
        uncounted = {name: Fetches() for name in segments}
        put_blocks(model, Streaming(segments, supplies, uncounted, memory, streams[runs], False, True), opened)
    opened.callback(cast(Any, model).register_load_state_dict_pre_hook(refuse_load).remove)
    opened.callback(guard_casts(model))
    if len(device_map.devices) > 1:  # with one device nothing crosses, and hooks would cost each call
        move_inputs(model, device_map, opened)
    # The handle owns the ways back from here on; until now an error takes them all.
    return Dispatched(model, device_map, blocks, fetches, opened.pop_all())


def _check_calls(model: nn.Module, tasks: list[Task], supplies: Mapping[str, Supply], opened: ExitStack) -> None:
    """Let calls of segments that compute from mapped files, and of the model, see whether those are still the same."""
    mapped: dict[str, list[Supply]] = {}
    for task in tasks:
        if task.way == "mapped" and supplies[task.weight.name].files is not None:
            for name in {"", task.segment.name}:
                mapped.setdefault(name, []).append(supplies[task.weight.name])
    for name, each in mapped.items():
        opened.callback(hook_mapped(model.get_submodule(name), each).remove)


def _by_segment(device_map: DeviceMap, tasks: list[Task], runs: str, way: Way) -> dict[str, list[Task]]:
    """Return the tasks of one way on one device, by segment."""
    found: dict[str, list[Task]] = {}
    for task in tasks:
        if task.way == way and device_map.runs[task.segment.name] == runs:
            found.setdefault(task.segment.name, []).append(task)
    return found


@context_first
def load_checkpoint_and_dispatch(
    ctx: DistContext,
    model: M,
    path: str | os.PathLike[str] | RemotePath,
    device_map: AutoMap,
    *,
    rename: Rename = (),
    allow_missing: Patterns = (),
    allow_unexpected: Patterns = (),
    readers: int = 4,
    advance: Callable[[int], object] | None = None,
    scratch: str | os.PathLike[str] | None = None,
    prefetch: bool = True,
) -> Dispatched[M]:
    """Load weights into the places of a map, and run the model from there. A collective. Mutates the model.

    The two steps in one: `load_checkpoint_in_model` for what the map keeps in memory, then `dispatch_model`, with the
    files of `path` for what it leaves there. Of a model that `prepare_model(allocate=False)` has divided, each rank
    reads and streams its own stage, or its parts of weights.

    Args:
        ctx: the context.
        model: built by `init_empty_weights`, or with values.
        path: the checkpoint, as `open_weights` takes it.
        device_map: homes and computing devices, such as `infer_device_map` gives; of this rank. "auto" infers them from
            nine tenths of what is free now, with the files for the rest: of the context's device, or of all
            accelerators for the only rank of a host, and of this rank's share of the host. Rank 0 prints its map.
        rename: maps a stored name to the model's; or recipes, for a checkpoint with another layout than the model's.
        allow_missing: names of the model that may be missing, or patterns of such names.
        allow_unexpected: stored names that the model may lack, or patterns of such names.
        readers: number of threads that read.
        advance: called with numbers of bytes that this rank has read, for a progress bar.
        scratch: a folder for values that the model has and that the map puts on "disk", as for `dispatch_model`.
        prefetch: whether a thread fetches blocks ahead of their use.

    Returns:
        The handle; close it, or use it in a `with` block.

    Raises:
        CheckpointError: weights are missing, unexpected or of other shapes, all in one error; or a file cannot be read.
            The same on every rank.
        ConfigError: the map is of another model.
        PlacementError: "auto", and the model does not fit; the same on every rank.
        StreamError: the model is dispatched already.
    """
    site = call_site()
    device_map = _map(ctx, model, device_map, site)
    load_checkpoint_in_model(
        ctx,
        model,
        path,
        device_map,
        dtype=_dtype(model, device_map),
        rename=rename,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        readers=readers,
        advance=advance,
    )
    door = partial(_door, ctx)
    with agreed(ctx.comm, Call("load_checkpoint_and_dispatch", site=site)):
        waits = any(is_dtensor(each) and each.is_meta for each in model.parameters())
        if not waits and not any(home in STORES for home in device_map.home.values()):
            # All values are in memory, so the files are not opened a second time.
            return _dispatch_by(door, model, device_map, None, None, prefetch)
        source = open_weights(path, rename=rename, readers=readers)
        try:
            run = _dispatch_by(door, model, device_map, source, scratch, prefetch)
        except BaseException:
            source.close()
            raise
        # Closed last: weights that go back into the model may still be read from it.
        run.call_last(source.close)
        return run


def _door(ctx: DistContext, device: torch.device) -> DeviceStreams:
    """Return the context's own door to its device, and torch's to others."""
    is_own = device == ctx.device or device.type == ctx.device.type == "cpu"  # "cpu:0" rehearses an accelerator
    return ctx.streams if is_own else streams_of(device)


def _map(ctx: DistContext, model: nn.Module, device_map: AutoMap, site: str) -> DeviceMap:
    """Return the device map; a collective for "auto", as one rank's model may fit and another's not."""
    where = "load_checkpoint_and_dispatch"
    if device_map != "auto":
        check_map(device_map, where=where)
        return device_map
    is_alone = ctx.local_world_size == 1 and ctx.device.type != "cpu"
    with agreed(ctx.comm, Call(f"{where}: device_map='auto'", site=site)):
        check_module(model, where=where)
        device = None if is_alone else ctx.device
        return auto_map(model, has_files=True, device=device, ranks=ctx.local_world_size, shows=ctx.is_main_process)


def _dtype(model: nn.Module, device_map: DeviceMap) -> torch.dtype | None:
    """Return the one dtype that a map gives the floating-point weights of an empty model; None to keep the model's."""
    dtypes = {dtype_of(weight.dtype) for weight in device_map.skeleton.weights()}
    floats = {dtype for dtype in dtypes if dtype.is_floating_point}
    return floats.pop() if len(floats) == 1 and any(each.is_meta for each in model.parameters()) else None


def cpu_offload(
    model: M, device: int | str | torch.device, *, slots: int = 2, storage_dtype: torch.dtype | None = None
) -> Dispatched[M]:
    """Run a model on a device while its blocks stay in host memory. Mutates the model until the result is closed.

    Args:
        model: the model, with its values.
        device: the computing device, a number for a CUDA device; "cpu:0" rehearses with slots on the host.
        slots: number of blocks that the device holds at a time.
        storage_dtype: dtype of matrices in host memory, such as torch.float8_e4m3fn, as for `describe`; the model's
            values are rounded to it, and their memory is given free. None for the model's own.

    Returns:
        The handle; close it, or use it in a `with` block.

    Raises:
        ConfigError: the device is the host, or weights have no values.
    """
    if str(device) == "cpu":
        raise ConfigError(
            "nothing to offload: the host computes",
            expected="an accelerator's device",
            got=repr(device),
            where="cpu_offload",
            fix="Call the model as it is, or use disk_offload; device='cpu:0' streams as an accelerator would.",
        )
    return dispatch_model(model, _all_at(describe(model, storage_dtype=storage_dtype), "cpu", device, slots))


def disk_offload(
    model: M,
    path: str | os.PathLike[str] | None,
    device: int | str | torch.device,
    *,
    slots: int = 2,
    scratch: str | os.PathLike[str] | None = None,
) -> Dispatched[M]:
    """Run a model on a device while its blocks stay in files: those that hold them, or new ones. Mutates the model.

    Weights that stay on the device are taken from the model if it has values, else from the files.

    Args:
        model: the model, best an empty one.
        path: the checkpoint, as `open_weights` takes it. None for a model with values, all written to `scratch`.
        device: the computing device, a number for a CUDA device; "cpu" for the host.
        slots: number of blocks that the device holds at a time.
        scratch: an existing folder on a local disk for the values that the model has, as for `dispatch_model`; None
            writes nothing.

    Returns:
        The handle; close it, or use it in a `with` block.

    Raises:
        CheckpointError: the files lack weights, or cannot be read.
    """
    return dispatch_model(model, _all_at(describe(model), "disk", device, slots), source=path, scratch=scratch)


def _all_at(skeleton: Skeleton, home: str, device: int | str | torch.device, slots: int) -> DeviceMap:
    """Return the map with one home for every movable segment."""
    runs = f"cuda:{device}" if isinstance(device, int) else str(device)
    homes = {segment.name: home if segment.movable else runs for segment in skeleton.segments}
    return DeviceMap(skeleton=skeleton, home=homes, runs=dict.fromkeys(homes, runs), slots=slots)
