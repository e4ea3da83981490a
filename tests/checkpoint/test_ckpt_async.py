# SPDX-License-Identifier: Apache-2.0
"""Saving in the background: what was saved is of the moment of the call, and every rank learns what became of it."""

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, Run, equal
from processes import free_port, run_ranks

from accel import latest_checkpoint, load_state, save_state, wait_for_everyone
from accel.checkpoint._background import ShareReport, collect_notes, leave_note
from accel.checkpoint._save import Stage, WrittenFile
from accel.context import DistContext, session, single
from accel.errors import AccelError, CheckpointError, CollectiveMismatch, ConfigError
from accel.storage import as_place
from accel.testing import WriteFault, simulate


def outcome(call: Callable[[], object]) -> str:
    try:
        return f"returned {call()}"
    except AccelError as error:
        return f"{type(error).__name__}: {error}"


class Gate:
    """Holds back the threads that write checkpoints until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, name: str = "fsync") -> None:
        self.open = threading.Event()
        real = getattr(os, name)

        def wait(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name.startswith("accel-save"):
                assert self.open.wait(30)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, wait)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_saved_is_of_the_moment_of_the_call(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, name="open")

    def body(ctx: DistContext) -> tuple[Any, Any]:
        torch.manual_seed(0)
        run = Run()
        run.step(2)
        saved = run.state()
        table = {"rows": [torch.ones(3)]}
        saving = save_state(ctx, tmp_path, run.items() | {"table": table}, step=2, mode="async")
        assert not saving.done()
        run.step(2)
        table["rows"][0].zero_()
        table["rows"].clear()
        assert latest_checkpoint(tmp_path) is None
        wait_for_everyone(ctx)
        gate.open.set()
        assert saving.result() == saving.path == latest_checkpoint(tmp_path, verify=True)
        assert saving.done()
        return saved, saving.result()

    results = simulate(body, world)
    other = Run(seed=3)
    loaded = other.load_with(CPU, results[0][1], {"table": {}})
    assert equal(loaded["table"], {"rows": [torch.ones(3)]})
    assert equal(other.state(), results[0][0])
    assert os.listdir(tmp_path) == ["step-00000002"]


def test_one_save_after_another_in_the_same_memory_holds_what_was_when_it_was_called(tmp_path: Path) -> None:
    ctx, sizes = single(), [(4, 3), (4, 3), (2, 5), (2, 5)]
    for step, size in enumerate(sizes):
        tensors = {"a": torch.full(size, float(step)), f"b{step}": torch.arange(3), "half": torch.ones(2).half()}
        before = dict(ctx.comm.spare)
        saving = save_state(ctx, tmp_path, {"t": tensors}, step=step, mode="async")
        tensors["a"].fill_(-1.0)
        kept = {name for name, memory in ctx.comm.spare.items() if memory is before.get(name)} - {"$rng"}
        assert kept == ({"t.half"} if step else set()) | ({"t.a"} if step in (1, 3) else set())
        assert {name for name in ctx.comm.spare if name.startswith("t.b")} == {f"t.b{step}"}
        saving.result()
    for step, size in enumerate(sizes):
        loaded = cast("Any", load_state(CPU, tmp_path / f"step-{step:08d}", {"t": {}}))
        assert loaded["t"]["a"].equal(torch.full(size, float(step)))
    ctx.comm.close()
    assert not ctx.comm.spare


def test_the_next_save_waits_and_retention_goes_on(tmp_path: Path) -> None:
    def body(ctx: DistContext) -> None:
        for step in range(4):
            last = save_state(ctx, tmp_path, {"x": torch.full((4,), step)}, step=step, keep=2, mode="async")
        assert save_state(ctx, tmp_path, {"x": torch.full((4,), 4)}, step=4, keep=2) == tmp_path / "step-00000004"
        assert last.done()

    simulate(body, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000004"]


def test_other_writers_are_refused_until_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saving = save_state(single(), tmp_path, {"x": 1}, step=1, mode="async")
    with assert_raises(CheckpointError, problem="another writer"):
        save_state(single(), tmp_path, {"x": 2}, step=2)
    gate.open.set()
    saving.result()
    save_state(single(), tmp_path, {"x": 2}, step=2)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("name", ["open", "write", "fsync", "rename"])
@pytest.mark.parametrize("told", ["result", "next save"])
def test_a_failure_of_one_rank_is_the_same_error_on_every_rank(
    failing: int, name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = save_state(CPU, tmp_path, {"x": torch.ones(4)}, step=0)
    real, broken = getattr(os, name), set[int]()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if getattr(threading.current_thread(), "rank", None) in broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    start = threading.Thread.start

    def start_with_rank(thread: threading.Thread) -> None:
        thread.rank = getattr(thread, "_args", [None])[0].__self__._ctx.rank if "save" in thread.name else None  # type: ignore[attr-defined]
        start(thread)

    def body(ctx: DistContext) -> list[str]:
        items = {"x": torch.arange(40.0).split(4)}
        saving = save_state(ctx, tmp_path, {"x": list(items["x"])}, step=1, keep=1, mode="async")
        if told == "result":
            text = outcome(saving.result)
        else:
            text = outcome(lambda: save_state(ctx, tmp_path, {"x": 1}, step=1))
        broken.clear()
        return [text, outcome(lambda: save_state(ctx, tmp_path, {"x": 5}, step=2, mode="async").result())]

    broken.add(failing)
    monkeypatch.setattr(os, name, fail)
    monkeypatch.setattr(threading.Thread, "start", start_with_rank)
    results = simulate(body, 3)
    assert len({text for text, _ in results}) == 1
    assert "No space left on device (ENOSPC)" in results[0][0]
    assert f"rank {failing}" in results[0][0]
    assert {text for _, text in results} == {f"returned {tmp_path / 'step-00000002'}"}
    assert sorted(os.listdir(tmp_path)) == [older.name, "step-00000002"]


def test_ranks_that_write_nothing_are_named(tmp_path: Path) -> None:
    stage = Stage(as_place(tmp_path), None, "")
    leave_note(stage, 2, ShareReport(share=WrittenFile("x", None)))
    given_up = threading.Event()
    with assert_raises(CheckpointError, problem="nothing was written for 0.1 s", got="none of rank 1, 3"):
        collect_notes(stage, [1, 2, 3], timeout_s=0.1, given_up=given_up)
    given_up.set()
    with assert_raises(CheckpointError, problem="abandoned", got="none of rank 1"):
        collect_notes(stage, [1], timeout_s=100, given_up=given_up)
    (tmp_path / "share-00001.json").write_text("[")
    with assert_raises(CheckpointError, problem="note is not valid"):
        collect_notes(stage, [1], timeout_s=100, given_up=given_up)
    leave_note(stage, 1, ShareReport(share=WrittenFile("y", None)))
    assert collect_notes(stage, [1, 2], timeout_s=100, given_up=given_up).keys() == {1, 2}
    assert os.listdir(tmp_path) == []


def test_a_note_that_gets_its_name_while_it_is_looked_for_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(as_place(tmp_path), None, "")
    (tmp_path / "share-00001.json.part").write_bytes(b'{"share":{"name":"x","entry":null}}')
    real = os.scandir

    @contextmanager
    def late(path: Path) -> Iterator[list[os.DirEntry[str]]]:
        with real(path) as entries:
            found = list(entries)
        with suppress(FileNotFoundError):
            (tmp_path / "share-00001.json.part").rename(tmp_path / "share-00001.json")
        yield found

    monkeypatch.setattr(os, "scandir", late)
    assert collect_notes(stage, [1], timeout_s=100, given_up=threading.Event()).keys() == {1}


def test_a_rank_that_writes_slowly_is_waited_for(tmp_path: Path) -> None:
    stage = Stage(as_place(tmp_path), None, "")

    def write() -> None:
        for size in range(1, 8):
            time.sleep(0.2)
            (tmp_path / "tensors").write_bytes(bytes(size))
        leave_note(stage, 1, ShareReport(share=WrittenFile("x", None)))

    thread = threading.Thread(target=write)
    thread.start()
    assert collect_notes(stage, [1], timeout_s=1, given_up=threading.Event()).keys() == {1}
    thread.join()


def test_a_bad_disk_under_a_thread_is_an_error_of_the_rank_that_it_belongs_to(tmp_path: Path) -> None:
    def body(ctx: DistContext) -> str:
        model = torch.nn.Linear(8, 8)
        return outcome(lambda: save_state(ctx, tmp_path, {"model": model}, step=1, mode="async").result())

    results = simulate(body, 2, faults=[WriteFault(rank=1, write=0, action="full")])
    assert len(set(results)) == 1
    assert "rank 1: No space left on device (ENOSPC)" in results[0]
    assert os.listdir(tmp_path) == []


def test_ranks_that_disagree_about_the_mode_all_raise(tmp_path: Path) -> None:
    def body(ctx: DistContext) -> str:
        mode: Any = "async" if ctx.rank else "sync"
        return outcome(lambda: save_state(ctx, tmp_path, {"x": 1}, step=1, mode=mode))

    results = simulate(body, 2)
    assert all(text.startswith(CollectiveMismatch.__name__) for text in results)
    with assert_raises(ConfigError, expected="one of sync, async"):
        save_state(CPU, tmp_path, {"x": 1}, step=1, mode="asinc")  # type: ignore[call-overload]
    assert os.listdir(tmp_path) == []


def test_the_end_of_a_session_waits_and_raises_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with session({}, device="cpu") as ctx:
        saving = save_state(ctx, tmp_path, {"x": 1}, step=1, mode="async")
    assert saving.done()
    assert latest_checkpoint(tmp_path) == saving.result() == saving.path

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def leave_unasked() -> None:
        with session({}, device="cpu") as ctx:
            save_state(ctx, tmp_path, {"x": 1}, step=2, mode="async")

    monkeypatch.setattr(os, "rename", full)
    with assert_raises(CheckpointError, problem="ENOSPC"):
        leave_unasked()
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_an_exception_that_ends_a_session_is_not_hidden_and_the_save_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    threading.Timer(0.2, gate.open.set).start()

    def fail() -> None:
        with session({}, device="cpu") as ctx:
            save_state(ctx, tmp_path, {"x": 1}, step=1, mode="async")
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail()
    assert latest_checkpoint(tmp_path, verify=True) == tmp_path / "step-00000001"
    assert os.listdir(tmp_path) == ["step-00000001"]


ENDS = """
import sys, torch, accel
accel.save_state(accel.single(), sys.argv[1], {"x": torch.ones(1000, 1000)}, step=3, mode="async")
if len(sys.argv) > 2:
    raise SystemExit("the program failed")
"""


@pytest.mark.parametrize("words", [pytest.param([], marks=pytest.mark.slow), ["fail"]])
def test_a_program_that_ends_waits_for_its_last_checkpoint(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path), *words], capture_output=True, text=True)
    assert done.stderr.strip() == ("the program failed" if words else "")
    assert latest_checkpoint(tmp_path, verify=True) == tmp_path / "step-00000003"


def worker(rank: int, out: str, port: int) -> None:
    torch.set_num_threads(1)
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with session(environ, device="cpu", timeout_s=60) as ctx:
        torch.manual_seed(0)
        run = Run(width=200)
        for step in range(1, 4):
            run.step(1)
            save_state(ctx, out, run.items(), step=step, keep=1, mode="async")
        torch.save(run.state(), Path(out) / f"state-{rank}.pt")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_save_in_the_background_and_end_with_all_of_it(tmp_path: Path) -> None:
    run_ranks(worker, str(tmp_path), free_port())
    assert sorted(os.listdir(tmp_path)) == ["state-0.pt", "state-1.pt", "step-00000003"]
    state = Run(seed=4, width=200).load(CPU, tmp_path / "step-00000003").state()
    assert equal(state[0], torch.load(tmp_path / "state-0.pt", weights_only=False)[0])


def test_a_simulation_waits_for_its_saves_and_raises_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(ctx: DistContext) -> None:
        save_state(ctx, tmp_path, {"x": torch.ones(3)}, step=ctx.world_size, mode="async")

    simulate(body, 3)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000003"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("accel-save")]

    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(CheckpointError):
        simulate(body, 3)
