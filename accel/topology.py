# SPDX-License-Identifier: Apache-2.0
"""What the dimensions of a mesh of ranks mean: which ranks have samples of their own, and which share them."""

from __future__ import annotations

from collections.abc import Sequence

from accel.errors import ConfigError

DATA_DIMS = (
    "dp",
    "ddp",
    "data",
    "data_parallel",
    "dp_replicate",
    "replicate",
    "dp_shard",
    "shard",
    "fsdp",
    "hsdp",
    "ep",
    "expert",
    "expert_parallel",
)
SHARED_DIMS = (
    "tp",
    "tensor",
    "tensor_parallel",
    "cp",
    "context",
    "context_parallel",
    "sp",
    "sequence",
    "sequence_parallel",
    "pp",
    "pipeline",
    "pipeline_parallel",
)


def data_place(
    names: Sequence[str] | None,
    shape: Sequence[int],
    coordinate: Sequence[int],
    data_dims: Sequence[str] | None = None,
) -> tuple[int, int]:
    """Return a rank's index among the shares of the samples, and how many shares there are.

    Ranks whose coordinates differ in a data dimension have samples of their own, ranks that differ in other dimensions
    alone share them. Shares are numbered in the order of the mesh, its last data dimension fastest.

    Args:
        names: of the mesh's dimensions; None for a mesh without, which is data parallel if it has one dimension.
        shape: of the mesh.
        coordinate: the rank's.
        data_dims: names of the data dimensions; None for those in `DATA_DIMS`, all others being in `SHARED_DIMS`.

    Raises:
        ConfigError: a dimension of which it is not known what it means, or `data_dims` that the mesh does not have.
    """
    data = _known(names, len(shape)) if data_dims is None else _stated(names or (), len(shape), data_dims)
    at, count = 0, 1
    for is_data, size, here in zip(data, shape, coordinate, strict=True):
        if is_data:
            at, count = at * size + here, count * size
    return at, count


def _known(names: Sequence[str] | None, ndim: int) -> list[bool]:
    """Which dimensions are data dimensions, by their names."""
    if names is None:
        if ndim > 1:
            raise ConfigError(
                "the mesh does not say which of its ranks share samples",
                expected="a name for each dimension, or one dimension alone",
                got=f"{ndim} dimensions without names",
                where="mesh=",
                fix='Name them: init_device_mesh(..., mesh_dim_names=("dp", "tp")).',
            )
        return [True] * ndim
    if unknown := [name for name in names if name not in DATA_DIMS + SHARED_DIMS]:
        raise ConfigError(
            "it is not known whether ranks along a mesh dimension share samples",
            expected=f"{', '.join(DATA_DIMS)} where they do not; {', '.join(SHARED_DIMS)} where they do",
            got=", ".join(map(repr, unknown)),
            where="mesh=",
            fix="Name all dimensions where they do not: data_dims=(...).",
        )
    return [name in DATA_DIMS for name in names]


def _stated(names: Sequence[str], ndim: int, data_dims: Sequence[str]) -> list[bool]:
    """Which dimensions are data dimensions, as the user says."""
    if isinstance(data_dims, str) or len(set(data_dims)) < len(data_dims) or not set(data_dims) <= set(names):
        raise ConfigError(
            "not data dimensions of the mesh",
            expected=f"a tuple of some of {', '.join(map(repr, names))}" if names else "a mesh with named dimensions",
            got=repr(data_dims),
            where="data_dims=",
        )
    return [name in data_dims for name in names] or [False] * ndim
