# SPDX-License-Identifier: Apache-2.0
"""Megatron's groups as one mesh, from the ranks of each group alone. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from accel.errors import ConfigError


class RankMesh(msgspec.Struct, frozen=True):
    """A mesh of ranks 0 to n - 1 in their order.

    Attributes:
        names: of the dimensions, the slowest first; those of one rank are left out, but for one of all.
        sizes: of the dimensions.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def row(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from a rank along a dimension at most, itself included, in ascending order."""
        if name not in self.names:
            return (rank,)
        at = self.names.index(name)
        stride = math.prod(self.sizes[at + 1 :])
        first = rank - rank // stride % self.sizes[at] * stride
        return tuple(first + each * stride for each in range(self.sizes[at]))


def mesh_of_groups(groups: Mapping[str, Sequence[int]], rank: int, world_size: int) -> RankMesh:
    """Return the mesh that a rank's groups form, whatever order of parallelism made them.

    A group's stride, the distance of its ranks, gives its dimension's place: the fastest dimension has stride 1. So
    every rank finds the same mesh.

    Args:
        groups: ranks of this rank's group of each kind, in ascending order: "tp", "cp", "dp" and "pp". Beside them "ep"
            and "edp", the ranks with other experts and those with the same ones: where they divide "dp", they stand in
            the mesh as "ep" and "dp".
        rank: this rank.
        world_size: number of all ranks.

    Raises:
        ConfigError: the groups do not form one mesh of all ranks.
    """
    dense = {name: tuple(groups[name]) for name in ("pp", "dp", "cp", "tp")}
    experts = tuple(groups.get("ep", (rank,)))
    if len(experts) > 1:
        divided = _mesh({**dense, "dp": tuple(groups["edp"]), "ep": experts}, rank, world_size)
        if divided is not None and _joint(divided, rank) == dense["dp"]:
            return divided
    found = _mesh(dense, rank, world_size)
    if found is None:
        listed = ", ".join(f"{name}={len(ranks)} {list(ranks)}" for name, ranks in dense.items())
        raise ConfigError(
            "Megatron's groups do not form one mesh of all ranks",
            expected=f"sizes of pp, dp, cp and tp whose product is {world_size}, each of evenly spaced ranks",
            got=listed,
            where="from_megatron",
            fix="Initialize Megatron's parallel state on torch's default group, with all of its ranks.",
        )
    return found


def _mesh(groups: Mapping[str, tuple[int, ...]], rank: int, world_size: int) -> RankMesh | None:
    """Return the mesh of groups ordered by their strides; None unless each group is its row of the mesh."""
    several = {name: ranks for name, ranks in groups.items() if len(ranks) > 1}
    names = sorted(several, key=lambda name: several[name][1] - several[name][0], reverse=True)
    sizes = tuple(len(several[name]) for name in names)
    if math.prod(sizes) != world_size:
        return None
    found = RankMesh(tuple(names), sizes)
    if any(found.row(name, rank) != several[name] for name in names):
        return None
    return found if names else RankMesh(("dp",), (1,))


def _joint(mesh: RankMesh, rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from a rank along "dp" and "ep" alone."""
    return tuple(sorted(each for other in mesh.row("ep", rank) for each in mesh.row("dp", other)))
