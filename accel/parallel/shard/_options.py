# SPDX-License-Identifier: Apache-2.0
"""Options of sharding, and what they mean on a mesh."""

from __future__ import annotations

from typing import Literal

import torch

from accel.errors import ConfigError
from accel.parallel._spread import SpreadOptions
from accel.topology import WireDtype

_WHERE = "prepare_model, strategy fsdp"


class ShardOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of sharding."""

    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    gather_dtype: WireDtype = "auto"
    reduce_dtype: WireDtype = "auto"
    units: Literal["auto"] | tuple[str, ...] | int = "auto"
    ignored: tuple[str, ...] = ()
    reshard_after_forward: bool | int | None = None
    prefetch: int | None = None
    offload: bool = False

    def check(self) -> None:
        """Raise `ConfigError` for what this torch does not have."""
        if not self.find_unused_parameters:
            return
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                "fully_shard of this torch cannot leave out parameters",
                got=f"torch {torch.__version__}",
                where=f"{_WHERE}, find_unused_parameters=",
                fix="Update torch, or use the strategy ddp.",
            )


def check_reshard(option: bool | int | None, shards: int, ranks: int, world_size: int) -> None:
    """Raise for a number of ranks that shards cannot be divided among after a forward.

    Args:
        option: `Plan.reshard_after_forward`.
        shards: number of ranks with shards of their own; 1 where nothing is sharded.
        ranks: number of ranks with the same parameters.
        world_size: number of all ranks.

    Raises:
        ConfigError: a number that does not divide `shards`, or a mesh of which torch cannot take a part.
    """
    if isinstance(option, bool) or option is None or shards == 1:
        return
    if shards % option:
        raise ConfigError(
            "shards cannot be divided among so many ranks after a forward",
            expected=f"a bool, or a number that divides {shards}",
            got=str(option),
            where="Plan.reshard_after_forward",
        )
    if 1 < option < shards and ranks != world_size:
        raise ConfigError(
            "torch opens groups for resharding on meshes of all ranks alone",
            expected="a bool, or a mesh without axes for parts of the model",
            got=f"{option}, on a mesh of {ranks} of {world_size} ranks",
            where="Plan.reshard_after_forward",
        )


def reshard_setting(option: bool | int | None, shards: int) -> bool | int | None:
    """Return the argument of `fully_shard`: a bool for a number that means one, its default where nothing is sharded.

    Args:
        option: `Plan.reshard_after_forward`, checked.
        shards: number of ranks with shards of their own.
    """
    if isinstance(option, bool) or option is None:
        return option
    if shards == 1:
        return None
    return False if option == 1 else True if option == shards or shards % option else option
