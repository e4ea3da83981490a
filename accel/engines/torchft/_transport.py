# SPDX-License-Identifier: Apache-2.0
"""The state of a group on its way to one that joins: safetensors over HTTP, nothing is unpickled."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save

from accel.errors import PeerError

_VALUES = "$values"  # no tensor's path begins so


class StateServer:
    """Serves the state of one rank at one step; in the place of torchft's own transport.

    Args:
        hostname: name under which other groups reach this host.
    """

    def __init__(self, hostname: str) -> None:
        self._hostname = hostname
        self._offered: tuple[int, bytes] | None = None
        self._changed = threading.Condition()
        self._wait_s = 60.0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = server.await_step(int(self.path.removeprefix("/")))
                if data is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                _ = self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Keep requests out of the output of the rank."""

        self._http = ThreadingHTTPServer(("", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, name="accel-heal", daemon=True)
        self._thread.start()

    def await_step(self, step: int) -> bytes | None:
        """Return the state at a step, once it is offered; None if it does not come."""
        with self._changed:
            _ = self._changed.wait_for(lambda: self._offered is not None and self._offered[0] == step, self._wait_s)
            return self._offered[1] if self._offered is not None and self._offered[0] == step else None

    def metadata(self) -> str:
        """Return the address of this server."""
        return f"http://{self._hostname}:{self._http.server_address[1]}"

    def send_checkpoint(
        self, dst_ranks: Sequence[int], step: int, state_dict: Mapping[str, Any], timeout: timedelta
    ) -> None:
        """Offer the state of a step, copied."""
        tensors: dict[str, torch.Tensor] = dict(state_dict["user"]["default"]["tensors"])
        values = {"user": state_dict["user"]["default"]["values"], "torchft": state_dict["torchft"]}
        tensors[_VALUES] = torch.frombuffer(bytearray(msgspec.json.encode(values)), dtype=torch.uint8)
        data = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
        with self._changed:
            self._wait_s = timeout.total_seconds()
            self._offered = (step, data)
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Withdraw the state, as the step changes it."""
        with self._changed:
            self._offered = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Fetch the state of a step from another group.

        Raises:
            PeerError: the answer is incomplete.
            OSError: that group does not answer.
        """
        with urllib.request.urlopen(f"{metadata}/{step}", timeout=timeout.total_seconds()) as answer:
            data = answer.read()
            if len(data) != int(answer.headers["Content-Length"]):
                raise PeerError("the state of another group was cut short", where=metadata)
        tensors = load(data)
        values = msgspec.json.decode(tensors.pop(_VALUES).numpy().tobytes())
        return {"user": {"default": {"tensors": tensors, "values": values["user"]}}, "torchft": values["torchft"]}

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()
        if wait:
            self._thread.join()
