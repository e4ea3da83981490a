# SPDX-License-Identifier: Apache-2.0
"""A loader over a stream: its division among ranks is stated by the user, because it cannot be guessed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Generator, Iterable
from typing import Any, Literal, NoReturn, Protocol, cast, get_args, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from accel.context import DistContext
from accel.data._shards import Coordinates, Tail
from accel.data.stream._reader import StepPlan, forgotten_samples, is_unseeded
from accel.errors import ConfigError, DataError
from accel.errors._checks import check_choice, check_count, check_kind
from accel.loop_state import LastPass
from accel.tree import Container

StreamMode = Literal["shards", "own", "elements", "dispatch"]

_STEPS_PER_MESSAGE = 8

_MODES = (
    'stream="shards": each rank reads its part of the sources, dataset.shard(num_shards=, index=); '
    'stream="own": the dataset of each rank is its own part already; '
    'stream="elements": the first rank of each node reads the full stream and sends batches to its node; '
    'stream="dispatch": rank 0 reads the full stream and sends batches to all'
)


def unread() -> DataError:
    """Make the error for a loop over a prepared loader."""
    return DataError(
        "a prepared loader is read by accel.batches, from a position",
        expected="for batch in accel.batches(ctx, loader, state)",
        got="for batch in loader",
    )


@runtime_checkable
class _Shardable(Protocol):
    def shard(self, num_shards: int, index: int) -> Iterable[Any]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamLoader:
    """A loader over a stream: its source, its readers and its steps. Iterate it with `batches(ctx, loader, state)`.

    Attributes:
        source: the dataset; in mode `shards` this rank's part of it.
        mode: division of the stream: `shards`, `own`, `elements` or `dispatch`.
        tail: treatment of the end: `ragged` takes a sample once, with shorter batches and placeholders on some ranks;
            `pad` keeps shapes; `drop` ends all ranks where the first has no full batch left.
        batch_size: samples in a rank's batch, where each rank reads; None for a stream of batches.
        global_batch: samples in a step of all ranks; None for a stream of batches.
        rank, world_size: data-parallel rank, and the number of these.
        prepared_for: the coordinates of its context.
        replay: whether to resume by reading from the beginning even if the stream has a state; by default if that state
            is known to be incomplete.
        steps_per_message: largest number of steps in one message between ranks.
        num_workers: worker processes that read ahead, on the ranks that read; 0 reads in the rank's own process.
        collate_fn: list of samples to batch.
        options: further arguments of torch's DataLoader, as the user's loader had them.
        passes: the memory of its last complete pass, which guards against a dropped cursor.
    """

    source: Iterable[Any]
    mode: StreamMode
    tail: Tail
    batch_size: int | None
    global_batch: int | None
    rank: int
    world_size: int
    prepared_for: Coordinates
    replay: bool
    steps_per_message: int
    num_workers: int
    collate_fn: Callable[[Any], Any]
    options: dict[str, Any]
    passes: LastPass = dataclasses.field(default_factory=LastPass, repr=False, compare=False)

    def __iter__(self) -> NoReturn:
        raise unread()

    @property
    def is_shared(self) -> bool:
        """Whether some ranks read the whole stream for others."""
        return self.mode in ("elements", "dispatch")

    def plan(self, mine: tuple[int, ...], containers: tuple[Container, ...]) -> StepPlan:
        """Return how a reader shards the stream.

        Args:
            mine: data-parallel ranks that the reader serves.
            containers: further kinds of containers that batches may hold.
        """
        whole = self.batch_size is None
        if not self.is_shared:
            return StepPlan(self.batch_size or 1, 1, (0,), self.tail, whole, containers)
        size = self.global_batch or self.world_size
        return StepPlan(size, self.world_size, mine, self.tail, whole, containers)


def is_stream(loader: object) -> bool:
    """Whether a loader is over a stream: a DataLoader over an IterableDataset, or an iterable that is no DataLoader."""
    if isinstance(loader, DataLoader):
        return isinstance(cast(Any, loader).dataset, IterableDataset)
    return isinstance(loader, Iterable) and hasattr(cast(object, loader), "state_dict")


def stream_loader(
    ctx: DistContext,
    loader: Any,
    mode: StreamMode | None,
    place: tuple[int, int],
    *,
    global_batch: int | None,
    tail: Tail | None,
    replay: bool | None,
    steps_per_message: int | None,
) -> StreamLoader:
    """Prepare a loader over a stream; see `prepare_loader`. No communication."""
    if mode is None:
        raise DataError(
            "a stream has no positions to shard",
            expected="prepare_loader(ctx, loader, stream=...), which states the division",
            got="no stream=",
            fix=_MODES,
        )
    check_choice(mode, get_args(StreamMode), "unknown way to read a stream", where="prepare_loader(stream=)")
    is_torch = isinstance(loader, DataLoader)
    if is_torch:
        _check_torch(loader)
    elif not isinstance(loader, Iterable) or isinstance(loader, Generator):
        raise DataError(
            "the loader is not a DataLoader",
            expected="a DataLoader over an IterableDataset, or an object that can be iterated once an epoch",
            got=type(cast(object, loader)).__name__,
            where="prepare_loader",
        )
    batch_size = loader.batch_size if is_torch else None
    chosen = _tail(tail, drops=is_torch and bool(loader.drop_last), whole=batch_size is None)
    if steps_per_message is not None:
        check_count(steps_per_message, "the number of steps is not valid", where="steps_per_message=")
    rank, world_size = place
    each, total = _sizes(world_size, batch_size, global_batch, mode)
    workers = loader.num_workers if is_torch else 0
    source = _source(place, cast(Any, loader).dataset if is_torch else loader, mode)
    if ctx.is_main_process and is_unseeded(source):
        logging.getLogger("accel.data").warning(
            "%s is shuffled without a seed: every process reads another order, so a resume would lose and repeat "
            "samples. Pass seed= to shuffle and interleave_datasets",
            type(source).__name__,
        )
    return StreamLoader(
        source=source,
        mode=mode,
        tail=chosen,
        batch_size=each,
        global_batch=total,
        rank=rank,
        world_size=world_size,
        prepared_for=(ctx.rank, ctx.world_size, ctx.data_parallel),
        replay=forgotten_samples(source) > 0 if replay is None else replay,
        steps_per_message=steps_per_message or (1 if workers else _STEPS_PER_MESSAGE),
        num_workers=workers,
        collate_fn=cast(Any, loader).collate_fn if is_torch else _unchanged,
        options=reading_options(loader) if is_torch else {},
    )


def tail_of(tail: Tail | None, *, drops: bool) -> Tail:
    """Return the treatment of an epoch's end: the stated one, or the loader's; `ConfigError` if they differ."""
    if tail is not None and drops and tail != "drop":
        raise ConfigError(
            "two arguments end the epoch", got=f"drop_last=True and tail={tail!r}", fix="Give one of them."
        )
    return tail or ("drop" if drops else "ragged")


def _tail(tail: Tail | None, *, drops: bool, whole: bool) -> Tail:
    """Return the treatment of an epoch's end in a stream."""
    chosen = tail_of(tail, drops=drops)
    check_choice(chosen, get_args(Tail), "unknown way to end an epoch", where="tail=")
    if whole and chosen == "pad":
        raise ConfigError(
            "a stream of batches cannot be padded",
            got='tail="pad" and no batch_size',
            where="prepare_loader",
            fix='Let the DataLoader batch the samples: batch_size=, or use tail="ragged" or "drop".',
        )
    return chosen


def _sizes(
    world_size: int, batch_size: int | None, global_batch: int | None, mode: StreamMode
) -> tuple[int | None, int | None]:
    """Return the samples in a rank's batch, and in a step."""
    if global_batch is None:
        return batch_size, None if batch_size is None else batch_size * world_size
    check_count(global_batch, "the number of samples in a step is not valid", where="global_batch=")
    if batch_size is None:
        raise ConfigError("the stream yields batches", got="global_batch= and no batch_size", fix="Leave it out.")
    if mode in ("shards", "own") and global_batch % world_size:
        raise ConfigError(
            "ranks that read separately have batches of one size",
            expected=f"a multiple of {world_size} ranks",
            got=str(global_batch),
            where="global_batch=",
        )
    return -(-global_batch // world_size), global_batch


def _source(place: tuple[int, int], dataset: Any, mode: StreamMode) -> Iterable[Any]:
    if mode != "shards":
        return dataset
    check_kind(
        dataset,
        _Shardable,
        "the dataset cannot be divided by source",
        expected="a method shard(num_shards, index), as Hugging Face's iterable datasets have",
        where="prepare_loader",
        fix="Add one, or choose another mode. " + _MODES,
        error=DataError,
    )
    for name in ("num_shards", "n_shards"):
        shards = getattr(dataset, name, None)
        if isinstance(shards, int) and shards < place[1]:
            raise DataError(
                "there are fewer source shards than ranks",
                expected=f"at least {place[1]}",
                got=f"{name}={shards}",
                where="prepare_loader",
                fix='Divide the data into more files, or use stream="elements" or "dispatch".',
            )
    return dataset.shard(num_shards=place[1], index=place[0])


def _check_torch(loader: Any) -> None:
    check_kind(
        loader.dataset,
        IterableDataset,
        "a dataset with positions is sharded by its order, not read as a stream",
        where="prepare_loader(stream=)",
        fix="Leave stream= out.",
        error=DataError,
    )
    refused = {
        "batches come in their order": (not getattr(loader, "in_order", True), "in_order=False"),
        "the cursor's seed decides": (loader.generator is not None, "a generator"),
        "a cursor marks the start of a pass": (
            getattr(loader, "next_iter_state", None) is not None,
            "a loaded state_dict",
        ),
    }
    for problem, (wrong, got) in refused.items():
        if wrong:
            raise DataError(problem, got=got, where="prepare_loader", fix="Leave it out.")


def reading_options(loader: Any) -> dict[str, Any]:
    """Return the arguments of a user's DataLoader that concern reading."""
    return {
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor if loader.num_workers else None,
    }


def _unchanged(batch: Any) -> Any:
    return batch
