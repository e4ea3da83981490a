# SPDX-License-Identifier: Apache-2.0
"""`prepare_loader`: a frozen description of an ordinary torch DataLoader, sharded over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast, overload

from torch.utils.data import DataLoader

from accel.context import DistContext, context_first
from accel.data._cursor import Coordinates, Cursor, LastPass
from accel.data._epoch import SampleSource, plan_epoch
from accel.data._plan import Plan, Tail
from accel.data._requests import Workers
from accel.data._user_loader import Lengths, sample_source
from accel.data.stream._loader import StreamLoader, StreamMode, is_stream, reading_options, stream_loader
from accel.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loader:
    """A sharded loader: samples, their cut into steps, and the rank. Iterate it with `batches(ctx, loader, cursor)`.

    Attributes:
        source: the samples, and how every epoch orders and cuts them.
        rank, world_size: data-parallel rank that reads here, and the number of these.
        prepared_for: the coordinates of its context.
        num_workers: worker processes that read ahead; 0 reads in this one.
        seed_samples: whether each sample is read with random streams of its own.
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
        plan, sampler = self.source.plan, self.source.sampler
        if isinstance(plan, Plan):
            return plan.steps
        if plan.batch_tokens is None and hasattr(sampler, "__len__"):
            count = len(sampler)
            return count // plan.batches_per_step if plan.tail == "drop" else -(-count // plan.batches_per_step)
        raise DataError(
            "the number of steps differs from epoch to epoch", got="len(loader)", fix="Use loader.steps(cursor)."
        )

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.source.dataset

    @property
    def samples(self) -> int | None:
        """Samples of an epoch that are used; None where they are known only after a draw."""
        plan = self.source.plan
        return plan.end if isinstance(plan, Plan) else self.source.samples

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
        raise DataError(
            "a prepared loader is read by accel.batches, from a position",
            expected="for batch in accel.batches(ctx, loader, state)",
            got="for batch in loader",
        )


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
    replay: bool = False,
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
    replay: bool = False,
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
        replay: for a stream only, whether to resume by reading from the beginning even if the stream has a state. For
            incomplete states, such as that of a Hugging Face dataset with a shuffle buffer.
        steps_per_message: for a stream only, largest number of small steps in one message between ranks; by default 1
            with workers, else 8, which are read at once. The first message holds one step.

    Returns:
        The sharded loader.

    Raises:
        DataError: a loader that cannot be sharded exactly; the error names the reason and a way out.
        ConfigError: an argument outside its range, or without an effect.

    Example:
        >>> loader = accel.prepare_loader(ctx, DataLoader(dataset, batch_size=4), global_batch=4)
        >>> [int(batch.valid) for batch in accel.batches(ctx, loader, accel.Cursor())]
        [4, 4, 2]
    """
    ctx.comm.check_open()
    raw = cast(Any, loader)  # torch leaves several attributes untyped
    rank, world_size = _place(ctx, data_parallel)
    if stream is not None or is_stream(loader):
        idle = {"batch_tokens": batch_tokens, "lengths": lengths, "batches_per_step": batches_per_step}
        _refuse_idle({**idle, "seed_samples": seed_samples})
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
    if replay or steps_per_message is not None:
        name = "replay" if replay else "steps_per_message"
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


def _refuse_idle(given: dict[str, object]) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name} has no effect on a stream", where=f"prepare_loader({name}=)", fix="Leave it out."
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
