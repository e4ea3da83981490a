# SPDX-License-Identifier: Apache-2.0
"""Axes of a mesh that a model is sharded along, and those along which it has replicas, by their names alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from accel.errors import PrepareError
from accel.topology import AXIS_NAMES, SHARED_DIMS


class ShardAxes(NamedTuple):
    """Axes of a mesh by number.

    Attributes:
        replicas: along these, ranks hold the same shards.
        shards: along these, each rank holds shards of its own.
    """

    replicas: tuple[int, ...]
    shards: tuple[int, ...]


def shard_axes(names: Sequence[str] | None, sizes: Sequence[int], taken: Sequence[str] = ()) -> ShardAxes:
    """Return the axes to shard a model along, so that its gradients cross every axis of more than one rank.

    Axes with a name for shards, such as `dp_shard`, and then no others; elsewhere those that are neither for replicas
    nor for ranks that share samples.

    Args:
        names: of the axes; None for a mesh of one.
        sizes: of the axes.
        taken: names of axes over which tensor parallelism has spread the model.

    Raises:
        PrepareError: no axis is left to shard along.
    """
    listed = list(names) if names is not None else [""] * len(sizes)
    free = [at for at, name in enumerate(listed) if name not in taken and sizes[at] > 1]
    shards = [at for at in free if listed[at] in AXIS_NAMES["shard"]]
    shards = shards or [at for at in free if listed[at] not in AXIS_NAMES["replicate"] + SHARED_DIMS]
    if not shards:
        raise PrepareError(
            "the mesh has no dimension to shard the model along",
            expected=f"one of more than one rank, such as dp, or one of {', '.join(AXIS_NAMES['shard'])}",
            got=", ".join(f"{name}={size}" for name, size in zip(listed, sizes, strict=True)),
            where="prepare_model, strategy fsdp",
            fix='Name one "fsdp", or use the strategy ddp for replicas.',
        )
    return ShardAxes(tuple(at for at in free if at not in shards), tuple(shards))
