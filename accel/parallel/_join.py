# SPDX-License-Identifier: Apache-2.0
"""Uneven inputs: ranks that have none left answer the exchanges of those that go on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator
from typing import Any, cast

from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from accel.context import DistContext, context_first
from accel.errors import ConfigError, PrepareError
from accel.parallel._ddp import replica_of


@context_first
@contextlib.contextmanager
def join_uneven_inputs(
    ctx: DistContext, *models: nn.Module, divide_by_initial_world_size: bool = True
) -> Generator[None]:
    """Let ranks take different numbers of steps in this block, on any device. A collective at its end.

    A rank that reaches the end answers the exchanges of the others' backward passes by zeros, and takes over the
    parameters of a rank that went on longest; its optimizer has then seen fewer steps. In the block make no other call
    that ranks make together: leave `weight=` out of `backward`, and gather nothing. `accel.batches` needs none of this:
    it gives every rank equally many batches, and stand-ins count as nothing.

    Args:
        ctx: the context.
        models: from `prepare_model`; all that the block trains.
        divide_by_initial_world_size: whether gradients are divided by all ranks, so that every sample counts the same,
            or by those that still have inputs, so that every step has the same size.

    Raises:
        ConfigError: no models.
        PrepareError: a model that DDP does not wrap, on more ranks than one.

    Reference: torch.distributed.algorithms.Join.
    """
    ctx.comm.check_open()
    if not models:
        raise ConfigError("nothing to join", expected="the models that the block trains", got="none")
    if ctx.world_size == 1:
        yield
        return
    replicas = cast("list[Any]", [_replica(each) for each in models])
    join = Join(replicas, divide_by_initial_world_size=divide_by_initial_world_size)
    try:
        yield
        with warnings.catch_warnings():  # whose filters torch would leave changed
            join.__exit__(None, None, None)
    finally:
        _ = Join(replicas, enable=False)  # or every later forward would go on telling the other ranks


def _replica(model: nn.Module) -> DistributedDataParallel:
    replica = replica_of(model)
    if replica is None:
        raise PrepareError(
            "only DDP answers for ranks that have no inputs left",
            expected="a model from accel.prepare_model",
            got=f"a {type(model).__name__} that DDP does not wrap",
            where="join_uneven_inputs",
        )
    return replica
