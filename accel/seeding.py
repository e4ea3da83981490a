# SPDX-License-Identifier: Apache-2.0
"""Random numbers of ranks: equal, or different for each.

Ranks with different samples (data parallel) need different dropout and augmentation. Ranks that share the work on one
sample (tensor parallel) need the same. Initial weights must be equal everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager

import torch

from accel.comm import Call, broadcast_value, call_site, shared_failure
from accel.context import DistContext, context_first
from accel.errors import ConfigError
from accel.errors._checks import check_count
from accel.random import Key, RngState, capture_rng, check_seed, restore_rng, rng_scope, seed_rng
from accel.topology import AXIS_NAMES, DATA_DIMS, names_of

__all__ = ["Key", "deterministic", "draw_seed", "rank_key", "seeded", "set_seed", "synchronize_rng"]
__dir__ = __all__.copy


@context_first
def rank_key(ctx: DistContext, key: Key, *, along: Sequence[str] | None = None, data_rank: int | None = None) -> Key:
    """Return the key of this rank: equal on ranks that share samples, unrelated on others. No communication.

    Args:
        ctx: the context.
        key: equal on every rank.
        along: axes of the mesh along which keys differ, instead of the axes of data parallelism; ranks that only differ
            along other axes have equal keys. Axes that the mesh does not have are ignored; "dp" means `dp_replicate`
            and `dp_shard` too. Random numbers of activations differ along the axes along which these do: ("dp", "cp")
            where ranks share positions, and also "tp" inside of modules that tensor parallelism divides.
        data_rank: index of this rank's share of the samples, from 0; by default the index in `ctx.data_parallel`, which
            gives each rank another share without a mesh.

    Raises:
        ConfigError: an index outside of the world, an unknown axis, or `along` together with `data_rank`.

    Examples:
        >>> accel.seeding.rank_key(accel.single(), accel.seeding.Key(0), along=("dp", "tp"))
        Key(seed=0, path=('rank', 0))
    """
    if along is not None:
        return _key_along(ctx, key, along, data_rank)
    share = ctx.data_parallel[0] if data_rank is None else data_rank
    check_count(share, "no such share of the samples", least=0, most=ctx.world_size - 1, where="data_rank=")
    return key.fold_in("rank", share)


def _key_along(ctx: DistContext, key: Key, along: Sequence[str], data_rank: int | None) -> Key:
    """Return the key of this rank's place along some axes. Their order, and axes of one rank, make no difference."""
    if isinstance(along, str):
        raise ConfigError("the names of axes are not valid", expected=f"({along!r},)", got=repr(along), where="along=")
    if data_rank is not None:
        raise ConfigError(
            "two choices of the ranks that draw alike",
            expected="along, or data_rank",
            got=f"along={tuple(along)!r} and data_rank={data_rank}",
            where="rank_key",
        )
    names = {own for name in along for own in names_of(ctx.position.axes, name, ctx.strategy)}
    ranks = {name: axis.rank for name, axis in ctx.position.axes if axis.size > 1}
    data = ranks.keys() & {*DATA_DIMS} - {*AXIS_NAMES["expert"]}
    if names >= data:
        names -= data
        key = key.fold_in("rank", ctx.data_parallel[0])
    for name in sorted(names & ranks.keys()):
        key = key.fold_in(name, ranks[name])
    return key


@context_first
def set_seed(
    ctx: DistContext,
    seed: int,
    *,
    per_rank: bool = True,
    along: Sequence[str] | None = None,
    data_rank: int | None = None,
) -> Key:
    """Seed the global streams of python, numpy, torch and this rank's device. Mutates them. No communication.

    Data order depends on the cursor's seed and not on these streams, so ranks with different streams still shard
    each epoch exactly.

    Args:
        ctx: the context.
        seed: 0 to 2**63 - 1.
        per_rank: whether ranks with different samples get different streams, for dropout and augmentation.
        along, data_rank: as in `rank_key`. Random numbers of whole samples, such as augmentation in the loop, must be
            equal on ranks that share samples, so axes other than data parallelism are only for activations.

    Returns:
        The key of the streams; fold names into it for further streams.

    Raises:
        ConfigError: not a seed, or as `rank_key`.
    """
    key = Key(check_seed(seed, where="set_seed(seed=)"))
    if per_rank:
        key = rank_key(ctx, key, along=along, data_rank=data_rank)
    elif along is not None or data_rank is not None:
        name = "data_rank" if along is None else "along"
        raise ConfigError(f"{name} has no effect where all ranks draw the same", where="set_seed(per_rank=False)")
    seed_rng(key, ctx.device)
    return key


@context_first
def seeded(ctx: DistContext, key: Key | int) -> AbstractContextManager[None]:
    """Seed the streams from a key during a block, such as for the initial weights of a model. No communication.

    After the block all streams continue as if it had not run.

    Args:
        ctx: the context.
        key: a key or a seed, equal on every rank; `rank_key(ctx, key)` for numbers that differ between ranks.
    """
    start = key if isinstance(key, Key) else Key(check_seed(key, where="seeded(key=)")).fold_in("seeded")
    return rng_scope(start, ctx.device)


@context_first
def synchronize_rng(ctx: DistContext) -> None:
    """Copy the state of rank 0's global streams to every rank. A collective. Mutates the streams.

    Raises:
        CollectiveMismatch: another rank called something else, or has another type of device.
    """
    call = Call("synchronize_rng", f"device {ctx.device.type}", call_site())
    with shared_failure(ctx.comm, call):
        mine = capture_rng(ctx.device)
    restore_rng(broadcast_value(ctx.comm, call, mine, RngState), ctx.device)


@contextlib.contextmanager
def deterministic(*, warn_only: bool = False) -> Generator[None]:
    """Restrict torch to deterministic algorithms during a block. They are slower.

    torch's flags hold for the process, so blocks of several threads must not overlap. On CUDA, matrix products
    also need CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment; torch raises where it is missing.

    Args:
        warn_only: whether an operation without a deterministic algorithm warns instead of raising RuntimeError.
    """
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    flags = cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    cudnn.deterministic = True
    cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = flags


@context_first
def draw_seed(ctx: DistContext) -> int:
    """Draw a seed on rank 0 and give it to every rank; rank 0 logs it. A collective.

    For runs that set no seed: a `TrainState` made with it keeps it in checkpoints, so a resumed run has the same order.

    Args:
        ctx: the context.

    Returns:
        The seed, 0 to 2**31 - 1, equal on all ranks and different in each run.

    Raises:
        CollectiveMismatch: Another rank called something else.

    Examples:
        >>> state = accel.train_state(ctx, seed=accel.seeding.draw_seed(ctx))
    """
    seed = broadcast_value(ctx.comm, Call("draw_seed", "", call_site()), secrets.randbits(31), int)
    if ctx.is_main_process:
        logging.getLogger("accel.seeding").info("drew the seed %d", seed)
    return seed
