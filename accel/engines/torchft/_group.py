# SPDX-License-Identifier: Apache-2.0
"""A replica group, the lighthouse where groups find each other, and state on its way to a group that joins."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load, save

from accel.collectives import broadcast_object_list
from accel.context import DistContext, context_first
from accel.endpoints import unresolved
from accel.errors import LaunchError, PeerError
from accel.errors._checks import check_arguments, import_extra

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
        """Fetch the state of a step from another group; `PeerError` if incomplete, `OSError` without an answer."""
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


_REACH_S = 10.0


class ReplicaGroup:
    """A handle on the replica group of this rank, from `replica`.

    Attributes:
        ctx: context of the group's own ranks.
        min_replicas: fewest groups that make a step.
        quorum_timeout_s: seconds to wait for them.
        manager: torchft's `Manager`.
        offer: returns the state that a joining group would take; None before the first step.
        taken: state of another group that this one has to adopt; None if there is none.
        begun: whether a step has begun.
    """

    def __init__(self, ctx: DistContext, min_replicas: int = 1, quorum_timeout_s: float = 300.0) -> None:
        self.ctx = ctx
        self.min_replicas = min_replicas
        self.quorum_timeout_s = quorum_timeout_s
        self.manager: Any = None
        self.offer: Callable[[], Mapping[str, Any]] | None = None
        self.taken: Mapping[str, Any] | None = None
        self.begun = False

    def give(self) -> Mapping[str, Any]:
        """Return the state for a joining group."""
        assert self.offer is not None
        return self.offer()

    def take(self, state: Mapping[str, Any]) -> None:
        """Keep the state of another group until `begin_step` takes it up."""
        self.taken = state


@contextmanager
def lighthouse(
    port: int = 0, *, min_replicas: int = 1, join_timeout_s: float = 60.0, heartbeat_timeout_s: float = 5.0
) -> Generator[str]:
    """Serve the lighthouse of a job from this process, as the program `torchft_lighthouse` does from its own.

    Args:
        port: port to listen on; 0 for any that is free.
        min_replicas: fewest groups that make a step.
        join_timeout_s: seconds that a step waits for groups that are alive but have not come yet.
        heartbeat_timeout_s: seconds of silence after which a group counts as dead.

    Returns:
        A context manager that gives the address, such as http://host:29510.

    Raises:
        MissingExtraError: torchft is not installed.
    """
    server = _require("torchft.coordination").LighthouseServer(
        bind=f"[::]:{port}",
        min_replicas=min_replicas,
        join_timeout_ms=round(join_timeout_s * 1000),
        heartbeat_timeout_ms=round(heartbeat_timeout_s * 1000),
        quorum_tick_ms=100,
    )
    try:
        yield server.address()
    finally:
        server.shutdown()


@context_first
@contextmanager
def replica(
    ctx: DistContext,
    *,
    lighthouse: str,
    name: str,
    min_replicas: int = 1,
    timeout_s: float = 60.0,
    quorum_timeout_s: float = 300.0,
    hostname: str | None = None,
) -> Generator[ReplicaGroup]:
    """Join a job as one replica group of the ranks of `ctx`. A collective of the group.

    Args:
        ctx: the context of the group's own launch, which replicates the model.
        lighthouse: address of the job's lighthouse, such as http://host:29510.
        name: name of this group; a replacement may have the same.
        min_replicas: fewest groups that make a step.
        timeout_s: seconds after which an exchange with other groups is given up, and the step with it.
        quorum_timeout_s: seconds to wait at the begin of a step for `min_replicas` groups.
        hostname: name under which other groups reach this host; `socket.gethostname()` if None.

    Returns:
        A context manager that gives the group, and leaves the job at its end.

    Raises:
        LaunchError: nothing listens at the lighthouse's address, or the host's name has no address.
        ConfigError: an argument outside its range.
        MissingExtraError: torchft is not installed.
    """
    torchft = _require("torchft")
    _check(lighthouse, name, min_replicas, timeout_s, quorum_timeout_s)
    _reach(lighthouse)
    hostname = socket.gethostname() if hostname is None else hostname
    _resolve(hostname)
    group = ReplicaGroup(ctx, min_replicas, quorum_timeout_s)
    store = (
        cast(Any, dist).TCPStore(hostname, 0, is_master=True, wait_for_workers=False) if ctx.is_main_process else None
    )
    place = [hostname, store.port] if store is not None else ["", 0]
    store_host, port = broadcast_object_list(ctx, place)  # ranks on other hosts have other names
    limit = timedelta(seconds=timeout_s)
    kind = torchft.ProcessGroupNCCL if ctx.device.type == "cuda" else torchft.ProcessGroupGloo
    exchange = kind(timeout=limit)
    group.manager = torchft.Manager(
        pg=exchange,
        load_state_dict=group.take,
        state_dict=group.give,
        min_replica_size=min_replicas,
        use_async_quorum=False,  # whoever joins takes part in the very step in which it heals
        timeout=limit,
        quorum_timeout=timedelta(seconds=quorum_timeout_s),
        connect_timeout=limit,
        rank=ctx.rank,
        world_size=ctx.world_size,
        store_addr=store_host,
        store_port=port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname=hostname,
        checkpoint_transport=StateServer(hostname),
    )
    try:
        yield group
    finally:
        group.manager.shutdown(wait=False)
        exchange.shutdown()
        group.offer = None


def _require(module: str) -> Any:
    return import_extra(module, "accel.engines.torchft", extra="torchft", where="accel.engines.torchft")


def _check(lighthouse: str, name: str, min_replicas: int, timeout_s: float, quorum_timeout_s: float) -> None:
    problems = {
        f"lighthouse={lighthouse!r}, expected http://host:port": not _is_address(lighthouse),
        f"name={name!r}, expected a text without a colon": not name or ":" in name,
        f"min_replicas={min_replicas}, expected at least 1": min_replicas < 1,
        f"timeout_s={timeout_s}, expected above 0": timeout_s <= 0,
        f"quorum_timeout_s={quorum_timeout_s}, expected above 0": quorum_timeout_s <= 0,
    }
    check_arguments(problems, where="torchft.replica")


def _is_address(lighthouse: str) -> bool:
    try:
        parts = urlsplit(lighthouse)
        return parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:  # not a port
        return False


def _resolve(hostname: str) -> None:
    """Raise unless a host's name has an address; torch would look for one for minutes."""
    if error := unresolved(hostname, 0):
        raise LaunchError(
            "the name of this host has no address",
            got=f"{hostname!r}: {error}",
            where="torchft.replica",
            fix="Pass a hostname= that resolves on this host and on the hosts of the other groups.",
        ) from error


def _reach(lighthouse: str) -> None:
    parts = urlsplit(lighthouse)
    try:
        socket.create_connection((str(parts.hostname), parts.port or 80), timeout=_REACH_S).close()
    except OSError as error:
        raise LaunchError(
            "the lighthouse does not answer",
            expected=f"a listener at {lighthouse}",
            got=str(error),
            where="torchft.replica",
            fix="Start it first: `torchft_lighthouse --min_replicas 1 --bind [::]:29510`, or torchft.lighthouse().",
        ) from error
