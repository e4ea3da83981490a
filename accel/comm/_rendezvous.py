# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of ranks: a key-value store that rank 0, or torchrun's agent, serves at the master's address."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any, cast

import msgspec
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

from accel.comm._lost import append_note, read_notes
from accel.endpoints import probe, retry
from accel.env import LaunchEnv, meeting_file
from accel.errors import EnvError, PeerError
from accel.errors._base import ErrorRecord, describe, rebuild
from accel.system import write_error
from accel.terminal import show_limit

_RETRY_S = 10.0
_LOOK_S = 0.1
_LOOKS_IN_TURN = 256  # ranks that look as often; more look less often, as one thread answers them all
_SILENT_S = 1.0  # delay before a rank prints that it waits for rank 0
_STARTING_S = 5.0  # the same where its host answers: rank 0 may be starting
_LINGER_S = 3.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_BACKLOG = 2048  # as torch's own server
# Keys of the store: the ranks that have come, an error, and whether either all have come or one has failed.
_CAME = "came"
_TROUBLE = "trouble"
_SETTLED = "settled"
# Fields of `LaunchEnv` that may differ between ranks.
_OWN = {
    "rank",
    "local_rank",
    "node_rank",
    "master_addr",
    "master_port",
    "init_method",
    "restarts",
    "launcher",
    "sources",
}


class _Member(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, as it introduces itself to the others."""

    host: str
    pid: int
    rank: int
    settings: dict[str, str]

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"


def open_store(env: LaunchEnv, timeout_s: float) -> Store:
    """Return an empty store that every rank has reached. A collective.

    Raises `EnvError`, with the hosts, where two processes have one rank or settings differ between ranks.
    """
    file = meeting_file(env.init_method)
    if file is not None and not os.path.isdir(os.path.dirname(file)):
        raise _unreachable(env, FileNotFoundError(f"no folder {os.path.dirname(file)}"))  # torch would look for ever
    if env.rank and file is None:
        _await_server(env, timeout_s)
    began = time.monotonic()
    while True:
        try:
            return _meet(env, timeout_s)
        except dist.DistNetworkError as error:
            # rank 0's store may belong to the previous group, about to close
            if env.rank == 0 or time.monotonic() - began > min(_RETRY_S, timeout_s):
                raise _unreachable(env, error) from error
            time.sleep(0.1)


def _meet(env: LaunchEnv, timeout_s: float) -> Store:
    timeout = timedelta(seconds=timeout_s)
    store = None
    try:
        shared = _serve_here(env, timeout) or _join(env, timeout)
        # all ranks add once an opening, so the quotient is alike on all of them without a message
        # torchrun's store outlives the groups opened in it, so each opening has a separate prefix
        opening = (shared.add("accel/openings", 1) - 1) // env.world_size
        store = PrefixStore(f"accel/{opening}", shared)
        store.set_timeout(timeout)
        _introduce(store, env, timeout_s)
        _await(store, env, timeout_s)
    except dist.DistStoreError as error:
        absent = _absent(store, env.world_size) if store is not None else []
        raise PeerError(
            f"{', '.join(absent) or 'a rank'} did not reach the collective within {show_limit(timeout_s)}",
            expected=f"{env.world_size} ranks at {meeting_of(env)}",
            got=str(error).splitlines()[0],
            where="from_env",
            fix="Check that all processes were started, and read their output.",
        ) from error
    return store


def _join(env: LaunchEnv, timeout: timedelta) -> Store:
    """Serve the master's address on all interfaces, or connect to its server, by torch's rendezvous."""
    file = meeting_file(env.init_method)
    if file is not None:
        return FileStore(file, env.world_size)
    if env.init_method.startswith("tcp://") and env.master_addr and env.master_port:
        return TCPStore(  # torch's would leave it to torchrun's agent to serve that address
            env.master_addr,
            env.master_port,
            env.world_size,
            env.rank == 0,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    address = f"tcp://{env.master_addr}:{env.master_port}"
    found = cast(Any, dist).rendezvous(address, env.rank, env.world_size, timeout=timeout)
    return cast(Store, next(iter(found))[0])


def _serve_here(env: LaunchEnv, timeout: timedelta) -> Store | None:
    """Serve an address of the loopback interface on that interface only, as torch would listen on all of them; None for
    another address, and for one that torchrun or an earlier opening serves."""
    if env.rank or env.master_addr not in _LOOPBACK or env.master_port is None:
        return None
    if meeting_file(env.init_method) is not None:
        return None
    # somebody serves it: torchrun's agent, or the store of an earlier opening
    if probe(env.master_addr, env.master_port, _SILENT_S) is None:
        return None
    family = socket.AF_INET6 if ":" in env.master_addr else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((env.master_addr, env.master_port))
        except OSError:  # torch reports the reason
            return None
        listener.listen(_BACKLOG)
        return TCPStore(
            env.master_addr,
            env.master_port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # the next opening may begin before this one has ended
            master_listen_fd=listener.detach(),
        )


def _await_server(env: LaunchEnv, timeout_s: float) -> None:
    """Wait until the master's address is served; torch's own wait would print, and hide the cause."""

    def notice(error: OSError, waited_s: float) -> bool:
        silent_s = _STARTING_S if isinstance(error, ConnectionRefusedError) else _SILENT_S
        if env.local_rank or waited_s < silent_s:
            return False
        where = f"{env.master_addr}:{env.master_port}, up to {show_limit(timeout_s)}"
        write_error(f"accel: rank {env.rank} waits for rank 0 at {where}: {error}\n")
        return True

    try:
        # under a scheduler the name of the address may become known only with rank 0, so no answer is final
        _ = retry(lambda limit_s: probe(env.master_addr, env.master_port or 0, limit_s), timeout_s, notice=notice)
    except (OSError, UnicodeError) as error:
        raise _unreachable(env, error) from error


def _introduce(store: Store, env: LaunchEnv, timeout_s: float) -> None:
    """Register this rank in the store, and compare its settings with the first rank's."""
    mine = _Member(host=os.uname().nodename, pid=os.getpid(), rank=env.rank, settings=_settings(env, timeout_s))
    encoded = msgspec.json.encode(mine).decode()
    # who comes first sets the terms: the error names that rank and the one that differs
    found = [store.compare_set(key, "", encoded) for key in ("first", f"rank {env.rank}")]
    first, here = (msgspec.json.decode(each, type=_Member) for each in found)
    append_note(store, _CAME, str(env.rank))
    differing = next((name for name, value in first.settings.items() if value != mine.settings[name]), None)
    if here != mine:
        error = EnvError(
            f"two processes are rank {env.rank}",
            got=f"{here} and {mine}",
            where="the environment",
            fix="Let one launcher set the ranks; another one, or a variable set by hand, may have set this.",
        )
    elif differing:
        error = EnvError(
            f"ranks do not agree on {differing}",
            got=f"{first.settings[differing]} at {first}, {mine.settings[differing]} at {mine}",
            where="the environment",
            fix="Start all ranks alike.",
        )
    else:
        return
    # the error before the sign that all may continue: whoever sees the sign finds the error
    _ = store.compare_set(_TROUBLE, "", msgspec.json.encode(describe(error)).decode())
    store.set(_SETTLED, "")


def _await(store: Store, env: LaunchEnv, timeout_s: float) -> None:
    """Wait for all ranks, or raise the error that one of them reports. torch's own wait would print."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    longest_s = _LOOK_S * max(1.0, env.world_size / _LOOKS_IN_TURN)
    if store.add("here", 1) == env.world_size:
        store.set(_SETTLED, "")
    while not store.check([_SETTLED]):
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"{store.add('here', 0)} of them after {show_limit(timeout_s)}")
        time.sleep(pause_s)
        # ranks of one host come within milliseconds, ranks of a cluster within minutes
        pause_s = min(2 * pause_s, longest_s)
    if store.check([_TROUBLE]):
        trouble = msgspec.json.decode(store.get(_TROUBLE), type=ErrorRecord)
        _ = store.add("connected", 1)
        ends = time.monotonic() + _LINGER_S
        while env.rank == 0 and store.add("connected", 0) < env.world_size and time.monotonic() < ends:
            time.sleep(0.05)  # the store ends with this process, and others must read the error first
        raise rebuild(trouble)


def _absent(store: Store, world_size: int) -> list[str]:
    """Return the names of the ranks that have not come, in one answer of the store."""
    came = set(read_notes(store, _CAME))
    return [f"rank {rank}" for rank in range(world_size) if str(rank) not in came]


def meeting_of(env: LaunchEnv) -> str:
    """Return the place where ranks meet, for errors."""
    return meeting_file(env.init_method) or f"{env.master_addr}:{env.master_port}"


def _settings(env: LaunchEnv, timeout_s: float) -> dict[str, str]:
    settings = {name: str(getattr(env, name)) for name in env.__struct_fields__ if name not in _OWN}
    return settings | {"timeout_s": f"{timeout_s:g}"}


def _unreachable(env: LaunchEnv, error: Exception) -> PeerError:
    doing, fix = "serve", "Choose another port."
    if meeting_file(env.init_method) is not None:
        doing, fix = "open", "Name a file in a folder that all ranks share."
    elif env.rank:
        doing, fix = "reach", "See what rank 0 printed, and check name, port and firewall."
    return PeerError(
        f"rank {env.rank} cannot {doing} the address where ranks meet",
        expected=meeting_of(env),
        got=str(error).splitlines()[0],
        where="init_method=" if env.init_method else "MASTER_ADDR, MASTER_PORT",
        fix=fix,
    )
