# SPDX-License-Identifier: Apache-2.0
"""What a user's own sampler gives for one epoch: the same on every rank, and again after a resume.

The sampler is copied. The random generators of the copy, and the global streams while it is asked, start from a key; so
what it gives follows from its settings, the seed and the epoch alone, and the user's object stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import random as python_random
import sys
from array import array
from collections.abc import Generator
from itertools import pairwise
from typing import Any, cast

import msgspec
import torch
from torch.utils.data import Sampler

from accel.data._plan import Cursor
from accel.errors import AccelError, DataError
from accel.random import Key, capture_rng, restore_rng, seed_rng

_CPU = torch.device("cpu")


class Draw(msgspec.Struct, frozen=True, eq=False):
    """What a sampler gave.

    Attributes:
        samples: positions in the dataset, int64, shape [given].
        bounds: of a batch sampler: 0, and where each batch ends among the samples; empty of another.
        digest: a short text that differs between different samples or batches.
    """

    samples: torch.Tensor
    bounds: list[int]
    digest: str


def draw(sampler: Any, cursor: Cursor, *, in_batches: bool, dataset: int | None) -> Draw:
    """Return the samples of one epoch. No communication; global random streams are left as they were.

    Args:
        sampler: gives positions in the dataset, or lists of them; has a length, unless it gives lists.
        cursor: which epoch of which seed.
        in_batches: whether it gives lists.
        dataset: samples in the dataset, None if it has no length.

    Raises:
        DataError: it fails, or gives nothing, more than it says, no integers, or positions outside the dataset.
    """
    name, given, bounds = type(sampler).__name__, array("q"), [0]
    try:
        with _fresh_streams(sampler, cursor) as clone:
            if in_batches:
                for batch in clone:
                    given.extend(batch)
                    bounds.append(len(given))
            else:
                most = len(sampler)
                for sample in clone:
                    given.append(sample)
                    if len(given) > most:
                        _refuse(name, "gives more than its length says", f"{most} samples", "more", "Correct __len__.")
    except AccelError:
        raise
    except Exception as error:  # whatever its code raises
        raise DataError(f"the sampler failed: {type(error).__name__}: {error}", where=name) from error
    if not given:
        _refuse(name, "gives nothing: an epoch without a batch would never end", "at least one sample", "none", "")
    if any(start == stop for start, stop in pairwise(bounds)):
        _refuse(name, "gives an empty batch", "at least one sample in each", "a batch of none", "")
    samples = torch.frombuffer(given, dtype=torch.int64)
    low, high = int(samples.min()), int(samples.max())
    if low < 0 or (dataset is not None and high >= dataset):
        bad = str(low if low < 0 else high)
        _refuse(name, "gives a position outside the dataset", f"0 to {(dataset or 2**63) - 1}", bad, "")
    hashed = hashlib.blake2b(given, digest_size=6)
    hashed.update(array("q", bounds))
    return Draw(samples, bounds if in_batches else [], hashed.hexdigest())


@contextlib.contextmanager
def _fresh_streams(sampler: Any, cursor: Cursor) -> Generator[Any]:
    key = Key(cursor.seed).fold_in("sampler", cursor.epoch)
    before = capture_rng(_CPU)
    try:
        seed_rng(key, _CPU)
        yield _fresh(sampler, key, cursor.epoch)
    finally:
        restore_rng(before, _CPU)


def _fresh(sampler: Any, key: Key, epoch: int) -> Any:
    """A copy, with copies of the samplers inside it, that knows the epoch and whose generators start from the key."""
    clone = copy.copy(sampler)
    for name, value in getattr(clone, "__dict__", {}).copy().items():
        if isinstance(value, Sampler):
            setattr(clone, name, _fresh(value, key.fold_in(name), epoch))
        elif (generator := _fresh_generator(value, key.fold_in(name))) is not None:
            setattr(clone, name, generator)
    if callable(set_epoch := getattr(clone, "set_epoch", None)):
        set_epoch(epoch)
    return clone


def _fresh_generator(value: Any, key: Key) -> Any:
    """A generator of the value's kind, seeded from the key and from the value's own seed or state; None for others."""
    if isinstance(value, torch.Generator):
        return key.fold_in(value.initial_seed()).generator()
    if isinstance(value, python_random.Random):
        return python_random.Random(key.fold_in(repr(value.getstate())).integers(1)[0])
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        kind = cast(Any, type(value.bit_generator))
        return numpy.random.Generator(kind(key.fold_in(repr(value.bit_generator.state)).integers(1)[0]))
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        state = hashlib.blake2b(value.get_state()[1].tobytes(), digest_size=8).hexdigest()
        return numpy.random.RandomState(key.fold_in(state).integers(1, bits=32)[0])
    return None


def _refuse(name: str, problem: str, expected: str, got: str, fix: str) -> None:
    raise DataError(f"the sampler {problem}", expected=expected, got=got, where=name, fix=fix)
