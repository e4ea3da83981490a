# SPDX-License-Identifier: Apache-2.0
"""Samples of the machine: what a line holds, cuts at a resume, gaps where a source fails, GPUs of a stand-in NVML."""

# ruff: noqa: N802 - functions of NVML have its names

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from catching import caught
from processes import wait_for

import accel
from accel.testing import Simulator
from accel.trackers import System, jsonl
from accel.trackers._system import Sampler, read_cgroup, sources_of

OFTEN = System(every_s=0.5)


def lines(folder: Path, node: int = 0) -> list[dict[str, Any]]:
    path = folder / f"system-{node}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


NOT_SUPPORTED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, GPU_IS_LOST = 3, 9, 12, 15


def standin(*, trouble: int = 0) -> types.ModuleType:
    """A module with the functions of NVML that are used, for two GPUs; the second has no sensor of its power."""

    def init() -> None:
        if trouble:
            raise NVMLError(trouble)

    def power(handle: int) -> int:
        if handle:
            raise NVMLError(NOT_SUPPORTED)
        return 250_500

    module = types.ModuleType("pynvml")
    vars(module).update(
        NVMLError=NVMLError,
        NVML_ERROR_LIBRARY_NOT_FOUND=LIBRARY_NOT_FOUND,
        NVML_ERROR_DRIVER_NOT_LOADED=DRIVER_NOT_LOADED,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda at: at,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=70 + handle),
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=3 * 2**30),
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetTemperature=lambda handle, kind: 55,
    )
    return module


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[[types.ModuleType], None]:
    _ = pytest.importorskip("psutil", reason="the extra `system` is not installed")
    return lambda module: monkeypatch.setitem(sys.modules, "pynvml", module)


class OldLibrary:
    """The C functions of NVML as nvidia-ml-py calls them: two GPUs without a sensor of power, the second one lost."""

    is_lost = False

    @property
    def answer(self) -> int:
        return GPU_IS_LOST if self.is_lost else 0

    def nvmlInitWithFlags(self, flags: int) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, found: Any) -> int:
        found._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, at: Any, found: Any) -> int:
        return GPU_IS_LOST if at.value == 1 else 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, found: Any) -> int:
        found._obj.gpu = 71
        return self.answer

    def nvmlDeviceGetMemoryInfo(self, handle: Any, found: Any) -> int:
        found._obj.used = 5 * 2**30
        return self.answer

    def nvmlDeviceGetPowerUsage(self, handle: Any, found: Any) -> int:
        return NOT_SUPPORTED

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, found: Any) -> int:
        found._obj.value = 54
        return self.answer


class NewLibrary(OldLibrary):
    def nvmlDeviceGetTemperatureV(self, handle: Any, found: Any) -> int:
        found._obj.temperature = 55
        return self.answer


@pytest.mark.parametrize(("library", "degrees"), [(OldLibrary(), 54), (NewLibrary(), 55)])
def test_the_package_of_nvml_is_called_by_its_names(
    library: OldLibrary, degrees: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    _ = pytest.importorskip("psutil", reason="the extra `system` is not installed")
    package = pytest.importorskip("pynvml", reason="the extra `system` is not installed")
    monkeypatch.setattr(package, "nvmlLib", library)
    monkeypatch.setattr(package, "_nvmlGetFunctionPointer_cache", {})
    written: list[dict[str, Any]] = []
    sampler = Sampler(dict, lambda line: written.append(json.loads(line)), 0.5, 7)
    found = sources_of([], str(tmp_path))
    sampler._sources = {name: found[name] for name in found if name.startswith("gpu")}
    sampler.sample()
    library.is_lost = True
    sampler.sample()
    sampler.end()
    [line] = written
    assert {name: line[name] for name in line if name.startswith("gpu")} == {
        "gpu0/use_percent": 71,
        "gpu0/memory_bytes": 5 * 2**30,
        "gpu0/temperature_c": degrees,
    }
    told = [each.getMessage().partition(", ")[2] for each in caplog.records]
    assert [text.split(" cannot be read or written: ")[0] for text in told] == ["gpu1", "gpu0"]
    assert all("GPU is lost" in text or "GpuIsLost" in text for text in told)


@pytest.mark.parametrize(("code", "names"), [(DRIVER_NOT_LOADED, set()), (LIBRARY_NOT_FOUND, set()), (18, {"NVML"})])
def test_a_machine_without_a_driver_has_no_gpus_and_a_broken_one_tells_it(
    code: int, names: set[str], nvml: Callable[[types.ModuleType], None], tmp_path: Path
) -> None:
    nvml(standin(trouble=code))
    sources = sources_of([], str(tmp_path))
    assert {name for name in sources if name.startswith(("gpu", "NVML"))} == names
    for name in names:
        assert "code 18" in str(caught(lambda name=name: sources[name](1.0)))


def test_a_host_is_sampled_with_its_gpus_and_cut_back_at_a_resume(
    nvml: Callable[[types.ModuleType], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(standin())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace(origin="here"))
    ctx = accel.single()

    def run(steps: range, saved: dict[str, Any] | None = None) -> dict[str, Any]:
        with accel.tracking(ctx, "p", to=[jsonl()], dir=tmp_path, system=OFTEN) as trackers:
            if saved is not None:
                trackers.load_state_dict(saved)
            states = list[dict[str, Any]]()
            for step in steps:
                accel.log(ctx, trackers, {"loss": 1.0}, step=step)
                states.append(trackers.state_dict())
                wait_for(lambda step=step: step in [line["step"] for line in lines(tmp_path)])
        return states[0]

    saved = run(range(3, 5))
    [first, *_] = lines(tmp_path)
    assert {name: first[name] for name in first if name.startswith("gpu")} == {
        "gpu0/use_percent": 70,
        "gpu0/memory_bytes": 3 * 2**30,
        "gpu0/power_w": 250.5,
        "gpu0/temperature_c": 55,
        "gpu1/use_percent": 71,
        "gpu1/memory_bytes": 3 * 2**30,
        "gpu1/temperature_c": 55,
    }
    assert first["memory/ranks_bytes"] > 10**7
    assert first["memory/host_total_bytes"] > first["memory/host_bytes"] > 0
    assert first["step"] == 3
    assert abs(first["time"]["at"] - time.time()) < 600
    before = (tmp_path / "system-0.jsonl").read_bytes()
    _ = run(range(9, 10), saved)
    kept = [line for line in before.splitlines(keepends=True) if json.loads(line)["step"] == 3]
    assert (tmp_path / "system-0.jsonl").read_bytes().startswith(b"".join(kept))
    assert {line["step"] for line in lines(tmp_path)[len(kept) :]} == {9}


def test_it_is_off_by_default(nvml: Callable[[types.ModuleType], None], tmp_path: Path, ranks: Simulator) -> None:
    nvml(standin(trouble=DRIVER_NOT_LOADED))

    def train(ctx: accel.DistContext) -> None:
        with accel.tracking(ctx, "p", to=[jsonl()], dir=tmp_path) as trackers:
            accel.log(ctx, trackers, {"loss": 1.0}, step=1)
            assert not any(each.name == "accel-system" for each in threading.enumerate())

    _ = ranks.run(train, 2)
    assert lines(tmp_path) == []


def test_slips_are_errors_on_every_rank(ranks: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(ctx: accel.DistContext, **options: Any) -> str:
        return str(caught(lambda: accel.init_trackers(ctx, "p", to=[jsonl("/dev/null")], **options)))

    for text in ranks.run(lambda ctx: told(ctx, system=3, dir=tmp_path), 2):
        assert "accel.trackers.System(every_s=5.0)" in text
    for text in ranks.run(lambda ctx: told(ctx, system=True), 2):
        assert "the run has no folder" in text
    assert "0.5 or more" in str(caught(lambda: System(every_s=0.1)))
    assert "0.5 or more" in str(caught(lambda: System(every_s=float("nan"))))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "psutil" else found(name))
    for text in ranks.run(lambda ctx: told(accel.replace(ctx, system=True), dir=tmp_path), 2):
        assert "pip install 'accel-torch[system]'" in text
        assert "at tracking, system=" in text


def test_a_source_that_fails_is_a_gap_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    written: list[dict[str, Any]] = []
    failing = [False]

    def write(line: bytes) -> None:
        if failing[0]:
            raise OSError("disk full")
        written.append(json.loads(line))

    def fail(seconds: float) -> dict[str, float]:
        raise RuntimeError("lost the card")

    sampler = Sampler(dict, write, 0.5, 7)
    sampler._sources = {"gpu0": fail, "cpu": lambda seconds: {"cpu/percent": 3.0}}
    for _ in range(2):
        sampler.sample()
    failing[0] = True
    sampler.sample()
    sampler.end()
    assert [(line["step"], line["cpu/percent"]) for line in written] == [(7, 3.0), (7, 3.0)]
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [text.partition(", ")[2] for text in told] == [
        "gpu0 cannot be read or written: RuntimeError: lost the card",
        "file cannot be read or written: OSError: disk full",
    ]


def test_the_pause_grows_with_the_cost_of_a_sample() -> None:
    times: list[float] = []

    def burn(seconds: float) -> dict[str, float]:
        times.append(time.monotonic())
        until = time.thread_time() + 0.02  # of CPU: 4 s of pause at 0.5 %
        while time.thread_time() < until:
            pass
        return {}

    sampler = Sampler(lambda: {"cpu": burn}, lambda line: None, 0.5, 0)
    sampler.start()
    wait_for(lambda: len(times) == 1)
    time.sleep(1.5)
    sampler.end()
    assert len(times) == 1


def test_processes_that_are_gone_are_left_out(nvml: Callable[[types.ModuleType], None], tmp_path: Path) -> None:
    nvml(standin(trouble=DRIVER_NOT_LOADED))
    sources = sources_of([2**22 + 5], str(tmp_path))
    assert sources["ranks"](1.0) == {}
    assert not any(name.startswith("gpu") for name in sources)


def test_memory_of_a_control_group_of_either_version(tmp_path: Path) -> None:
    for path, content in {
        "job/memory.current": "4096\n",
        "job/memory.max": "max\n",
        "memory/old/memory.usage_in_bytes": "100",
        "memory/old/memory.limit_in_bytes": "9223372036854771712",
        "memory/limited/memory.usage_in_bytes": "100",
        "memory/limited/memory.limit_in_bytes": "800",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        _ = (tmp_path / path).write_text(content)
    assert read_cgroup("0::/job\n", tmp_path) == {"memory/cgroup_bytes": 4096}
    assert read_cgroup("0::/gone\n", tmp_path) == {}
    _ = (tmp_path / "memory.current").write_text("7")
    assert read_cgroup("0::/above/a/namespace\n", tmp_path) == {"memory/cgroup_bytes": 7}
    assert read_cgroup("5:cpu:/x\n4:memory:/old\n", tmp_path) == {"memory/cgroup_bytes": 100}
    limited = {"memory/cgroup_bytes": 100, "memory/cgroup_limit_bytes": 800}
    assert read_cgroup("4:hugetlb,memory:/limited\n0::/\n", tmp_path) == limited
