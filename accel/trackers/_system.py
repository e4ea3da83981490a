# SPDX-License-Identifier: Apache-2.0
"""The machine of a run: CPU, memory, disk, network and GPUs of each host, sampled in the background by psutil and NVML.

A sample that fails is a gap. The pause between two grows with what one costs, so that the thread never takes more than
its share of a core.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from accel.errors import ConfigError
from accel.run_folder import encode_line
from accel.trackers._line_file import open_lines, step_of
from accel.trackers._packages import load, needs
from accel.trackers._tracker import Run, Tracker

SYSTEM = "system"
_LEAST_S = 0.5
_SHARE = 0.005  # of a core
_FAMILY_S = 60.0  # between two looks for the children of ranks, which read all processes of the host
_CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # bytes; version 1 writes none as a huge number
_GAPS = "system samples have gaps, %s cannot be read or written: %s: %s"

Values = dict[str, float]


class System(msgspec.Struct, frozen=True):
    """Samples of the machine, as `tracking(system=)` takes them.

    Attributes:
        every_s: seconds between two samples, 0.5 or more.

    Raises:
        ConfigError: fewer seconds.
    """

    every_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.every_s >= _LEAST_S:
            got = repr(self.every_s)
            raise ConfigError("samples too close to each other", expected="0.5 or more", got=got, where="every_s=")


def system_tracker(settings: System, *, node: int, pids: Iterable[int]) -> Tracker:
    """Return the tracker that samples a host into `system-NODE.jsonl` of the run's folder; `pids` are its ranks'."""

    def start(run: Run, config: object) -> Sampler:
        del config
        try:
            return begin(run)
        except Exception as error:  # a gap that lasts, and no error of the run
            logging.getLogger("accel.trackers").warning(_GAPS, "the machine", type(error).__name__, error)
            return Sampler(dict, lambda line: None, settings.every_s, 0)

    def begin(run: Run) -> Sampler:
        kept = run if run.step is None else msgspec.structs.replace(run, step=run.step + 1, lines=0)
        folder = run.folder_for(SYSTEM)
        lines = open_lines(folder / f"{SYSTEM}-{node}.jsonl", kept)
        lines.cut_back(kept, step_of)
        ranks = sorted(set(pids))
        sampler = Sampler(lambda: sources_of(ranks, str(folder)), lines.append, settings.every_s, run.step or 0)
        sampler.start()
        return sampler

    def log(live: Sampler, values: object, step: int) -> None:
        del values
        live.step = step

    return Tracker(SYSTEM, start, log, finish=lambda live, ending: live.end(), check=check_system)


def check_system(run: Run) -> None:
    """Raise if the packages are missing, or the run has no folder."""
    needs("system", "psutil", "pynvml", where="system=")(run)
    _ = run.folder_for(SYSTEM)


Source = Callable[[float], Values]  # takes the seconds since its last call


class Sampler(threading.Thread):
    """A thread that samples until its end.

    Attributes:
        step: last logged step.
    """

    def __init__(
        self, sources: Callable[[], Mapping[str, Source]], write: Callable[[bytes], object], every_s: float, step: int
    ) -> None:
        super().__init__(name="accel-system", daemon=True)
        self.step = step
        self._find_sources = sources
        self._sources: Mapping[str, Source] = {}
        self._write = write
        self._every_s = every_s
        self._ended = threading.Event()
        self._reported: set[str] = set()
        self._last_s = time.monotonic()

    def run(self) -> None:
        with self._gaps("the machine"):
            self._sources = self._find_sources()  # here, as psutil compares the CPU's times thread by thread
        pause_s = min(self._every_s, 1.0)  # the first sample soon, with rates since the start
        while not self._ended.wait(pause_s):
            began = time.thread_time()
            self.sample()
            pause_s = max(self._every_s, (time.thread_time() - began) / _SHARE)

    def sample(self) -> None:
        """Write a line of what can be read now."""
        now_s = time.monotonic()
        seconds = max(now_s - self._last_s, 1e-6)
        self._last_s = now_s
        values: Values = {}
        for name, source in self._sources.items():
            with self._gaps(name):
                values |= source(seconds)
        if values:
            with self._gaps("file"):
                _ = self._write(encode_line(self.step, values, {"at": round(time.time(), 3)}))

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        if self.is_alive():
            self.join(_LEAST_S)

    @contextlib.contextmanager
    def _gaps(self, name: str) -> Any:
        try:
            yield
        except Exception as error:  # drivers and /proc raise anything
            if name not in self._reported:
                self._reported.add(name)
                logging.getLogger("accel.trackers").warning(_GAPS, name, type(error).__name__, error)


def sources_of(pids: Sequence[int], folder: str) -> dict[str, Source]:
    """Return what is read for a sample, by name."""
    psutil = load("psutil")
    _ = psutil.cpu_percent(None)  # the first call has nothing to compare with
    sources: dict[str, Source] = {
        "cpu": lambda seconds: {"cpu/percent": psutil.cpu_percent(None)},
        "memory": lambda seconds: _memory(psutil.virtual_memory()),
        "cgroup": lambda seconds: read_cgroup(Path("/proc/self/cgroup").read_text(), _CGROUP),
        "ranks": _Ranks(psutil, pids),
        "disk": _Rates(psutil.disk_io_counters, {"disk/read": "read_bytes", "disk/write": "write_bytes"}),
        "folder": lambda seconds: {"disk/used_percent": psutil.disk_usage(folder).percent},
        "network": _Rates(psutil.net_io_counters, {"network/sent": "bytes_sent", "network/received": "bytes_recv"}),
    }
    return sources | _gpu_sources(load("pynvml"))


def _memory(found: Any) -> Values:
    return {"memory/host_bytes": found.total - found.available, "memory/host_total_bytes": found.total}


class _Rates:
    """Bytes per second from counters, such as the counters of all disks."""

    def __init__(self, count: Callable[[], Any], fields: Mapping[str, str]) -> None:
        self._count = count
        self._fields = fields
        self._before = self._read()

    def __call__(self, seconds: float) -> Values:
        now = self._read()
        before, self._before = self._before, now
        grown = {name: now[name] - before[name] for name in now.keys() & before.keys()}
        return {f"{name}_bytes_per_s": each / seconds for name, each in grown.items() if each >= 0}  # else set to 0

    def _read(self) -> dict[str, int]:
        found = self._count()
        return {name: getattr(found, field) for name, field in self._fields.items()} if found is not None else {}


class _Ranks:
    """CPU, in cores, and resident memory of the host's ranks and their children."""

    def __init__(self, psutil: Any, pids: Sequence[int]) -> None:
        self._psutil = psutil
        self._pids = pids
        self._family: dict[int, Any] = {}
        self._cpu_s: dict[int, float] = {}
        self._age_s = _FAMILY_S

    def __call__(self, seconds: float) -> Values:
        self._age_s += seconds
        if self._age_s >= _FAMILY_S:
            self._age_s = 0.0
            self._family = self._find()
        resident, cpu_s = 0, dict[int, float]()
        for pid, process in self._family.items():
            with contextlib.suppress(self._psutil.Error):  # it has ended
                with process.oneshot():
                    times = process.cpu_times()
                    resident += process.memory_info().rss
                cpu_s[pid] = times.user + times.system
        used_s = sum(each - self._cpu_s[pid] for pid, each in cpu_s.items() if pid in self._cpu_s)
        is_first = not self._cpu_s
        self._cpu_s = cpu_s
        if not cpu_s:
            return {}
        return {"memory/ranks_bytes": resident} | ({} if is_first else {"cpu/ranks_cores": used_s / seconds})

    def _find(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for pid in self._pids:
            with contextlib.suppress(self._psutil.Error):
                rank = self._psutil.Process(pid)
                found |= {each.pid: each for each in (rank, *rank.children(recursive=True))}
        return found


def read_cgroup(own: str, root: Path) -> Values:
    """Read memory and its limit of a control group, given the text of /proc/self/cgroup; nothing where there is none.

    See https://docs.kernel.org/admin-guide/cgroup-v2.html, and cgroup-v1/memory.html.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        below = path.strip("/")
        if not controllers:
            places, names = [root / below, root], ("memory.current", "memory.max")
        elif "memory" in controllers.split(","):
            places = [root / "memory" / below, root / "memory"]
            names = ("memory.usage_in_bytes", "memory.limit_in_bytes")
        else:
            continue
        for place in places:  # a container may see its own group at the root
            used, limit = (_number(place / name) for name in names)
            if used is not None:
                limits = {} if limit is None or limit >= _NO_LIMIT else {"memory/cgroup_limit_bytes": limit}
                return {"memory/cgroup_bytes": used, **limits}
    return {}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None


def _gpu_sources(nvml: Any) -> dict[str, Source]:
    """Return a source for each GPU that NVML shows; none without a driver."""
    try:
        nvml.nvmlInit()
        count: int = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        is_absent = error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return {} if is_absent else {"NVML": _failing(error)}
    sources: dict[str, Source] = {}
    for at in range(count):
        try:
            sources[f"gpu{at}"] = _gpu_source(nvml, f"gpu{at}", nvml.nvmlDeviceGetHandleByIndex(at))
        except nvml.NVMLError as error:  # one that is lost or not ours; the others have their numbers
            sources[f"gpu{at}"] = _failing(error)
    return sources


def _failing(error: Exception) -> Source:
    def read(seconds: float) -> Values:
        raise error

    return read


def _gpu_source(nvml: Any, name: str, handle: Any) -> Source:
    readings: dict[str, Callable[[], float]] = {
        "use_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: _temperature(nvml, handle),
    }

    def read(seconds: float) -> Values:
        del seconds
        values: Values = {}
        problem: Exception | None = None
        for reading, ask in readings.items():
            try:
                values[f"{name}/{reading}"] = ask()
            except nvml.NVMLError as error:  # a card without that sensor
                problem = error
        if problem is not None and not values:  # one that fell off the bus
            raise problem
        return values

    return read


def _temperature(nvml: Any, handle: Any) -> float:
    """Return degrees of Celsius; by the older function, which CUDA 14 drops, where package or driver lack the newer."""
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        return nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU)
    return nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
