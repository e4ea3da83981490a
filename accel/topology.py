# SPDX-License-Identifier: Apache-2.0
"""What the dimensions of a mesh of ranks mean: which ranks have samples of their own, and which share them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from accel.errors import AccelError, ConfigError, did_you_mean

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

# along these, ranks hold layers or experts of their own, not replicas or shards of one model
PIPELINE_DIMS = ("pp", "pipeline", "pipeline_parallel")
EXPERT_DIMS = ("ep", "expert", "expert_parallel")

MESH_TEXT = r"^([a-z_]+=(-1|[1-9][0-9]{0,6})(,[a-z_]+=(-1|[1-9][0-9]{0,6}))*)?$"


def mesh_sizes(text: str, *, where: str, error: type[AccelError] = ConfigError) -> dict[str, int]:
    """Return the sizes of a mesh that a text describes, in its order: of "dp=-1,tp=2" they are {"dp": -1, "tp": 2}.

    Args:
        text: sizes by dimension, the slowest first; -1 for all ranks that the others leave. No mesh if empty.
        where: what said so, for errors.
        error: what to raise.

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
        world_size: how many ranks the mesh is to have.
        where: what said so, for errors.
        error: what to raise.

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
