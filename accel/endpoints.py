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
    """Repeat an attempt, such as `probe`, until it succeeds; a name that does not resolve yet is waited for, too.

    Args:
        attempt: returns its error, None if it succeeded; given the seconds that it may take.
        timeout_s: seconds to wait.
        notice: prints that the attempt fails, given the error and the seconds waited; returns whether it did so.
        pause: waits between two attempts, given seconds; another result than 0 or None ends the wait.

    Returns:
        0 once the attempt succeeds; else the result of `pause` that ended the wait.

    Raises:
        OSError: there is no route, or no success in time.
        UnicodeError: the host cannot be a name.
    """
    began_s = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    noticed = False
    while error := attempt(min(timeout_s, _PROBE_S if noticed else _FIRST_PROBE_S)):
        waited_s = time.monotonic() - began_s
        if not isinstance(error, OSError) or error.errno in NO_ROUTE or waited_s >= timeout_s:
            raise error
        noticed = noticed or notice(error, waited_s)
        if stopped := pause(pause_s):
            return stopped
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return 0
