# SPDX-License-Identifier: Apache-2.0
"""A model's tensors, whole and by names without wrappers; sharded ones are gathered one at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import overload

import msgspec
import torch
from torch import nn

from accel.checkpoint._live_tensors import check_tensor
from accel.collectives import check_rank
from accel.comm import Call, Comm, barrier, broadcast_flat, call_site, exchange_values, shared_failure
from accel.context import DistContext, context_first
from accel.items._module import clean_name
from accel.parallel._empty import check_filled
from accel.parallel._engines import whole_model
from accel.parallel._modules import unwrap_model
from accel.parallel.axes.pipeline import pipeline_of
from accel.storage import dtype_name
from accel.tensors import full_tensor, is_dtensor, state_tensors, stored_values


class _Held(msgspec.Struct, frozen=True):
    """A tensor that a rank holds, as the others see it."""

    dtype: str
    shape: tuple[int, ...]


class StagedTensors:
    """The tensors of all stages of a model.

    Attributes:
        facts: tensors on the meta device by name, in the order of the whole model.
        aliases: of each tied name but the first one of its tensor, that first name.
    """

    def __init__(self, ctx: DistContext, comm: Comm, ranks: list[dict[str, _Held]], order: Mapping[str, int]) -> None:
        self._ctx = ctx
        self._comm = comm
        self._owners: dict[str, int] = {}
        found: dict[str, torch.Tensor] = {}
        for rank, held in enumerate(ranks):
            for name, each in held.items():
                if self._owners.setdefault(name, rank) == rank:
                    found[name] = torch.empty(each.shape, dtype=getattr(torch, each.dtype), device="meta")
        self.facts = dict(sorted(found.items(), key=lambda pair: order.get(pair[0], len(order))))
        self.aliases: dict[str, str] = {}

    def whole(self, name: str, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a tensor of `facts` whole. A collective along the pipeline, and of the mesh of a DTensor."""
        fact = self.facts[name]
        if self._comm.rank == self._owners[name]:
            found = full_tensor(own[name]).to(self._ctx.device).contiguous()  # one that streams is on the host
        else:
            found = torch.empty(fact.shape, dtype=fact.dtype, device=self._ctx.device)
        if found.numel():
            broadcast_flat(self._comm, found, source=self._owners[name])
        return found


def staged_tensors(ctx: DistContext, model: nn.Module, own: Mapping[str, torch.Tensor]) -> StagedTensors | None:
    """Return the tensors of all stages of a model; None of a model without a pipeline. A collective along it."""
    pipeline = pipeline_of(unwrap_model(model))
    if pipeline is None:
        return None
    mine = {name: _Held(dtype_name(each.dtype), tuple(each.shape)) for name, each in own.items()}
    ranks = exchange_values(pipeline.comm, Call("tensors of stages"), mine, dict[str, _Held])
    order = {name: at for at, name in enumerate(pipeline.order)}
    found = StagedTensors(ctx, pipeline.comm, ranks, order)
    for names in pipeline.names:
        first, *others = sorted(names, key=lambda name: order.get(name, len(order)))
        found.aliases |= dict.fromkeys(others, first)
    return found


_EXTRA_STATE = "_extra_state"


@overload
def get_state_dict(ctx: DistContext, model: nn.Module, *, dst: None) -> dict[str, torch.Tensor]: ...


@overload
def get_state_dict(ctx: DistContext, model: nn.Module, *, dst: int = 0) -> dict[str, torch.Tensor] | None: ...


@context_first
def get_state_dict(ctx: DistContext, model: nn.Module, *, dst: int | None = 0) -> dict[str, torch.Tensor] | None:
    """Return a model's parameters and persistent buffers whole, on the CPU. A collective.

    Names are those of the model without wrappers. Sharded tensors are gathered one at a time, so a rank without the
    result needs memory for one of them. Tensors that are whole on the CPU are the live ones, not copies.

    Args:
        ctx: the context.
        model: plain model, from `prepare_model`, compiled, or spread by `fully_shard` or tensor parallelism.
        dst: the rank that gets the result; None for all.

    Returns:
        The tensors in the model's order, tied ones under every name; None on ranks other than `dst`. Extra state that
        is no tensor is left out, with a warning of the logger `accel.checkpoint`.

    Raises:
        CheckpointError: a tensor has no values, or is sparse or quantized; the same on every rank.
        CollectiveMismatch: ranks hold different models.
        ConfigError: no such rank.
        PrepareError: the model was prepared empty, and nobody has filled it.
    """
    site = call_site()
    with shared_failure(ctx.comm, Call("get_state_dict", f"dst={dst}", site)):
        check_rank(ctx, dst, "get_state_dict, dst=")
        model = whole_model(ctx, model)
        check_filled(model, where="get_state_dict")
        tensors = live_tensors(model)
    if (stages := staged_tensors(ctx, model, tensors)) is not None:
        barrier(ctx.comm, Call("get_state_dict", "\n".join([f"dst={dst}", *facts(stages.facts)]), site))
        return _whole_stages(stages, tensors, keeps=dst in (None, ctx.rank))
    barrier(ctx.comm, Call("get_state_dict", "\n".join([f"dst={dst}", *facts(tensors)]), site))
    if dst not in (None, ctx.rank):
        for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
            _ = full_tensor(tensor)
        return None
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in found:
            found[id(tensor)] = full_tensor(tensor).cpu()
    return {name: found[id(tensor)] for name, tensor in tensors.items()}


def _whole_stages(
    stages: StagedTensors, own: dict[str, torch.Tensor], *, keeps: bool
) -> dict[str, torch.Tensor] | None:
    """Gather the tensors of a pipelined model; tied ones stay one object."""
    found: dict[str, torch.Tensor] = {}
    for name in stages.facts:
        if (first := stages.aliases.get(name)) in stages.facts:
            if keeps:
                found[name] = found[first]
            continue
        whole = stages.whole(name, own)
        if keeps:
            found[name] = whole.cpu()
    return found if keeps else None


def live_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """List a model's parameters and persistent buffers in order, by clean names; sharded ones as they are."""
    tensors: dict[str, torch.Tensor] = {}
    for raw, value in state_tensors(model).items():
        name = clean_name(model, raw)
        if isinstance(value, torch.Tensor):
            check_tensor(value, name)
            tensors[name] = (
                value if is_dtensor(value) else stored_values(value).detach()
            )  # tied shards are known by being one object
        elif raw.rpartition(".")[2] == _EXTRA_STATE:
            logger = logging.getLogger("accel.checkpoint")
            logger.warning("%s is left out: it is extra state, and no tensor", name)
    return tensors


def facts(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the facts that ranks must agree on, a line for each tensor."""
    return [f"{name} {dtype_name(tensor.dtype)} {list(tensor.shape)}" for name, tensor in tensors.items()]
