# SPDX-License-Identifier: Apache-2.0
"""The note of a rank that failed, and the connections that are cut for it."""

from __future__ import annotations

import os
import socket

import pytest
from torch.distributed import HashStore

from accel.comm._lost import StoreAlarm, _open_sockets, _shut_down


def test_the_first_note_stays_and_is_returned_to_all():
    store = HashStore()
    alarms = [StoreAlarm(store, lambda store: None, lambda store, group: None) for _ in range(2)]
    with alarms[0].watching(), alarms[1].watching():
        assert not any(alarm.rung() for alarm in alarms)
        assert alarms[0].ring(b"first") == b"first"
        assert alarms[1].ring(b"second") == b"first"
        assert all(alarm.rung() for alarm in alarms)
    assert not any(alarm.rung() for alarm in alarms)  # and nobody waits for a store that may not answer


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="nothing lists this process's descriptors")
def test_a_connection_is_shut_down_and_neither_a_listener_nor_a_later_socket_of_that_descriptor():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        numbers = _open_sockets()
        _shut_down(client.fileno(), numbers[client.fileno()] + 1)  # the descriptor is another socket's now
        client.sendall(b"x")
        assert server.recv(1) == b"x"
        _shut_down(client.fileno(), numbers[client.fileno()])
        assert server.recv(1) == b""
        _shut_down(listener.fileno(), numbers[listener.fileno()])
        again = socket.create_connection(listener.getsockname())
        for each in (client, server, again):
            each.close()
