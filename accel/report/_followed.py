# SPDX-License-Identifier: Apache-2.0
"""A run's folder, read again and again: its state as one line, rows of ranks, and a page that a server keeps fresh."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import socket
import socketserver
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qs, urlsplit

import msgspec
from msgspec.structs import replace

from accel.alerts import Alert, read_alerts
from accel.errors import ConfigError
from accel.report._media import MEDIA_ROOM, MediaShelf
from accel.report._page import contents_json, page_of, served_page
from accel.report._run_data import (
    AT,
    Curves,
    MachineSamples,
    MediaFolder,
    MetricCurve,
    RunData,
    RunState,
    StoredCheckpoint,
    name_runs,
    state_of,
)
from accel.report._series import charts_of, ranked_metrics
from accel.report._tables import rank_text, show_number
from accel.run_folder import METRICS, PROFILE, LaunchRecord, Position, decode_line, read_launches, read_new, read_run
from accel.terminal import show_clock, show_text


class FollowedRun:
    """A run that is followed.

    Args:
        name: name of the run.
        folder: its folder, which need not exist yet.
        list_checkpoints: returns the checkpoints in a folder.
        read_profile: returns the profile in a folder as text; with it, `look` reads all that a page shows.

    Attributes:
        alerts: alerts of the run at the last look.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        list_checkpoints: Callable[[Path], Sequence[StoredCheckpoint]],
        read_profile: Callable[[Path], str] | None = None,
    ) -> None:
        self._name = name
        self._folder = folder
        self._list_checkpoints = list_checkpoints
        self._position = Position()
        self._curves = Curves()
        self.alerts: Sequence[Alert] = ()
        self._checkpoints: Sequence[StoredCheckpoint] = ()
        self._listed = 0  # change of the folder at the last listing
        self._read_profile = read_profile
        self._profile = ""
        self._profiled: Stamps = ()
        self._machine = MachineSamples()
        self._media = MediaFolder()

    def look(self) -> RunData:
        """Return the run as it is now, or raise `OSError`. Of a file that was cut back, only the rest counts."""
        while True:
            lines, self._position, restarted = read_new(self._folder / METRICS, self._position)
            if restarted:
                self._curves = Curves()
            self._curves.add(map(decode_line, lines))
            if not lines:
                break
        changed = self._folder.stat().st_mtime_ns if self._folder.is_dir() else 0
        if changed != self._listed:  # a checkpoint that commits or goes changes its folder's list of names
            self._listed = changed
            self._checkpoints = self._list_checkpoints(self._folder) if changed else ()
        launches = read_launches(self._folder)
        run = read_run(self._folder, launches)
        self.alerts = read_alerts(self._folder, 0.0 if run is None else run.started_s)
        is_page = self._read_profile is not None
        return RunData(
            name=self._name,
            folder=self._folder,
            curves=self._curves,
            run=run,
            launches=launches,
            checkpoints=self._checkpoints,
            profile=self._look_at_profile(),
            machine=self._machine.look(self._folder, self._curves.time.get(AT, MetricCurve())) if is_page else {},
            alerts=read_alerts(self._folder) if is_page else (),
            media=self._media.look(self._folder) if is_page else (),
        )

    def stamps(self) -> Stamps:
        """Return what changes with any file that a look reads, without reading one."""
        inner = (self._folder / name for name in (PROFILE, "launches", "alerts"))
        return _stamps([self._folder, *inner])

    def _look_at_profile(self) -> str:
        if self._read_profile is not None and (now := _stamps([self._folder / PROFILE])) != self._profiled:
            self._profiled = now
            self._profile = self._read_profile(self._folder)
        return self._profile


Stamps = tuple[tuple[str, int, int], ...]  # name, change and size of files


def _stamps(folders: Sequence[Path]) -> Stamps:
    paths: list[str] = []
    for folder in folders:
        with suppress(OSError):  # not there yet
            paths += [each.path for each in os.scandir(folder)]
    found: list[tuple[str, int, int]] = []
    for path in sorted(paths):
        with suppress(OSError):  # it went, or is a link to nowhere
            state = os.stat(path)
            found.append((path, state.st_mtime_ns, state.st_size))
    return tuple(found)


_MOST_VALUES = 6
_LONGEST = 120  # characters of an error
_RATES = ("samples_per_s", "tokens_per_s", "mfu")  # readings of clocks in the line; all have a curve


def status_line(run: RunData, state: RunState, alerts: Sequence[Alert] = ()) -> str:
    """Return a run's state in one line: step, the metrics that matter, speed, ranks, newest checkpoint, alerts."""
    curves = run.curves
    if is_absent(run, state):
        return show_text(f"nothing of a run in {run.folder}")
    parts = [] if curves.last_step is None else [f"step {curves.last_step}"]
    names = [name for name in ordered_names(run) if name in curves.values][:_MOST_VALUES]
    ends = {name: curves.values[name].last for name in names}
    parts += [f"{name} {show_number(end[1])}" for name, end in ends.items() if end is not None]
    parts += _speeds(run)
    counts = Counter(text.partition(":")[0] for *_, text in rank_rows(run.launches))
    counted = ", ".join(f"{count} {text}" for text, count in counts.items())
    parts += [f"ranks: {counted}"] if counted else []
    whole = [each.name for each in run.checkpoints if not each.problem]
    parts += [whole[-1]] if whole else []
    parts += [f"unreadable lines: {run.damaged}"] if run.damaged else []
    parts += [f"alerts: {len(alerts)}, {_short(alert_text(alerts[-1]))}"] if alerts else []
    return show_text("  ".join([*parts, state.text + _message(run, state)]))


def _message(run: RunData, state: RunState) -> str:
    """Return the first line of the error that ended the newest launch."""
    attempts = run.launches[-1].attempts if run.launches and state.kind == "failed" else ()
    error = attempts[-1].error if attempts else None
    if error is None or not error.message or not state.text.endswith(error.exception):
        return ""
    return f": {_short(error.message.splitlines()[0])}"


def _short(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def alert_text(alert: Alert) -> str:
    """Return an alert in one line, with its level and the number of equal ones."""
    return f"{alert.level}: {alert.line}" + (f" ({alert.count} times)" if alert.count > 1 else "")


def is_absent(run: RunData, state: RunState) -> bool:
    """Return whether a folder has nothing of a run."""
    return state.kind == "unknown" and run.curves.last_step is None and not run.checkpoints


def exit_status(run: RunData, state: RunState) -> int:
    """Return the exit status of `accel watch`: 0 finished or running, 1 failed, stopped or lost, 3 nothing of a run."""
    if is_absent(run, state):
        return 3
    return int(state.kind in ("failed", "stopped", "lost"))


def ordered_names(run: RunData) -> list[str]:
    """Return the names of the curves, those that matter first; readings of clocks without their "time/"."""
    charts = charts_of([run])
    saved = {name for each in run.checkpoints for name in each.metrics}
    matter = list(ranked_metrics(charts, tuple(saved)))
    clocks = [chart for chart in charts if chart.group == "time"]
    rest = [chart for chart in charts if chart not in matter and chart.group != "time"]
    order = [*matter, *(chart for chart in clocks if chart.kind == "curve"), *rest]
    order += [chart for chart in clocks if chart.kind != "curve"]
    return [chart.title.removeprefix("time/") if chart.group == "time" else chart.title for chart in order]


def _speeds(run: RunData) -> list[str]:
    """Return steps per second by the clock, and the run's own rates."""
    speed = run.curves.speed()
    rates = [] if speed is None else [f"{speed:.3g} steps/s"]
    curves = run.curves.time
    ends = {name: curves[name].last for name in _RATES if name in curves}
    return rates + [f"{name} {end[1]:.4g}" for name, end in ends.items() if end is not None]


def rank_rows(launches: Sequence[LaunchRecord]) -> list[tuple[str, str, str, str]]:
    """Return a row for each rank of the newest launch, on all of its hosts: rank, host, time until its end, state."""
    if not launches:
        return []
    newest = launches[-1]
    together = [each for each in launches if each.ended_s is None or each.ended_s > newest.started_s]
    rows: dict[int, tuple[str, str, str, str]] = {}
    for launch in [*together, newest]:
        attempt = launch.attempts[-1] if launch.attempts else None
        for rank in attempt.ranks if attempt else ():
            after = "" if rank.ended_s is None or attempt is None else show_clock(rank.ended_s - attempt.started_s)
            rows[rank.rank] = (str(rank.rank), launch.host, after, rank_text(rank))
    return [rows[rank] for rank in sorted(rows)]


class ServedPage(NamedTuple):
    """A page at a moment, made once for all readers.

    Attributes:
        version: differs between snapshots that differ.
        page: the whole page.
        data: the same for the script of an open page, as JSON.
        problem: reason why there is no page; empty for none.
        contents: JSON of images and other media by their keys in `data`, for those that a reader looks at.
    """

    version: str
    page: bytes
    data: bytes
    problem: str = ""
    contents: Mapping[str, bytes] = {}


class LiveReport:
    """Snapshots of runs that are followed, for any number of readers.

    Args:
        find: returns the folders of runs by now; other folders may be among them as long as they hold no run.
        follow: returns a run that is followed.
        every_s: least time between two looks at the files; a long look makes it longer, so that looks take a tenth.
        now_s: the clock.
        room: bytes of media that readers can look at.
    """

    def __init__(
        self,
        find: Callable[[], Sequence[Path]],
        follow: Callable[[Path], FollowedRun],
        every_s: float = 2.0,
        now_s: Callable[[], float] = time.monotonic,
        room: int = MEDIA_ROOM,
    ) -> None:
        self._find = find
        self._follow = follow
        self._every_s = every_s
        self._now_s = now_s
        self._lock = Lock()
        self._due_s = -float("inf")
        self._kept = ServedPage("", b"", b"")
        self._runs: dict[Path, tuple[FollowedRun, Stamps, RunData]] = {}
        self._shown: dict[Path, None] = {}  # runs with something to show, in the order in which they had it
        self._order: dict[str, int] = {}  # of charts
        self._shelf = MediaShelf(room)
        self._seen: object = None

    def snapshot(self) -> ServedPage:
        """Return the newest snapshot; look at the files first if the last look is long ago."""
        with self._lock:
            began_s = self._now_s()
            if began_s >= self._due_s:
                try:
                    self._kept = self._look()
                except (OSError, ConfigError) as error:
                    self._seen = None
                    self._kept = ServedPage("", b"", b"", f"A file of the run cannot be read: {error}")
                ended_s = self._now_s()
                self._due_s = ended_s + max(self._every_s, 9 * (ended_s - began_s))
            return self._kept

    def _look(self) -> ServedPage:
        for folder in dict.fromkeys((*self._runs, *self._find())):
            known = self._runs.get(folder)
            followed = known[0] if known else self._follow(folder)
            stamps = followed.stamps()  # before the look, so that the next one sees later changes
            if known is None or stamps != known[1]:
                self._runs[folder] = (followed, stamps, followed.look())
            if not self._runs[folder][2].is_empty:
                _ = self._shown.setdefault(folder)
        found = [self._runs[folder] for folder in self._shown or list(self._runs)[:1]]
        seen = [(stamps, state_of(run.run, run.launches)) for _, stamps, run in found]
        if seen == self._seen:
            return self._kept
        runs = [run for *_, run in found]
        names = name_runs([run.folder for run in runs])
        named = [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
        page = page_of(named, self._order, self._shelf)
        data = msgspec.json.encode({"title": page.title, "kind": page.kind, "main": str(page.main), "data": page.data})
        version = hashlib.blake2b(data, digest_size=12).hexdigest()
        self._seen = seen
        text = served_page(page, version).encode(errors="replace")
        return ServedPage(version, text, data, contents=page.contents)


_LOCAL = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
_PATHS = ("/", "/data", "/media")
_PATIENCE_S = 20.0  # for a reader's next bytes
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Type": "text/plain; charset=utf-8",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class ReportServer(ThreadingHTTPServer):
    """A server of one page, its data and its media, and of no file as it is.

    A request needs the token in its URL. That of another method than GET and HEAD, for another host than this one, or
    from the page of another origin is refused: a name of elsewhere that was turned to this machine reads nothing.

    Args:
        report: the snapshots.
        token: the token.
        host: name or address to listen at, one that readers use.
        port: port; 0 for a free one.

    Attributes:
        url: address of the page, with the token.

    Raises:
        OSError: The port is taken, or the address is not one of this machine.
    """

    daemon_threads = True

    def __init__(self, report: LiveReport, token: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self.report = report
        self.token = token
        self.names = {*_LOCAL, host.lower()}
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Reader)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server_address[1]}/?token={token}"

    def server_bind(self) -> None:
        """Bind without the question to a name server that `HTTPServer` asks."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of readers that went away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Reader(BaseHTTPRequestHandler):
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        refusal = self._refusal()
        if refusal is not None:
            self.send_error(*refusal)
            return
        found = cast("ReportServer", self.server).report.snapshot()
        target = urlsplit(self.path)
        if found.problem:
            self.send_error(503, found.problem)
        elif target.path == "/":
            self._send(200, found.page, {"Content-Type": "text/html; charset=utf-8"})
        elif target.path == "/media":
            keys = ",".join(parse_qs(target.query).get("keys", [])).split(",")
            self._send(200, contents_json(found.contents, keys).encode(), {"Content-Type": "application/json"})
        elif self.headers.get("If-None-Match") == f'"{found.version}"':
            self._send(304, b"", {"ETag": f'"{found.version}"'})
        else:
            self._send(200, found.data, {"Content-Type": "application/json", "ETag": f'"{found.version}"'})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _refusal(self) -> tuple[int, str] | None:
        """Return status and reason of a refusal; None for a reader with the token."""
        server = cast("ReportServer", self.server)
        hosts = self.headers.get_all("Host", [])
        named = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if named is None or named[1].strip("[]").lower() not in server.names:
            return 403, "This server answers to its own name alone."
        if any(origin != f"http://{hosts[0]}" for origin in self.headers.get_all("Origin", [])):
            return 403, "Pages of other origins read nothing here."
        path, _, query = self.path.partition("?")
        given = parse_qs(query).get("token", [])
        if len(given) != 1 or not hmac.compare_digest(given[0].encode(errors="replace"), server.token.encode()):
            return 403, "Open the URL that `accel report --serve` printed: its token is missing or not the one of now."
        return None if path in _PATHS else (404, "There is the page alone.")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with a reason in plain text."""
        is_method = code == 501
        text = "GET and HEAD alone are answered." if is_method else message or ""
        self._send(
            405 if is_method else code,
            f"{text}\n".encode(errors="replace"),
            {"Allow": "GET, HEAD"} if is_method else {},
        )

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.close_connection = True
        self.send_response(code)
        for name, value in {**_HEADERS, **headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and code != 304:
            _ = self.wfile.write(body)

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "accel"

    def log_message(self, format: str, *args: Any) -> None:
        """Keep requests, which have the token, off the terminal."""
