# SPDX-License-Identifier: Apache-2.0
"""The lock of a folder: one holder, named to all others; one that is gone holds nothing."""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from catching import assert_raises
from processes import end

from accel.errors import CheckpointError
from accel.storage import LOCK, as_place, take_lock

HOLD = """
import sys
from pathlib import Path
from accel.storage import take_lock
lock = take_lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
GONE = {"host": os.uname().nodename, "pid": 1, "started": "", "since": ""}


def holder_process(folder: Path) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def rewrite(folder: Path, **changes: Any) -> None:
    holder = msgspec.json.decode((folder / LOCK).read_bytes())
    (folder / LOCK).write_bytes(msgspec.json.encode(holder | changes))


def test_a_second_writer_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    lock = take_lock(tmp_path)
    with assert_raises(CheckpointError, got=f"process {os.getpid()} on host .*this process") as caught:
        take_lock(tmp_path)
    assert caught.value.where == str(tmp_path / LOCK)
    lock.release()
    lock.release()
    assert os.listdir(tmp_path) == []
    take_lock(tmp_path).release()


def test_another_process_is_named_while_it_lives_and_leaves_nothing_that_counts(tmp_path: Path) -> None:
    process = holder_process(tmp_path)
    try:
        with assert_raises(CheckpointError, got=rf"process {process.pid} on host .*\(this host\), saving since"):
            take_lock(tmp_path)
    finally:
        end(process)
    assert os.listdir(tmp_path) == [LOCK]
    take_lock(tmp_path).release()
    assert os.listdir(tmp_path) == []


def test_a_process_of_the_same_number_is_not_taken_for_the_holder(tmp_path: Path) -> None:
    end(holder_process(tmp_path))
    rewrite(tmp_path, pid=os.getpid())
    take_lock(tmp_path).release()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_flock_the_number_and_the_start_of_the_process_tell(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    process = holder_process(tmp_path)
    with assert_raises(CheckpointError, got=f"process {process.pid} "):
        take_lock(tmp_path)
    end(process)
    rewrite(tmp_path, pid=os.getpid(), started="1")  # the number has a new owner
    take_lock(tmp_path).release()
    (tmp_path / LOCK).write_text('{"host":"elsewhere","pid":1,"started":"","since":"Monday"}')
    with assert_raises(CheckpointError, got="process 1 on host elsewhere"):
        take_lock(tmp_path)


def test_a_holder_on_another_host_holds_until_somebody_removes_the_file(tmp_path: Path) -> None:
    end(holder_process(tmp_path))
    rewrite(tmp_path, host="elsewhere")
    with assert_raises(CheckpointError, got="on host elsewhere, saving since", fix="If that process is gone, delete"):
        take_lock(tmp_path)
    (tmp_path / LOCK).unlink()
    take_lock(tmp_path).release()


@pytest.mark.parametrize("text", [b"", b'{"host":', b"\xff\xfe", b"[1]"])
def test_a_file_that_names_nobody_is_of_a_process_that_died_making_it(text: bytes, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_bytes(text)
    take_lock(tmp_path).release()
    assert os.listdir(tmp_path) == []


def test_no_release_removes_the_lock_of_another(tmp_path: Path) -> None:
    first = take_lock(tmp_path)
    (tmp_path / LOCK).unlink()  # by somebody who took the first for dead
    second = take_lock(tmp_path)
    first.release()
    with assert_raises(CheckpointError, got="this process"):
        take_lock(tmp_path)
    second.release()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"")
    (tmp_path / LOCK).symlink_to(tmp_path / "secret")
    with assert_raises(CheckpointError, problem="ELOOP"):
        take_lock(tmp_path)
    assert (tmp_path / LOCK).is_symlink()


@pytest.mark.parametrize("name", ["open", "write", "fsync", "unlink"])
def test_a_disk_that_fails_once_leaves_no_lock_that_counts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        if name == "unlink":
            take_lock(tmp_path).release()
        else:
            with assert_raises(CheckpointError, problem="ENOSPC"):
                take_lock(tmp_path)
    take_lock(tmp_path).release()


@pytest.mark.parametrize("abandoned", [False, True])
def test_many_writers_at_once_never_hold_it_together(abandoned: bool, tmp_path: Path) -> None:
    inside, most, taken = list[int](), list[int](), list[int]()
    gone = tmp_path / "gone"

    def write(number: int) -> None:
        for _ in range(30):
            if abandoned and number == 0:
                gone.write_bytes(msgspec.json.encode(GONE))
                with contextlib.suppress(FileExistsError):  # a lock that another has is not replaced
                    os.link(gone, tmp_path / LOCK)
                gone.unlink()
            try:
                lock = take_lock(tmp_path)
            except CheckpointError:
                continue
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.0005)
            inside.remove(number)
            taken.append(number)
            lock.release()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert taken


def test_a_writer_of_this_process_finds_a_lock_held_as_soon_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec", reason="needs accel-torch[remote]")
    place = as_place("memory://locks/at-once")
    kind = type(fsspec.filesystem("memory"))
    write = kind.pipe_file
    refused: list[CheckpointError] = []
    threads = set(threading.enumerate())

    def pipe_file(store: Any, *args: Any, **kwargs: Any) -> None:
        write(store, *args, **kwargs)
        monkeypatch.setattr(kind, "pipe_file", write)
        with assert_raises(CheckpointError, got="which is this process") as caught:
            place.lock()
        refused.append(caught.value)

    monkeypatch.setattr(kind, "pipe_file", pipe_file)
    held = place.lock()
    assert len(refused) == 1
    held.check()
    held.release()
    assert not [each for each in set(threading.enumerate()) - threads if each.name.startswith("accel-beat")]
