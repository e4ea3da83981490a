# SPDX-License-Identifier: Apache-2.0
"""Axes of a mesh: what a text such as "dp=4,tp=2" says, and which ranks lie along them."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping

import msgspec

from accel.errors import AccelError, ConfigError, did_you_mean

MESH_TEXT = r"^([a-z_]+=(-1|[1-9][0-9]{0,6})(,[a-z_]+=(-1|[1-9][0-9]{0,6}))*)?$"


class Axes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the axes of a mesh. Ranks are numbered in the order of the fields, neighbours along the last.

    Attributes:
        pp: pipeline stages; each rank holds the layers of its own.
        dp: data parallel, where there is one way of it: replicas or shards, as the strategy says.
        dp_replicate: data parallel, beside `dp_shard`: along it ranks hold the same shards.
        dp_shard: data parallel, beside `dp_replicate`: along it each rank holds shards of its own.
        cp: context parallel; ranks share the positions of a sequence. Shards lie along it too.
        tp: tensor parallel; ranks share each layer's product.
        ep: expert parallel; each rank holds experts of its own. It takes its ranks from those along dp or dp_shard, cp
            and tp, neighbours first, and so is no factor of the number of ranks.

    Raises:
        ConfigError: a size below 1, `dp` beside `dp_replicate` or `dp_shard`, or an `ep` that does not divide the ranks
            that it takes.
    """

    pp: int = 1
    dp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in AXES}
        if -1 in sizes.values():
            raise ConfigError(
                "an open size without a number of ranks",
                expected="1 or more",
                got=str(sizes),
                where="Axes",
                fix="Texts have open sizes: accel.session(mesh='dp=-1,tp=2').",
            )
        check_axes_sizes(sizes, where="Axes")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the factors of the number of ranks that are above 1, in the order of ranks; `ep` is none of them."""
        return {name: size for name in FACTORS if (size := getattr(self, name)) > 1}

    @property
    def expert_ranks(self) -> int:
        """Number of the ranks that `ep` divides: those along dp or dp_shard, cp and tp."""
        return self.dp * self.dp_shard * self.cp * self.tp

    def __str__(self) -> str:
        sizes = {**self.sizes, "ep": self.ep} if self.ep > 1 else self.sizes
        return ",".join(f"{name}={size}" for name, size in sizes.items())


AXES = Axes.__struct_fields__
FACTORS = tuple(name for name in AXES if name != "ep")


def mesh_sizes(text: str, *, where: str, error: type[AccelError] = ConfigError) -> dict[str, int]:
    """Return the sizes of the axes that a text names, in the order of ranks: of "tp=2,dp=-1", {"dp": -1, "tp": 2}.

    Args:
        text: sizes by axis, in any order; -1 for all ranks that the others leave. No mesh if empty.
        where: source of the text, for errors.
        error: class of the errors.

    Raises:
        AccelError: the text is none of these; an axis stands twice, is unknown, or cannot stand beside another; two
            sizes are -1, or that of `ep` is.
    """
    if not isinstance(text, str) or not re.fullmatch(MESH_TEXT, text):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise error("not a mesh", expected="a text such as dp=2,tp=2 or dp=-1,tp=4", got=repr(text), where=where)
    pairs = [part.split("=") for part in text.split(",") if part]
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise error("an axis stands twice", got=repr(text), where=where, fix=f"Name {name} once.")
        if name not in AXES:
            fix = did_you_mean(name, AXES) or f"Axes are {', '.join(AXES)}."
            raise error("unknown axis of a mesh", got=f"{name!r} in {text!r}", where=where, fix=fix)
    stated = {name: int(size) for name, size in pairs}
    sizes = {name: stated[name] for name in AXES if name in stated}
    if list(sizes.values()).count(-1) > 1:
        raise error("two sizes are open", got=repr(text), where=where, fix="Let one at most be -1.")
    check_axes_sizes(sizes, where=where, error=error)
    return sizes


def fit_axes(text: str, world_size: int, *, where: str, error: type[AccelError] = ConfigError) -> Axes | None:
    """Return the axes of a mesh of so many ranks: of "dp=-1,tp=2" and 8 ranks, dp=4 and tp=2. None of an empty text.

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
        return None
    known = math.prod(size for name, size in sizes.items() if size != -1 and name != "ep")
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
    settled = {name: world_size // known if size == -1 else size for name, size in sizes.items()}
    check_axes_sizes(settled, where=where, error=error)
    return Axes(**settled)


def check_axes_sizes(sizes: Mapping[str, int], *, where: str, error: type[AccelError] = ConfigError) -> None:
    """Raise for sizes that no mesh has; of open ones, what the others say already.

    Args:
        sizes: by name; -1 for all ranks that the others leave.
        where: source of the sizes, for errors.
        error: class of the errors.

    Raises:
        AccelError: as `Axes` says.
    """
    for name, size in sizes.items():
        is_open = size == -1 and name != "ep"
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and not is_open):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise error("not the size of an axis", expected="1 or more", got=f"{name}={size!r}", where=where)
    parts = [f"{name}={sizes[name]}" for name in ("dp_replicate", "dp_shard") if sizes.get(name, 1) != 1]
    if sizes.get("dp", 1) != 1 and parts:
        raise error(
            "two names for data parallelism",
            expected="dp alone, or dp_replicate and dp_shard",
            got=f"dp={sizes['dp']} beside {' and '.join(parts)}",
            where=where,
            fix="dp is of replicas or of shards as the strategy says; name both where there are both.",
        )
    taken = [sizes.get(name, 1) for name in ("dp", "dp_shard", "cp", "tp")]
    experts = sizes.get("ep", 1)
    if -1 not in taken and math.prod(taken) % experts:
        raise error(
            "experts cannot be divided among these ranks",
            expected=f"an ep that divides {math.prod(taken)}, the ranks along dp or dp_shard, cp and tp",
            got=f"ep={experts}",
            where=where,
        )


def coordinates(axes: Axes, rank: int) -> Mapping[str, int]:
    """Return a rank's index along each axis, `ep` too.

    Args:
        axes: of the mesh.
        rank: 0 to `axes.world_size` - 1.
    """
    found: dict[str, int] = {}
    rest = rank
    for name in reversed(FACTORS):
        rest, found[name] = divmod(rest, getattr(axes, name))
    return {**{name: found[name] for name in FACTORS}, "ep": rank % axes.expert_ranks % axes.ep}


def rank_rows(axes: Axes, *along: str) -> tuple[tuple[int, ...], ...]:
    """Return rows of ranks, one for each place off some axes: the ranks of a row differ along these axes alone.

    Args:
        axes: of the mesh.
        along: names of axes. "ep" divides the ranks along dp or dp_shard, cp and tp anew: beside it these are left, and
            "efsdp" stands for those of them that hold the same experts.
    """
    if {"ep", "efsdp"} & set(along):
        shape = {"pp": axes.pp, "dp_replicate": axes.dp_replicate, "efsdp": axes.expert_ranks // axes.ep, "ep": axes.ep}
    else:
        shape = {name: getattr(axes, name) for name in FACTORS}
    unknown = set(along) - shape.keys()
    assert not unknown, f"{sorted(unknown)} cannot stand in one row with {along}"
    rows: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*map(range, shape.values()))):
        off = tuple(at for name, at in zip(shape, place, strict=True) if name not in along)
        rows.setdefault(off, []).append(rank)
    return tuple(map(tuple, rows.values()))
