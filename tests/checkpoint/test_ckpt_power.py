# SPDX-License-Identifier: Apache-2.0
"""A power cut at any file operation of a save: what was not flushed is empty or torn, and names may be lost, too."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from ckpt_helpers import CPU, Run, equal

from accel import latest_checkpoint, save_state

DONE, CUT = 7, 9
Loss = Literal["emptied", "torn"]

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Disk:
    """Watches this process's file operations, and at one of them leaves what a disk without power would hold.

    Args:
        moment: at which operation the power is cut.
        loss: what becomes of a file with bytes that were not flushed.
        names: whether names that were made or changed since their folder was flushed are lost as well.
    """

    def __init__(self, moment: int, loss: Loss, *, names: bool) -> None:
        self.moment, self.loss, self.names = moment, loss, names
        self.count = 0
        self.real = {name: getattr(os, name) for name in ("open", "write", "fsync", "close", "rename", "mkdir")}
        self.paths: dict[int, str] = {}
        self.dirty: dict[str, int] = {}  # the file's number here, held open: it may be renamed
        self.undo: list[tuple[str, Callable[[], object]]] = []  # the folder, and how its last change is lost
        for name in self.real:
            setattr(os, name, getattr(self, name))

    def open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        self.step()
        file = self.real["open"](path, flags, *args, **kwargs)
        if "dir_fd" not in kwargs:
            self.paths[file] = str(path)
        if flags & os.O_CREAT:
            self.changed(str(path), lambda: os.unlink(path))
        return int(file)

    def write(self, file: int, data: Any) -> int:
        if file in self.paths and file not in self.dirty.values():
            self.dirty.setdefault(self.paths[file], os.dup(file))
        self.step()
        return int(self.real["write"](file, data))

    def fsync(self, file: int) -> None:
        self.step()
        self.real["fsync"](file)
        path = self.paths.get(file, "")
        if path in self.dirty:
            self.real["close"](self.dirty.pop(path))
        self.undo = [(folder, back) for folder, back in self.undo if folder != path]

    def close(self, file: int) -> None:
        self.step()
        self.real["close"](file)
        self.paths.pop(file, None)

    def rename(self, source: Any, target: Any) -> None:
        self.step()
        self.real["rename"](source, target)
        self.changed(str(target), lambda: self.real["rename"](target, source))

    def mkdir(self, path: Any, *args: Any) -> None:
        self.step()
        self.real["mkdir"](path, *args)
        self.changed(str(path), lambda: shutil.rmtree(path))

    def changed(self, path: str, back: Callable[[], object]) -> None:
        self.undo.append((os.path.dirname(path), back))

    def step(self) -> None:
        self.count += 1
        if self.count <= self.moment:
            return
        for name, function in self.real.items():
            setattr(os, name, function)
        for file in self.dirty.values():
            os.ftruncate(file, 0 if self.loss == "emptied" else os.fstat(file).st_size // 2)
        for _, back in reversed(self.undo if self.names else []):
            with contextlib.suppress(FileNotFoundError):  # retention has deleted what lay there
                back()
        os._exit(CUT)


def cut_at(moment: int, loss: Loss, out: Path, run: Run, step: int, *, names: bool, mode: str) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            Disk(moment, loss, names=names)
            saved: Any = save_state(CPU, out, run.items(), step=step, keep=1, mode=mode)  # type: ignore[call-overload]
            if mode == "async":
                saved.result()
            os._exit(DONE)
        except BaseException as error:
            print(f"child: {error!r}", flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


CASES: list[Any] = [("emptied", True, "keep_1", "sync", 3)]  # every third operation
ALL = [
    (loss, names, layout, mode, 6 if mode == "async" else 4)
    for loss in ("emptied", "torn")
    for names in (True, False)
    for layout in ("keep_1", "same_step", "fresh")
    for mode in ("sync", "async")
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ALL]


@pytest.mark.parametrize(("loss", "names", "layout", "mode", "every"), CASES + SLOW)
def test_a_power_cut_at_any_file_operation_loses_nothing(
    loss: Loss, names: bool, layout: str, mode: str, every: int, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    code, moment = CUT, 0
    step = 1 if layout == "same_step" else 2
    while code == CUT:
        out, run = tmp_path / str(moment), Run()
        if layout != "fresh":
            save_state(CPU, out, run.items(), step=1)
        old = run.state()
        run.step(1)
        new = run.state()
        code = cut_at(moment, loss, out, run, step, names=names, mode=mode)
        found = latest_checkpoint(out, verify=True)
        assert code in (CUT, DONE)
        if found is None:
            assert (layout, code) == ("fresh", CUT)
        else:
            resumed = Run(seed=5).load(CPU, found).state()
            assert equal(resumed, new) or (code == CUT and equal(resumed, old))
        path = save_state(CPU, out, run.items(), step=3, keep=1)
        assert os.listdir(out) == [path.name]
        moment += every
    assert moment > 20
