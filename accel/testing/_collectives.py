# SPDX-License-Identifier: Apache-2.0
"""Collectives as functions of the buffers of all ranks; they write into the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accel.errors import CollectiveMismatch
from accel.testing._reductions import Reduction, reduce_tensors


class Buffers(NamedTuple):
    """The tensors that one rank brings to a call."""

    inputs: list[Tensor]
    outputs: list[Tensor]


class Layout(NamedTuple):
    """Layout that must agree between tensors; printed like `float32[2, 3]`."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class SimulatedCall(NamedTuple):
    """A collective and all that ranks must agree on about it; printed like `broadcast(0, int64[4])`."""

    name: str
    facts: tuple[object, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.facts))})"


Run = Callable[[Sequence[Buffers]], None]


def layout(tensor: Tensor) -> Layout:
    """The layout of a tensor."""
    return Layout(tensor.dtype, tensor.shape)


def fill(target: Tensor, source: Tensor) -> None:
    """Copy as a backend does: element by element, never broadcast nor cast.

    Raises:
        CollectiveMismatch: another dtype, or another number of elements.
    """
    if target.dtype != source.dtype or target.numel() != source.numel():
        raise CollectiveMismatch(
            "a buffer does not fit what it is to receive", expected=str(layout(source)), got=str(layout(target))
        )
    target.copy_(source.reshape(target.shape))


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
    """As `all_to_all`, with the parts being views of one tensor; where they are equal that tensor may come instead.

    Each rank's outputs may share memory with its inputs.
    """
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
