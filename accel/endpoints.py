# SPDX-License-Identifier: Apache-2.0
"""Endpoints, host and port, where processes meet: whether something listens there, the wait until it does. And JSON for
a webhook."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH)
_FIRST_PROBE_S = 1.0
_PROBE_S = 5.0
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 1.0


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of an endpoint, an IPv6 address without its brackets."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def probe(host: str | None, port: int, timeout_s: float) -> OSError | UnicodeError | None:
    """Connect to an endpoint; return the error, None if something listens there."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            # Linux connects a socket to itself where the port is one of its own choice, and nothing listens.
            if connection.getsockname() == connection.getpeername():
                return ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    except (OSError, UnicodeError) as error:  # the latter for a text that no host can have as its name
        return error
    return None


def unresolved(host: str | None, port: int) -> OSError | UnicodeError | None:
    """Resolve an endpoint's host; return the error, None if it has an address."""
    try:
        _ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return error
    return None


def retry(
    attempt: Callable[[float], OSError | UnicodeError | None],
    timeout_s: float,
    *,
    notice: Callable[[OSError, float], bool],
    pause: Callable[[float], int | None] = time.sleep,
) -> int:
    """Repeat an attempt until it returns no error, or `pause` ends the wait; return 0, or that result of `pause`.

    The last error is raised after `timeout_s`; an attempt gets the seconds left to it, `notice` prints that it fails.
    """
    began_s = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    noticed = False
    while error := attempt(min(timeout_s, _PROBE_S if noticed else _FIRST_PROBE_S)):
        waited_s = time.monotonic() - began_s
        if not isinstance(error, OSError) or error.errno in NO_ROUTE or waited_s >= timeout_s:
            raise error  # no route, no valid name, or too late; a name may still resolve later
        noticed = noticed or notice(error, waited_s)
        if stopped := pause(pause_s):
            return stopped
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return 0


def post_json(url: str, body: bytes, patience_s: float) -> None:
    """Send JSON to an https URL, whose certificate is checked; follow no redirection, and read the status alone.

    Args:
        url: the URL.
        body: the JSON.
        patience_s: seconds in which an answer has begun, however slowly a server sends it.

    Raises:
        OSError: A failure, an answer of another status than 2xx, a redirection among them, or none in time.
        ValueError: Another scheme.
    """
    if not url.startswith("https://"):
        raise ValueError("not https")
    opened: list[Any] = []
    errors: list[Exception] = []

    def send() -> None:
        try:
            _post(url, body, patience_s, opened)
        except Exception as error:  # raised by the caller's thread
            errors.append(error)

    sending = threading.Thread(target=send, name="accel-webhook", daemon=True)
    sending.start()
    sending.join(patience_s)
    if sending.is_alive():
        for connection in opened:  # the thread waits for its next byte
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        raise TimeoutError(f"no answer in {patience_s:g} s")
    if errors:
        raise errors[0]


def _post(url: str, body: bytes, patience_s: float, opened: list[Any]) -> None:
    """Send JSON; each step of it may take the whole time."""
    import http.client  # 40 ms with the next, which no run without a webhook spends
    import urllib.error
    import urllib.request

    class KnownConnection(http.client.HTTPSConnection):
        def connect(self) -> None:
            opened.append(self)
            super().connect()

    class WithConnection(urllib.request.HTTPSHandler):
        def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(KnownConnection, req)

    class NoRedirection(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any, **__: Any) -> None: ...  # another host must not get the alert

    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")
    try:
        urllib.request.build_opener(WithConnection, NoRedirection).open(request, timeout=patience_s).close()
    except urllib.error.HTTPError as error:
        error.close()
        raise
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
