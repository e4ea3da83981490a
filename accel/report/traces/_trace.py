# SPDX-License-Identifier: Apache-2.0
"""A trace of torch.profiler as sets of intervals: work, communication, waits for data, steps."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from accel.errors import ConfigError
from accel.opening import open_regular
from accel.terminal import show_size

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return spans in any order, which may overlap, as a set of intervals. Empty spans vanish."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Return the part of a set that is not in another one."""
    rest: list[Span] = []
    first = 0
    for start, end in left:
        while first < len(right) and right[first][1] <= start:
            first += 1
        at = first
        while at < len(right) and right[at][0] < end:
            if right[at][0] > start:
                rest.append((start, right[at][0]))
            start = max(start, right[at][1])
            at += 1
        if start < end:
            rest.append((start, end))
    return rest


def intersect(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Return the part of a set that is in another one, too."""
    return subtract(left, subtract(left, right))


def length(spans: Iterable[Span]) -> float:
    """Return the length of a set."""
    return sum(end - start for start, end in spans)


MOST_TRACE = 2_000_000_000  # bytes of the traces of a profile
DATA = "accel.data"
_LOADER = "enumerate(DataLoader)"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_EXCHANGES = ("gloo:", "c10d::", "nccl:", "record_param_comms")
# they hold other operators, and waits without a name
_WRAPPERS = re.compile(r"autograd::engine::|torch::autograd::|DistributedDataParallel|.*Backward\d*$")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_TRACE = re.compile(r"[^.].*\.json(\.gz)?")  # one that is still written begins with a dot
_RANK = re.compile(r"rank[-_]?(\d+)")


class Communication(msgspec.Struct, frozen=True):
    """A collective of a rank."""

    name: str
    group: str  # ranks or name of its group; empty if the trace has none
    start: float  # time of its start, in microseconds
    end: float  # time of its end, in microseconds


class Operator(msgspec.Struct, frozen=True):
    """An operator, or a kernel on a GPU."""

    calls: int  # number of calls
    time_us: float  # time in it, without operators inside of it, in microseconds


class Trace(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The trace of one rank; times are in microseconds."""

    name: str  # its file
    rank: int
    world_size: int | None  # number of ranks of the run; None if the trace has none
    on_gpu: bool  # whether work and communication ran on a GPU
    steps: dict[int, Span]  # time of each step, by its number
    work: list[Span]  # computing
    communications: list[Communication]  # collectives in order of their start
    data: list[Span]  # waits for data
    operators: dict[str, Operator]  # operators by name


class _Event(msgspec.Struct, frozen=True):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def span(self) -> Span:
        return (self.ts, self.ts + self.dur)


class _TracedRank(msgspec.Struct, frozen=True):
    rank: int | None = None
    world_size: int | None = None


class _File(msgspec.Struct, frozen=True):
    traceEvents: list[_Event]  # noqa: N815 - the format's own name
    distributedInfo: _TracedRank = _TracedRank()  # noqa: N815
    accel: _TracedRank = _TracedRank()


def read_traces(folder: Path, *, within: Path | None = None, most: int = MOST_TRACE) -> list[Trace]:
    """Read the traces in a folder in order of their ranks.

    Args:
        folder: the folder of the traces.
        within: folder of the run, which links must not leave; None follows links.
        most: bytes of all traces, unpacked.

    Raises:
        ConfigError: They are not traces of one run, one for each rank, or they are larger than `most`.
    """
    files = sorted(path for path in folder.iterdir() if _TRACE.fullmatch(path.name))
    if not files:
        raise ConfigError(
            "no traces", expected="files *.json or *.json.gz", where=str(folder), fix="Write some by `accel.profile`."
        )
    traces: list[Trace] = []
    for path in files:
        content = _content(path, within, most)
        most -= len(content)
        traces.append(parse_trace(path.name, content))
    traces.sort(key=lambda trace: trace.rank)
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        names = ", ".join(trace.name for trace in traces if trace.rank == twice)
        raise ConfigError(
            f"several traces of rank {twice}",
            got=names,
            where=str(folder),
            fix="Keep the traces of one profile in a folder.",
        )
    sizes = {trace.world_size for trace in traces} - {None}
    if len(sizes) > 1:
        got = ", ".join(f"{trace.name} of {trace.world_size} ranks" for trace in traces)
        raise ConfigError(
            "traces of different runs", got=got, where=str(folder), fix="Delete the traces of the other run."
        )
    return traces


def parse_trace(name: str, content: bytes) -> Trace:
    """Return a trace, or raise `ConfigError`; the name of its file has the rank where the trace has none."""
    try:
        file = msgspec.json.decode(content, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("the file is not a trace of torch.profiler", got=str(error), where=name) from error
    events = [event for event in file.traceEvents if event.ph == "X" and event.dur > 0]
    on_gpu = any(event.cat == "kernel" for event in events)
    exchanges = [event for event in events if is_exchange(event.cat, event.name, on_gpu=on_gpu)]
    own = _device_work(events) if on_gpu else _operator_work(events)
    found = _RANK.search(name)
    ranks = (file.accel.rank, file.distributedInfo.rank, int(found[1]) if found else None)
    sizes = (file.accel.world_size, file.distributedInfo.world_size)
    return Trace(
        name=name,
        rank=next((rank for rank in ranks if rank is not None), 0),
        world_size=next((size for size in sizes if size is not None), None),
        on_gpu=on_gpu,
        steps=_steps(events),
        work=union(span for _, spans in own for span in spans),
        communications=sorted(
            (Communication(event.name, _group(event), *event.span) for event in exchanges), key=lambda each: each.start
        ),
        data=union(event.span for event in events if event.name == DATA or event.name.startswith(_LOADER)),
        operators=_sums(own),
    )


def is_exchange(cat: str, name: str, *, on_gpu: bool) -> bool:
    """Return whether an event is communication."""
    if on_gpu:
        return cat == "kernel" and ("nccl" in name.lower() or "rccl" in name.lower())
    return name.startswith(_EXCHANGES)


def _steps(events: Iterable[_Event]) -> dict[int, Span]:
    """Return the windows of steps; on a device, where kernels run after the host has left a step, its windows."""
    found: dict[str, dict[int, Span]] = {"gpu_user_annotation": {}, "user_annotation": {}}
    for event in events:
        if event.cat in found and (match := _STEP.fullmatch(event.name)):
            found[event.cat][int(match[1])] = event.span
    return dict(sorted((found["gpu_user_annotation"] or found["user_annotation"]).items()))  # a GPU's lie in any order


def _device_work(events: Iterable[_Event]) -> list[tuple[str, list[Span]]]:
    return [
        (event.name, [event.span])
        for event in events
        if event.cat in _DEVICE and not is_exchange(event.cat, event.name, on_gpu=True)
    ]


def _operator_work(events: Iterable[_Event]) -> list[tuple[str, list[Span]]]:
    """Return operators of a CPU with their time outside of operators that they call."""
    threads: dict[tuple[int | str, int | str], list[_Event]] = {}
    for event in events:
        if event.cat == "cpu_op":
            threads.setdefault((event.pid, event.tid), []).append(event)
    own: list[tuple[str, list[Span]]] = []
    for calls in threads.values():
        own += [
            (event.name, spans)
            for event, spans in _own_time(calls)
            if not (event.name.startswith(_EXCHANGES) or _WRAPPERS.match(event.name))
        ]
    return own


def _own_time(calls: list[_Event]) -> list[tuple[_Event, list[Span]]]:
    """Return calls of one thread, each with its time outside of the calls inside of it."""
    found: list[tuple[_Event, list[Span]]] = []
    opened: list[int] = []
    for call in sorted(calls, key=lambda call: (call.ts, -call.dur)):
        start, end = call.span
        while opened and found[opened[-1]][0].span[1] <= start:
            _ = opened.pop()
        if opened:
            spans = found[opened[-1]][1]
            last = spans.pop() if spans else (start, start)
            spans += [span for span in ((last[0], start), (end, last[1])) if span[0] < span[1]]
        opened.append(len(found))
        found.append((call, [call.span]))
    return found


def _sums(own: Iterable[tuple[str, Sequence[Span]]]) -> dict[str, Operator]:
    sums: dict[str, Operator] = {}
    for name, spans in own:
        before = sums.get(name, Operator(0, 0.0))
        sums[name] = Operator(before.calls + 1, before.time_us + sum(end - start for start, end in spans))
    return sums


def _group(event: _Event) -> str:
    args: Any = msgspec.json.decode(event.args)
    return str(args.get("Process Group Ranks") or args.get("Process Group Name") or "")


def _content(path: Path, within: Path | None, most: int) -> bytes:
    try:
        with open(open_regular(path, within=within), "rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                raise _too_large(path, most)
            is_packed = file.read(2) == b"\x1f\x8b"
            _ = file.seek(0)
            with gzip.open(file) if is_packed else file as unpacked:
                content = unpacked.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        got = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ConfigError("a trace cannot be read", got=got, where=str(path)) from error
    if len(content) > most:
        raise _too_large(path, most)
    return content


def _too_large(path: Path, most: int) -> ConfigError:
    fix = "Profile fewer steps, or fewer ranks."
    return ConfigError("a trace is too large", expected=f"{show_size(most)} or less", where=str(path), fix=fix)
