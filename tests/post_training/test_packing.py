# SPDX-License-Identifier: Apache-2.0
"""Packed rows: each row once, well filled, the same after any kill and on any number of ranks."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import Tensor
from torch.utils.data import DataLoader

import accel
from accel.errors import ConfigError, DataError
from accel.post_training import PackedRows, PackedTokens, TokenRow, _packing, pack
from accel.testing import Simulator

LENGTHS = st.lists(st.integers(1, 12), max_size=40)


def rows_of(lengths: Sequence[int]) -> list[TokenRow]:
    """Rows whose tokens name them, and whose weights are those of an answer behind a prompt."""
    return [
        TokenRow(
            [100 * (at + 1) + place for place in range(length)], [float(2 * place >= length) for place in range(length)]
        )
        for at, length in enumerate(lengths)
    ]


def found(packed: Sequence[PackedTokens]) -> list[list[int]]:
    """The documents of packed rows, without padding."""
    documents: list[list[int]] = []
    for each in packed:
        for number in range(int(each.documents.max()) + 1):
            ids = each.ids[each.documents == number].tolist()
            documents += [ids] * (ids[0] != 0)
    return documents


class Stateful:
    """Rows of an iterable with a state."""

    def __init__(self, rows: Sequence[TokenRow]) -> None:
        self.rows = rows
        self.at = 0

    def __iter__(self) -> Iterator[TokenRow]:
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Plain:
    """Rows of an iterable that begins anew."""

    def __init__(self, rows: Sequence[TokenRow]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[TokenRow]:
        return iter(self.rows)


KINDS: list[Any] = [list, Stateful, Plain]


@settings(max_examples=share(3))
@given(LENGTHS, st.integers(12, 30), st.integers(1, 9), st.sampled_from(KINDS))
def test_each_row_comes_once_and_whole(lengths: list[int], size: int, lookahead: int, kind: Any) -> None:
    rows = rows_of(lengths)
    packed = [*pack(kind(rows), size, lookahead=lookahead)]
    assert sorted(found(packed)) == [row.ids for row in rows]
    weights = {row.ids[at]: row.loss_weights[at] for row in rows for at in range(1, len(row.ids))}
    for each in packed:
        assert all(part.shape == (size,) for part in each)
        place = torch.arange(size)
        begins = torch.ones(size, dtype=torch.bool)
        begins[1:] = each.documents[1:] != each.documents[:-1]
        assert torch.equal(each.position_ids, place - torch.where(begins, place, 0).cummax(0).values)
        real = each.ids != 0
        inner = real & ~begins.roll(-1).logical_or(place == size - 1)
        assert torch.equal(each.targets[inner], each.ids.roll(-1)[inner])
        assert not each.loss_weights[~inner].any()
        assert each.loss_weights[inner].tolist() == [weights[each] for each in each.targets[inner].tolist()]
        ends = each.cumulative_lengths()
        assert ends.dtype == torch.int32
        assert torch.equal(ends.diff(), each.documents.bincount())


def test_cumulative_lengths_of_a_batch_are_of_the_flattened_one() -> None:
    loader = DataLoader(pack(rows_of([3, 2, 4, 5]), 5, lookahead=2), batch_size=3)
    [batch] = loader
    assert isinstance(batch, PackedTokens)
    assert batch.cumulative_lengths().tolist() == [0, 3, 5, 9, 10, 15]


@settings(max_examples=share(3))
@given(LENGTHS, st.integers(1, 9), st.sampled_from(KINDS), st.data())
def test_a_pass_goes_on_from_any_state(lengths: list[int], lookahead: int, kind: Any, data: st.DataObject) -> None:
    rows = rows_of(lengths)

    def made() -> PackedRows:
        return pack(kind(rows), 16, lookahead=lookahead)

    whole = [each.ids.tolist() for each in made()]
    again = made()
    seen: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 3))):  # kills
        for _, each in zip(range(data.draw(st.integers(0, 4))), again, strict=False):
            seen.append(each.ids.tolist())
        if len(seen) >= len(whole):
            break
        state = again.state_dict()
        again = made()
        again.load_state_dict(state)
    seen += [each.ids.tolist() for each in again] if len(seen) < len(whole) else []
    assert seen == whole
    assert [each.ids.tolist() for each in made()] == whole


def best_fit_decreasing(lengths: Sequence[int], size: int) -> int:
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = bisect.bisect_left(free, length)
        room = free.pop(at) if at < len(free) else size
        bisect.insort(free, room - length)
    return len(free)


@pytest.mark.parametrize("kind", ["lognormal", "long", "uniform", "two sizes", "two near sizes", "short"])
def test_fill_is_within_a_point_of_best_fit_decreasing(kind: str) -> None:
    draw = random.Random(0)
    size = 512
    lengths = [
        {
            "lognormal": min(size, max(2, int(math.exp(draw.gauss(0, 1)) * 75))),
            "long": min(size, max(2, int(math.exp(draw.gauss(0, 1.5)) * 150))),
            "uniform": draw.randint(1, size),
            "two sizes": draw.choice([300, 210]),
            "two near sizes": max(1, min(size, int(draw.gauss(draw.choice([325, 175]), 25)))),
            "short": draw.randint(1, 15),
        }[kind]
        for _ in range(5000)
    ]
    count = sum(1 for _ in pack([TokenRow(torch.ones(each), torch.ones(each)) for each in lengths], size))
    share = sum(lengths) / size
    assert share / count > share / best_fit_decreasing(lengths, size) - 0.01


def read(ctx: accel.DistContext, packed: PackedRows, steps: int, state: Any = None) -> Any:
    """Batches of 3 packed rows of all ranks, and the state behind them."""
    loader = accel.prepare_loader(ctx, DataLoader(packed), stream="dispatch", global_batch=6)
    state = accel.train_state(ctx) if state is None else state
    batches: list[list[list[int]]] = []
    for _, batch in zip(range(steps), accel.batches(ctx, loader, state), strict=False):
        state = state.at(batch.next)
        batches.append(accel.gather_for_metrics(ctx, batch.data.ids, batch).tolist())
    return batches, state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [None, 7])
def test_any_number_of_ranks_reads_and_resumes_the_same(ranks: Simulator, kind: Any, seed: Any) -> None:
    if seed is not None and kind is not list:
        with assert_raises(DataError, problem="shuffled"):
            _ = pack(kind([]), 8, seed=seed)
        return
    rows = rows_of([1 + at % 7 for at in range(60)])

    def run(ctx: accel.DistContext, steps: int, state: Any = None) -> Any:
        return read(ctx, pack(kind(rows), 8, lookahead=8, seed=seed), steps, state)

    whole, _ = run(accel.single("cpu"), 99)
    assert sorted(each for step in whole for ids in step for each in ids if each) == sorted(
        each for row in rows for each in row.ids
    )
    first, state = ranks.run(lambda ctx: run(ctx, 2), 3)[0]
    rest, _ = ranks.run(lambda ctx: run(ctx, 99, state), 2)[0]
    assert first + rest == whole


def test_shards_and_workers_divide_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of([1 + at % 7 for at in range(30)])
    parts = [
        [*pack(rows, 8, lookahead=4, seed=3).shard(3, index).shard(2, each)] for index in range(3) for each in range(2)
    ]
    assert sorted(ids for part in parts for ids in found(part)) == [row.ids for row in rows]
    workers: list[PackedTokens] = []
    for index in range(2):  # as in the processes of a loader
        monkeypatch.setattr(_packing, "get_worker_info", lambda index=index: SimpleNamespace(id=index, num_workers=2))
        workers += pack(rows, 8, lookahead=4)
    assert sorted(found(workers)) == [row.ids for row in rows]


def test_epochs_differ_by_seed() -> None:
    packed = pack(rows_of([1] * 20), 20, seed=0)
    orders: list[Tensor] = []
    for epoch in (0, 1, 0):
        packed.set_epoch(epoch)
        orders += [each.ids for each in packed]
    assert not torch.equal(orders[0], orders[1])
    assert torch.equal(orders[0], orders[2])


def test_a_position_in_another_order_is_refused() -> None:
    rows = rows_of([3, 4, 5, 6])
    begun = pack(rows, 8, seed=1)
    reading = iter(begun)
    _ = next(reading)
    state = begun.state_dict()
    rest = found([*reading])
    for other in (pack(rows, 8, seed=2), pack(rows, 8), pack(rows_of([3, 4]), 8, seed=1)):
        with assert_raises(DataError, problem="another order"):
            other.load_state_dict(state)
    older = {name: each for name, each in state.items() if name != "order"}  # as versions before this one saved it
    for known in (state, older):
        again = pack(rows, 8, seed=1)
        again.load_state_dict(known)
        assert found([*again]) == rest


def test_rows_that_are_too_long_are_counted_or_cut() -> None:
    rows = rows_of([3, 9, 2, 11])
    with assert_raises(DataError, problem="2 of the next 4 rows are too long", got="11 tokens") as caught:
        _ = [*pack(rows, 8)]
    assert "max_tokens=11" in str(caught.value)
    assert sorted(found([*pack(rows, 11)])) == [row.ids for row in rows]  # the fix, and the other one
    cut = pack(rows, 8, truncate=True, lookahead=2)
    assert sorted(found([*cut])) == [row.ids[:8] for row in rows]
    begun = pack(rows, 8, truncate=True, lookahead=4)
    first = next(iter(begun))
    rest = pack(rows, 8, truncate=True, lookahead=4)
    rest.load_state_dict(begun.state_dict())
    assert sorted(found([first, *rest])) == [row.ids[:8] for row in rows]


@pytest.mark.parametrize(
    ("call", "error", "problem"),
    [
        (lambda: TokenRow([1, 2], [1.0]), DataError, "do not fit"),
        (lambda: TokenRow([], []), DataError, "do not fit"),
        (lambda: [*pack([TokenRow([1.5, 2.0], [0, 1])], 8)], DataError, "the tokens are not valid"),
        (lambda: [*pack([TokenRow([1, -100], [0, 1])], 8)], DataError, "the tokens are not valid"),
        (lambda: [*pack([TokenRow([1, 2], [0, -1])], 8)], DataError, "below 0"),
        (lambda: [*pack([TokenRow([1, 2], [0, float("nan")])], 8)], DataError, "NaN"),
        (lambda: pack(rows_of([3]), 8, pad_id=-100), ConfigError, "behind the last row"),
        (lambda: pack(iter(rows_of([3])), 8), DataError, "begin anew"),
        (lambda: [*pack([[1, 2]], 8)], DataError, "the row does not hold tokens"),  # type: ignore[list-item]
    ],
)
def test_slips_are_errors(call: Any, error: Any, problem: str) -> None:
    with assert_raises(error, problem=problem):
        _ = call()
