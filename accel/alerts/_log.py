# SPDX-License-Identifier: Apache-2.0
"""Alerts as they are raised: the file that keeps them, and the command or webhook that they reach in the background."""

from __future__ import annotations

import collections
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from accel.alerts._rules import Alerts
from accel.run_folder import append_rest, bounded, hide_in_text

FOLDER = "alerts"  # of a run's folder, with a file for each process that has alerts


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """An alert, as a file, a command and a webhook get it, without credentials.

    Attributes:
        time_s: its time, in seconds since the epoch.
        level: its level.
        title, text: the alert.
        source: the process that raised it: "rank 3" or "launch".
        host: name of its host.
        run: name of the run; empty if unknown.
        count: number of equal ones until `last_s`.
        last_s: time of the last one.
    """

    time_s: float
    level: str
    title: str
    text: str = ""
    source: str = ""
    host: str = ""
    run: str = ""
    count: int = 1
    last_s: float = 0.0

    @property
    def line(self) -> str:
        """The alert in one line."""
        return f"{self.title}: {' '.join(self.text.split())}" if self.text else self.title


def read_alerts(folder: Path, since_s: float = 0.0) -> list[Alert]:
    """Return the alerts in a run's folder in order of time; lines that cannot be read are left out.

    Args:
        folder: the run's folder.
        since_s: earliest time, such as the start of the run.
    """
    found: dict[tuple[str, float, str, str], Alert] = {}
    for path in (folder / FOLDER).glob("*.jsonl"):
        try:
            lines = path.read_bytes().splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                alert = msgspec.json.decode(line, type=Alert)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            found[(path.name, alert.time_s, alert.title, alert.text)] = alert  # a later line has the newer count
    return sorted((each for each in found.values() if each.time_s >= since_s), key=lambda each: each.time_s)


_MOST_TITLE, _MOST_TEXT = 200, 2_000  # characters
_MOST_OPEN = 1_000  # alerts whose repeats are counted
_MOST_WAITING = 100  # alerts that wait for their delivery
_PATIENCE_S = 10.0  # for one try of the webhook, and for the command
_RETRIES = 2
_PAUSE_S = 1.0  # before the first of them, and twice as long before the second

Post = Callable[[str, bytes, float], None]  # URL, body, seconds of patience; raises OSError or ValueError
Key = tuple[str, ...]


class AlertLog:
    """The alerts of this process. Its thread starts with the first one, and is a daemon.

    Args:
        settings: command and webhook.
        source: "rank 3" or "launch".
        report: takes the level and the text of a line for the log.
        run: returns the run's name.
        folders: folders of runs to write to.
        post: sends a body to a URL.
        clock: returns the time, in seconds since the epoch.
    """

    def __init__(
        self,
        settings: Alerts,
        *,
        source: str,
        report: Callable[[str, str], object],
        run: Callable[[], str] = str,
        folders: Sequence[str] = (),
        post: Post | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._source = source
        self._report = report
        self._run = run
        self._folders = list(folders)
        self._post = post or post_json
        self._clock = clock
        began = datetime.fromtimestamp(clock(), UTC).strftime("%Y%m%dT%H%M%S.%f")
        host = re.sub(r"[^0-9A-Za-z.-]", "_", socket.gethostname())
        self._file = f"{began}-{host}-{os.getpid()}-{source.replace(' ', '-')}.jsonl"
        self._changed = threading.Condition()
        self._open: dict[Key, Alert] = {}
        self._written: dict[Key, int] = {}  # the count on file
        self._content = bytearray()
        self._waiting: collections.deque[Alert] = collections.deque()
        self._started = self._ended = self._done = self._is_dirty = False
        self._left_out = 0
        self._reported: set[str] = set()

    def add_folder(self, folder: str) -> None:
        """Write to another folder of a run too, all alerts so far included."""
        with self._changed:
            if folder in self._folders:
                return
            self._folders.append(folder)
            if self._content:
                self._is_dirty = True
                self._start()

    def add(
        self, title: str, text: str = "", *, level: str, every_s: float, key: Key = (), is_known: bool = False
    ) -> None:
        """Raise an alert; one with the key of another in the last `every_s` seconds only counts. Waits for nothing.

        Args:
            title, text: the alert.
            level: its level.
            every_s: seconds in which equal ones are one.
            key: identity of equal ones; title, text and level by default.
            is_known: whether the log has it already.
        """
        key = key or (level, title, text)
        now_s = self._clock()
        with self._changed:
            if self._ended:
                return
            known = self._open.get(key)
            if known is not None and now_s < known.time_s + every_s:
                self._open[key] = known = replace(known, count=known.count + 1, last_s=now_s)
                if known.count >= 2 * self._written[key]:  # a file of many repeats stays short
                    self._write(key, known)
                return
            self._forget(key)
            alert = Alert(
                time_s=now_s,
                level=level,
                title=_plain(title, _MOST_TITLE),
                text=_plain(text, _MOST_TEXT),
                source=self._source,
                host=socket.gethostname(),
                run=self._run(),
                last_s=now_s,
            )
            self._open[key] = alert
            self._write(key, alert)
            self._deliver_later(alert)
        if not is_known:
            _ = self._report(level, f"alert: {alert.line}")

    def end(self, patience_s: float) -> None:
        """Write and deliver what waits, for some seconds at most; later alerts are dropped."""
        with self._changed:
            if self._ended:
                return
            for key in list(self._open):
                self._forget(key)
            self._ended = True
            self._changed.notify_all()
            if not self._started:
                return
            _ = self._changed.wait_for(lambda: self._done, patience_s)
            late = 0 if self._done else 1 + len(self._waiting)
        if late + self._left_out:
            _ = self._report("warning", f"{late + self._left_out} alerts were not delivered in time")

    def has_work(self) -> bool:
        """Return whether an alert waits to be written or delivered."""
        with self._changed:
            return bool(self._waiting) or self._is_dirty

    def _forget(self, key: Key) -> None:
        """Close an alert, and write its last count; and the oldest ones of too many."""
        if (known := self._open.pop(key, None)) is not None and self._written.pop(key, 0) != known.count:
            self._write(key, known)
            _ = self._written.pop(key)
        while len(self._open) >= _MOST_OPEN:
            self._forget(next(iter(self._open)))

    def _write(self, key: Key, alert: Alert) -> None:
        self._written[key] = alert.count
        self._content += msgspec.json.encode(alert) + b"\n"
        self._is_dirty = True
        self._start()

    def _deliver_later(self, alert: Alert) -> None:
        if self._settings.command or self._settings.webhook:
            self._waiting.append(alert)
            while len(self._waiting) > _MOST_WAITING:
                _ = self._waiting.popleft()
                self._left_out += 1

    def _start(self) -> None:
        if not self._started:
            self._started = True
            threading.Thread(target=self._work, name="accel-alerts", daemon=True).start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                _ = self._changed.wait_for(lambda: self._waiting or self._is_dirty or self._ended)
                content = bytes(self._content) if self._is_dirty else b""
                folders = list(self._folders)
                self._is_dirty = False
                alert = self._waiting.popleft() if self._waiting else None
                if not content and alert is None:
                    self._done = True
                    self._changed.notify_all()
                    return
            for folder in folders if content else ():
                self._append(folder, content)
            if alert is not None:
                self._deliver(alert)

    def _append(self, folder: str, content: bytes) -> None:
        try:
            (Path(folder) / FOLDER).mkdir(exist_ok=True)
            append_rest(Path(folder) / FOLDER / self._file, content)
        except OSError as error:  # the next alert tries again
            if folder not in self._reported:
                self._reported.add(folder)
                _ = self._report("warning", f"{folder} gets no record of alerts: {error.strerror}")

    def _deliver(self, alert: Alert) -> None:
        body = msgspec.json.encode({**msgspec.to_builtins(alert), "line": alert.line})
        for name, used, send in (
            ("command", self._settings.command, lambda: run_command(self._settings.command, alert, body)),
            ("webhook", self._settings.webhook, lambda: self._send(body)),
        ):
            if used and (problem := send()):
                _ = self._report("warning", f"the {name} did not get the alert {alert.title!r}: {problem}")

    def _send(self, body: bytes) -> str:
        """Send to the webhook, with two more tries; return the last problem, without the URL."""
        problem = ""
        for number in range(1 + _RETRIES):
            if number:
                time.sleep(_PAUSE_S * number)
            try:
                self._post(self._settings.webhook, body, _PATIENCE_S)
            except (OSError, ValueError) as error:
                code: object = getattr(error, "code", None)
                reason: object = getattr(error, "reason", None) or error
                text = f"HTTP status {code}" if code is not None else f"{type(error).__name__}: {reason}"
                problem = _plain(text.replace(self._settings.webhook, "***"), _MOST_TITLE)
            else:
                return ""
        return f"{1 + _RETRIES} tries, {problem}"


def run_command(words: Sequence[str], alert: Alert, body: bytes) -> str:
    """Run a command with an alert on its standard input; return the problem, or nothing."""
    import subprocess  # no launch without a command needs it

    fields = {"{title}": alert.title, "{text}": alert.text, "{level}": alert.level}
    filled = [re.sub(r"\{(title|text|level)\}", lambda found: fields[found[0]], word) for word in words]
    try:
        ended = subprocess.run(
            filled,
            input=body,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_PATIENCE_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return f"no end in {_PATIENCE_S:g} s"
    except (OSError, ValueError) as error:
        return _plain(str(error), _MOST_TITLE)
    last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return _plain(f"exit status {ended.returncode} {last}".strip(), _MOST_TITLE) if ended.returncode else ""


def post_json(url: str, body: bytes, patience_s: float, *, scheme: str = "https") -> None:
    """Send JSON to a URL of a scheme; raise `OSError` for a failure, an answer of another status, or a redirection."""
    import http.client  # 40 ms with the next, which no run without a webhook spends
    import urllib.error
    import urllib.request

    class NoRedirection(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any, **__: Any) -> None:
            """Follow nothing: another host must not get the alert."""

    if not url.startswith(f"{scheme}://"):
        raise ValueError(f"not {scheme}")
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.build_opener(NoRedirection).open(request, timeout=patience_s) as answer:
            _ = answer.read(1)
    except urllib.error.HTTPError as error:
        error.close()
        raise
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _plain(text: str, most: int) -> str:
    """Return a text without credentials and without what terminals act on, bounded."""
    lines = ("".join(char if char.isprintable() else " " for char in line) for line in text.split("\n"))
    return bounded(hide_in_text("\n".join(lines)), most)
