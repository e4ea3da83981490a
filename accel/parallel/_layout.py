# SPDX-License-Identifier: Apache-2.0
"""Along which dimensions of a mesh a model is sharded, and along which it has replicas, by their names alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from accel.errors import PrepareError
from accel.topology import AXIS_NAMES, SHARED_DIMS

_SHARDS = AXIS_NAMES["shard"]
_REPLICAS = AXIS_NAMES["replicate"]


class Layout(NamedTuple):
    """Places of dimensions in a mesh.

    Attributes:
        replicas: along these, ranks hold the same shards.
        shards: along these, each rank holds shards of its own.
    """

    replicas: tuple[int, ...]
    shards: tuple[int, ...]


def check_dims(names: Sequence[str] | None, sizes: Sequence[int]) -> None:
    """Refuse a mesh along which ranks hold layers or experts of their own.

    Stages and experts often have equal names and shapes, so every one of them would begin with rank 0's values and
    would be averaged with the others.

    Args:
        names: of the dimensions; None for a mesh of one.
        sizes: of the dimensions.

    Raises:
        PrepareError: a pipeline or expert dimension of more than one rank.
    """
    for name, size in zip(names or (), sizes, strict=False):
        if size > 1 and name in AXIS_NAMES["pipeline"] + AXIS_NAMES["expert"]:
            held = "stage" if name in AXIS_NAMES["pipeline"] else "experts"
            raise PrepareError(
                f"every rank would begin with rank 0's {held}, and average gradients with all others",
                expected="a mesh without pipeline and expert dimensions of more than one rank",
                got=f"{name}={size}",
                where="prepare_model, ctx.mesh",
                fix=f"Leave {name} out of the mesh, or keep the model out of prepare and exchange its gradients.",
            )


def layout(names: Sequence[str] | None, sizes: Sequence[int], taken: Sequence[str] = ()) -> Layout:
    """Return how a model is laid out on a mesh, so that its gradients cross every dimension of more than one rank.

    Dimensions whose names say that they shard do, and then no others; elsewhere those that are neither for replicas
    nor for ranks that share samples.

    Args:
        names: of the dimensions; None for a mesh of one.
        sizes: of the dimensions.
        taken: names of dimensions over which tensor parallelism has spread the model.

    Raises:
        PrepareError: no dimension is left to shard along.
    """
    listed = list(names) if names is not None else [""] * len(sizes)
    free = [at for at, name in enumerate(listed) if name not in taken and sizes[at] > 1]
    shards = [at for at in free if listed[at] in _SHARDS]
    shards = shards or [at for at in free if listed[at] not in _REPLICAS + SHARED_DIMS]
    if not shards:
        raise PrepareError(
            "the mesh has no dimension to shard the model along",
            expected=f"one of more than one rank, such as dp, or one of {', '.join(_SHARDS)}",
            got=", ".join(f"{name}={size}" for name, size in zip(listed, sizes, strict=True)),
            where="prepare_model, strategy fsdp",
            fix='Name one "fsdp", or use the strategy ddp for replicas.',
        )
    return Layout(tuple(at for at in free if at not in shards), tuple(shards))
