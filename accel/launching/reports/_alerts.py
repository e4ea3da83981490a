# SPDX-License-Identifier: Apache-2.0
"""Alerts of a launcher: ranks that failed or are silent, and disks of its folders that are almost full."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence

from accel.alerts import AlertLog, Alerts
from accel.launching.reports._report import notify
from accel.terminal import show_size

_LOOK_S = 30.0  # between two looks at the disks
_AGAIN = 0.01  # below the limit, a disk that was full is one that may be full again
_END_S = 10.0
_SILENT_S = 1.0


class LaunchAlerts:
    """The alerts of a launch on this host.

    Args:
        settings: settings of alerts.
        look_s: seconds between two looks at the disks.
    """

    def __init__(self, settings: Alerts, look_s: float = _LOOK_S) -> None:
        self._settings = settings
        self._look_s = look_s
        self._log = AlertLog(
            settings,
            source="launch",
            report=lambda level, text: notify(f"accel: {text}\n"),
        )
        self._folders: list[str] = []
        self._full: set[int] = set()
        self._ended = threading.Event()
        self._looks = False

    def begin(self, folders: Sequence[str], *, looks: bool) -> None:
        """Note a start of all ranks; `looks` on the host of rank 0, which watches the disks of folders."""
        looks = looks and self._settings.disk_full < 1
        for folder in folders:
            self.add_folder(folder)
        if looks and not self._looks:
            self._looks = True
            # A thread, as a disk of a server that is gone answers nothing.
            threading.Thread(target=self._watch, name="accel-launch-disks", daemon=True).start()

    def add_folder(self, folder: str) -> None:
        """Write alerts to a folder, and watch its disk."""
        if folder not in self._folders:
            self._folders.append(folder)
            self._log.add_folder(folder)

    def lost(self, rank: int, text: str) -> None:
        """Alert of a rank that failed; the launcher reports it itself."""
        self._add(f"rank {rank} is lost", text, "error")

    def silent(self, text: str) -> None:
        """Alert of ranks without output; the launcher reports them itself."""
        lines = [line.removeprefix("accel: ") for line in text.splitlines() if line.startswith("accel: ")]
        self._add("ranks are silent", "\n".join(lines), "warning")

    def end(self) -> None:
        """Deliver what waits, for some seconds at most."""
        self._ended.set()
        until = time.monotonic() + _SILENT_S
        while self._log.has_work() and time.monotonic() < until:
            time.sleep(0.01)
        if self._log.has_work():
            notify(f"accel: waiting up to {_END_S:g} s for alerts to be delivered\n")
        self._log.end(_END_S)

    def look(self) -> None:
        """Alert of each disk that has become almost full since the last look."""
        for folder in list(self._folders):
            with contextlib.suppress(OSError):
                device = os.stat(folder).st_dev
                found = os.statvfs(folder)
                used = 1 - found.f_bavail / found.f_blocks if found.f_blocks else 0.0
                if used < self._settings.disk_full - _AGAIN:
                    self._full.discard(device)
                elif used >= self._settings.disk_full and device not in self._full:
                    self._full.add(device)
                    free = show_size(found.f_bavail * found.f_frsize)
                    self._log.add(
                        f"the disk of {folder} is almost full",
                        f"{used:.1%} in use, {free} left",
                        level="warning",
                        every_s=self._settings.every_s,
                    )

    def _add(self, title: str, text: str, level: str) -> None:
        self._log.add(title, text, level=level, every_s=self._settings.every_s, is_known=True)

    def _watch(self) -> None:
        folders = 0
        waited_s = self._look_s
        pause_s = min(1.0, self._look_s)
        while not self._ended.wait(pause_s):
            waited_s += pause_s
            if len(self._folders) != folders or waited_s >= self._look_s:
                folders, waited_s = len(self._folders), 0.0
                self.look()
