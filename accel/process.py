# SPDX-License-Identifier: Apache-2.0
"""Barriers, once-only work, and errors that all ranks agree on before any of them raises."""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

import torch

from accel.comm import Call, as_bytes, as_tensor, check_tag, exchange, fail, shared_failure, start, tagged
from accel.context import DistContext, context_first
from accel.errors import AccelError, ConfigError
from accel.tree import leaves, map_leaves

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
    _meet(ctx, "wait_for_everyone")


@context_first
def any_rank(ctx: DistContext, flag: bool, *, tag: str | None = None) -> bool:
    """Return whether the flag is set on any rank. A collective of one small message.

    Args:
        ctx: the context.
        flag: this rank's, such as "my loss is below the target" or "my clock says stop".
        tag: name of the call, compared between ranks if any rank gives one; see `gather`.

    Raises:
        CollectiveMismatch: another rank called something else; on every rank.
        AccelError: a flag that is neither true nor false, such as a tensor of two elements, or a tag that is no text;
            on every rank.
    """
    with shared_failure(ctx.comm, "any_rank"):
        check_tag(tag, "any_rank")
        mine = as_tensor(bytes([bool(flag)]))
    call = Call("any_rank", tagged("", tag), ordered=tag is None)
    return any(as_bytes(theirs) != b"\0" for theirs in exchange(ctx.comm, call, mine))


def agree(ctx: DistContext, error: BaseException | None, name: str) -> None:
    """Let all ranks return, or all raise the same error. A collective.

    Args:
        ctx: the context.
        error: what went wrong on this rank, None if nothing did.
        name: what was attempted, for reports.

    Raises:
        AccelError: the lowest failing rank's error, on every rank, with the rank unless all failed alike; errors of
            other kinds arrive as `PeerError`.
    """
    if error is not None:
        fail(ctx.comm, Call(name), error)
    _meet(ctx, name)


@contextlib.contextmanager
def agreed(ctx: DistContext, name: str) -> Generator[None]:
    """Run a block without collectives on every rank; an error on one is raised on all. A collective at the end.

    Args:
        ctx: the context.
        name: what the block attempts, for reports.

    Raises:
        AccelError: as `agree`.
    """
    try:
        yield
    except Exception as error:
        agree(ctx, error, name)
    else:
        agree(ctx, None, name)


@context_first
@contextlib.contextmanager
def main_process_first(ctx: DistContext) -> Generator[None]:
    """Run the block on rank 0 first, on the others when it has finished. A collective.

    Raises:
        AccelError: on the other ranks, if the block failed on rank 0, which raises its own error as it was.
    """
    with _first(ctx, ctx.is_main_process, "main_process_first"):
        yield


@context_first
@contextlib.contextmanager
def local_main_process_first(ctx: DistContext) -> Generator[None]:
    """Run the block on the first rank of each node, then on the others. A collective of all ranks.

    Raises:
        AccelError: on the other ranks, if the block failed on a node's first rank.
    """
    with _first(ctx, ctx.is_local_main_process, "local_main_process_first"):
        yield


@context_first
def on_main_process(ctx: DistContext, function: Callable[P, R]) -> Callable[P, R | None]:
    """Return the function as one that runs on rank 0 and gives None elsewhere. No communication.

    Args:
        ctx: the context.
        function: what to run; its name and documentation are kept.
    """
    return _only(ctx.is_main_process, function)


@context_first
def on_local_main_process(ctx: DistContext, function: Callable[P, R]) -> Callable[P, R | None]:
    """Return the function as one that runs on the first rank of each node and gives None elsewhere."""
    return _only(ctx.is_local_main_process, function)


@context_first
def on_last_process(ctx: DistContext, function: Callable[P, R]) -> Callable[P, R | None]:
    """Return the function as one that runs on the highest rank and gives None elsewhere."""
    return _only(ctx.is_last_process, function)


@context_first
def on_process(ctx: DistContext, function: Callable[P, R], rank: int) -> Callable[P, R | None]:
    """Return the function as one that runs on one rank and gives None elsewhere.

    Raises:
        ConfigError: there is no such rank.
    """
    _check_rank(rank, ctx.world_size, "on_process")
    return _only(ctx.rank == rank, function)


@context_first
def on_local_process(ctx: DistContext, function: Callable[P, R], local_rank: int) -> Callable[P, R | None]:
    """Return the function as one that runs on one local rank of each node and gives None elsewhere.

    Raises:
        ConfigError: there is no such local rank.
    """
    _check_rank(local_rank, ctx.local_world_size, "on_local_process")
    return _only(ctx.local_rank == local_rank, function)


@context_first
def print(ctx: DistContext, *values: object, **options: Any) -> None:
    """Print on rank 0 only; arguments are the built-in's. No communication."""
    if ctx.is_main_process:
        builtins.print(*values, **options)


@context_first
def split_between_processes(ctx: DistContext, inputs: T, *, pad: bool = False) -> T:
    """Return this rank's part of the inputs: contiguous, in order, lengths differing by at most one.

    Args:
        ctx: the context.
        inputs: a list, tuple, tensor or anything sliced by position (an array); or a dict, namedtuple, dataclass,
            Struct or kind of `ctx.containers` of equally long ones, nested if need be; and None. The caller's object
            is left as it is.
        pad: repeat the last element so that every rank's part is equally long; drop the surplus after gathering.

    Returns:
        A part of the same type. No communication.

    Raises:
        ConfigError: parts of different lengths, an object that has no positions, or one that cannot be padded; by its
            path, on every rank.
        TreeError: a container that cannot be taken apart, by its path; on every rank.
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
    part = inputs[start : start + each + (ctx.rank < extra)]
    if not pad:
        return part
    missing = each + (extra > 0) - len(part)
    if isinstance(inputs, torch.Tensor):
        return torch.cat([part, *[inputs[-1:]] * missing]) if missing else part
    if isinstance(inputs, list | tuple):
        return part + cast(Any, inputs)[-1:] * missing
    raise ConfigError(
        "only lists, tuples and tensors can be padded",
        got=type(inputs).__name__,
        where="split_between_processes",
        fix="Convert the inputs, or leave pad out.",
    )


def _is_sliced(others: tuple[type, ...], inputs: object) -> bool:
    """Whether something is cut by position, and not taken apart."""
    if isinstance(inputs, (str, bytes, Mapping, *others)) or hasattr(inputs, "_fields"):  # a namedtuple has no slices
        return False
    if isinstance(inputs, _Sliceable):
        with contextlib.suppress(TypeError):  # a 0-d tensor or array has no length, a deque no slices
            _ = len(inputs), inputs[:0]
            return True
    return False


def _length(inputs: Any, where: str, sliced: Callable[[object], bool]) -> int:
    if sliced(inputs):
        return len(inputs)
    raise ConfigError(
        "this cannot be split by position",
        expected="a list, tuple, tensor, array, or a container of them",
        got=type(inputs).__name__,
        where=f"split_between_processes, {where}",
    )


@contextlib.contextmanager
def _first(ctx: DistContext, goes_first: bool, name: str) -> Generator[None]:
    ctx.comm.check_open()
    if not goes_first:
        _meet(ctx, name)
        yield
        return
    try:
        yield
    except Exception as error:
        with contextlib.suppress(AccelError):  # which is for the other ranks
            agree(ctx, error, name)
        raise
    _meet(ctx, name)


def _meet(ctx: DistContext, name: str) -> None:
    ctx.comm.check_open()
    if ctx.comm.size > 1:
        _ = start(ctx.comm, Call(name, ordered=False))()


def _only(here: bool, function: Callable[P, R]) -> Callable[P, R | None]:
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if here else None

    return run


def _check_rank(rank: int, size: int, where: str) -> None:
    if not 0 <= rank < size:
        raise ConfigError("no such rank", expected=f"0 to {size - 1}", got=str(rank), where=where)
