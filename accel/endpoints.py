# SPDX-License-Identifier: Apache-2.0
"""Endpoints, host and port, where processes meet: whether something listens there, and the wait until it does."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

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
