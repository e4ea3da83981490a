# SPDX-License-Identifier: Apache-2.0
"""From the elements of a stream to the parts of a step: how many samples each rank gets, and its batch of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from accel.data._plan import Tail
from accel.errors import DataError
from accel.tree import Container, tensors


class Cut(msgspec.Struct, frozen=True):
    """How a reader cuts its stream.

    Attributes:
        size: elements to a step.
        ranks: among how many ranks a step is divided.
        mine: the ranks whose batches are made here.
        tail: what becomes of a step with fewer elements.
        whole: whether an element is a batch already, one for a rank.
        containers: further kinds of containers that batches may hold.
    """

    size: int
    ranks: int
    mine: tuple[int, ...]
    tail: Tail
    whole: bool
    containers: tuple[Container, ...] = ()


class Part(msgspec.Struct, frozen=True, eq=False):
    """One rank's batch.

    Attributes:
        data: what the collate function made.
        rows: samples in it, stand-ins included.
    """

    data: Any
    rows: int


def cut(plan: Cut, elements: Sequence[Any], collate: Callable[[Any], Any]) -> tuple[dict[int, Part], list[int]]:
    """Divide the elements of one step: contiguous, in rank order, sizes differing by at most one.

    Args:
        plan: how.
        elements: at least one.
        collate: a list of samples to a batch; if elements are batches already, one of them to what ranks get.

    Returns:
        The batches that are made here by rank, and the real samples of every rank.

    Raises:
        DataError: elements are batches already, and one has no rows that can be counted.
    """
    if plan.whole:
        return _deal(plan, [collate(element) for element in elements])
    each, extra = divmod(len(elements), plan.ranks)
    counts = [each + (rank < extra) for rank in range(plan.ranks)]
    constant = -(-plan.size // plan.ranks) if plan.tail == "pad" else 0
    parts: dict[int, Part] = {}
    for rank in plan.mine:
        start, rows = rank * each + min(rank, extra), max(counts[rank], constant, 1)
        chosen = [elements[min(start + row, len(elements) - 1)] for row in range(counts[rank])]
        parts[rank] = Part(collate(chosen + [elements[-1]] * (rows - len(chosen))), rows)
    return parts, counts


def _deal(plan: Cut, given: list[Any]) -> tuple[dict[int, Part], list[int]]:
    rows = [count_rows(batch, plan.containers) for batch in given]
    last = len(given) - 1
    counts = [rows[rank] if rank <= last else 0 for rank in range(plan.ranks)]
    return {rank: Part(given[min(rank, last)], rows[min(rank, last)]) for rank in plan.mine}, counts


def count_rows(batch: object, containers: Sequence[Container] = ()) -> int:
    """Return how many samples a batch holds that the stream itself has made.

    Args:
        batch: nested containers of tensors of shape [samples, ...].
        containers: further kinds of containers.

    Raises:
        DataError: it holds no tensors, or they differ in their first dimension, or there is no sample.
        TreeError: a container that cannot be taken apart.
    """
    shapes = {path: list(leaf.shape) for path, leaf in tensors(batch, containers)}
    rows = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(rows) != 1 or rows == {0}:
        raise DataError(
            "the stream gives batches whose samples cannot be counted",
            expected="tensors of shape [samples, ...], at least one sample, equally many in all",
            got=", ".join(f"{path} of {shape}" for path, shape in shapes.items()) or f"{type(batch).__name__}",
            fix="Let the stream give samples, and the DataLoader batch them: batch_size=.",
        )
    return rows.pop()
