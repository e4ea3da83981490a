# SPDX-License-Identifier: Apache-2.0
"""Barriers, flags of any rank, and work of some ranks only."""

from __future__ import annotations

import builtins
import contextlib
import functools
import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from accel.comm import Call, barrier, check_tag, reduce_ints, shared_failure, tagged
from accel.context import DistContext, context_first
from accel.errors import AccelError, ConfigError
from accel.errors._checks import with_article
from accel.tree._walk import leaves, map_leaves

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@runtime_checkable
class _Sliceable(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> object: ...


@context_first
def wait_for_everyone(ctx: DistContext) -> None:
    """Return once every rank has called this. A collective.

    Raises:
        CollectiveMismatch: another rank called something else; on every rank.
    """
    barrier(ctx.comm, Call("wait_for_everyone", ordered=False))


@context_first
def any_rank(ctx: DistContext, flag: bool, *, tag: str | None = None) -> bool:
    """Return whether the flag is set on any rank. A collective of one small message.

    Args:
        ctx: the context.
        flag: this rank's, such as a loss below the target or a time limit reached.
        tag: name of the call, compared between ranks if any rank passes one; see `gather`.

    Raises:
        CollectiveMismatch: another rank called something else; on every rank.
        AccelError: a flag that is neither true nor false, such as a tensor of two elements, or a tag that is no text;
            on every rank.
    """
    with shared_failure(ctx.comm, Call("any_rank")):
        check_tag(tag, "any_rank")
        mine = int(bool(flag))
    call = Call("any_rank", tagged("", tag), ordered=tag is None)
    return reduce_ints(ctx.comm, call, [mine], "max") == [1]


@context_first
@contextlib.contextmanager
def main_process_first(ctx: DistContext) -> Generator[None]:
    """Run the block on rank 0, then on the other ranks. A collective.

    Raises:
        AccelError: the block failed on rank 0; on the other ranks. Rank 0 raises its own error unchanged.
    """
    with _first(ctx, ctx.is_main_process, "main_process_first"):
        yield


@context_first
@contextlib.contextmanager
def local_main_process_first(ctx: DistContext) -> Generator[None]:
    """Run the block on the first rank of each node, then on the others. A collective of all ranks.

    Raises:
        AccelError: the block failed on the first rank of a node; on the other ranks.
    """
    with _first(ctx, ctx.is_local_main_process, "local_main_process_first"):
        yield


@context_first
def on_main_process(ctx: DistContext, function: Callable[P, R]) -> Callable[P, R | None]:
    """Wrap a function to run on rank 0 and return None elsewhere. No communication.

    Args:
        ctx: the context.
        function: the function to wrap; name and documentation stay.
    """
    return _only(ctx.is_main_process, function)


@context_first
def on_local_main_process(ctx: DistContext, function: Callable[P, R]) -> Callable[P, R | None]:
    """Wrap a function to run on the first rank of each node and return None elsewhere. No communication."""
    return _only(ctx.is_local_main_process, function)


@context_first
def on_last_process(ctx: DistContext, function: Callable[P, R]) -> Callable[P, R | None]:
    """Wrap a function to run on the last rank and return None elsewhere. No communication."""
    return _only(ctx.is_last_process, function)


@context_first
def on_process(ctx: DistContext, function: Callable[P, R], rank: int) -> Callable[P, R | None]:
    """Wrap a function to run on one rank and return None elsewhere. No communication.

    Raises:
        ConfigError: there is no such rank.
    """
    _check_rank(rank, ctx.world_size, "on_process")
    return _only(ctx.rank == rank, function)


@context_first
def on_local_process(ctx: DistContext, function: Callable[P, R], local_rank: int) -> Callable[P, R | None]:
    """Wrap a function to run on one local rank of each node and return None elsewhere. No communication.

    Raises:
        ConfigError: there is no such local rank.
    """
    _check_rank(local_rank, ctx.local_world_size, "on_local_process")
    return _only(ctx.local_rank == local_rank, function)


@context_first
def print(ctx: DistContext, *values: object, once_per_node: bool = False, **options: Any) -> None:
    """Print on rank 0, or on every node's first rank; other arguments are the built-in's. No communication."""
    if ctx.is_local_main_process if once_per_node else ctx.is_main_process:
        builtins.print(*values, **options)


@context_first
def split_between_processes(ctx: DistContext, inputs: T, *, pad: bool = False) -> T:
    """Return this rank's part of the inputs. Parts are contiguous, in rank order, and differ in length by at most one.

    Args:
        ctx: the context.
        inputs: a list, tuple, tensor, or other object with slices of its type (an array); a dataset of torch
            or Hugging Face with positions; None; or a nested dict, namedtuple, dataclass, Struct or kind of
            `ctx.containers` of these, of equal length. It stays unchanged.
        pad: repeat the last element until all parts have one length; drop the surplus after gathering.

    Returns:
        A part of the same type; for a torch dataset other than TensorDataset, a `Subset`. No communication.

    Raises:
        ConfigError: inputs of different lengths, without positions, with slices of another type, or without padding;
            with the path, on every rank.
        TreeError: a container of an unknown kind, with its path; on every rank.
    """
    sliced = functools.partial(_is_sliced, tuple(container.kind for container in ctx.containers))
    found = leaves(inputs, ctx.containers, is_leaf=sliced)
    lengths = {path: _length(part, path, sliced) for path, part in found if part is not None}
    if len(set(lengths.values())) > 1:
        raise ConfigError(
            "values of different lengths cannot be split together",
            expected="equal lengths",
            got=", ".join(f"{length} at {path}" for path, length in lengths.items()),
            where="split_between_processes",
        )
    length = max(lengths.values(), default=0)
    return map_leaves(
        lambda part: None if part is None else _part(ctx, part, length, pad), inputs, ctx.containers, is_leaf=sliced
    )


def _part(ctx: DistContext, inputs: Any, length: int, pad: bool) -> Any:
    each, extra = divmod(length, ctx.world_size)
    start = ctx.rank * each + min(ctx.rank, extra)
    stop = start + each + (ctx.rank < extra)
    missing = each + (extra > 0) - (stop - start) if pad else 0
    if _is_dataset(inputs):
        return _rows(inputs, [*range(start, stop), *[length - 1] * missing])
    part = inputs[start:stop]
    last = [inputs[-1:]] * missing
    if isinstance(inputs, torch.Tensor):
        return torch.cat([part, *last]) if missing else part
    if isinstance(inputs, list | tuple):
        return functools.reduce(operator.add, last, part)
    if pad:
        raise _unpadded(inputs)
    return part


def _rows(dataset: Any, positions: list[int]) -> Any:
    """Select samples of a dataset, as a dataset."""
    if callable(getattr(dataset, "select", None)):  # Hugging Face's
        return dataset.select(positions)
    if type(dataset) is TensorDataset:
        return TensorDataset(*(tensor[positions] for tensor in dataset.tensors))
    return Subset(dataset, positions)


def _is_dataset(inputs: object) -> bool:
    """Return whether an object is a map-style dataset, of torch or Hugging Face; its own slices have another type."""
    if isinstance(inputs, Dataset):
        return hasattr(cast(object, inputs), "__len__") and not isinstance(inputs, IterableDataset)
    return callable(getattr(inputs, "select", None)) and hasattr(inputs, "features") and hasattr(inputs, "__len__")


def _unpadded(inputs: object) -> ConfigError:
    return ConfigError(
        "only lists, tuples, tensors and datasets can be padded",
        got=type(inputs).__name__,
        where="split_between_processes",
        fix="Convert the inputs, with torch.as_tensor(...) or list(...), or leave pad out.",
    )


def _is_sliced(others: tuple[type, ...], inputs: object) -> bool:
    """Return whether an object is split by position, and not traversed."""
    if isinstance(inputs, (str, bytes, Mapping, *others)) or hasattr(inputs, "_fields"):  # no slice is a namedtuple
        return False
    if _is_dataset(inputs):
        return True
    if isinstance(inputs, Dataset):  # a stream; torch's class defines indexing all the same
        return False
    if isinstance(inputs, _Sliceable):
        with contextlib.suppress(TypeError):  # 0-d tensors have no length, deques no slices
            _ = len(inputs), inputs[:0]
            return True
    return False


def _check_slice(inputs: Any, where: str) -> None:
    """Raise for an object with slices of another type, such as the columns of a table."""
    if isinstance(inputs, Sequence | torch.Tensor) or _is_dataset(inputs):
        return
    part = inputs[:0]
    if type(part) is not type(inputs):
        kind = with_article(type(inputs).__name__)
        raise ConfigError(
            "a slice of this is of another type",
            expected=kind,
            got=with_article(type(part).__name__),
            where=f"split_between_processes, {where}",
            fix=f"Split range(len(...)) and take the items at these positions, or let __getitem__ give {kind}.",
        )


def _length(inputs: object, where: str, sliced: Callable[[object], bool]) -> int:
    if sliced(inputs):
        _check_slice(inputs, where)
        return len(cast(Any, inputs))
    if isinstance(inputs, str | bytes):
        fix = "Pass a list of texts, or the text's list(...)."
    elif hasattr(inputs, "__iter__"):
        fix = "Pass its list(...); a stream is divided by accel.prepare_loader(ctx, loader, stream=)."
    else:
        fix = "Pass a list, and take the item out of the part."
    raise ConfigError(
        "this cannot be split by position",
        expected="a list, tuple, tensor, array, dataset, or a container of them",
        got=type(inputs).__name__,
        where=f"split_between_processes, {where}",
        fix=fix,
    )


@contextlib.contextmanager
def _first(ctx: DistContext, goes_first: bool, name: str) -> Generator[None]:
    ctx.comm.check_open()
    call = Call(name, ordered=False)
    if not goes_first:
        barrier(ctx.comm, call)
        yield
        return
    try:
        yield
    except Exception as error:
        # this rank raises its own error, unchanged
        with contextlib.suppress(AccelError), shared_failure(ctx.comm, call):
            raise error
        raise
    barrier(ctx.comm, call)


def _only(here: bool, function: Callable[P, R]) -> Callable[P, R | None]:
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if here else None

    return run


def _check_rank(rank: int, size: int, where: str) -> None:
    if not 0 <= rank < size:
        raise ConfigError("there is no such rank", expected=f"0 to {size - 1}", got=str(rank), where=where)
