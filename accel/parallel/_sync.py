# SPDX-License-Identifier: Apache-2.0
"""When the gradients of a model are exchanged: never in a `no_sync` block, at once in a `trigger_sync_in_backward`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm import Comm, lost_rank
from accel.context import DistContext, context_first
from accel.errors import AccelError, PrepareError
from accel.parallel._engines import engine_of
from accel.parallel._labels import is_local, unused_parameters
from accel.parallel._modules import Sharded, is_pipelined, sharded_roots
from accel.parallel._private import mixes_dtensors
from accel.parallel._sharded import check_replicated, check_sharded, is_sharded, stage_size
from accel.parallel._watches import computed_in_block
from accel.parallel.axes.replicate._ddp import Replica, replica_of

Exchanger = DistributedDataParallel | Sharded


@context_first
def no_sync(ctx: DistContext, *models: nn.Module) -> AbstractContextManager[None]:
    """Keep the gradients of backward passes in this block on their rank; forward belongs into the block too.

    Args:
        ctx: the context.
        models: from `prepare_model`.

    Returns:
        A context manager for one block. No communication of gradients; sharded models still gather parameters.

    Raises:
        PrepareError: a trainable model that is not prepared, or one with a static graph, on more ranks than one.
        PeerError: out of the block, where another rank was lost in it.
    """
    engine = engine_of(ctx)
    if engine is not None:
        return engine.hold(ctx, models, False)
    if ctx.world_size == 1:
        return contextlib.nullcontext()
    replicas: list[DistributedDataParallel] = []
    sharded: list[Sharded] = []
    for each in _exchangers(ctx, models):
        if isinstance(each, DistributedDataParallel):
            replicas.append(each)
        else:
            sharded.append(each)
    if any(each.static_graph for each in replicas):
        raise PrepareError(
            "DDP records a static graph in a backward that exchanges gradients",
            expected="a model without static_graph=True, to hold its gradients back",
            got="no_sync, or an accumulation of several micro-batches",
            where=f"rank {ctx.rank}",
            fix="Leave static_graph out, or use train_state(ctx, sync_each_batch=True).",
        )
    return _Holding(ctx.comm, replicas, sharded)


def exchanging(ctx: DistContext, *models: nn.Module) -> AbstractContextManager[None]:
    """Let ranks exchange gradients in this block, and check at its end that they have.

    Raises out of the block: `StepError` for a parameter without a part in it, `PeerError` for a lost rank.
    """
    engine = engine_of(ctx)
    if engine is not None:
        return engine.hold(ctx, models, True)
    if ctx.world_size == 1:
        return contextlib.nullcontext()
    return _Exchanging(ctx.comm, _exchangers(ctx, models))


@context_first
@contextlib.contextmanager
def trigger_sync_in_backward(ctx: DistContext, model: nn.Module, loss: torch.Tensor | None = None) -> Generator[None]:
    """Let the backward in this block exchange gradients, though its forward passes ran under `no_sync`.

    Args:
        ctx: the context.
        model: from `prepare_model`.
        loss: the tensor that the block calls backward on; needed for find_unused_parameters, which follows it to the
            parameters.

    Raises:
        PrepareError: a trainable model that is not prepared, or find_unused_parameters without `loss`.
        StepError: out of the block: a parameter took no part in it, so that nothing was exchanged.
    """
    engine = engine_of(ctx)
    if engine is not None:
        with engine.hold(ctx, (model,), True):
            yield
        return
    exchangers: Sequence[Exchanger] = () if ctx.world_size == 1 else check_prepared(ctx, model)
    for each in exchangers:
        if isinstance(each, DistributedDataParallel) and each.find_unused_parameters and loss is None:
            raise PrepareError(
                "unused parameters cannot be found without the loss",
                expected="trigger_sync_in_backward(ctx, model, loss)",
                got="find_unused_parameters=True and no loss",
                where=f"rank {ctx.rank}, trigger_sync_in_backward",
            )
    for each in exchangers:
        _arm(each, loss)
    with _Exchanging(ctx.comm, exchangers):
        yield


def check_prepared(ctx: DistContext, model: nn.Module) -> Sequence[Exchanger]:
    """Return the modules that exchange the model's gradients; raise `PrepareError` for a trainable parameter of none of
    them."""
    replica = replica_of(model)
    if replica is not None:
        if isinstance(replica, Replica):
            _check_frozen(ctx, replica)
        else:
            check_replicated(ctx, replica)
        return (replica,)
    if is_pipelined(model):
        return (cast(Sharded, model),)
    if is_local(model):
        return sharded_roots(model)
    if is_sharded(model):
        check_sharded(ctx, model)
        return sharded_roots(model)
    if stage_size(ctx) > 1 and any(parameter.requires_grad for parameter in model.parameters()):
        raise PrepareError(
            "the model is not prepared, so its gradients would stay on each rank",
            expected="model = accel.prepare_model(ctx, model)",
            got=f"a plain {type(model).__name__} on {ctx.world_size} ranks",
            where=f"rank {ctx.rank}",
            fix="Prepare the model before the loop.",
        )
    return ()


def _exchangers(ctx: DistContext, models: Sequence[nn.Module]) -> Sequence[Exchanger]:
    if len(models) == 1:
        return check_prepared(ctx, models[0])
    return [each for model in models for each in check_prepared(ctx, model)]


def _arm(exchanger: Exchanger, loss: torch.Tensor | None) -> None:
    """Do what a forward outside of `no_sync` does."""
    if isinstance(exchanger, DistributedDataParallel):
        exchanger.require_forward_param_sync = True
        cast(Any, exchanger).reducer.prepare_for_backward([] if loss is None else [loss])
    else:
        exchanger.set_requires_gradient_sync(True)


class _Holding:
    """Holds gradients back for one block."""

    __slots__ = ("_before", "_comm", "_replicas", "_sharded")

    def __init__(self, comm: Comm, replicas: Sequence[DistributedDataParallel], sharded: Sequence[Sharded]) -> None:
        self._comm = comm
        self._replicas = replicas
        self._sharded = sharded
        self._before: list[bool] = []

    def __enter__(self) -> None:
        for each in self._replicas:
            self._before.append(each.require_backward_grad_sync)
            each.require_backward_grad_sync = False
        for each in self._sharded:
            each.set_requires_gradient_sync(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, before in zip(self._replicas, self._before, strict=True):
            each.require_backward_grad_sync = before
        for each in self._sharded:
            each.set_requires_gradient_sync(True)  # fully_shard does not return its former value
        raise_lost_peer(self._comm, error, "forward or backward")
        _raise_of_shards(error)


class _Exchanging:
    """Checks after one block that gradients were exchanged in it."""

    __slots__ = ("_comm", "_exchangers")

    def __init__(self, comm: Comm, exchangers: Sequence[Exchanger]) -> None:
        self._comm = comm
        self._exchangers = exchangers

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise_lost_peer(self._comm, error, "forward or backward")
        _raise_of_shards(error)
        if error is None:
            for each in self._exchangers:
                _check_exchanged(self._comm.rank, each)


def raise_lost_peer(comm: Comm, error: BaseException | None, name: str) -> None:
    """Raise `PeerError` if the error of a call means a lost rank, where torch ran its collectives."""
    if isinstance(error, RuntimeError) and (lost := lost_rank(comm, error, name)) is not None:
        raise lost from error


def _raise_of_shards(error: BaseException | None) -> None:
    """Raise `StepError` if a line of a block computed with a parameter as ranks keep it."""
    if isinstance(error, RuntimeError) and not isinstance(error, AccelError) and mixes_dtensors(error):
        raise computed_in_block(error) from error


def _check_exchanged(rank: int, exchanger: Exchanger) -> None:
    """Raise for a missing gradient: DDP waits for all parameters of a bucket before it exchanges any of them."""
    if not isinstance(exchanger, Replica) or not exchanger.uses_all:
        return
    trained = [(name, each) for name, each in exchanger.exchanged if each.requires_grad]
    unused = [name for name, each in trained if each.grad is None]
    # where no gradient is left, a step within the block has used them; a step looks for missing ones itself
    if 0 < len(unused) < len(trained):
        raise unused_parameters(rank, unused)
    try:
        exchanger.rebuild_buckets()  # what the next forward does; raises if DDP still waits
    except RuntimeError as error:
        listed = re.search(r"for rank \d+: ([\d ]+)", str(error))  # torch counts them
        names = [exchanger.exchanged[int(at)][0] for at in listed[1].split()] if listed else ["some of them"]
        raise unused_parameters(rank, names) from error


def _check_frozen(ctx: DistContext, replica: Replica) -> None:
    for name, parameter in replica.frozen:
        if parameter.requires_grad:
            raise PrepareError(
                "a parameter became trainable after preparing, so its gradient would stay on each rank",
                expected="the parameters that were trainable then",
                got=f"{name} as well",
                where=f"rank {ctx.rank}",
                fix="Set requires_grad first, then prepare: accel.prepare_model(ctx, accel.unwrap_model(model)).",
            )
