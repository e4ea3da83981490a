# SPDX-License-Identifier: Apache-2.0
"""A process that ends at any file operation of a save leaves the former checkpoint or the new one, exactly."""

import faulthandler
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_helpers import CPU, Run, equal
from processes import free_port, patience

from accel import latest_checkpoint, save_state
from accel.context import DistContext, session
from accel.testing import simulate

OPERATIONS = ["open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "close"]
DONE, CRASHED = 7, 9

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def crash_at(moment: int) -> None:
    """Let this process end before (a write: halfway through) its file operation of that number."""
    calls = iter(range(10**6))

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) != moment:
                return real(*args, **kwargs)
            if name == "write":
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
            os._exit(CRASHED)

        return call

    for name in OPERATIONS:
        setattr(os, name, wrap(name, getattr(os, name)))


def in_child(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(DONE)
        except BaseException as error:
            print(f"child: {error!r}", flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save_all(world: int, out: Path, run: Run, step: int, keep: int | None, mode: str) -> None:
    def body(ctx: DistContext) -> Path:
        if mode == "async":
            return save_state(ctx, out, run.items(), step=step, keep=keep, mode="async").result()
        return save_state(ctx, out, run.items(), step=step, keep=keep)

    simulate(body, world) if world > 1 else body(CPU)


CASES = [(1, "keep_1", "sync", 3)]  # every third operation
SLOW = [(1, layout, "sync") for layout in ("keep_1", "fresh", "same_step")] + [(2, "keep_1", "async")]
SLOW += [(2, layout, "sync") for layout in ("fresh", "per_step", "keep_1", "same_step")] + [(1, "per_step", "sync")]
SLOW += [(world, layout, "async") for world in (1, 2) for layout in ("fresh", "per_step", "same_step")]


@pytest.mark.kept("default")
@pytest.mark.parametrize(
    ("world", "layout", "mode", "every"),
    CASES + [pytest.param(*case, case[0], marks=pytest.mark.slow) for case in SLOW],
)
def test_a_crash_at_any_file_operation_loses_nothing(
    world: int, layout: str, mode: str, every: int, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    keep = 1 if layout in ("keep_1", "fresh") else None
    step = 1 if layout == "same_step" else 2
    points = 0
    for moment in range(0, 1000, every):  # after an operation is before the next
        out = tmp_path / str(moment)
        run = Run()
        if layout != "fresh":
            save_state(CPU, out, run.items(), step=1)
        old = run.state()
        run.step(1)
        new = run.state()

        def work(out: Path = out, run: Run = run, moment: int = moment) -> None:
            crash_at(moment)
            save_all(world, out, run, step, keep, mode)

        code = in_child(work)
        assert code in (DONE, CRASHED)
        found = latest_checkpoint(out)
        if found is not None:
            resumed = Run(seed=5).load(CPU, found).state()
            assert equal(resumed, old) or equal(resumed, new)
            assert code == CRASHED or equal(resumed, new)
        else:
            assert layout == "fresh"
            assert code == CRASHED
        assert_next_save(out, run, step, keep)
        if code == DONE:
            break
        points += 1
    assert points > 20 // every


def assert_next_save(out: Path, run: Run, step: int, keep: int | None) -> None:
    """Whatever the crash left, the next save works and clears it up."""
    path = save_state(CPU, out, run.items(), step=step + 1, keep=keep)
    assert latest_checkpoint(out) == path
    names = os.listdir(out)
    assert all("." not in name for name in names), names
    if keep == 1:
        assert names == [path.name]


def kill_one_save(out: Path, run: Run, delay: float, keep: int) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            for step in range(2, 10**6):
                save_state(CPU, out, run.items() | {"step": step}, step=step, keep=keep)
        finally:
            os._exit(1)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("trials", [20, pytest.param(50, marks=pytest.mark.slow)])
def test_random_kills_lose_nothing(trials: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    rng, run = random.Random(trials), Run()
    run.step(1)
    save_state(CPU, tmp_path, run.items() | {"step": 1}, step=1, keep=1)
    expected = run.state()
    for _ in range(trials):
        kill_one_save(tmp_path, run, 0.005 + rng.random() * 0.06, keep=rng.choice([1, 2]))
        found = latest_checkpoint(tmp_path)
        assert found is not None
        other = Run(seed=3)
        loaded = other.load_with(CPU, found, {"step": 0})
        assert loaded["step"] == int(found.name.removeprefix("step-"))
        assert equal(other.state(), expected)


def keep_saving(rank: int, port: int, out: Path, run: Run, start: int) -> None:
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with session(environ, device="cpu", timeout_s=30) as ctx:
        for step in range(start, 10**6):
            items, keep = run.items() | {"step": step}, 1 + step % 2
            if step % 3:
                save_state(ctx, out, items, step=step, keep=keep)
            else:
                save_state(ctx, out, items, step=step, keep=keep, mode="async")


@pytest.mark.multiprocess
@pytest.mark.parametrize("trials", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_random_kills_of_two_processes_lose_nothing(trials: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    rng, run, last = random.Random(trials), Run(), 1
    run.step(1)
    save_state(CPU, tmp_path, run.items() | {"step": last}, step=last, keep=1)
    expected = run.state()
    for _ in range(trials):
        port = free_port()
        ranks = list[int]()
        for rank in (0, 1):
            if (pid := os.fork()) == 0:
                faulthandler.dump_traceback_later(50)  # before the deadline below
                try:
                    keep_saving(rank, port, tmp_path, run, last + 1)
                except BaseException as error:
                    print(f"rank {rank}: {error!r}", flush=True)
                finally:
                    os._exit(1)
            ranks.append(pid)
        began = time.monotonic()
        while latest_checkpoint(tmp_path) == tmp_path / f"step-{last:08d}":  # until they have joined and saved
            assert time.monotonic() - began < patience(60), "stuck"
            assert all(os.waitpid(pid, os.WNOHANG) == (0, 0) for pid in ranks), "a rank has failed by itself"
            time.sleep(0.005)
        time.sleep(rng.random() * 0.1)
        for pid in rng.sample(ranks, 2):
            os.kill(pid, signal.SIGKILL)
            time.sleep(rng.choice([0.0, 0.02]))
        for pid in ranks:
            os.waitpid(pid, 0)
        found = latest_checkpoint(tmp_path, verify=True)
        assert found is not None
        other = Run(seed=3)
        last = other.load_with(CPU, found, {"step": 0})["step"]
        assert found.name == f"step-{last:08d}"
        assert equal(other.state(), expected)
