# SPDX-License-Identifier: Apache-2.0
"""Optimizers that know their ranks; and matrices that ranks hold parts of: each goes to its owner by one message, and
the result comes back by another.

The elements of each rank only depend on shapes and placements, so all ranks make the same plan without a message.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from accel.comm import exchanged
from accel.context import DistContext, group_of
from accel.errors import StepError
from accel.tensors import integers, is_dtensor, placements_of, split_dims

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Where: TypeAlias = tuple["slice | Tensor", ...]  # indices by dimension


_DATA = ("dp", "dp_replicate", "dp_shard")


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what a step's closure returns, run with gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class RankedOptimizer(torch.optim.Optimizer):
    """An optimizer that sends messages in its steps. `accel.optimizer_step` gives it the ranks."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._group: dist.ProcessGroup | None = None
        self._plans: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the ranks, which the next step gives."""
        own: dict[str, Any] = {"_plans": {}, "_group": None}
        return {**super().__getstate__(), **own}

    def share_ranks(self, ctx: DistContext, *, independent: bool) -> None:
        """Take the ranks that hold parts or copies of the parameters, and equal gradients. A collective, once.

        Args:
            ctx: the context.
            independent: whether replicas step on their own, as with local SGD.
        """
        group = group_of(ctx, *(() if independent else _DATA), "cp", "tp")
        if group is not self._group:
            self._plans.clear()
        self._group = group

    def ranks_of(self, tensors: Iterable[Tensor]) -> Sequence[int]:
        """Return the numbers of the ranks in the world, in the group's order, which hold all parts of the tensors."""
        ranks = _ranks(self._group)
        for each in tensors:
            if not is_dtensor(each) or not split_dims(each):
                continue
            if self._group is None:
                raise StepError(
                    "the optimizer does not know the ranks that hold parts of a parameter",
                    expected="a step by accel.optimizer_step, which knows them",
                    got=f"optimizer.step() with a parameter of placements {placements_of(each)}",
                    where=f"{type(self).__name__}.step",
                    fix="state = accel.optimizer_step(ctx, optimizer, state)",
                )
            if not set(integers(each.device_mesh.mesh.flatten())) <= set(ranks):
                raise StepError(
                    "ranks outside of the group hold parts of a parameter",
                    expected=f"a mesh within the ranks {[*ranks]}",
                    got=f"{each.device_mesh}",
                    where=f"{type(self).__name__}.step",
                    fix="Name the axes of the mesh dp, cp, tp and pp, so that accel knows them.",
                )
        return ranks


def _ranks(group: dist.ProcessGroup | None) -> Sequence[int]:
    if group is None:
        return [0]
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # a group that torch has not opened, which no mesh is made of
        return range(group.size())


class MatrixPart(NamedTuple):
    """The elements of a matrix that a rank holds."""

    here: Where  # their indices in the rank's part of the parameter
    there: Where  # their indices in the matrix
    shape: tuple[int, ...]  # of the elements


class Matrix(NamedTuple):
    """A matrix: a parameter, rows of one that is a pack, or an element of a stack."""

    at: int  # number of the parameter
    shape: tuple[int, int]  # rows and columns
    owner: int  # rank of the group that computes with the whole matrix
    parts: Mapping[int, MatrixPart]  # by ranks of the group that hold elements
    senders: tuple[int, ...]  # ranks that send their elements to the owner, each element once


class Spec(NamedTuple):
    """A parameter to plan for: its tensor, and the rows of each matrix of a pack; none for one matrix."""

    tensor: Tensor
    packs: tuple[int, ...]


def plan_matrices(specs: Sequence[Spec], ranks: Sequence[int]) -> list[Matrix]:
    """Return the matrices of parameters, with their owners by cost, the largest first.

    Args:
        specs: the parameters.
        ranks: numbers of the group's ranks in the world, in its order.
    """
    places = {rank: at for at, rank in enumerate(ranks)}
    found = list[Matrix]()
    for at, spec in enumerate(specs):
        holds = {places[rank]: own for rank, own in indices_of(spec.tensor, ranks).items() if rank in places}
        for start, stop, is_stacked in _bounds(spec):
            parts = {rank: part for rank, own in holds.items() if (part := _part(own, start, stop, is_stacked))}
            rows, columns = spec.tensor.shape[-2:] if is_stacked else (stop - start, spec.tensor.shape[1])
            found.append(Matrix(at, (rows, columns), -1, parts, ()))
    # Matrices of replicas that do not know each other's are given out last, alike on all ranks that share them.
    everybody = set(range(len(ranks)))
    load = dict.fromkeys(everybody, 0.0)
    common = [each for each in range(len(found)) if set(found[each].parts) == everybody]
    others = [each for each in range(len(found)) if set(found[each].parts) != everybody]
    for some in (common, others):
        if some is others:
            load = dict.fromkeys(everybody, 0.0)
        for number in sorted(some, key=lambda each: -cost(found[each].shape)):
            found[number] = _owned(found[number], load)
    return found


def cost(shape: tuple[int, int]) -> float:
    """Return a matrix's cost: a product with its transpose."""
    return float(math.prod(shape) * min(shape))


def _owned(matrix: Matrix, load: dict[int, float]) -> Matrix:
    """Give a matrix to the least loaded rank, if possible one that has all of it, and count its cost."""
    size = math.prod(matrix.shape)
    have_all = [rank for rank, part in matrix.parts.items() if math.prod(part.shape) == size]
    owner = min(have_all or matrix.parts, key=lambda rank: (load[rank], rank))
    load[owner] += cost(matrix.shape)
    senders = list[int]()
    covered = set[str]()
    for rank in sorted(matrix.parts, key=lambda rank: (rank != owner, rank)):  # the owner's elements need no message
        elements = str(matrix.parts[rank].there)
        if not have_all and elements not in covered:
            covered.add(elements)
            senders.append(rank)
    return matrix._replace(owner=owner, senders=tuple(each for each in senders if each != owner))


def _bounds(spec: Spec) -> Iterable[tuple[int, int, bool]]:
    """The rows along dimension 0 of each matrix, and whether it is one of a stack."""
    if spec.tensor.ndim == 3:
        yield from ((each, each + 1, True) for each in range(spec.tensor.shape[0]))
        return
    start = 0
    for rows in spec.packs or (spec.tensor.shape[0],):
        yield start, start + rows, False
        start += rows


def _part(own: Sequence[Tensor], start: int, stop: int, is_stacked: bool) -> MatrixPart | None:
    """The elements in some rows of the indices that a rank holds; None for none."""
    mine = (own[0] >= start) & (own[0] < stop)
    if not mine.any() or not all(map(len, own)):
        return None
    here = [mine.nonzero()[:, 0], *(torch.arange(len(each)) for each in own[1:])]
    there = [own[0][mine] - start, *own[1:]]
    shape = tuple(map(len, there))
    if is_stacked:
        there, shape = there[1:], shape[1:]
    return MatrixPart(tuple(map(sliced, here)), tuple(map(sliced, there)), shape)


def sliced(indices: Tensor) -> slice | Tensor:
    """Return ascending indices as a slice, if they are a range."""
    first = int(indices[0])
    last = int(indices[-1])
    is_range = last - first + 1 == len(indices)
    return slice(first, last + 1) if is_range else indices


def indices_of(tensor: Tensor, ranks: Sequence[int]) -> Mapping[int, Sequence[Tensor]]:
    """Return the indices by dimension that each rank of the world holds of a tensor."""
    whole = [torch.arange(each) for each in tensor.shape]
    if not is_dtensor(tensor) or not split_dims(tensor):
        return dict.fromkeys(ranks, whole)
    mesh = tensor.device_mesh
    found = dict[int, Sequence[Tensor]]()
    order = _cuts(tensor)
    for place in itertools.product(*map(range, mesh.mesh.shape)):
        own = list(whole)
        for along, dim in order:
            chunks = own[dim].chunk(mesh.size(along))
            own[dim] = chunks[place[along]] if place[along] < len(chunks) else own[dim][:0]
        found[int(mesh.mesh[place])] = own
    return found


def _cuts(tensor: DTensor) -> Sequence[tuple[int, int]]:
    """Dimensions of the mesh and of the tensor, in the order in which the tensor was cut."""
    kinds = cast(Sequence[Any], tensor.placements)
    plain = [at for at, each in enumerate(kinds) if each.is_shard()]
    # what `fully_shard` cut again after tensor parallelism
    strided = [at for at, each in enumerate(kinds) if hasattr(each, "dim") and not each.is_shard()]
    return [(at, kinds[at].dim % tensor.ndim) for at in (*plain, *reversed(strided))]


def through_owners(
    updates: Mapping[int, Tensor],
    matrices: Sequence[Matrix],
    group: dist.ProcessGroup | None,
    compute: Callable[[Matrix, Tensor], Tensor],
    place: Callable[[Matrix, Where, Tensor], object],
) -> None:
    """Compute with matrices that ranks hold parts of. At most two messages of the group.

    Args:
        updates: this rank's part of each parameter's tensor, by number; all of one dtype.
        matrices: matrices of the plan to compute with.
        group: the ranks; None for only this one.
        compute: makes the result of a matrix [rows, columns]; only its owner calls it.
        place: takes this rank's part of a result, and where it is in the update.
    """
    me, size = (0, 1) if group is None else (group.rank(), group.size())
    like = next(iter(updates.values()))
    came: Sequence[list[Tensor]] = [[] for _ in range(size)]
    if any(each.senders for each in matrices):
        sent = [(each, each.owner) for each in matrices if me in each.senders]
        awaited = [
            (sender, each.parts[sender].shape) for each in matrices if each.owner == me for sender in each.senders
        ]
        parts = [(rank, _cut(updates[each.at], each.parts[me].here)) for each, rank in sent]
        came = _exchange(parts, awaited, like, group)
    results = list[tuple[int, Tensor]]()
    for each in matrices:
        if each.owner == me:
            result = compute(each, _assembled(each, me, updates, came))
            for rank, part in each.parts.items():
                own = _cut(result, part.there)
                if rank == me:
                    _ = place(each, part.here, own)
                else:
                    results.append((rank, own))
    if any(len(each.parts) > 1 for each in matrices):
        theirs = [each for each in matrices if each.owner != me and me in each.parts]
        came = _exchange(results, [(each.owner, each.parts[me].shape) for each in theirs], like, group)
        for each in theirs:
            _ = place(each, each.parts[me].here, came[each.owner].pop(0))


def _assembled(matrix: Matrix, me: int, updates: Mapping[int, Tensor], came: Sequence[list[Tensor]]) -> Tensor:
    """The whole matrix, on its owner."""
    own = matrix.parts.get(me)
    update = updates[matrix.at]
    if own is not None and own.shape == matrix.shape:
        return _cut(update, own.here)
    whole = update.new_zeros(matrix.shape)
    if own is not None:
        put(whole, own.there, _cut(update, own.here))
    for sender in matrix.senders:
        put(whole, matrix.parts[sender].there, came[sender].pop(0))
    return whole


def _exchange(
    parts: Sequence[tuple[int, Tensor]],
    awaited: Sequence[tuple[int, tuple[int, ...]]],
    like: Tensor,
    group: dist.ProcessGroup | None,
) -> Sequence[list[Tensor]]:
    """Send parts to ranks, and return those that come, by rank. One message."""
    assert group is not None
    size = group.size()
    to, back = [0] * size, [0] * size
    for rank, part in parts:
        to[rank] += part.numel()
    for rank, shape in awaited:
        back[rank] += math.prod(shape)
    flat = [part.reshape(-1) for _, part in sorted(parts, key=lambda each: each[0])]  # stable: in the plan's order
    sent = torch.cat(flat) if flat else like.new_empty(0)
    came: Any = exchanged(sent.to(like.dtype), to, back, group)
    came = came.split(back)
    found: Sequence[list[Tensor]] = [[] for _ in range(size)]
    starts = [0] * size
    for rank, shape in awaited:
        count = math.prod(shape)
        found[rank].append(came[rank][starts[rank] : starts[rank] + count].view(shape))
        starts[rank] += count
    return found


def _cut(tensor: Tensor, where: Where) -> Tensor:
    """Elements at indices; one element of a stack by itself."""
    found = taken(tensor, where)
    return found[0] if tensor.ndim == 3 else found


def taken(tensor: Tensor, where: Where) -> Tensor:
    """Return the elements at indices."""
    for dim, each in enumerate(where):
        if isinstance(each, slice):
            tensor = tensor.narrow(dim, each.start, each.stop - each.start)
        else:
            tensor = tensor.index_select(dim, each.to(tensor.device))
    return tensor


def put(tensor: Tensor, where: Where, values: Tensor) -> None:
    """Write elements at indices, in any dtype."""
    if all(isinstance(each, slice) for each in where):
        _ = tensor[where].view(values.shape).copy_(values)
        return
    spans = [torch.arange(each.start, each.stop) if isinstance(each, slice) else each for each in where]
    grid = torch.meshgrid(*(each.to(tensor.device) for each in spans), indexing="ij")
    tensor[grid] = values.reshape(grid[0].shape).to(tensor.dtype)
