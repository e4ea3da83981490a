# SPDX-License-Identifier: Apache-2.0
"""`prepare_loader`: a frozen description of an ordinary torch DataLoader, sharded over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, NoReturn, cast, overload

import msgspec
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from accel.context import DistContext, context_first
from accel.data._epoch import SampleSource, lengths_in, plan_epoch, steps_of
from accel.data._requests import Workers
from accel.data._shards import BatchPlan, Coordinates, EpochPlan, Tail
from accel.data.stream._loader import (
    StreamLoader,
    StreamMode,
    is_stream,
    reading_options,
    stream_loader,
    tail_of,
    unread,
)
from accel.errors import ConfigError, DataError
from accel.loop_state import Cursor, LastPass

_FABRIC = "_FabricDataLoader"
_SHARDED_BATCHES, _SHARDED_STREAM = "BatchSamplerShard", "IterableDatasetShard"  # of Accelerate, and of HF's Trainer


def unwrapped_loader(loader: Any) -> Any:
    """Return the DataLoader inside of Lightning Fabric's wrapper; `DataError` for a stream that is divided already."""
    wrapped = type(loader).__name__ == _FABRIC
    held: Any = cast(dict[str, Any], vars(loader)).get("_dataloader", loader) if wrapped else loader
    source: Any = held.dataset if isinstance(cast(object, held), DataLoader) else held
    if type(source).__name__ == _SHARDED_STREAM:
        raise _divided("the stream", source)
    return held


def unwrapped_batches(batcher: Any) -> Any:
    """Return the batch sampler inside of Accelerate's shard; `DataError` for a shard that splits each batch."""
    if type(batcher).__name__ != _SHARDED_BATCHES:
        return batcher
    if batcher.split_batches:
        raise _divided("the batch sampler", batcher)
    return batcher.batch_sampler


def _divided(what: str, found: object) -> DataError:
    return DataError(
        f"{what} is divided among processes already",
        got=type(found).__name__,
        where="prepare_loader",
        fix="Pass the loader before it is wrapped.",
    )


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
    # a batch sampler's own drop_last is about its batches
    tail = tail_of(tail, drops=drops) if not cuts_itself else tail or ("drop" if drops else "ragged")
    held = len(loader.dataset) if isinstance(loader.dataset, Sized) else None
    by_length = _lengths(lengths, held, batch_tokens) if batch_tokens is not None else None
    samples, shuffle, salt, drawn = (None, False, None, sampler) if cuts_itself else _ordered(loader, sampler, held)
    if cuts_itself or batch_tokens is not None:
        per_step = world_size if batches_per_step is None else batches_per_step
        plan = BatchPlan(per_step, cast(Any, tail), batch_tokens)
    else:
        plan = EpochPlan(samples, size * world_size if global_batch is None else global_batch, tail)
    source = SampleSource(
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
    steps_of(source, *lengths_in(source, 1))  # raises if a tail drops the whole epoch
    return source


def _check_loader(loader: Any) -> None:
    """Refuse a loader that does not yield its batches as torch's DataLoader does."""
    kind = cast(Any, type(loader))
    _refuse(
        not isinstance(loader, DataLoader),
        "the loader is not a DataLoader",
        kind.__name__,
        "Pass a torch.utils.data.DataLoader.",
    )
    changed = any(getattr(kind, name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))
    _refuse(
        changed and not hasattr(kind, "load_state_dict"),  # StatefulDataLoader's own way gives what torch's does
        "the loader changes what is iterated",
        f"{kind.__name__}, a DataLoader with its own __iter__",
        "Change samples in the dataset or in collate_fn, and pass a plain DataLoader.",
    )
    _refuse(
        not getattr(loader, "in_order", True), "batches come in their order", "in_order=False", "Leave in_order out."
    )
    begun = getattr(loader, "next_iter_state", None) is not None  # of a StatefulDataLoader
    _refuse(begun, "a cursor marks the start of a pass", "a loaded state_dict", "Leave it out.")
    skipped = getattr(loader, "skip_batches", 0)  # Accelerate's own `__iter__` skips them; it is not used here
    fix = "Use accel.skip_first_batches, or pass the loader before it is wrapped."
    _refuse(bool(skipped), "a cursor marks the start of a pass", f"skip_batches={skipped}", fix)


def _batcher(loader: Any) -> Any:
    """Return the batch sampler, which a user may also pass as `sampler=`."""
    if loader.batch_sampler is not None:
        return unwrapped_batches(loader.batch_sampler)
    alone = not isinstance(loader.sampler, BatchSampler)
    _refuse(alone, "batches are cut by the plan", "batch_size=None", "Pass batch_size=1 and a collate_fn=.")
    return loader.sampler


def _ordered(loader: Any, sampler: Any, dataset: int | None) -> tuple[int | None, bool, int | None, Any]:
    """Return the samples of an epoch, whether they are shuffled, the second seed, and the sampler to draw from."""
    generators = (getattr(sampler, "generator", None), loader.generator)
    salt = next((each.initial_seed() for each in generators if each is not None), None)
    name = type(sampler).__name__
    kind = cast(type[object], type(sampler))
    shuffled = kind is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    # arithmetic replaces only torch's own plain samplers; a subclass may order in its own way
    if kind is SequentialSampler or shuffled:
        unsized = dataset is None or not isinstance(sampler.data_source, Sized)
        _refuse(unsized, "the dataset has no length", "no __len__", "Give it one.")
        count = len(sampler)
        _refuse(count > cast(int, dataset), "the sampler is over more than the dataset", f"{count} positions", "")
        return count, shuffled, salt, None
    sharded = isinstance(sampler, DistributedSampler)
    fix = "Leave it out and pass shuffle=, or pass the loader before it is wrapped."
    _refuse(sharded, "the sampler shards already", name, fix)
    return None, False, salt, sampler


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
            "two arguments set the batch size", got=f"batch_tokens= and batch_size={size}", fix="Leave batch_size out."
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loader:
    """A sharded loader: samples, their cut into steps, and the rank. Iterate it with `batches(ctx, loader, state)`.

    Attributes:
        source: the samples, and how every epoch orders and cuts them.
        rank, world_size: data-parallel rank that reads here, and the number of these.
        prepared_for: the coordinates of its context.
        num_workers: worker processes that read ahead; 0 reads in this one.
        seed_samples: whether each sample is read with separate random streams.
        collate_fn: list of samples to batch.
        whole: whether the dataset takes the list of a batch's samples as its index.
        options: further arguments of torch's DataLoader, as the user's loader had them.
        workers: the handle on persistent workers; None without them.
        passes: the memory of its last complete pass, which guards against a dropped cursor.
    """

    source: SampleSource
    rank: int
    world_size: int
    prepared_for: Coordinates
    num_workers: int
    seed_samples: bool
    collate_fn: Callable[[Any], Any]
    whole: bool
    options: dict[str, Any]
    workers: Workers | None = dataclasses.field(default=None, repr=False)
    passes: LastPass = dataclasses.field(default_factory=LastPass, repr=False)

    def __len__(self) -> int:
        """Steps in an epoch, the same on every rank.

        Raises:
            DataError: epochs differ in their steps; see `steps`.
        """
        steps = steps_of(self.source, self._length())
        if steps is None:
            raise DataError(
                "the number of steps differs from epoch to epoch",
                got="len(loader)",
                fix="Use loader.steps(state.cursor).",
            )
        return steps

    def _length(self) -> int | None:
        """Return the length of every epoch, None if epochs differ or need a draw."""
        first, second = lengths_in(self.source, 2)
        return first if first == second else None

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.source.dataset

    @property
    def samples(self) -> int | None:
        """Samples of an epoch that are used; None if epochs differ or need a draw."""
        length = None if self.source.in_batches else self._length()
        if length is None or not isinstance(plan := self.source.plan, EpochPlan):
            return length
        return msgspec.structs.replace(plan, samples=length).end

    def steps(self, cursor: Cursor) -> int:
        """Return the number of steps from a cursor to the end of its epoch. Draws from the user's sampler.

        Raises:
            DataError: a cursor of another dataset; or the sampler fails.
        """
        return plan_epoch(self.source, cursor).plan.steps_after(cursor.consumed)

    def close(self) -> None:
        """End persistent workers, which otherwise live as long as the loader; a later epoch starts new ones."""
        if self.workers is not None:
            self.workers.close()

    def __iter__(self) -> NoReturn:
        raise unread()


@overload
def prepare_loader(
    ctx: DistContext,
    loader: DataLoader[Any],
    *,
    stream: None = None,
    global_batch: int | None = None,
    tail: Tail | None = None,
    batch_tokens: int | None = None,
    lengths: Lengths | None = None,
    batches_per_step: int | None = None,
    data_parallel: tuple[int, int] | None = None,
    seed_samples: bool | None = None,
) -> Loader: ...


@overload
def prepare_loader(
    ctx: DistContext,
    loader: Iterable[Any],
    *,
    stream: StreamMode,
    global_batch: int | None = None,
    tail: Tail | None = None,
    data_parallel: tuple[int, int] | None = None,
    replay: bool | None = None,
    steps_per_message: int | None = None,
) -> StreamLoader: ...


@context_first
def prepare_loader(
    ctx: DistContext,
    loader: Iterable[Any],
    *,
    stream: StreamMode | None = None,
    global_batch: int | None = None,
    tail: Tail | None = None,
    batch_tokens: int | None = None,
    lengths: Lengths | None = None,
    batches_per_step: int | None = None,
    data_parallel: tuple[int, int] | None = None,
    seed_samples: bool | None = None,
    replay: bool | None = None,
    steps_per_message: int | None = None,
) -> Loader | StreamLoader:
    """Shard a DataLoader over the ranks of the context. No communication; the user's loader does not change.

    `shuffle=True` means a new order each epoch; the order itself follows from the cursor's seed. Every rank draws from
    a sampler once an epoch, with random streams seeded from the cursor.

    Args:
        ctx: the context.
        loader: over a map-style dataset, with any sampler or batch sampler; or over a stream.
        stream: for a stream only, its division: "shards", "own", "elements" or "dispatch"; see `StreamLoader`.
        global_batch: samples of all ranks in one step; by default the loader's batch size times the ranks.
        tail: treatment of a last step that is not full; by default `drop` if the loader has `drop_last`, else
            `ragged`. `pad` keeps shapes constant; not for batches of different sizes.
        batch_tokens: largest number of tokens in a rank's batch, its rows times its longest sample. Batches then differ
            in size.
        lengths: for `batch_tokens`: lengths of the dataset's samples in tokens, or a function from a sample's position
            to its length.
        batches_per_step: for `batch_tokens` and for a batch sampler of your own: batches of all ranks in one step, by
            default one a rank. A rank takes whole batches, and joins several into one.
        data_parallel: (index, count) of this rank among the data-parallel ranks; by default `ctx.data_parallel`.
            Without a mesh every rank is one. Ranks with the same index read the same samples.
        seed_samples: whether each sample is read with its own random streams, seeded by seed, epoch and position; by
            default if the loader has workers. Augmentation then depends on neither workers nor ranks. A dataset that
            draws nothing, such as a TensorDataset, is seeded once a batch. Streams are always seeded.
        replay: for a stream only, whether to resume by reading from the beginning even if the stream has a state. By
            default if the state is known to be incomplete, as a Hugging Face dataset's with a shuffle buffer. With
            False the samples in the buffer are lost at a resume.
        steps_per_message: for a stream only, largest number of small steps in one message between ranks; by default 1
            with workers, else 8, which are read at once. The first message holds one step.

    Returns:
        The sharded loader.

    Raises:
        DataError: a loader that cannot be sharded exactly; the error names the reason and a fix.
        ConfigError: an argument outside its range, or without an effect.

    Examples:
        >>> loader = accel.prepare_loader(ctx, DataLoader(dataset, batch_size=4), global_batch=4)
        >>> [int(batch.valid) for batch in accel.batches(ctx, loader)]
        [4, 4, 2]
    """
    ctx.comm.check_open()
    loader = unwrapped_loader(loader)
    raw = cast(Any, loader)  # torch leaves several attributes untyped
    rank, world_size = _place(ctx, data_parallel)
    if stream is not None or is_stream(loader):
        idle = {"batch_tokens": batch_tokens, "lengths": lengths, "batches_per_step": batches_per_step}
        for name in (name for name, value in {**idle, "seed_samples": seed_samples}.items() if value is not None):
            problem, where = f"{name} has no effect on a stream", f"prepare_loader({name}=)"
            raise ConfigError(problem, where=where, fix="Leave it out.")
        return stream_loader(
            ctx,
            loader,
            stream,
            (rank, world_size),
            global_batch=global_batch,
            tail=tail,
            replay=replay,
            steps_per_message=steps_per_message,
        )
    if replay is not None or steps_per_message is not None:
        name = "replay" if replay is not None else "steps_per_message"
        raise ConfigError(f"{name} has an effect on streams only", where="prepare_loader", fix="Leave it out.")
    source = sample_source(
        raw,
        world_size,
        global_batch=global_batch,
        tail=tail,
        batch_tokens=batch_tokens,
        lengths=lengths,
        batches_per_step=batches_per_step,
    )
    workers = raw.num_workers
    return Loader(
        source=source,
        rank=rank,
        world_size=world_size,
        prepared_for=(ctx.rank, ctx.world_size, ctx.data_parallel),
        num_workers=workers,
        seed_samples=workers > 0 if seed_samples is None else seed_samples,
        collate_fn=raw.collate_fn,
        whole=raw.batch_sampler is None,
        options=reading_options(raw) | {"persistent_workers": raw.persistent_workers},
        workers=Workers() if raw.persistent_workers else None,
    )


def _place(ctx: DistContext, data_parallel: tuple[int, int] | None) -> tuple[int, int]:
    if data_parallel is None:
        return ctx.data_parallel
    match data_parallel:
        case (int(index), int(count)) if 0 <= index < count and (ctx.world_size == 1 or ctx.world_size % count == 0):
            return index, count
        case _:
            raise ConfigError(
                "no such index among data-parallel ranks",
                expected=f"(index, count), an index below a count that divides {ctx.world_size} ranks",
                got=repr(data_parallel),
                where="prepare_loader(data_parallel=)",
            )
