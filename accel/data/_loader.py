# SPDX-License-Identifier: Apache-2.0
"""`prepare_loader`: an ordinary torch DataLoader becomes a frozen description of how its samples are sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sized
from typing import Any, NoReturn, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accel.context import DistContext
from accel.data._plan import Plan, Tail
from accel.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """A sharded loader: what to read, how to cut it, for which rank. Iterate it with `batches(ctx, loader, cursor)`.

    Attributes:
        dataset: map-style.
        plan: how an epoch is cut.
        rank, world_size: whom it is sharded for.
        num_workers: processes that read ahead; 0 reads in this one.
        collate_fn: list of samples to batch.
        options: further arguments of torch's DataLoader, as the user's loader had them.
    """

    dataset: Any
    plan: Plan
    rank: int
    world_size: int
    num_workers: int
    collate_fn: Callable[[list[Any]], Any]
    options: dict[str, Any]

    def __len__(self) -> int:
        """Steps in an epoch, the same on every rank."""
        return self.plan.steps

    def __iter__(self) -> NoReturn:
        raise DataError(
            "a prepared loader is iterated from a cursor",
            expected="for batch in accel.batches(ctx, loader, cursor)",
            got="for batch in loader",
        )


def prepare_loader(
    ctx: DistContext, loader: DataLoader[Any], *, global_batch: int | None = None, tail: Tail | None = None
) -> Loader:
    """Shard a DataLoader over the ranks of the context. No communication; the user's loader is left as it is.

    `shuffle=True` is taken as the wish for a new order each epoch; the order itself follows from the cursor's seed.

    Args:
        ctx: the context.
        loader: over a map-style dataset, in sequence or shuffled, with a batch size.
        global_batch: samples of all ranks in one step; by default the loader's batch size times the ranks.
        tail: what to do with a last batch that is not full; by default `drop` if the loader has `drop_last`, else
            `ragged`.

    Returns:
        The sharded loader.

    Raises:
        DataError: a loader that cannot be sharded exactly; the message says why and what to do.
        ConfigError: a global batch below 1, or an unknown tail.
    """
    ctx.comm.check_open()
    raw = cast(Any, loader)  # torch leaves several attributes untyped
    kind = cast(type[object], type(raw))
    _refuse(not isinstance(raw, DataLoader), "not a loader", kind.__name__, "Pass a torch.utils.data.DataLoader.")
    size = _batch_size(raw)
    shuffle = _is_shuffled(raw)
    _refuse(
        loader.persistent_workers,
        "workers do not persist from one epoch to the next",
        "persistent_workers=True",
        "Leave it out.",
    )
    _refuse(not getattr(raw, "in_order", True), "batches come in their order", "in_order=False", "Leave it out.")
    _refuse(not isinstance(raw.dataset, Sized), "the dataset has no length", "no __len__", "Give it one.")
    drops = bool(loader.drop_last)
    if tail is not None and drops and tail != "drop":
        raise ConfigError("two ways to end an epoch", got=f"drop_last=True and tail={tail!r}", fix="Give one of them.")
    plan = Plan(
        samples=len(cast(Sized, loader.dataset)),
        global_batch=size * ctx.world_size if global_batch is None else global_batch,
        shuffle=shuffle,
        tail=tail or ("drop" if drops else "ragged"),
    )
    workers = loader.num_workers
    return Loader(
        dataset=loader.dataset,
        plan=plan,
        rank=ctx.rank,
        world_size=ctx.world_size,
        num_workers=workers,
        collate_fn=raw.collate_fn,
        options={
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": raw.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor if workers else None,
        },
    )


def _batch_size(loader: Any) -> int:
    iterable = isinstance(loader.dataset, IterableDataset)
    _refuse(iterable, "a stream has no positions to shard", "an IterableDataset", "Pass a map-style dataset.")
    own_batches = loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler
    _refuse(own_batches, "batches are cut by the plan", "batch_size=None or a batch_sampler", "Pass batch_size=.")
    return cast(int, loader.batch_size)


def _is_shuffled(loader: Any) -> bool:
    sampler = loader.sampler
    given = loader.generator is not None or getattr(sampler, "generator", None) is not None
    _refuse(given, "the cursor's seed decides the order", "a generator", "Leave generator out; use Cursor(seed=).")
    kind = cast(type[object], type(sampler))  # a subclass may order in its own way
    known = kind in (SequentialSampler, RandomSampler)
    _refuse(not known, "the order is in sequence or shuffled", kind.__name__, "Pass shuffle=True or no sampler.")
    shuffled = kind is RandomSampler
    drawn = shuffled and (sampler.replacement or sampler.num_samples != len(loader.dataset))
    _refuse(drawn, "every sample is taken once an epoch", "a RandomSampler that draws", "Pass shuffle=True.")
    return shuffled


def _refuse(condition: bool, problem: str, got: str, fix: str) -> None:
    if condition:
        raise DataError(problem, got=got, where="prepare_loader", fix=fix)
