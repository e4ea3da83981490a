# SPDX-License-Identifier: Apache-2.0
"""Dimensions of a mesh of ranks: those along which ranks have samples of their own, and those that share them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from accel.errors import AccelError, ConfigError, did_you_mean

Dimension = Literal["data", "replicate", "shard", "expert", "tensor", "context", "sequence", "pipeline"]

# names of a mesh's axes by what their ranks do; along "data" ranks hold replicas or shards, as the strategy says
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
_DATA: tuple[Dimension, ...] = ("data", "replicate", "shard", "expert")  # along these ranks have samples of their own
_DIMENSION_OF: Mapping[str, Dimension] = {name: dimension for dimension, names in AXIS_NAMES.items() for name in names}
DATA_DIMS = tuple(name for name, dimension in _DIMENSION_OF.items() if dimension in _DATA)
SHARED_DIMS = tuple(name for name in _DIMENSION_OF if name not in DATA_DIMS)

MESH_TEXT = r"^([a-z_]+=(-1|[1-9][0-9]{0,6})(,[a-z_]+=(-1|[1-9][0-9]{0,6}))*)?$"


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
    """

    data: tuple[int, int]
    axes: tuple[tuple[str, Axis], ...] = dataclasses.field(compare=False)

    def find(self, name: str) -> str | None:
        """Return the mesh's own name of an axis, which may be another one of the same dimension; None without one.

        Raises:
            ConfigError: no mesh has an axis of that name.
        """
        names = [own for own, _ in self.axes]
        if name in names:
            return name
        if name not in _DIMENSION_OF:
            known = (*names, *_DIMENSION_OF)
            raise ConfigError("unknown axis of a mesh", got=repr(name), fix=did_you_mean(str(name), known))
        return next((own for own in names if _DIMENSION_OF.get(own) == _DIMENSION_OF[name]), None)

    def axis(self, name: str) -> Axis:
        """Return index and size along an axis; (0, 1) where the mesh has none.

        Raises:
            ConfigError: as `find`.
        """
        own = self.find(name)
        return Axis(0, 1) if own is None else dict(self.axes)[own]


def mesh_sizes(text: str, *, where: str, error: type[AccelError] = ConfigError) -> dict[str, int]:
    """Return the sizes of a mesh that a text describes, in its order: of "dp=-1,tp=2" they are {"dp": -1, "tp": 2}.

    Args:
        text: sizes by dimension, the slowest first; -1 for all ranks that the others leave. No mesh if empty.
        where: source of the text, for errors.
        error: class of the errors.

    Raises:
        AccelError: the text is none of these, a dimension stands twice or means nothing known, or two sizes are -1.
    """
    if not isinstance(text, str) or not re.fullmatch(MESH_TEXT, text):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise error("not a mesh", expected="a text such as dp=2,tp=2 or fsdp=-1,tp=4", got=repr(text), where=where)
    pairs = [part.split("=") for part in text.split(",") if part]
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise error("a dimension stands twice", got=repr(text), where=where, fix=f"Name {name} once.")
        if name not in DATA_DIMS + SHARED_DIMS:
            fix = did_you_mean(name, DATA_DIMS + SHARED_DIMS)
            raise error("unknown dimension of a mesh", got=f"{name!r} in {text!r}", where=where, fix=fix)
    sizes = {name: int(size) for name, size in pairs}
    if list(sizes.values()).count(-1) > 1:
        raise error("two sizes are open", got=repr(text), where=where, fix="Let one at most be -1.")
    return sizes


def fit_mesh(text: str, world_size: int, *, where: str, error: type[AccelError] = ConfigError) -> dict[str, int]:
    """Return the sizes of a mesh of so many ranks: of "dp=-1,tp=2" and 8 ranks they are {"dp": 4, "tp": 2}.

    Args:
        text: as for `mesh_sizes`.
        world_size: number of ranks of the mesh.
        where: source of the text, for errors.
        error: class of the errors.

    Raises:
        AccelError: the sizes multiply to another number of ranks; or as `mesh_sizes`.
    """
    sizes = mesh_sizes(text, where=where, error=error)
    if not sizes:
        return {}
    known = math.prod(size for size in sizes.values() if size != -1)
    is_open = -1 in sizes.values()
    wanted = f"{'a multiple of ' if is_open else ''}{known}"
    if world_size % known if is_open else world_size != known:
        raise error(
            "the mesh does not fit the ranks",
            expected=f"{wanted} ranks for {text}",
            got=str(world_size),
            where=where,
            fix=f"Start {wanted} processes{'.' if is_open else ', or let one size be -1.'}",
        )
    return {name: world_size // known if size == -1 else size for name, size in sizes.items()}


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
    at, count = 0, 1
    for is_data, size, here in zip(data, shape, coordinate, strict=True):
        if is_data:
            at, count = at * size + here, count * size
    axes = tuple(Axis(here, size) for here, size in zip(coordinate, shape, strict=True))
    named = ("dp",) if names is None else tuple(names)
    return MeshPosition((at, count), tuple(zip(named, axes, strict=False)))


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
