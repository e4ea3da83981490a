# SPDX-License-Identifier: Apache-2.0
"""Strategies for worlds: number of ranks, their schedule, and their faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec
from hypothesis import strategies as st

from accel.errors import ConfigError, check_choice
from accel.testing._faults import CallAction, Fault, WriteAction, WriteFault

_LARGEST_SEED = 2**32 - 1
_LARGEST_BYTE = 2**16 - 1


class World(msgspec.Struct, frozen=True):
    """Arguments of `simulate` beside the function: `simulate(fn, world.size, seed=world.seed)`.

    Attributes:
        size: number of ranks.
        seed: of the schedule; None for rank order.
    """

    size: int
    seed: int | None


def worlds(*, min_size: int = 1, max_size: int = 8) -> st.SearchStrategy[World]:
    """Generate worlds; they shrink to few ranks that go in rank order.

    Args:
        min_size: the fewest ranks, 1 or more.
        max_size: the most ranks.

    Raises:
        ConfigError: sizes out of range.
    """
    check_sizes(min_size, max_size)
    return st.builds(World, size=st.integers(min_size, max_size), seed=schedules())


def schedules() -> st.SearchStrategy[int | None]:
    """Generate values for `seed=`; they shrink to None, which lets ranks go in rank order."""
    return st.none() | st.integers(0, _LARGEST_SEED)


def faults(
    world_size: int, calls: int, *, actions: Sequence[CallAction] = get_args(CallAction)
) -> st.SearchStrategy[Fault]:
    """Generate faults; they shrink to rank 0 and call 0.

    Args:
        world_size: number of ranks, 1 or more.
        calls: number of calls of every rank without faults, 1 or more. Where it is too large, the run raises
            `FaultNotReached`, which says how many there were.
        actions: kinds of faults; the first is the one to shrink to.

    Raises:
        ConfigError: a number below 1, no actions or an unknown one.
    """
    _check_points(world_size, calls, "calls")
    kinds = _checked_actions(actions, get_args(CallAction))
    return st.builds(Fault, rank=st.integers(0, world_size - 1), call=st.integers(0, calls - 1), action=kinds)


def write_faults(
    world_size: int, writes: int, *, actions: Sequence[WriteAction] = get_args(WriteAction)
) -> st.SearchStrategy[WriteFault]:
    """Generate bad writes; they shrink to rank 0 and write 0.

    Args:
        world_size: number of ranks, 1 or more.
        writes: number of files that every rank writes through accel, 1 or more.
        actions: kinds of faults; the first is the one to shrink to.

    Raises:
        ConfigError: a number below 1, no actions or an unknown one.
    """
    _check_points(world_size, writes, "writes")
    return st.builds(
        WriteFault,
        rank=st.integers(0, world_size - 1),
        write=st.integers(0, writes - 1),
        action=_checked_actions(actions, get_args(WriteAction)),
        byte=st.integers(0, _LARGEST_BYTE),
    )


def check_sizes(min_size: int, max_size: int) -> None:
    """Raise `ConfigError` unless there can be a world between these sizes."""
    if not 1 <= min_size <= max_size:
        raise ConfigError(
            "no world of such a size", expected="1 <= min_size <= max_size", got=f"{min_size} and {max_size}"
        )


def _check_points(world_size: int, points: int, where: str) -> None:
    if world_size < 1 or points < 1:
        raise ConfigError(
            "no fault can happen", expected=f"world_size and {where} from 1", got=f"{world_size} and {points}"
        )


def _checked_actions(actions: Sequence[str], known: Sequence[str]) -> st.SearchStrategy[str]:
    for action in actions:
        check_choice(action, known, "unknown action", where="actions=")
    if not actions:
        raise ConfigError("no action to choose from", expected=f"some of {', '.join(known)}", where="actions=")
    return st.sampled_from(list(actions))
