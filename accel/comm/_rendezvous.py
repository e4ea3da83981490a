# SPDX-License-Identifier: Apache-2.0
"""Where ranks find each other: a key-value store that rank 0, or torchrun's agent, serves at the master's address."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage] - documented names

from accel.env import LaunchEnv
from accel.errors import PeerError

_RETRY_S = 10.0


def open_store(env: LaunchEnv, timeout_s: float) -> Store:
    """Return a store that holds nothing yet, once every rank has come to it. A collective.

    A process may open one group after another. torchrun's store outlives them all, so each opening gets a name of its
    own in it; a store of rank 0 may be the one that is just closing, so the others try again.

    Args:
        env: this process's place and the master's address.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        PeerError: a rank did not come in time, by its number; or the address cannot be served or reached.
    """
    began = time.monotonic()
    while True:
        try:
            return _meet(env, timeout_s)
        except dist.DistNetworkError as error:
            if env.rank == 0 or time.monotonic() - began > min(_RETRY_S, timeout_s):
                raise _unreachable(env, error) from error
            time.sleep(0.1)


def _meet(env: LaunchEnv, timeout_s: float) -> Store:
    timeout = timedelta(seconds=timeout_s)
    address = f"tcp://{env.master_addr}:{env.master_port}"
    names = [f"rank {rank}" for rank in range(env.world_size)]
    store = None
    try:
        found = cast(Any, dist).rendezvous(address, env.rank, env.world_size, timeout=timeout)
        shared = cast(Store, next(iter(found))[0])
        opening = (shared.add("accel/openings", 1) - 1) // env.world_size
        store = PrefixStore(f"accel/{opening}", shared)
        store.set_timeout(timeout)
        store.set(names[env.rank], "here")
        store.wait(names, timeout)
    except dist.DistStoreError as error:
        absent = [name for name in names if not store.check([name])] if store is not None else []
        raise PeerError(
            f"{', '.join(absent) or 'a rank'} did not come within {timeout_s:g} s",
            expected=f"{env.world_size} ranks at {env.master_addr}:{env.master_port}",
            got=str(error).splitlines()[0],
            where="from_env",
            fix="See whether all processes were started, and what they printed.",
        ) from error
    return store


def _unreachable(env: LaunchEnv, error: Exception) -> PeerError:
    doing = "serve" if env.rank == 0 else "reach"
    return PeerError(
        f"rank {env.rank} cannot {doing} the address where ranks meet",
        expected=f"{env.master_addr}:{env.master_port}",
        got=str(error).splitlines()[0],
        where="MASTER_ADDR, MASTER_PORT",
        fix="Choose another MASTER_PORT, or see whether rank 0 failed before.",
    )
