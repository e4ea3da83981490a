# SPDX-License-Identifier: Apache-2.0
"""A page that a server keeps fresh: snapshots of the runs that are followed, and the server, which asks for a token."""

from __future__ import annotations

import gzip
import hashlib
import hmac
import re
import socket
import socketserver
import sys
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import parse_qs, urlsplit

import msgspec
from msgspec.structs import replace

from accel.errors import ConfigError
from accel.report._followed import FollowedRun, Stamps
from accel.report._media import MEDIA_ROOM, MediaShelf
from accel.report._page import contents_json, page_of, served_page
from accel.report._run_data import FoundRuns, RunData, name_runs
from accel.report._run_state import state_of


class ServedPage(NamedTuple):
    """A page at a moment, made once for all readers."""

    version: str  # differs between snapshots that differ
    page: bytes  # the whole page
    data: bytes  # the same for the script of an open page, as JSON
    problem: str = ""  # reason why there is no page; empty for none
    # JSON of images and other media by their keys in `data`, for those that a reader looks at.
    contents: Mapping[str, bytes] = {}


class LiveReport:
    """Snapshots of runs that are followed, for any number of readers.

    Args:
        find: returns the runs by now; other folders may be among them as long as they hold no run.
        follow: returns a run that is followed.
        every_s: least time between two looks at the files; a long look makes it longer, so that looks take a tenth.
        now_s: the clock.
        room: bytes of media that readers can look at.
    """

    def __init__(
        self,
        find: Callable[[], FoundRuns],
        follow: Callable[[Path], FollowedRun],
        every_s: float = 2.0,
        now_s: Callable[[], float] = time.monotonic,
        room: int = MEDIA_ROOM,
    ) -> None:
        self._find = find
        self._follow = follow
        self._every_s = every_s
        self._now_s = now_s
        self._looking = Lock()  # held by the reader that looks; no other reader waits for it
        self._has_first = Event()
        self._due_s = -float("inf")
        self._kept = ServedPage("", b"", b"")
        self._runs: dict[Path, tuple[FollowedRun, Stamps, RunData]] = {}
        self._shown: dict[Path, None] = {}  # runs with something to show, in the order in which they had it
        self._order: dict[str, int] = {}  # of charts
        self._shelf = MediaShelf(room)
        self._seen: object = None

    def snapshot(self) -> ServedPage:
        """Return the newest snapshot; look at the files first if the last look is long ago.

        One reader looks at a time. Others get the snapshot before, or wait for the first one.
        """
        if self._now_s() >= self._due_s and self._looking.acquire(blocking=False):
            try:
                began_s = self._now_s()
                if began_s >= self._due_s:
                    self._kept = self._look_or_report()
                    ended_s = self._now_s()
                    self._due_s = ended_s + max(self._every_s, 9 * (ended_s - began_s))
                    self._has_first.set()
            finally:
                self._looking.release()
        if not self._has_first.wait(_FIRST_S):
            return ServedPage("", b"", b"", "The runs are being read. Try again in a moment.")
        return self._kept

    def _look_or_report(self) -> ServedPage:
        try:
            return self._look()
        except (OSError, ConfigError) as error:
            self._seen = None
            return ServedPage("", b"", b"", f"A file of the run cannot be read: {error}")

    def _look(self) -> ServedPage:
        runs_now = self._find()
        for folder in dict.fromkeys((*self._runs, *runs_now.folders)):
            known = self._runs.get(folder)
            followed = known[0] if known else self._follow(folder)
            stamps = followed.stamps()  # before the look, so that the next one sees later changes
            if known is None or stamps != known[1]:
                self._runs[folder] = (followed, stamps, followed.look())
            if not self._runs[folder][2].is_empty:
                _ = self._shown.setdefault(folder)
        found = [self._runs[folder] for folder in self._shown or list(self._runs)[:1]]
        states = [state_of(run.run, run.launches, folder=run.folder) for *_, run in found]
        seen = [*runs_now.unreadable, *zip((stamps for _, stamps, _ in found), states, strict=True)]
        if seen == self._seen:
            return self._kept
        runs = [run for *_, run in found]
        names = name_runs([run.folder for run in runs])
        named = [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
        page = page_of(named, self._order, self._shelf, runs_now.unreadable)
        data = msgspec.json.encode({"title": page.title, "kind": page.kind, "main": str(page.main), "data": page.data})
        version = hashlib.blake2b(data, digest_size=12).hexdigest()
        self._seen = seen
        text = served_page(page, version).encode(errors="replace")
        return ServedPage(version, text, data, contents=page.contents)


def change_of(old: Any, new: Any) -> dict[str, Any] | None:
    """Return what turns one JSON value into another; None for equal ones.

    {"v": value} replaces it. {"k": {key: change}, "x": [keys]} changes and drops keys of an object; {"k": ..., "n":
    length} changes a list by index. {"t": text, "a": before, "z": after} keeps that many characters at both ends of a
    text, as a curve keeps its older values.
    """
    if old == new:
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        was = cast("dict[str, Any]", old)
        now = cast("dict[str, Any]", new)
        kept = {key: change_of(was[key], value) if key in was else {"v": value} for key, value in now.items()}
        return {"k": {key: each for key, each in kept.items() if each}, "x": [key for key in was if key not in now]}
    if isinstance(old, list) and isinstance(new, list):
        before = cast("list[Any]", old)
        after = cast("list[Any]", new)
        places = {
            str(at): change_of(before[at], value) if at < len(before) else {"v": value}
            for at, value in enumerate(after)
        }
        return {"k": {at: each for at, each in places.items() if each}, "n": len(after)}
    if isinstance(old, str) and isinstance(new, str) and old.isascii() and new.isascii():  # one unit a character there
        begin = _alike(old, new)
        end = _alike(old[begin:][::-1], new[begin:][::-1])
        if begin + end >= _LEAST_ALIKE:
            return {"t": new[begin : len(new) - end], "a": begin, "z": end}
    return {"v": new}


def _alike(one: str, other: str) -> int:
    """Return how many characters two texts have alike from the start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_LEAST_ALIKE = 40  # characters, below which the whole text is as short


_FIRST_S = 10.0  # a reader's wait for the first snapshot
_LOCAL = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
_PATHS = ("/", "/data", "/media")
_SMALL = 1000  # bytes that are not worth it
_LEVEL = 5
_KEPT = 4  # the page and the data of two moments
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
        self._lock = Lock()
        self._known: dict[str, bytes] = {}  # data of the newest versions that were sent
        self._packed: dict[bytes, bytes] = {}  # the newest bodies, by their digest, packed once for all readers
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Reader)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server_address[1]}/?token={token}"

    def server_bind(self) -> None:
        """Bind without the question to a name server that `HTTPServer` asks."""
        socketserver.TCPServer.server_bind(self)

    def data_since(self, base: str, found: ServedPage) -> bytes:
        """Return a page's data, or what changed in it since a version that a reader has."""
        with self._lock:
            before = self._known.get(base)
            _put(self._known, found.version, found.data)
        if before is None:
            return found.data
        change = change_of(msgspec.json.decode(before), msgspec.json.decode(found.data))
        return msgspec.json.encode({"base": base, "change": change})

    def packed(self, body: bytes) -> bytes:
        """Return a body compressed by gzip; one that several readers get is compressed once."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        with self._lock:
            made = self._packed.get(digest)
        if made is None:
            made = gzip.compress(body, _LEVEL, mtime=0)
            with self._lock:
                _put(self._packed, digest, made)
        return made

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of readers that went away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


K = TypeVar("K")


def _put(kept: dict[K, bytes], key: K, value: bytes) -> None:
    """Keep a value as the newest of a few."""
    _ = kept.pop(key, None)
    while len(kept) >= _KEPT:
        _ = kept.pop(next(iter(kept)))
    kept[key] = value


def _takes_gzip(accepted: str) -> bool:
    """Whether a reader's `Accept-Encoding` has gzip, and not with a weight of zero."""
    for each in accepted.lower().split(","):
        name, _, weight = each.replace(" ", "").partition(";q=")
        if name == "gzip":
            return weight.strip("0.") != "" or not weight
    return False


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
            base = parse_qs(target.query).get("base", [""])[0]
            data = cast("ReportServer", self.server).data_since(base, found)
            self._send(200, data, {"Content-Type": "application/json", "ETag": f'"{found.version}"'})

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
        text = "Only GET and HEAD are answered." if is_method else message or ""
        self._send(
            405 if is_method else code,
            f"{text}\n".encode(errors="replace"),
            {"Allow": "GET, HEAD"} if is_method else {},
        )

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.close_connection = True
        if len(body) > _SMALL and _takes_gzip(self.headers.get("Accept-Encoding", "")):
            body = cast("ReportServer", self.server).packed(body)
            headers = {**headers, "Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
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
