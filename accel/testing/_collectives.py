# SPDX-License-Identifier: Apache-2.0
"""Collectives and reductions as functions of the buffers of all ranks; they write into the outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accel.errors import CollectiveMismatch
from accel.testing._sites import SimulationError


class Reduction(Enum):
    """A way to combine tensors; the value is torch's name of it."""

    SUM = "SUM"
    AVG = "AVG"
    PRODUCT = "PRODUCT"
    MIN = "MIN"
    MAX = "MAX"
    BAND = "BAND"
    BOR = "BOR"
    BXOR = "BXOR"


BITWISE = frozenset({Reduction.BAND, Reduction.BOR, Reduction.BXOR})


def reduction_of(op: Any) -> Reduction:
    """Translate torch's reduce op, a `ReduceOp` or one of its members; raise `SimulationError` for an unknown one."""
    reduction = next((known for known in Reduction if op == getattr(dist.ReduceOp, known.value)), None)
    if reduction is None:
        raise SimulationError("unknown reduce op", expected=", ".join(known.value for known in Reduction), got=repr(op))
    return reduction


def reduce_tensors(reduction: Reduction, tensors: Sequence[Tensor]) -> Tensor:
    """Combine one tensor of each rank, of one shape and dtype, in rank order; return a new tensor."""
    first = tensors[0]
    if first.is_sparse:  # sums alone, see `check_layouts`
        each_coalesced = [tensor.coalesce() for tensor in tensors]  # gloo too rounds a rank's repeated rows first
        return functools.reduce(torch.add, each_coalesced).coalesce()
    match reduction:
        case Reduction.SUM:
            return _total(tensors)
        case Reduction.AVG:
            whole = not (first.dtype.is_floating_point or first.dtype.is_complex)
            return torch.div(_total(tensors), len(tensors), rounding_mode="trunc" if whole else None)  # as nccl
        case Reduction.PRODUCT:
            return torch.stack(tuple(tensors)).prod(0).to(first.dtype)
        case Reduction.MIN:
            return torch.stack(tuple(tensors)).amin(0)
        case Reduction.MAX:
            return torch.stack(tuple(tensors)).amax(0)
        case Reduction.BAND:
            return _fold(torch.bitwise_and, tensors)
        case Reduction.BOR:
            return _fold(torch.bitwise_or, tensors)
        case Reduction.BXOR:
            return _fold(torch.bitwise_xor, tensors)


def _total(tensors: Sequence[Tensor]) -> Tensor:
    if tensors[0].is_complex():  # torch adds up all complex dtypes only as pairs
        return torch.view_as_complex(_total([torch.view_as_real(tensor) for tensor in tensors]))
    stacked = torch.stack(tuple(tensors))
    return stacked.any(0) if stacked.dtype == torch.bool else stacked.sum(0, dtype=stacked.dtype)


def _fold(combine: Callable[[Tensor, Tensor], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(combine, tensors[1:], tensors[0].clone())


class Buffers(NamedTuple):
    """The tensors that one rank brings to a call."""

    inputs: list[Tensor]
    outputs: list[Tensor]


class TensorLayout(NamedTuple):
    """Layout that must agree between tensors; printed like `float32[2, 3]`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sparse: bool = False

    def __str__(self) -> str:
        return f"{'sparse ' * self.sparse}{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class SimulatedCall(NamedTuple):
    """A collective and all that ranks must agree on about it; printed like `broadcast(0, int64[4])`."""

    name: str
    facts: tuple[object, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.facts))})"


Run = Callable[[Sequence[Buffers]], None]


def layout(tensor: Tensor) -> TensorLayout:
    """The layout of a tensor."""
    return TensorLayout(tensor.dtype, tensor.shape, tensor.is_sparse)


def fill(target: Tensor, source: Tensor) -> None:
    """Copy element by element, as a backend does; `CollectiveMismatch` for another dtype or size."""
    if target.dtype != source.dtype or target.numel() != source.numel():
        raise CollectiveMismatch(
            "a buffer does not fit the message", expected=str(layout(source)), got=str(layout(target))
        )
    target.copy_(source if source.is_sparse else source.reshape(target.shape))


def barrier(ranks: Sequence[Buffers]) -> None:
    """Nothing but the meeting itself."""


def all_reduce(reduction: Reduction, ranks: Sequence[Buffers]) -> None:
    """Every output becomes the reduction of the inputs at its place."""
    for inputs, outputs in _by_place(ranks):
        _fill_all(outputs, reduce_tensors(reduction, inputs))


def reduce(reduction: Reduction, dst: int, ranks: Sequence[Buffers]) -> None:
    """As `all_reduce`, on rank `dst` only."""
    for inputs, outputs in _by_place(ranks):
        fill(outputs[dst], reduce_tensors(reduction, inputs))


def broadcast(src: int, ranks: Sequence[Buffers]) -> None:
    """Every output becomes the input of rank `src`."""
    for inputs, outputs in _by_place(ranks):
        _fill_all((target for rank, target in enumerate(outputs) if rank != src), inputs[src])


def all_gather(ranks: Sequence[Buffers]) -> None:
    """Output i of every rank becomes the input of rank i."""
    for mine in ranks:
        for target, other in zip(mine.outputs, ranks, strict=True):
            fill(target, other.inputs[0])


def all_gather_single(ranks: Sequence[Buffers]) -> None:
    """Every output becomes the inputs at its place, one rank's after another's."""
    for inputs, outputs in _by_place(ranks):
        _fill_all(outputs, torch.cat([tensor.reshape(-1) for tensor in inputs]))


def all_gather_coalesced(ranks: Sequence[Buffers]) -> None:
    """Every rank's outputs become all ranks' inputs, one rank's after another's."""
    everything = [tensor for rank in ranks for tensor in rank.inputs]
    for mine in ranks:
        for target, source in zip(mine.outputs, everything, strict=True):
            fill(target, source)


def gather(dst: int, ranks: Sequence[Buffers]) -> None:
    """As `all_gather`, on rank `dst` only."""
    for target, other in zip(ranks[dst].outputs, ranks, strict=True):
        fill(target, other.inputs[0])


def scatter(src: int, ranks: Sequence[Buffers]) -> None:
    """The output of rank i becomes input i of rank `src`."""
    for mine, source in zip(ranks, ranks[src].inputs, strict=True):
        fill(mine.outputs[0], source)


def reduce_scatter(reduction: Reduction, ranks: Sequence[Buffers]) -> None:
    """The output of rank i becomes the reduction of all ranks' input i."""
    totals = [reduce_tensors(reduction, same) for same in zip(*(rank.inputs for rank in ranks), strict=True)]
    for mine, total in zip(ranks, totals, strict=True):
        fill(mine.outputs[0], total)


def reduce_scatter_single(reduction: Reduction, ranks: Sequence[Buffers]) -> None:
    """The output of rank i becomes part i of the reduction of the inputs at its place."""
    for inputs, outputs in _by_place(ranks):
        parts = reduce_tensors(reduction, inputs).reshape(-1).tensor_split(len(ranks))
        for target, part in zip(outputs, parts, strict=True):
            fill(target, part)


def all_to_all(ranks: Sequence[Buffers]) -> None:
    """Output j of rank i becomes input i of rank j."""
    for i, mine in enumerate(ranks):
        for target, other in zip(mine.outputs, ranks, strict=True):
            fill(target, other.inputs[i])


def all_to_all_single(ranks: Sequence[Buffers]) -> None:
    """As `all_to_all`, on parts of one tensor; equal parts come as the tensor. Outputs may share memory with inputs."""
    count = len(ranks)
    whole = [tensor for rank in ranks for tensor in (*rank.inputs, *rank.outputs)]
    sizes = {tensor.numel() for tensor in whole}
    if len(whole) == 2 * count and len(sizes) == 1 and (size := sizes.pop()) and not size % count:
        received = torch.stack([rank.inputs[0].reshape(count, -1) for rank in ranks], dim=1)
        for rank, mine in zip(ranks, received, strict=True):
            fill(rank.outputs[0], mine)
    else:
        inputs = [[tensor.clone() for tensor in _parts(rank.inputs, count)] for rank in ranks]
        outputs = [_parts(rank.outputs, count) for rank in ranks]
        all_to_all([Buffers(*both) for both in zip(inputs, outputs, strict=True)])


def _parts(tensors: list[Tensor], count: int) -> list[Tensor]:
    return tensors if len(tensors) == count else list(tensors[0].tensor_split(count))


def _by_place(ranks: Sequence[Buffers]) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    inputs = zip(*(rank.inputs for rank in ranks), strict=True)
    outputs = zip(*(rank.outputs for rank in ranks), strict=True)
    return list(zip(inputs, outputs, strict=True))


def _fill_all(targets: Iterable[Tensor], source: Tensor) -> None:
    for target in targets:
        fill(target, source)
