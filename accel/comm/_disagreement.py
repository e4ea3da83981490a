# SPDX-License-Identifier: Apache-2.0
"""Errors that every rank raises when first messages differ or report a failure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NoReturn

import msgspec
import torch

from accel.comm._answers import Answers
from accel.comm._bytes import as_bytes, as_tensor
from accel.comm._call import Call, call_trace
from accel.comm._handle import Comm
from accel.comm._header import Head
from accel.comm._order import Met, Step, are_branches, crossed, steps
from accel.comm._torch import all_gather_flat, gather_bytes
from accel.errors import CollectiveMismatch, ErrorRecord, rebuild


def raise_failure(
    comm: Comm, heads: list[Head], answers: Answers, failure: bytes, cause: BaseException | None
) -> NoReturn:
    """Raise the lowest failing rank's error. A collective if the error is longer than a first message.

    Args:
        comm: an open handle of more than one rank.
        heads: the headers of all ranks.
        answers: their first messages.
        failure: this rank's encoded error; empty without one.
        cause: the error itself.
    """
    rank = next(i for i, head in enumerate(heads) if head.failed)
    size = heads[rank].payload_bytes
    data = answers.inline[rank, :size]
    if size > data.numel():
        mine = as_tensor(failure if comm.rank == rank else b"")
        gathered = gather_bytes(comm, mine, [size if i == rank else 0 for i in range(comm.size)])
        assert gathered is not None  # without dst
        data = gathered
    record = msgspec.json.decode(as_bytes(data), type=ErrorRecord)
    if any((head.failed, head.variant) != (True, heads[rank].variant) for head in heads):
        record = msgspec.structs.replace(record, problem=f"rank {rank}: {record.problem}")
    raise rebuild(record) from cause


def raise_mismatch(comm: Comm, call: Call, heads: list[Head]) -> NoReturn:
    """Raise `CollectiveMismatch` for rank 0's call and the first that differs from it. A collective."""
    other = next(i for i, head in enumerate(heads) if head.fingerprint != heads[0].fingerprint)
    detail = call.explain() if call.explain is not None else call.detail
    texts = _texts(comm, f"{call.label}\n{call.name}\n{detail}".encode(errors="backslashreplace"), (0, other))
    (label, *left), (other_label, *right) = (text.decode().split("\n") for text in texts)
    differing = ((a, b) for a, b in zip_longest(left, right, fillvalue="nothing") if a != b)
    ours, theirs = next(differing, ("", "")) if left[0] == right[0] else ("", "")
    way = call.hint(ours, theirs) if call.hint is not None else ""
    raise CollectiveMismatch(
        "ranks disagree about the call they make together",
        expected=f"rank 0: {label}" + f" ({ours})" * bool(ours),
        got=f"rank {other}: {other_label}" + f" ({theirs})" * bool(theirs),
        fix=way or "Let every rank make the same calls, in the same order, with the same structure.",
    )


def check_order(comm: Comm, call: Call, earlier: Met | None, heads: list[Head]) -> None:
    """Raise `CollectiveMismatch` if ranks made this call and the one before in opposite orders. A collective then."""
    places = [head.place for head in heads]
    if places.count(places[0]) == len(places):
        return
    now = Met(heads[0].fingerprint, places, call_trace())
    comm.met = now
    ranks = crossed(earlier, now)
    if earlier is not None and ranks is not None:
        _check_traces(comm, call, earlier, now, ranks)


def right_order(comm: Comm, earlier: Met | None, head: Head) -> int:
    """Return the number of the last comparison in which this rank made this call after the one before; 0 for none."""
    if earlier is None or earlier.fingerprint != head.fingerprint:
        return 0
    return comm.right_orders.get((head.fingerprint, earlier.places[0], head.place), 0)


def check_reduced_order(comm: Comm, call: Call, earlier: Met | None, head: Head, is_right: bool) -> None:
    """Do as `check_order` in a large group where the places of a call differ. A collective unless they are known.

    Args:
        comm: an open handle of more than one rank.
        call: the expected call of all ranks.
        earlier: the ordered call before, if ranks made it from different places.
        head: this rank's header.
        is_right: whether one earlier comparison had the same places on all ranks, and found nothing.
    """
    now = Met(head.fingerprint, [head.place], call_trace())
    comm.met = now
    if earlier is None or earlier.fingerprint != now.fingerprint or is_right:
        return
    before, place = earlier.places[0], head.place
    pairs = [as_bytes(row) for row in all_gather_flat(comm, as_tensor(before + place).to(comm.control)).cpu()]
    befores = [pair[: len(before)] for pair in pairs]
    places = [pair[len(before) :] for pair in pairs]
    ranks = crossed(earlier._replace(places=befores), now._replace(places=places))
    if ranks is not None:
        _check_traces(comm, call, earlier, now, ranks)
    else:
        comm.right_orders[head.fingerprint, before, place] = comm.next_number()


def _check_traces(comm: Comm, call: Call, earlier: Met, now: Met, ranks: tuple[int, int]) -> None:
    """Raise `CollectiveMismatch` unless two crossed calls are branches. A collective."""
    mine = (steps(earlier.trace), steps(now.trace))
    texts = _texts(comm, msgspec.json.encode(mine), ranks)
    left, right = (msgspec.json.decode(text, type=tuple[list[Step], list[Step]]) for text in texts)
    if are_branches(left, right):
        return
    expected, got = (
        f"rank {rank}: {call.name} at {before[-1].text}, then at {after[-1].text}"
        for rank, (before, after) in zip(ranks, (left, right), strict=True)
    )
    raise CollectiveMismatch(
        "two calls of one kind were made in opposite orders, and each met the other",
        expected=expected,
        got=got,
        fix="Make them in the same order on every rank, or send all values as one dict in one call. Calls that belong "
        'together from different lines say so by the same `tag="..."`.',
    )


def _texts(comm: Comm, mine: bytes, ranks: Sequence[int]) -> list[bytes]:
    """Gather texts of some ranks on every rank. A collective."""
    text = as_tensor(mine if comm.rank in ranks else b"")
    length = torch.tensor([text.numel()], dtype=torch.int64, device=comm.control)
    sizes = [int(size) for size in all_gather_flat(comm, length).flatten()]
    gathered = gather_bytes(comm, text, sizes)
    assert gathered is not None  # without dst
    parts = torch.split(gathered, sizes)
    return [as_bytes(parts[rank]) for rank in ranks]
