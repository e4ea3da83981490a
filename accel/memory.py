# SPDX-License-Identifier: Apache-2.0
"""Memory: the largest batch size that fits on every rank, and the release of cached memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec
import torch

from accel.comm import Alarm, Call, barrier, call_site, peer_error, shared_failure
from accel.context import DistContext, context_first
from accel.errors import AccelError, ConfigError, OutOfMemoryError, PeerError
from accel.errors._checks import check_count
from accel.random import capture_rng, restore_rng

R = TypeVar("R")

_NAME = "find_executable_batch_size"
_SIGNS = (  # texts of backends without an exception class
    "out of memory",
    "can't allocate memory",
    "MemoryError",
    "RESOURCE_EXHAUSTED",
    "STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "PT_DEVMEM Allocation failed",
)


class _AttemptFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's failure in an attempt."""

    rank: int  # the failed rank
    search: str  # call and batch size of the search
    text: str  # the error in one line
    memory: bool  # whether memory ran out


@context_first
def find_executable_batch_size(
    ctx: DistContext,
    function: Callable[[int], R],
    starting_batch_size: int,
    *,
    shrink: Callable[[int], int] = lambda size: size // 2,
    least: int = 1,
) -> R:
    """Call a function with smaller and smaller batch sizes until no rank runs out of memory. A collective.

    When one rank runs out, all try the next size together. Every attempt begins with the same random streams, and the
    memory of the attempt before is free. Build model, optimizer and loader inside the function, so that they are fresh
    too. Nothing is kept between calls.

    A rank may run out anywhere, also in the backward of a prepared model. The other ranks notice within a second, and
    all ranks open the process group again. A model of several ranks that was prepared before the call refers to the
    former group and cannot be used again. Where the group cannot be opened again (an adopted group, a mesh of several
    dimensions, XLA), the other ranks notice in their next call of accel.

    Args:
        ctx: the context.
        function: called on every rank with the batch size of the attempt.
        starting_batch_size: the first size, equal on every rank.
        shrink: maps a size to the next smaller one; half of it by default.
        least: the smallest size.

    Returns:
        The function's result on this rank. Let it return the batch size, too, where you need it.

    Raises:
        OutOfMemoryError: the smallest size does not fit; on every rank.
        CollectiveMismatch: ranks start with different sizes, or shrink to different ones.
        ConfigError: a size below 1 or `least`, or a `shrink` that returns no smaller size; on every rank.
        AccelError: the function failed on another rank, which raises its own error; or `shrink` failed.
    """
    site = call_site()
    size = _agreed(ctx, site, partial(_first, starting_batch_size, least))
    streams = capture_rng(ctx.device)
    while True:
        results = list[R]()
        why = _attempt(ctx, function, size, site, results)
        if results:
            return results[0]
        ctx.comm.steps.clear()  # memory may have run out in a step that other ranks took
        _free_attempt(ctx, _call(size, site))
        restore_rng(streams, ctx.device)
        size = _agreed(ctx, site, partial(_next, size, shrink, least, why))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, reports that memory ran out. No communication.

    Args:
        error: an exception, as caught; None has not run out.
    """
    return any(
        isinstance(each, torch.OutOfMemoryError | MemoryError)
        or (isinstance(each, RuntimeError) and any(sign in str(each) for sign in _SIGNS))
        for each in _causes(error)
    )


@context_first
def free_memory(ctx: DistContext) -> None:
    """Collect garbage and release the device's cached memory. No communication.

    Delete your own references first: `del model, optimizer`.
    """
    gc.collect()
    if ctx.device.type in ("cpu", "xla"):  # XLA frees memory by itself
        return
    module = torch.get_device_module(ctx.device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


def _free_attempt(ctx: DistContext, call: Call) -> None:
    """Free the memory of a failed attempt. Of ranks that share a process one collects garbage, once all have left it.

    The collector goes through all objects of the process, and the other ranks wait for it where they agree on a size.
    """
    alone = ctx.comm.share is None
    if not alone:
        barrier(ctx.comm, call)
    if alone or ctx.comm.rank == 0:
        free_memory(ctx)


def _attempt(ctx: DistContext, function: Callable[[int], R], size: int, site: str, results: list[R]) -> str:
    """Append the function's result if every rank has one, else return the failure; keeps no traceback alive."""
    alarm = ctx.comm.alarm
    if alarm is not None:
        return _watched_attempt(ctx, alarm, function, size, site, results)
    call = _call(size, site)
    try:
        result = _run(ctx, function, size, call)
        barrier(ctx.comm, call)
    except OutOfMemoryError as sent:  # raised on every rank
        return sent.problem
    except PeerError as sent:
        if sent.where == _where(call):
            sent.where += f", {site}"  # for a search around this one, which all ranks leave
        raise
    results.append(result)
    return ""


def _watched_attempt(
    ctx: DistContext, alarm: Alarm, function: Callable[[int], R], size: int, site: str, results: list[R]
) -> str:
    """Do as `_attempt`, with an alarm for ranks that wait in collectives of torch."""
    call = _call(size, site)
    search = f"{_where(call)}, {site}"
    own: Exception | None = None
    with alarm.watching():
        try:
            result = function(size)
            barrier(ctx.comm, call)
        except Exception as error:
            sent = _sent_error(error, search)
            if isinstance(sent, OutOfMemoryError):
                return sent.problem
            if sent is not None:
                raise sent from None
            mine = _AttemptFailure(rank=ctx.rank, search=search, text=_headline(error), memory=is_out_of_memory(error))
            note = msgspec.json.decode(alarm.ring(msgspec.json.encode(mine)), type=_AttemptFailure)
            if not note.memory and not _is_lost_peer(error):
                own = error  # only here: its frames hold the memory of the attempt
        else:
            results.append(result)
            return ""
    alarm.renew()
    problem = f"rank {note.rank}: {note.text}"
    if note.search != search:  # of a search around this one, of all ranks
        raise (OutOfMemoryError if note.memory else PeerError)(problem, where=note.search) from own
    if note.memory:
        return problem
    raise own or PeerError(problem, where=search)


def _run(ctx: DistContext, function: Callable[[int], R], size: int, call: Call) -> R:
    """Call the function; the other ranks receive its failure."""
    where = _where(call)
    try:
        return function(size)
    except Exception as error:
        if (sent := _sent_error(error, where)) is not None:
            raise sent from None  # without the errors around it
        text = _headline(error)
        if is_out_of_memory(error):
            with shared_failure(ctx.comm, call):
                raise OutOfMemoryError(text, where=where) from None
        with contextlib.suppress(AccelError), shared_failure(ctx.comm, call):
            raise PeerError(text, where=where) from None
        raise


def _sent_error(error: BaseException, where: str) -> AccelError | None:
    """Return the error that a failed rank sent, if the function raised it, as it is or as the cause of another."""
    return next((each for each in _causes(error) if isinstance(each, AccelError) and each.where == where), None)


def _headline(error: BaseException) -> str:
    first_line = str(error).splitlines()[:1]
    return ": ".join([type(error).__name__, *first_line]).encode(errors="backslashreplace").decode()


def _is_lost_peer(error: BaseException) -> bool:
    return any(isinstance(each, PeerError) or peer_error(each, _NAME) is not None for each in _causes(error))


def _where(call: Call) -> str:
    """Return the `where` of errors that ranks send during an attempt."""
    return f"{call.name}, {call.detail}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def _agreed(ctx: DistContext, site: str, choose: Callable[[], int]) -> int:
    """Choose a size on every rank; raise on all if one fails, or if sizes differ."""
    with shared_failure(ctx.comm, Call(_NAME, site=site)):
        size = choose()
    barrier(ctx.comm, _call(size, site))
    return size


def _first(starting: int, least: int) -> int:
    for name, value in (("starting_batch_size=", starting), ("least=", least)):
        check_count(value, "the batch size is not valid", where=name)
    if starting < least:
        raise ConfigError(
            "the first batch size is below the minimum",
            expected=f"at least {least}",
            got=str(starting),
            where="starting_batch_size=",
        )
    return starting


def _next(size: int, shrink: Callable[[int], int], least: int, why: str) -> int:
    smaller = shrink(size)
    if type(smaller) is not int or smaller >= size:
        raise ConfigError(
            "the next batch size is not smaller", expected=f"below {size}", got=repr(smaller), where="shrink="
        )
    if smaller < least:
        raise OutOfMemoryError(
            "no batch size fits into memory",
            expected=f"one of at least {least} that does",
            got=f"at {size}: {why}",
            where=_NAME,
            fix="Make the model, its inputs or its precision smaller, or spread it over more devices.",
        )
    return smaller


def _call(size: int, site: str) -> Call:
    return Call(_NAME, f"batch size {size}", site)
