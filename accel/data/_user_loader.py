# SPDX-License-Identifier: Apache-2.0
"""A user's DataLoader: its order and its batches, accepted as they are or refused with a way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from accel.data._epoch import SampleSource
from accel.data._plan import BatchPlan, Plan, Tail
from accel.errors import ConfigError, DataError

Lengths = Sequence[int] | torch.Tensor | Callable[[int], int]


def sample_source(
    loader: Any,
    world_size: int,
    *,
    global_batch: int | None,
    tail: Tail | None,
    batch_tokens: int | None,
    lengths: Lengths | None,
    batches_per_step: int | None,
) -> SampleSource:
    """Return the samples of a torch DataLoader; arguments and errors are `prepare_loader`'s."""
    _check_loader(loader)
    batcher = _batcher(loader)
    cuts_itself = type(batcher) is not BatchSampler
    sampler = batcher if cuts_itself else batcher.sampler
    _refuse(
        hasattr(sampler, "__next__"),
        "the sampler can be iterated only once",
        type(sampler).__name__,
        "Pass an object that returns a new iterator each time.",
    )
    size = 0 if cuts_itself else batcher.batch_size
    drops = getattr(batcher, "drop_last", False) is True
    given = {"global_batch": global_batch, "batch_tokens": batch_tokens, "batches_per_step": batches_per_step}
    _check_arguments({name for name, value in given.items() if value is not None}, lengths, cuts_itself, size)
    if (
        tail is not None and drops and tail != "drop" and not cuts_itself
    ):  # a batch sampler's own drop_last is about its batches
        raise ConfigError("two ways to end an epoch", got=f"drop_last=True and tail={tail!r}", fix="Give one of them.")
    tail = tail or ("drop" if drops else "ragged")
    held = len(loader.dataset) if isinstance(loader.dataset, Sized) else None
    by_length = _lengths(lengths, held, batch_tokens) if batch_tokens is not None else None
    samples, shuffle, salt, drawn = (None, False, None, sampler) if cuts_itself else _ordered(loader, sampler, held)
    if cuts_itself or batch_tokens is not None:
        per_step = world_size if batches_per_step is None else batches_per_step
        plan = BatchPlan(per_step, cast(Any, tail), batch_tokens)
    else:
        plan = Plan(cast(int, samples), size * world_size if global_batch is None else global_batch, tail)
    return SampleSource(
        samples=samples,
        dataset=loader.dataset,
        size=held,
        plan=plan,
        shuffle=shuffle,
        salt=salt,
        sampler=drawn,
        in_batches=cuts_itself,
        lengths=by_length,
    )


def _check_loader(loader: Any) -> None:
    """Refuse a loader that does not yield its batches as torch's DataLoader does."""
    kind = cast(Any, type(loader))
    _refuse(not isinstance(loader, DataLoader), "not a loader", kind.__name__, "Pass a torch.utils.data.DataLoader.")
    changed = any(getattr(kind, name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))
    _refuse(
        changed and not hasattr(kind, "load_state_dict"),  # StatefulDataLoader's own way gives what torch's does
        "the loader changes what is iterated",
        f"{kind.__name__}, a DataLoader with an __iter__ of its own",
        "Change samples in the dataset or in collate_fn, and pass a plain DataLoader.",
    )
    _refuse(
        not getattr(loader, "in_order", True), "batches come in their order", "in_order=False", "Leave in_order out."
    )
    begun = getattr(loader, "next_iter_state", None) is not None  # of a StatefulDataLoader
    _refuse(begun, "a cursor says where to begin", "a loaded state_dict", "Leave it out.")


def _batcher(loader: Any) -> Any:
    """Return the batch sampler, which a user may also pass as `sampler=`."""
    if loader.batch_sampler is not None:
        return loader.batch_sampler
    alone = not isinstance(loader.sampler, BatchSampler)
    _refuse(alone, "batches are cut by the plan", "batch_size=None", "Pass batch_size=1 and a collate_fn=.")
    return loader.sampler


def _ordered(loader: Any, sampler: Any, dataset: int | None) -> tuple[int, bool, int | None, Any]:
    """Return the samples of an epoch, whether they are shuffled, the second seed, and the sampler to draw from.

    Arithmetic replaces only torch's own plain samplers; a subclass may order in its own way.
    """
    generators = (getattr(sampler, "generator", None), loader.generator)
    salt = next((each.initial_seed() for each in generators if each is not None), None)
    name = type(sampler).__name__
    kind = cast(type[object], type(sampler))
    shuffled = kind is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    if kind is SequentialSampler or shuffled:
        unsized = dataset is None or not isinstance(sampler.data_source, Sized)
        _refuse(unsized, "the dataset has no length", "no __len__", "Give it one.")
        count = len(sampler)
        _refuse(count > cast(int, dataset), "the sampler is over more than the dataset", f"{count} positions", "")
        return count, shuffled, salt, None
    sharded = isinstance(sampler, DistributedSampler)
    _refuse(sharded, "the sampler shards already", name, "Leave it out and pass shuffle=.")
    _refuse(not hasattr(sampler, "__len__"), "the sampler has no length", name, "Give it a __len__.")
    return len(sampler), False, salt, sampler


def _check_arguments(given: set[str], lengths: object, cuts_itself: bool, size: int) -> None:
    """Refuse arguments that contradict each other, or have no effect."""
    by_tokens = "batch_tokens" in given
    if cuts_itself:
        refused, why, instead = {"global_batch", "batch_tokens"}, "the batch sampler", "batches_per_step"
    elif by_tokens:
        refused, why, instead = {"global_batch"}, "batch_tokens", "batches_per_step"
    else:
        refused, why, instead = {"batches_per_step"}, "the batch size", "global_batch"
    for name in sorted(given & refused):
        raise ConfigError(
            f"{why} cuts the batches", got=f"{name}=", where="prepare_loader", fix=f"Use {instead}= instead."
        )
    if by_tokens and size != 1:
        raise ConfigError(
            "two ways to cut batches", got=f"batch_tokens= and batch_size={size}", fix="Leave batch_size out."
        )
    if by_tokens != (lengths is not None):
        raise ConfigError("batch_tokens= and lengths= need each other", where="prepare_loader", fix="Give both.")


def _lengths(lengths: Any, dataset: int | None, batch_tokens: int) -> torch.Tensor:
    _refuse(dataset is None, "the dataset has no length", "no __len__", "Give it one.")
    try:
        known = [lengths(sample) for sample in range(cast(int, dataset))] if callable(lengths) else lengths
        counts = torch.as_tensor(known)
    except Exception as error:  # any error of the user's function
        raise DataError(
            "lengths cannot be read", got=f"{type(error).__name__}: {error}", where="prepare_loader(lengths=)"
        ) from error
    whole = not (counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool)
    _refuse(
        not whole or counts.shape != (dataset,),
        "lengths must be one integer a sample",
        f"{counts.dtype} of shape {list(counts.shape)} for {dataset} samples",
        "",
    )
    longest = int(counts.max()) if dataset else 0
    shortest = int(counts.min()) if dataset else 0
    _refuse(shortest < 0, "a length is negative", str(shortest), "")
    sample = int(counts.argmax()) if dataset else 0
    too_long = f"sample {sample} of {longest} tokens with batch_tokens={batch_tokens}"
    _refuse(
        longest > batch_tokens, "a sample is longer than a batch may be", too_long, "Truncate it, or raise the limit."
    )
    return counts.to(torch.int64)


def _refuse(condition: bool, problem: str, got: str, fix: str) -> None:
    if condition:
        raise DataError(problem, got=got, where="prepare_loader", fix=fix)
