# SPDX-License-Identifier: Apache-2.0
"""Endpoints, host and port, where processes meet: whether something listens there, the wait until it does. And requests
that end in time."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from accel.terminal import show_limit

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
            # Linux connects a socket to itself if it has chosen the port and nothing listens.
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
    """Send JSON to an https URL. Checks the certificate, follows no redirection, and reads only the status.

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
    status, reason = _within(patience_s, url, body, {"Content-Type": "application/json"}, has_proxies=True)
    if not 200 <= status < 300:
        import urllib.error
        from email.message import Message

        raise urllib.error.HTTPError(url, status, reason.decode(), Message(), None)


def post(url: str, body: bytes, patience_s: float, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """Send a request to a server of one's own; follow no redirection, and take no proxy of the environment.

    Args:
        url: http or https.
        body: the body.
        patience_s: seconds in which the whole answer has arrived, however slowly a server sends it.
        headers: of the request.

    Returns:
        Status and body of the answer.

    Raises:
        OSError: A failure, or no whole answer in time.
        ValueError: Another scheme.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError("neither http nor https")
    return _within(patience_s, url, body, headers, has_proxies=False)


def _within(
    patience_s: float, url: str, body: bytes, headers: Mapping[str, str], *, has_proxies: bool
) -> tuple[int, bytes]:
    """Send a request from a thread, which is given up after so many seconds."""
    opened: list[Any] = []
    found: list[tuple[int, bytes]] = []
    errors: list[Exception] = []

    def send() -> None:
        try:
            found.append(_send(url, body, patience_s, headers, opened, has_proxies=has_proxies))
        except Exception as error:  # raised by the caller's thread
            errors.append(error)

    sending = threading.Thread(target=send, name="accel-request", daemon=True)
    sending.start()
    sending.join(patience_s)
    if sending.is_alive():
        for connection in opened:  # the thread waits for its next byte
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        raise TimeoutError(f"no answer in {show_limit(patience_s)}")
    if errors and isinstance(errors[0], TimeoutError):  # the socket's, a moment before the thread's
        raise TimeoutError(f"no answer in {show_limit(patience_s)}") from errors[0]
    if errors:
        raise errors[0]
    return found[0]


def _send(
    url: str, body: bytes, patience_s: float, headers: Mapping[str, str], opened: list[Any], *, has_proxies: bool
) -> tuple[int, bytes]:
    """Send a request; each step of it may take the whole time. With proxies, read the reason of the status alone."""
    import http.client  # 40 ms with the next, which no run without a server spends
    import urllib.request

    def connection(host: str, /, **options: Any) -> http.client.HTTPConnection:
        secure = url.startswith("https://")
        made = http.client.HTTPSConnection(host, **options) if secure else http.client.HTTPConnection(host, **options)
        opened.append(made)
        return made

    class WithPlain(urllib.request.HTTPHandler):
        def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(connection, req)

    class WithSecure(urllib.request.HTTPSHandler):
        def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(connection, req)

    class AnyStatus(urllib.request.HTTPErrorProcessor):
        def http_response(self, request: Any, response: Any) -> Any:
            return response  # a redirection too: another host must not get what is sent

        https_response = http_response

    opener = urllib.request.OpenerDirector()  # `build_opener` would read certificates for http, too
    if has_proxies:
        opener.add_handler(urllib.request.ProxyHandler())
    opener.add_handler(WithSecure() if url.startswith("https://") else WithPlain())
    opener.add_handler(AnyStatus())
    request = urllib.request.Request(url, data=body, headers=dict(headers), method="POST")
    try:
        with opener.open(request, timeout=patience_s) as answer:
            return answer.status, answer.reason.encode() if has_proxies else answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
