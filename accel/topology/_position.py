# SPDX-License-Identifier: Apache-2.0
"""A rank's position on a mesh: dimensions along which ranks have samples of their own, and those that share them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from accel.errors import ConfigError, did_you_mean
from accel.topology._axes import Axes, coordinates

Dimension = Literal["data", "replicate", "shard", "expert", "tensor", "context", "sequence", "pipeline"]

# Names of a mesh's axes by what their ranks do; along "data" ranks hold replicas or shards, as the strategy says. A
# text knows the first of each alone: the others are those of meshes that other frameworks make.
AXIS_NAMES: Mapping[Dimension, tuple[str, ...]] = {
    "data": ("dp", "data", "data_parallel", "hsdp"),
    "replicate": ("dp_replicate", "replicate", "ddp"),
    "shard": ("dp_shard", "shard", "fsdp"),
    "expert": ("ep", "expert", "expert_parallel"),
    "tensor": ("tp", "tensor", "tensor_parallel"),
    "context": ("cp", "context", "context_parallel"),
    "sequence": ("sp", "sequence", "sequence_parallel"),
    "pipeline": ("pp", "pipeline", "pipeline_parallel"),
}
# What an axis such as "dp" is for under each strategy that spreads plain models.
STRATEGY_DIMENSION: Mapping[str, Dimension] = {"ddp": "replicate", "fsdp": "shard"}
_DATA: tuple[Dimension, ...] = ("data", "replicate", "shard", "expert")  # along these ranks have samples of their own
_DIMENSION_OF: Mapping[str, Dimension] = {name: dimension for dimension, names in AXIS_NAMES.items() for name in names}
DATA_DIMS = tuple(name for name, dimension in _DIMENSION_OF.items() if dimension in _DATA)
SHARED_DIMS = tuple(name for name in _DIMENSION_OF if name not in DATA_DIMS)


class Axis(NamedTuple):
    """A rank's index along an axis of a mesh, and the axis's size."""

    rank: int
    size: int


def dimension_of(name: str) -> Dimension | None:
    """Return the dimension that an axis's name stands for; None for a name that only its user knows."""
    return _DIMENSION_OF.get(name)


@dataclasses.dataclass(frozen=True, slots=True)
class MeshPosition:
    """A rank's coordinate on a mesh.

    Attributes:
        data: index among the shares of the samples, and their number.
        axes: index and size along each named axis, in the mesh's order; not part of equality, as the mesh is not.
        opened: whether a text such as "dp=2,cp=2" named the mesh, so that its axes are used as the names say; a mesh of
            the user's may serve other ends. Not part of equality.
    """

    data: tuple[int, int]
    axes: tuple[tuple[str, Axis], ...] = dataclasses.field(compare=False)
    opened: bool = dataclasses.field(default=False, compare=False)

    def find(self, name: str, data: Dimension = "data") -> tuple[str, ...]:
        """Return the mesh's own names of an axis, which may be others of the same dimension; none without one.

        "dp" of a mesh of both `dp_replicate` and `dp_shard` is both.

        Args:
            name: of the axis.
            data: dimension of an axis such as "dp", of which the strategy says whether its ranks hold replicas
                ("replicate") or shards ("shard"); "data" where nobody says.

        Raises:
            ConfigError: no mesh has an axis of that name.
        """
        names = [own for own, _ in self.axes]
        if name in names:
            return (name,)
        if name not in _DIMENSION_OF:
            known = (*names, *_DIMENSION_OF)
            raise ConfigError("unknown axis of a mesh", got=repr(name), fix=did_you_mean(str(name), known))
        dimensions = [_DIMENSION_OF.get(own) for own in names]
        wanted = _DIMENSION_OF[name]
        if wanted == data and wanted not in dimensions and "data" in dimensions:
            wanted = "data"
        if wanted in dimensions:
            return (names[dimensions.index(wanted)],)
        both = zip(names, dimensions, strict=True) if wanted == "data" else ()
        return tuple(own for own, dimension in both if dimension in ("replicate", "shard"))

    def axis(self, name: str, data: Dimension = "data") -> Axis:
        """Return index and size along an axis; (0, 1) where the mesh has none. Arguments as for `find`.

        Raises:
            ConfigError: as `find`.
        """
        own = self.find(name, data)
        return _joint(axis for each, axis in self.axes if each in own)


def without_mesh(rank: int, size: int) -> MeshPosition:
    """Return a rank's position where no mesh is known: on one axis "dp" of all ranks."""
    return MeshPosition((rank, size), (("dp", Axis(rank, size)),))


def mesh_position(
    names: Sequence[str] | None,
    shape: Sequence[int],
    coordinate: Sequence[int],
    data_dims: Sequence[str] | None = None,
) -> MeshPosition:
    """Return a rank's position on a mesh.

    Ranks whose coordinates differ in a data dimension have samples of their own, ranks that differ in other dimensions
    alone share them. Shares are numbered in the order of the mesh, its last data dimension fastest.

    Args:
        names: of the mesh's axes; None for a mesh without, which is data parallel if it has one axis.
        shape: of the mesh.
        coordinate: the rank's.
        data_dims: names of the data dimensions; None for those in `DATA_DIMS`, all others being in `SHARED_DIMS`.

    Raises:
        ConfigError: an axis of unknown meaning, or `data_dims` that the mesh does not have.
    """
    data = _known(names, len(shape)) if data_dims is None else _stated(names or (), len(shape), data_dims)
    axes = tuple(Axis(here, size) for here, size in zip(coordinate, shape, strict=True))
    share = _joint(axis for is_data, axis in zip(data, axes, strict=True) if is_data)
    named = ("dp",) if names is None else tuple(names)
    return MeshPosition((share.rank, share.size), tuple(zip(named, axes, strict=False)))


def axes_position(axes: Axes, names: Iterable[str], rank: int) -> MeshPosition:
    """Return a rank's position on a mesh of axes.

    Args:
        axes: of the mesh.
        names: of the axes to list, in their order.
        rank: 0 to `axes.world_size` - 1.
    """
    at = coordinates(axes, rank)
    listed = tuple((name, Axis(at[name], getattr(axes, name))) for name in names)
    share = _joint(axis for name, axis in listed if name in ("dp", "dp_replicate", "dp_shard"))
    return MeshPosition((share.rank, share.size), listed, opened=True)


def _joint(axes: Iterable[Axis]) -> Axis:
    """Return the place along several axes, the last fastest."""
    rank = 0
    count = 1
    for axis in axes:
        rank = rank * axis.size + axis.rank
        count *= axis.size
    return Axis(rank, count)


def _known(names: Sequence[str] | None, ndim: int) -> list[bool]:
    """Return the data dimensions, by their names."""
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
    """Return the data dimensions that the user names."""
    if isinstance(data_dims, str) or len(set(data_dims)) < len(data_dims) or not set(data_dims) <= set(names):
        raise ConfigError(
            "not data dimensions of the mesh",
            expected=f"a tuple of some of {', '.join(map(repr, names))}" if names else "a mesh with named dimensions",
            got=repr(data_dims),
            where="data_dims=",
        )
    return [name in data_dims for name in names] or [False] * ndim
