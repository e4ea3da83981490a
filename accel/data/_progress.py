# SPDX-License-Identifier: Apache-2.0
"""Steps of a prepared loader, `progress` as a line of text, and `gather_for_metrics` without padding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TextIO, TypeVar, cast, overload

import torch
from torch.utils.data import DataLoader

from accel.collectives import check_packable, gather, gather_object
from accel.comm import Call, shared_failure
from accel.context import DistContext, context_first
from accel.data._batches import Batch, cursor_of
from accel.data._epoch import lengths_in, plan_epoch, skip_steps, steps_of
from accel.data._loader import Lengths, Loader, prepare_loader
from accel.data._shards import Tail
from accel.data.stream._loader import StreamLoader, is_stream
from accel.errors import ConfigError, DataError, TreeError
from accel.errors._checks import check_count, check_kind
from accel.loop_state import Cursor, Positioned
from accel.terminal import ProgressBar
from accel.tree import map_tensors
from accel.tree._walk import leaves

P = TypeVar("P", bound=Cursor | Positioned)


@context_first
def progress(
    ctx: DistContext,
    batches: Iterable[Batch],
    *,
    total: int | None = None,
    label: str = "",
    show: bool = True,
    file: TextIO | None = None,
    every_s: float | None = None,
    values: Callable[[], Mapping[str, float | torch.Tensor]] | None = None,
) -> Generator[Batch]:
    """Yield batches, and show their progress on the main rank. No communication beyond theirs.

    A terminal or a notebook shows a bar, also the terminal of `accel launch`; a log gets a line now and then, and one
    at the end. The rate counts the real samples of all ranks since the start. The bar shows the position in the epoch,
    so a resumed epoch does not begin at zero.

    Args:
        ctx: the context.
        batches: from `accel.batches`.
        total: samples in the epoch, such as `loader.samples`; without it neither bar nor remaining time is shown.
        label: text in front; the epoch by default.
        show: whether to show anything.
        file: stream to print to; standard error by default.
        every_s: seconds between two updates; by default 0.2 on a terminal, 1 in a notebook and 10 elsewhere.
        values: function that returns numbers and scalar tensors by name, such as the loss and the learning rate. Called
            on the main rank only, at each update, so it must not communicate. Waits for tensors on a GPU.

    Yields:
        The batches.

    Raises:
        ConfigError: something else than batches, or `values` returned something else than numbers by name; on the main
            rank.
    """
    if not ctx.is_main_process or not show:
        yield from batches
        return
    out = sys.stderr if file is None else file
    bar = ProgressBar(out, total, show=_show_count, unit=" samples", every_s=every_s, columns=ctx.columns)
    seen = 0
    try:
        for batch in batches:
            check_kind(  # tqdm is given anything
                batch,
                Batch,
                "progress counts the samples of batches",
                expected="accel.batches(ctx, loader, ...)",
                where="progress",
                fix="For other things take tqdm itself: tqdm(things, disable=not ctx.is_main_process).",
            )
            yield batch
            seen += batch.valid.world
            if batch.is_last or bar.is_due():
                epoch = batch.next.epoch - batch.is_last
                at = (total if batch.is_last else batch.next.consumed) or seen
                facts = "" if values is None else _facts(values())
                bar.draw(label or f"epoch {epoch}", at, seen, facts)
    finally:
        bar.close()


def _show_count(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 10 else f"{value:.2f}"


def _facts(values: Mapping[str, float | torch.Tensor]) -> str:
    """Return names with four digits of each number."""
    for name, value in values.items():
        if not isinstance(value, Real) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
            shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise ConfigError(
                "a progress line shows numbers only",
                expected="a number or a tensor of one element",
                got=f"{type(value).__name__}{shape}",
                where=f"progress(values=), {name}",
            )
    return "".join(f"  {name} {float(value):.4g}" for name, value in values.items())


def skip_first_batches(state: P, steps: int, loader: Loader) -> P:
    """Return the state or cursor after some steps of its epoch, without reading them. No communication.

    Arithmetic for batches of one size; otherwise the epoch is drawn and cut.

    Args:
        state: the start position, a `TrainState` or a cursor.
        steps: number of global batches to skip.
        loader: the prepared loader.

    Raises:
        ConfigError: a negative number of steps.
        StepError: a state that waits for `backward` or `optimizer_step`.
        DataError: the epoch has fewer steps, the position is another dataset's, or the loader reads a stream.

    Examples:
        >>> state = accel.train_state(ctx, seed=0)
        >>> accel.skip_first_batches(state, 2, loader).cursor.consumed
        8
    """
    if not isinstance(loader, Loader):  # pyright: ignore[reportUnnecessaryIsInstance] - others take the loader first
        raise DataError(
            "only steps of a prepared loader over positions can be skipped",
            expected="skip_first_batches(state, steps, loader)",
            got=f"{type(loader).__name__} for the loader",
        )
    check_count(steps, "the number of steps is not valid", least=0, where="skip_first_batches")
    cursor = cursor_of(state)
    after = skip_steps(plan_epoch(loader.source, cursor), steps)
    return cast(P, state.at(after) if isinstance(state, Positioned) else after)


def total_steps(
    loader: Loader | StreamLoader | DataLoader[Any],
    *,
    ctx: DistContext | None = None,
    global_batch: int | None = None,
    tail: Tail | None = None,
    batch_tokens: int | None = None,
    lengths: Lengths | None = None,
    batches_per_step: int | None = None,
    data_parallel: tuple[int, int] | None = None,
    seed_samples: bool | None = None,
    steps: int | None = None,
    accumulation: int = 1,
    epochs: int = 1,
) -> int:
    """Return the number of optimizer steps of a run, for a schedule's length. Pure arithmetic, no communication.

    It is the same on all ranks. With `global_batch` it is also the same on any number of ranks. The epoch's last window
    steps even if it is not full. A schedule that is prepared in one line with its loader needs the number before: then
    pass torch's DataLoader, with the context and the keywords that `prepare_loader` gets.

    Args:
        loader: from `prepare_loader`; or a DataLoader, with `ctx` if it is over a map-style dataset.
        ctx: the context, for a DataLoader alone.
        global_batch, tail, batch_tokens, lengths, batches_per_step, data_parallel, seed_samples: for a DataLoader
            alone, as for `prepare_loader`.
        steps: batches of all ranks in one epoch, for a stream or a loader that does not know them: with `batch_tokens`,
            or with a sampler without `__len__`. Lengths of a sampler are asked for each epoch, after its `set_epoch`.
        accumulation: micro-batches in a full window.
        epochs: passes over the loader.

    Raises:
        ConfigError: a number below 1; a DataLoader without `ctx`; arguments of a DataLoader with a prepared one; or
            `steps` where they are known.
        DataError: no `steps` for a loader that needs them; or a loader that cannot be sharded.

    Examples:
        >>> rows = torch.utils.data.TensorDataset(torch.arange(100))
        >>> loader = accel.prepare_loader(accel.single(), torch.utils.data.DataLoader(rows, batch_size=8))
        >>> accel.total_steps(loader, accumulation=4, epochs=3)  # 13 batches are 4 windows
        12
    """
    check_count(accumulation, "the number of micro-batches is not valid", where="total_steps(accumulation=)")
    check_count(epochs, "the number of epochs is not valid", where="total_steps(epochs=)")
    cut = {
        "global_batch": global_batch,
        "tail": tail,
        "batch_tokens": batch_tokens,
        "lengths": lengths,
        "batches_per_step": batches_per_step,
        "data_parallel": data_parallel,
        "seed_samples": seed_samples,
    }
    given = {name: value for name, value in cut.items() if value is not None}
    if steps is not None:
        check_count(steps, "the number of batches is not valid", where="total_steps(steps=)")
    source = None if isinstance(loader, StreamLoader) or is_stream(loader) else _prepared(loader, ctx, given).source
    known = [None] * epochs if source is None else [steps_of(source, each) for each in lengths_in(source, epochs)]
    return sum(-(-_stated(each, steps) // accumulation) for each in known)


def _stated(known: int | None, steps: int | None) -> int:
    """Return the batches of an epoch: known ones, or the user's `steps`."""
    if known is None and steps is None:
        raise DataError(
            "the number of steps of an epoch is not known before it is read",
            expected="steps=, the batches of all ranks in one epoch",
            got="a stream, batch_tokens=, or a sampler without a __len__ that set_epoch makes right",
            where="total_steps",
            fix="Estimate it: accel.total_steps(loader, steps=1000, epochs=3).",
        )
    if known is not None and steps is not None:
        raise ConfigError(
            "the loader knows its steps",
            expected=f"{known} batches in an epoch",
            got=f"steps={steps}",
            where="total_steps",
            fix="Leave steps= out.",
        )
    return cast(int, steps if known is None else known)


def _prepared(loader: object, ctx: DistContext | None, cut: dict[str, Any]) -> Loader:
    """Return the prepared loader to count steps of; `cut` has the passed keywords of `prepare_loader`."""
    if isinstance(loader, Loader):
        if ctx is not None or cut:
            raise ConfigError(
                "a prepared loader is cut already",
                expected="total_steps(loader, accumulation=..., epochs=...)",
                got=", ".join(f"{name}=" for name in [*(["ctx"] if ctx is not None else []), *cut]),
                where="total_steps",
                fix="Leave them out; prepare_loader takes them.",
            )
        return loader
    raw = cast("DataLoader[Any]", loader) if isinstance(loader, DataLoader) else None
    if raw is None:
        raise DataError(
            "steps are counted of a loader",
            expected="a loader from accel.prepare_loader, or torch's DataLoader",
            got=type(cast("object", loader)).__name__,
            where="total_steps",
        )
    if ctx is None:
        raise ConfigError(
            "the number of ranks that share a DataLoader is not known",
            expected="total_steps(loader, ctx=ctx, ...), or a prepared loader",
            got="a DataLoader without ctx=",
            where="total_steps",
            fix="Pass ctx=ctx, and the keywords that prepare_loader gets.",
        )
    check_kind(
        ctx, DistContext, "the value is not a context", expected="the `ctx` of a session", where="total_steps(ctx=)"
    )
    return cast("Loader", prepare_loader(ctx, raw, **cut))


T = TypeVar("T")


@overload
def gather_for_metrics(
    ctx: DistContext, tree: Sequence[T], batch: Batch, *, use_gather_object: Literal[True], tag: str | None = None
) -> list[T]: ...


@overload
def gather_for_metrics(
    ctx: DistContext, tree: T, batch: Batch, *, use_gather_object: Literal[False] = False, tag: str | None = None
) -> T: ...


@context_first
def gather_for_metrics(
    ctx: DistContext, tree: Any, batch: Batch, *, use_gather_object: bool = False, tag: str | None = None
) -> Any:
    """Gather per-sample tensors, or objects, of all ranks, real samples only. A collective.

    Over an epoch, each sample of the dataset is gathered once, for every world size and tail policy.

    Args:
        ctx: the context.
        tree: nested containers of tensors of shape [batch.rows, ...]. A tensor of shape [] counts as one value of
            this rank; it is left out if the rank's batch holds no real sample. With `use_gather_object` a list of
            batch.rows objects that pickle takes, such as texts.
        batch: the batch that the tensors were computed on.
        use_gather_object: whether objects are gathered, as by `gather_object`, instead of tensors.
        tag: name of the call, compared between ranks if any rank passes one; see `gather`.

    Returns:
        The same containers, tensors of shape [real samples of all ranks, ...]; or a list of as many objects.

    Raises:
        TreeError: a nested, jagged or sparse tensor, or a leaf that is no tensor; on every rank.
        DataError: a tensor with another first dimension than the batch, or not a list of as many objects; on all ranks.
        ConfigError: an object that cannot be pickled, as `gather_object`; on every rank.
        CollectiveMismatch: as `gather`. Tensors that differ in another dimension than the first need
            `pad_across_processes` before.

    Examples:
        >>> counted = 0
        >>> for batch in accel.batches(ctx, loader):
        ...     inputs, targets = batch.data
        ...     counted += len(accel.gather_for_metrics(ctx, (model(inputs) - targets).square(), batch))
        >>> counted == len(dataset)
        True
    """
    with shared_failure(ctx.comm, Call("gather_for_metrics")):
        if use_gather_object:
            _check_objects(tree, batch)
        else:
            _check_rows(ctx, tree, batch)
    if use_gather_object:
        return [each for part in gather_object(ctx, list(tree)[: batch.weight], tag=tag) for each in part]
    return gather(ctx, map_tensors(lambda leaf: _real_rows(leaf, batch), tree, ctx.containers), tag=tag)


def _check_rows(ctx: DistContext, tree: object, batch: Batch) -> None:
    for path, leaf in leaves(tree, ctx.containers):
        if isinstance(leaf, str | bytes):
            raise TreeError(
                "only tensors are gathered for metrics",
                expected="a tensor",
                got=f"{type(leaf).__name__} {leaf!r:.40}",
                where=f"gather_for_metrics, {path}",
                fix="Send texts with accel.gather_for_metrics(ctx, texts, batch, use_gather_object=True).",
            )
        if isinstance(leaf, torch.Tensor):
            check_packable(f"gather_for_metrics, {path}", leaf, ctx.device)  # before a slice, which others refuse
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] != batch.rows:
            raise DataError(
                "the tensor does not belong to the batch",
                expected=f"{batch.rows} rows",
                got=f"shape {list(leaf.shape)}",
                where=f"gather_for_metrics, {path}",
                fix="Pass values with one row a sample, or use gather.",
            )


def _check_objects(objects: object, batch: Batch) -> None:
    listed = isinstance(objects, Sequence) and not isinstance(objects, str | bytes)
    count = len(cast("Sequence[object]", objects)) if listed else None
    if count != batch.rows:
        raise DataError(
            "the objects do not match the rows of the batch",
            expected=f"a list of {batch.rows}",
            got=type(cast("object", objects)).__name__ + (f" of {count}" if listed else ""),
            where="gather_for_metrics, use_gather_object=True",
            fix="Pass one object a sample, or use gather_object for one object a rank.",
        )


def _real_rows(leaf: torch.Tensor, batch: Batch) -> torch.Tensor:
    return leaf.reshape(1)[: min(batch.weight, 1)] if leaf.ndim == 0 else leaf[: batch.weight]
