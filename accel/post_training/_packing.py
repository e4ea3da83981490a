# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens packed into rows of one length: a stream with a state, for `prepare_loader(stream=)`.

A packed row begins with the oldest row that waits, so none waits for ever, and takes the longest others that fit. Which
rows come together only depends on lengths and order, so every number of ranks reads the same.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import IterableDataset, get_worker_info

from accel.data import order
from accel.errors import DataError
from accel.errors._checks import check_count, check_kind
from accel.post_training._samples import token_ids

Tokens = Sequence[int] | Sequence[float] | Tensor


class TokenRow(msgspec.Struct, frozen=True):
    """One sequence of tokens, and how much each of them is trained on.

    Attributes:
        ids: tokens, at least one: integers, or int64 of shape [tokens].
        loss_weights: factor of the loss of predicting each token: 0 for a prompt's, 1 for an answer's, or another
            from 0.
    """

    ids: Tokens
    loss_weights: Tokens

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.loss_weights) or not len(self.ids):
            raise DataError(
                "tokens and their loss weights do not fit each other",
                expected="one weight for each token, and a token at least",
                got=f"{len(self.ids)} tokens and {len(self.loss_weights)} weights",
                where="TokenRow",
            )


class PackedTokens(NamedTuple):
    """Tokens of several rows, one behind the other, shape [tokens], or [rows, tokens] in a batch.

    Attributes:
        ids: tokens, int64; behind the last row, padding.
        position_ids: places that begin anew with each row, int64, as models of transformers take them.
        documents: number of each token's row in the packed row, from 0, int64; padding is one more document.
        targets: token that comes next, int64.
        loss_weights: factor of the loss of `targets`, fp32; 0 for the last token of a row and for padding.
    """

    ids: Tensor
    position_ids: Tensor
    documents: Tensor
    targets: Tensor
    loss_weights: Tensor

    def cumulative_lengths(self) -> Tensor:
        """Return where each document begins in the flattened batch, and the end: int32, for kernels of variable length.

        Waits for the device.
        """
        begins = self.position_ids.flatten() == 0
        places = begins.nonzero().flatten()
        return torch.cat([places, places.new_tensor([begins.numel()])]).int()


class PackedRows(IterableDataset[PackedTokens]):
    """A stream of `PackedTokens`, made by `pack`. Its state is the place in the rows, and which rows wait."""

    def __init__(
        self,
        rows: Iterable[TokenRow],
        max_tokens: int,
        *,
        lookahead: int,
        truncate: bool,
        pad_id: int,
        seed: int | None,
    ) -> None:
        super().__init__()
        self.rows, self.max_tokens, self.lookahead = rows, max_tokens, lookahead
        self.truncate, self.pad_id, self.seed = truncate, pad_id, seed
        self._epoch = 0
        self._share = (0, 1)
        self._begin: dict[str, Any] = {}
        self._now: dict[str, Any] = {}

    def __iter__(self) -> Iterator[PackedTokens]:
        begin, self._begin = self._begin, {}
        rows = self._source(begin.get("source"))
        waiting = _Waiting(self.max_tokens, rows, begin)
        self._now = begin
        while True:
            read: list[_Read] = []
            while len(waiting.rows) + len(read) < self.lookahead and (row := next(rows, None)) is not None:
                read.append(row)
            self._check(read)
            for row in read:
                waiting.add(row)
            if not waiting.rows:
                break
            taken = waiting.take()
            self._now = {**waiting.state(), "order": self._order}
            yield _laid(taken, self.max_tokens, self.pad_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the packed row that came last: of about 1 KB, whatever the rows."""
        return dict(self._now)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin at a position.

        Raises:
            DataError: a position in rows that were shuffled by another seed, or were more or fewer.
        """
        if state.get("order", self._order) != self._order:
            raise DataError(
                "the position is in rows of another order",
                expected=f"seed and number of rows {self._order}",
                got=str(state["order"]),
                where="pack(seed=)",
                fix="Pass the rows and the seed of the run that saved it.",
            )
        self._begin = self._now = dict(state)

    @property
    def _order(self) -> list[int] | None:
        """Return seed and number of shuffled rows."""
        return None if self.seed is None else [self.seed, len(cast(Any, self.rows))]

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch, and pass its number to the rows."""
        self._epoch = epoch
        if callable(set_epoch := getattr(self.rows, "set_epoch", None)):
            _ = set_epoch(epoch)

    def shard(self, num_shards: int, index: int) -> PackedRows:
        """Return the packed rows of a part of the rows, for `prepare_loader(stream="shards")`."""
        part = copy.copy(self)
        if _is_indexed(self.rows):
            first, step = self._share
            part._share = (first + step * index, step * num_shards)
        else:
            part.rows = cast(Any, self.rows).shard(num_shards=num_shards, index=index)
        return part

    def _source(self, begin: Any) -> Iterator[_Read]:
        """Read the rows from a state. Workers split rows with indices; other rows split themselves, as in torch."""
        if not _is_indexed(self.rows):
            return _streamed(self.rows, begin)
        first, step = self._share
        if (worker := get_worker_info()) is not None:
            first, step = first + step * worker.id, step * worker.num_workers
        count = len(cast(Any, self.rows))
        places: Any = range(count) if self.seed is None or not count else order(self.seed, self._epoch, count)
        numbers = enumerate(range(first, count, step)[begin or 0 :], begin or 0)
        return (_read(cast(Any, self.rows)[places[place]], at, at + 1) for at, place in numbers)

    def _check(self, read: Sequence[_Read]) -> None:
        """Raise `DataError` for rows that are too long, unless they are cut."""
        too_long = [row for row in read if len(row.ids) > self.max_tokens]
        if too_long and not self.truncate:
            longest = max(len(row.ids) for row in too_long)
            raise DataError(
                f"{len(too_long)} of the next {len(read)} rows are too long",
                expected=f"rows of {self.max_tokens} tokens at most",
                got=f"{longest} tokens in the longest",
                where="pack(max_tokens=)",
                fix=f"Pass max_tokens={longest}, or truncate=True, which cuts their ends off.",
            )


def pack(
    rows: Iterable[TokenRow],
    max_tokens: int,
    *,
    lookahead: int = 1024,
    truncate: bool = False,
    pad_id: int = 0,
    seed: int | None = None,
) -> PackedRows:
    """Pack rows of tokens into rows of one length, as a stream that any number of ranks reads and resumes.

    Pass it to `prepare_loader(ctx, DataLoader(packed, batch_size), stream="dispatch")`, or with `stream="shards"`.
    Every row comes once an epoch. No communication.

    Args:
        rows: rows of tokens: a list, an object with `__len__` and `__getitem__`, or an iterable that begins anew in
            each epoch, with a state (`state_dict`, `load_state_dict`) if a resume must not read it from the beginning.
        max_tokens: length of a packed row, at least the longest row's.
        lookahead: number of rows that wait for a place; more fill better. 1 packs nothing.
        truncate: True cuts the ends of longer rows off, False refuses them.
        pad_id: token behind the last row.
        seed: shuffles rows with indices anew in each epoch; None keeps their order.

    Returns:
        The stream, of `PackedTokens`.

    Raises:
        ConfigError: a number out of its range.
        DataError: an iterator, which cannot begin anew, or shuffled rows without indices. In iteration: rows that are
            too long, with their number among the rows that are read at once.

    Examples:
        >>> rows = [post_training.TokenRow([1, 2, 3], [0, 1, 1]), post_training.TokenRow([4, 5], [0, 1])]
        >>> [packed] = post_training.pack(rows, 6)
        >>> packed.ids.tolist(), packed.documents.tolist()
        ([1, 2, 3, 4, 5, 0], [0, 0, 0, 1, 1, 2])
    """
    check_count(max_tokens, "the length of packed rows is not valid", where="pack(max_tokens=)")
    check_count(lookahead, "the number of rows is not valid", where="pack(lookahead=)")
    check_count(pad_id, "the token behind the last row is not valid", least=0, where="pack(pad_id=)")
    if isinstance(rows, Iterator):
        raise DataError(
            "an iterator cannot begin anew",
            expected="rows that can be read again in the next epoch",
            got=type(rows).__name__,
            where="pack",
            fix="Pass list(rows), or an object that reads them in __iter__.",
        )
    if seed is not None and not _is_indexed(rows):
        raise DataError(
            "rows without indices cannot be shuffled",
            expected="__len__ and __getitem__",
            got=type(rows).__name__,
            where="pack(seed=)",
            fix="Shuffle the rows where they are read.",
        )
    return PackedRows(rows, max_tokens, lookahead=lookahead, truncate=truncate, pad_id=pad_id, seed=seed)


def _is_indexed(rows: object) -> bool:
    return hasattr(rows, "__len__") and hasattr(rows, "__getitem__")


class _Read(NamedTuple):
    """A row that was read, and the states of its source in front of it and behind it."""

    ids: Tensor
    weights: Tensor
    before: Any
    behind: Any


def _read(row: TokenRow, before: Any, behind: Any) -> _Read:
    problem = "the row does not hold tokens"
    check_kind(row, TokenRow, problem, expected="a TokenRow", where="pack(rows)", error=DataError)
    weights = torch.as_tensor(row.loss_weights, dtype=torch.float32)
    if not bool((weights >= 0).all()):
        problem, got = "loss weights are below 0 or NaN", str(row.loss_weights)[:80]
        raise DataError(problem, expected="factors from 0", got=got, where="pack(rows)")
    return _Read(token_ids(row.ids, "TokenRow(ids=)"), weights, before, behind)


def _streamed(rows: Any, begin: Any) -> Iterator[_Read]:
    """Read rows in a loop. A state is theirs, or the number of rows read, which a resume reads again."""
    if not (hasattr(rows, "state_dict") and hasattr(rows, "load_state_dict")):
        yield from itertools.islice((_read(row, at, at + 1) for at, row in enumerate(rows)), begin, None)
        return
    owner = copy.copy(rows)
    if begin is not None:
        owner.load_state_dict(begin)
    before = copy.deepcopy(owner.state_dict())
    for row in owner:
        behind = copy.deepcopy(owner.state_dict())
        yield _read(row, before, behind)
        before = behind


class _Waiting:
    """Rows, cut to a length, that wait for a place in a packed row, by their number in order of reading.

    A state: the source's at the oldest row that waits, and of the rows read since then which ones wait, as bits.
    """

    def __init__(self, max_tokens: int, rows: Iterator[_Read], state: dict[str, Any]) -> None:
        self.rows: dict[int, _Read] = {}  # the oldest first
        self._most = max_tokens
        self._by_length: list[tuple[int, int]] = []  # of equal lengths the oldest, with the least negative number, last
        self._next = 0
        self._first = 0  # number of the row of the lowest bit
        self._bits = 0  # which rows wait
        self._behind: Any = state.get("source")
        bits = int(state.get("waiting", "0"), 16)
        for place, row in enumerate(itertools.islice(rows, state.get("read", 0))):
            self.add(row, waits=bool(bits >> place & 1))

    def add(self, row: _Read, *, waits: bool = True) -> None:
        """Take the next row that was read, or pass over it."""
        number = self._next
        self._next += 1
        self._behind = row.behind
        if waits:
            self.rows[number] = row._replace(ids=row.ids[: self._most], weights=row.weights[: self._most])
            bisect.insort(self._by_length, (len(self.rows[number].ids), -number))
            self._bits |= 1 << (number - self._first)

    def take(self) -> list[_Read]:
        """Take the oldest row, and again and again the longest that fits."""
        oldest = next(iter(self.rows))
        at = bisect.bisect_left(self._by_length, (len(self.rows[oldest].ids), -oldest))
        room = self._most
        taken: list[_Read] = []
        while at >= 0:
            length, below_zero = self._by_length.pop(at)
            taken.append(self.rows.pop(-below_zero))
            self._bits ^= 1 << (-below_zero - self._first)
            room -= length
            at = bisect.bisect_right(self._by_length, (room, 1)) - 1
        return taken

    def state(self) -> dict[str, Any]:
        """Return the state, from which a resume reads the rows that wait again."""
        oldest = next(iter(self.rows), self._next)
        source = self.rows[oldest].before if self.rows else self._behind
        self._bits >>= oldest - self._first
        self._first = oldest
        return {"source": source, "read": self._next - oldest, "waiting": f"{self._bits:x}"}


def _laid(rows: Sequence[_Read], size: int, pad_id: int) -> PackedTokens:
    """Lay rows one behind the other."""

    def joined(parts: Iterable[Tensor], value: int = 0) -> Tensor:
        whole = torch.cat(list(parts))
        return pad(whole, (0, size - len(whole)), value=value)

    lengths = [len(row.ids) for row in rows]
    lengths += [size - sum(lengths)] * (sum(lengths) < size)
    counts = torch.tensor(lengths)
    documents = torch.arange(len(lengths)).repeat_interleave(counts)
    return PackedTokens(
        ids=joined((row.ids for row in rows), pad_id),
        position_ids=torch.arange(size) - (counts.cumsum(0) - counts)[documents],
        documents=documents,
        targets=joined((pad(row.ids[1:], (0, 1), value=pad_id) for row in rows), pad_id),
        loss_weights=joined(pad(row.weights[1:], (0, 1)) for row in rows),
    )
