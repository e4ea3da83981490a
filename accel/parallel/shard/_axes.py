# SPDX-License-Identifier: Apache-2.0
"""Axes of a mesh that a model is sharded along, and those along which it has replicas, by their names alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from accel.errors import PrepareError
from accel.parallel._sharded import MODEL_DIMENSIONS
from accel.topology import AXIS_NAMES, Dimension, dimension_of

_SEQUENCE: tuple[Dimension, ...] = ("context", "sequence")


class ShardAxes(NamedTuple):
    """Axes of a mesh by number, in the mesh's order.

    Attributes:
        replicas: along these, ranks hold the same shards.
        shards: along these, each rank holds shards of its own.
    """

    replicas: tuple[int, ...]
    shards: tuple[int, ...]


def shard_axes(
    names: Sequence[str] | None, sizes: Sequence[int], taken: Sequence[str] = (), *, whole: bool = False
) -> ShardAxes:
    """Return the axes to shard a model along, so that its gradients cross every axis of more than one rank.

    Axes with a name for shards, such as `dp_shard`; elsewhere those that are neither for replicas nor for ranks that
    share samples. In either case also axes along which ranks share a sequence, as they need the same parameters. Ranks
    of another pipeline stage have no part in it.

    Args:
        names: of the axes; None for a mesh of one.
        sizes: of the axes.
        taken: names of axes over which tensor parallelism has spread the model.
        whole: whether every rank is to hold whole parameters: all axes are for replicas then.

    Raises:
        PrepareError: no axis is left to shard along, and the mesh has none for parts of the model either.
    """
    listed = list(names) if names is not None else [""] * len(sizes)
    large = [at for at in range(len(listed)) if sizes[at] > 1]
    free = [at for at in large if listed[at] not in taken and dimension_of(listed[at]) != "pipeline"]
    if whole:
        return ShardAxes(tuple(free), ())
    data = [at for at in free if dimension_of(listed[at]) == "shard"]
    data = data or [at for at in free if dimension_of(listed[at]) in ("data", "expert", None)]
    shards = sorted({*data, *(at for at in free if dimension_of(listed[at]) in _SEQUENCE)})
    if not shards and not any(dimension_of(listed[at]) in MODEL_DIMENSIONS for at in large):
        raise PrepareError(
            "the mesh has no dimension to shard the model along",
            expected=f"one of more than one rank, such as dp, or one of {', '.join(AXIS_NAMES['shard'])}",
            got=", ".join(f"{name}={size}" for name, size in zip(listed, sizes, strict=True)),
            where="prepare_model, strategy fsdp",
            fix='Name one "dp_shard", or use the strategy ddp for replicas.',
        )
    return ShardAxes(tuple(at for at in free if at not in shards), tuple(shards))
