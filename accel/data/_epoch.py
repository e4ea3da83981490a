# SPDX-License-Identifier: Apache-2.0
"""One epoch: its order as a keyed permutation or as a sampler drew it, and its steps from any cursor."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import math
import random as python_random
import sys
from array import array
from collections.abc import Generator, Sized
from itertools import pairwise
from typing import Any, cast

import msgspec
import torch
from torch.utils.data import Sampler

from accel.data._shards import BatchBounds, BatchPlan, EpochPlan, beyond, check_cursor, token_bounds
from accel.errors import AccelError, ConfigError, DataError
from accel.loop_state import Cursor, advance
from accel.random import Key, capture_rng, check_seed, restore_rng, seed_rng

_CPU = torch.device("cpu")
_PASSES = 100  # over the dataset, before a sampler without a length counts as endless
_PLAIN = {int, float, bool, str, bytes, tuple, type(None)}


class DrawnOrder(msgspec.Struct, frozen=True, eq=False):
    """The samples of one epoch, as a sampler drew them."""

    samples: torch.Tensor  # positions in the dataset, int64, shape [n]
    bounds: list[int]  # of a batch sampler: 0, and the end of each batch among the samples; else empty
    digest: str  # a short text, different for different samples or batches

    def at(self, positions: torch.Tensor) -> Any:
        """Return the samples at several positions, as nested lists of the positions' shape."""
        return cast(Any, self.samples[positions]).tolist()


def draw(sampler: Any, cursor: Cursor, *, in_batches: bool, dataset: Any) -> DrawnOrder:
    """Return the samples of one epoch, drawn from the user's sampler; the global random streams are restored.

    Raises `DataError` where it fails, or yields nothing, too many, no integers or positions outside the dataset.
    """
    name = type(sampler).__name__
    given = array("q")
    bounds = [0]
    size = len(dataset) if isinstance(dataset, Sized) else None
    limit = _PASSES * size if size is not None else None
    try:
        with _fresh_streams(sampler, cursor, dataset) as clone:
            most = _length(clone)
            is_announced = most is not None
            for count, each in enumerate(clone, 1):
                if most is not None and count > most:
                    most = _length(clone)  # which some know once they have begun
                    is_announced = False
                    if most is not None and count > most:
                        things = "batches" if in_batches else "samples"
                        _refuse(name, "yields more than its length", f"{most} {things}", "more", "Correct __len__.")
                if not is_announced and limit is not None and len(given) > limit:
                    _refuse(
                        name,
                        "has no length, and may have no end",
                        f"at most {_PASSES} times the dataset's {size} samples",
                        "more",
                        "Give it a __len__, or let __iter__ end.",
                    )
                if in_batches:
                    given.extend(each)
                    bounds.append(len(given))
                else:
                    given.append(each)
    except AccelError:
        raise
    except Exception as error:  # any error of the user's code
        raise _failed(sampler, error) from error
    if not given:
        _refuse(name, "yields nothing: an epoch without a batch would never end", "at least one sample", "none", "")
    if any(start == stop for start, stop in pairwise(bounds)):
        _refuse(name, "yields an empty batch", "at least one sample in each", "a batch of none", "")
    samples = torch.frombuffer(given, dtype=torch.int64)
    low = int(samples.min())
    high = int(samples.max())
    if low < 0 or (size is not None and high >= size):
        bad = str(low if low < 0 else high)
        _refuse(name, "yields a position outside the dataset", f"0 to {(size or 2**63) - 1}", bad, "")
    hashed = hashlib.blake2b(given, digest_size=6)
    hashed.update(array("q", bounds))
    return DrawnOrder(samples, bounds if in_batches else [], hashed.hexdigest())


def _length(sampler: Any) -> int | None:
    """Return a sampler's length; None if it has none, or has none yet."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError, AttributeError):  # the first two as torch's documentation asks
        return None


def _length_at(sampler: Any, epoch: int, dataset: object) -> int | None:
    lengths: set[int | None] = set()
    for seed in (0, 1):  # a length that depends on the run's seed is not known before the run
        with _fresh_streams(sampler, Cursor(seed, epoch), dataset) as clone:
            lengths.add(_length(clone))
    return lengths.pop() if len(lengths) == 1 else None


def _follows_epoch(sampler: Any) -> bool:
    """Whether a sampler, or one that it holds, has `set_epoch`."""
    waiting, seen = [sampler], set[int]()
    while waiting:
        each = waiting.pop()
        if callable(getattr(each, "set_epoch", None)):
            return True
        seen.add(id(each))
        held = list(getattr(each, "__dict__", {}).values())
        for value in held.copy():
            if isinstance(value, list | dict) and not set(map(type, cast(Any, value))) <= _PLAIN:
                held += cast(Any, value).values() if isinstance(value, dict) else value
        waiting += [value for value in held if isinstance(value, Sampler) and id(cast(object, value)) not in seen]
    return False


@contextlib.contextmanager
def _fresh_streams(sampler: Any, cursor: Cursor, dataset: object) -> Generator[Any]:
    key = Key(cursor.seed).fold_in("sampler", cursor.epoch)
    before = capture_rng(_CPU)
    try:
        seed_rng(key, _CPU)
        yield _fresh(sampler, key, cursor.epoch, {id(dataset): dataset})  # which may be too large to copy
    finally:
        restore_rng(before, _CPU)


def _fresh(sampler: Any, key: Key, epoch: int, known: dict[int, Any]) -> Any:
    """Return a copy of a sampler at an epoch, with copies of what iteration may change; `known` keeps shares shared."""
    clone = known[id(sampler)] = copy.copy(sampler)
    for name, value in getattr(clone, "__dict__", {}).copy().items():
        if (new := _fresh_part(value, key.fold_in(name), epoch, known)) is not value:
            setattr(clone, name, new)
    if callable(set_epoch := getattr(clone, "set_epoch", None)):
        set_epoch(epoch)
    return clone


def _fresh_part(value: Any, key: Key, epoch: int, known: dict[int, Any]) -> Any:
    """Copy a sampler, a list, dict or array of positions, or a random generator; return anything else as it is."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Sampler):
        return _fresh(value, key, epoch, known)
    if issubclass(kind := cast(type[object], type(value)), list | dict):
        clone = known[id(value)] = copy.copy(value)
        inside = list(cast(Any, clone.items() if issubclass(kind, dict) else enumerate(clone)))
        if not {type(each) for _, each in inside} <= _PLAIN:
            for at, each in inside:
                clone[at] = _fresh_part(each, key.fold_in(str(at)), epoch, known)
        return clone
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray and value.ndim == 1 and value.dtype.kind in "iu":
        new = value.copy()
    else:
        new = fresh_generator(value, key)
    if new is None:
        return value
    known[id(value)] = new
    return new


def fresh_generator(value: Any, key: Key) -> Any:
    """Return a generator of the value's kind, seeded from the key and the value's seed or state; None for others, and
    for generators without a seed, such as the system's."""
    if isinstance(value, torch.Generator):
        return key.fold_in(value.initial_seed()).generator(value.device)
    if isinstance(value, python_random.Random):
        try:
            seed = key.fold_in(repr(value.getstate())).integers(1)[0]
        except NotImplementedError:  # `random.SystemRandom`
            return None
        kind = cast(Any, type(value))
        new = kind.__new__(kind)  # of a subclass too, with its methods
        new.__dict__.update(vars(value))
        new.seed(seed)
        return new
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        kind = cast(Any, type(value.bit_generator))
        return numpy.random.Generator(kind(key.fold_in(repr(value.bit_generator.state)).integers(1)[0]))
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        words = value.get_state(legacy=False)["state"].get("key")
        if words is None:  # of another algorithm than MT19937, which `RandomState` does not seed
            return None
        state = hashlib.blake2b(words.tobytes(), digest_size=8).hexdigest()
        return numpy.random.RandomState(key.fold_in(state).integers(1, bits=32)[0])
    return None


def _failed(sampler: object, error: Exception) -> DataError:
    return DataError(f"the sampler failed: {type(error).__name__}: {error}", where=type(sampler).__name__)


def _refuse(name: str, problem: str, expected: str, got: str, fix: str) -> None:
    raise DataError(f"the sampler {problem}", expected=expected, got=got, where=name, fix=fix)


_ROUNDS = 6
_TABLE = 1024  # samples up to which a whole permutation is cheaper than the network
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as a signed integer, like the next
_MIXER = 0xBF58476D1CE4E5B9 - 2**64
_MASK = 2**31 - 1


class Order(msgspec.Struct, frozen=True):
    """A permutation of `range(n)` that is evaluated at single positions.

    Attributes:
        n: the number of samples.
        keys: a 63-bit key for each round; none leaves the samples in sequence.
    """

    n: int
    keys: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> int:
        """Return the sample at a position of the epoch."""
        if not 0 <= position < self.n:
            raise IndexError(f"position {position} of an order of {self.n}")
        return self.at(torch.tensor([position]))[0]

    def at(self, positions: torch.Tensor) -> Any:
        """Return the samples at positions, int64 of any shape, each from 0 to n - 1; overwrites them."""
        if self.keys and self.n <= _TABLE:
            positions = _ranked(self.n, self.keys)[positions]
        elif self.keys:
            rows = math.isqrt(self.n - 1) + 1
            columns = -(-self.n // rows)
            positions = _permute(positions, rows, columns, self.keys)
            while bool((beyond := positions >= self.n).any()):
                positions[beyond] = _permute(positions[beyond], rows, columns, self.keys)
        return cast(Any, positions).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleSource:
    """The samples of a loader, and how every epoch orders and cuts them.

    Attributes:
        samples: samples in an epoch; None for a sampler: its epochs may differ.
        dataset: the user's.
        size: samples in the dataset, None if it has no length.
        plan: the cut of an epoch into steps.
        shuffle: whether each epoch has its own permutation; without meaning with a sampler.
        salt: seed of the loader's own generator, None without one.
        sampler: the user's own, None for an order that is arithmetic.
        in_batches: whether the sampler yields lists.
        lengths: tokens of each sample of the dataset, for batches that are cut by length.
    """

    samples: int | None
    dataset: Any = dataclasses.field(repr=False)
    size: int | None
    plan: EpochPlan | BatchPlan
    shuffle: bool = False
    salt: int | None = None
    sampler: Any = None
    in_batches: bool = False
    lengths: torch.Tensor | None = None


class Epoch(msgspec.Struct, frozen=True, eq=False):
    """One epoch of one seed."""

    order: Order | DrawnOrder  # the sample at each position
    plan: EpochPlan | BatchBounds  # the cut of its positions into steps
    cursor: Cursor  # the start position; its `of` names the order


def order(seed: int, epoch: int, n: int, *, shuffle: bool = True, salt: int | None = None) -> Order:
    """Return the order of one epoch's samples: a permutation with random access and O(1) memory.

    Args:
        seed: seed of the run.
        epoch: number of the epoch, which has its own permutation.
        n: number of samples, at most 10**15.
        shuffle: False for the dataset's own sequence.
        salt: a second seed, such as the seed of a loader's generator.

    Raises:
        ConfigError: n below 1 or too large, or a seed or epoch outside its range.
    """
    if type(n) is not int or not 1 <= n <= 10**15:
        expected = "an integer from 1 to 10**15"
        raise ConfigError("cannot order so many samples", expected=expected, got=repr(n), where="order(n=)")
    key = Key(check_seed(seed, where="order(seed=)")).fold_in("data", check_seed(epoch, where="order(epoch=)"))
    key = key if salt is None else key.fold_in("salt", salt)
    return Order(n, tuple(key.integers(_ROUNDS, bits=63)) if shuffle else ())


def plan_epoch(source: SampleSource, cursor: Cursor) -> Epoch:
    """Return the epoch of the cursor; `DataError` for a cursor of another order, or past the end. No communication."""
    check_cursor(cursor)
    this, count, bounds, name = _ordered(source, cursor)
    if cursor.of not in ("", name):
        raise DataError(
            "the cursor belongs to another order",
            expected=name,
            got=cursor.of,
            where=f"epoch {cursor.epoch}, {cursor.consumed} consumed",
            fix="Use the dataset and the sampler that it came from, or begin the epoch again: state ="
            " state.at(Cursor(seed, epoch)). What a sampler draws must come from the global random streams or from"
            " generators that it holds.",
        )
    if cursor.consumed >= count:
        raise beyond(cursor, count)
    entered = Cursor(cursor.seed, cursor.epoch, cursor.consumed, name)
    plan = source.plan
    if isinstance(plan, EpochPlan):
        return Epoch(this, msgspec.structs.replace(plan, samples=count), entered)
    if source.lengths is not None and plan.batch_tokens is not None:
        rest: Any = source.lengths[torch.tensor(this.at(torch.arange(cursor.consumed, count)))]
        bounds = token_bounds(rest.tolist(), plan.batch_tokens, cursor.consumed)
    return Epoch(this, BatchBounds(bounds, plan.batches_per_step, plan.tail == "drop"), entered)


def lengths_in(source: SampleSource, epochs: int) -> list[int | None]:
    """Return the samples of each epoch, or its batches if the sampler cuts them; None where it needs a draw.

    Raises `DataError` if the sampler fails.
    """
    sampler = source.sampler
    if sampler is None:
        return [source.samples] * epochs
    try:
        if not _follows_epoch(sampler):
            return [_length(sampler) or None] * epochs
        return [_length_at(sampler, epoch, source.dataset) or None for epoch in range(epochs)]
    except Exception as error:  # any error of the user's code
        raise _failed(sampler, error) from error


def steps_of(source: SampleSource, length: int | None) -> int | None:
    """Return the steps of an epoch of a length from `lengths_in`; None if it needs a draw."""
    plan = source.plan
    if length is None or (isinstance(plan, BatchPlan) and plan.batch_tokens is not None):
        return None
    if isinstance(plan, EpochPlan):
        return msgspec.structs.replace(plan, samples=length).steps
    return length // plan.batches_per_step if plan.tail == "drop" else -(-length // plan.batches_per_step)


def skip_steps(epoch: Epoch, steps: int) -> Cursor:
    """Return the cursor after some more steps of the epoch; raise `DataError` if the rest has fewer."""
    plan, cursor = epoch.plan, epoch.cursor
    left = plan.steps_after(cursor.consumed)
    if steps > left:
        raise DataError(
            "cannot skip beyond the end of an epoch",
            expected=f"at most {left} steps",
            got=str(steps),
            fix="Begin the next epoch: state = state.next_epoch().",
        )
    if isinstance(plan, EpochPlan):
        consumed = cursor.consumed + steps * plan.global_batch
    else:
        batch = plan.batch_at(cursor.consumed) + steps * plan.batches_per_step
        consumed = plan.bounds[min(batch, len(plan.bounds) - 1)]
    return advance(cursor, consumed, is_last=steps == left)


def _ordered(source: SampleSource, cursor: Cursor) -> tuple[Order | DrawnOrder, int, list[int], str]:
    """Return the order of an epoch, its number of samples, the bounds of a sampler's batches, and the order's name."""
    if source.sampler is None:
        assert source.samples is not None  # a sampler alone can hide it
        this = order(cursor.seed, cursor.epoch, source.samples, shuffle=source.shuffle, salt=source.salt)
        salted = f" by a generator of seed {source.salt}" if source.salt is not None else ""
        name = f"{source.samples} samples {f'shuffled{salted}' if source.shuffle else 'in sequence'}"
        return this, source.samples, [], name
    drawn = draw(source.sampler, cursor, in_batches=source.in_batches, dataset=source.dataset)
    name = f"{len(drawn.samples)} samples drawn by {type(source.sampler).__name__}, digest {drawn.digest}"
    return drawn, len(drawn.samples), drawn.bounds, name


def _ranked(n: int, keys: tuple[int, ...]) -> torch.Tensor:
    """Return a table for small n, where a network of few values favours some permutations."""
    hashes = torch.arange(n)
    for key in keys:
        hashes = _mix(hashes, key)
    return torch.argsort(hashes, stable=True)


def _permute(x: torch.Tensor, rows: int, columns: int, keys: tuple[int, ...]) -> torch.Tensor:
    left = torch.div(x, columns, rounding_mode="floor")
    right = x - left * columns
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        left.add_(_mix(right, first)).remainder_(rows)
        right.add_(_mix(left, second)).remainder_(columns)
    return left.mul_(columns).add_(right)


def _mix(x: torch.Tensor, key: int) -> torch.Tensor:
    """Hash to integers below 2**31; products wrap around, and the constants are SplitMix64's."""
    y = (x + key).mul_(_GOLDEN)
    y.bitwise_xor_(y >> 32).mul_(_MIXER)
    return y.bitwise_right_shift_(33).bitwise_and_(_MASK)
