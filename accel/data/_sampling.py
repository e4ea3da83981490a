# SPDX-License-Identifier: Apache-2.0
"""One epoch's samples from a user's own sampler: the same on every rank, and again after a resume.

The sampler is copied, with the lists and samplers in it. The random generators of the copy, and the global streams
while it is iterated, start from a key. So its samples follow from its settings, the seed and the epoch alone, and the
user's object stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import random as python_random
import sys
from array import array
from collections.abc import Generator, Sized
from itertools import pairwise
from typing import Any, cast

import msgspec
import torch
from torch.utils.data import Sampler

from accel.data._cursor import Cursor
from accel.errors import AccelError, DataError
from accel.random import Key, capture_rng, restore_rng, seed_rng

_CPU = torch.device("cpu")
_PLAIN = {int, float, bool, str, bytes, tuple, type(None)}


class SamplerDraw(msgspec.Struct, frozen=True, eq=False):
    """Samples drawn from a sampler.

    Attributes:
        samples: positions in the dataset, int64, shape [given].
        bounds: of a batch sampler: 0, and the end of each batch among the samples; else empty.
        digest: a short text, different for different samples or batches.
    """

    samples: torch.Tensor
    bounds: list[int]
    digest: str


def draw(sampler: Any, cursor: Cursor, *, in_batches: bool, dataset: Any) -> SamplerDraw:
    """Return the samples of one epoch. No communication; restores the global random streams.

    Args:
        sampler: iterable of positions in the dataset, or of lists of them; has a length, unless it yields lists.
        cursor: position in the epoch to draw.
        in_batches: whether the sampler yields lists.
        dataset: the user's dataset, with or without a length.

    Raises:
        DataError: the sampler fails, or yields nothing, more than its length, no integers, or positions outside the
            dataset.
    """
    name = type(sampler).__name__
    given = array("q")
    bounds = [0]
    size = len(dataset) if isinstance(dataset, Sized) else None
    try:
        most = _length(sampler)
        with _fresh_streams(sampler, cursor, dataset) as clone:
            for count, each in enumerate(clone, 1):
                if most is not None and count > most:
                    things = "batches" if in_batches else "samples"
                    _refuse(name, "yields more than its length", f"{most} {things}", "more", "Correct __len__.")
                if in_batches:
                    given.extend(each)
                    bounds.append(len(given))
                else:
                    given.append(each)
    except AccelError:
        raise
    except Exception as error:  # any error of the user's code
        raise DataError(f"the sampler failed: {type(error).__name__}: {error}", where=name) from error
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
    return SamplerDraw(samples, bounds if in_batches else [], hashed.hexdigest())


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):  # as torch says that a batch sampler without a length should do
        return None


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
    """Return a copy at an epoch, with copies of the attributes that iteration may change.

    Args:
        sampler: the original.
        key: start of its generators.
        epoch: argument of its `set_epoch`.
        known: copies by the identity of their originals, so that shared attributes stay shared.
    """
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
        new = _fresh_generator(value, key)
    if new is None:
        return value
    known[id(value)] = new
    return new


def _fresh_generator(value: Any, key: Key) -> Any:
    """Return a generator of the value's kind, seeded from the key and the value's seed or state; None for others."""
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
