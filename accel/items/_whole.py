# SPDX-License-Identifier: Apache-2.0
"""A model's tensors, whole and by names without wrappers; sharded ones are gathered one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import overload

import torch
from torch import nn

from accel.checkpoint._live_tensors import check_tensor, tied
from accel.collectives import check_rank
from accel.comm import Call, Comm, barrier, broadcast_flat, call_site, exchange_values, shared_failure
from accel.context import DistContext, context_first
from accel.items._module import EXTRA_STATE
from accel.items._source import Facts
from accel.parallel._empty import check_filled
from accel.parallel._engines import whole_model
from accel.parallel._modules import clean_name, refuse_assigned, unwrap_model
from accel.parallel.axes.pipeline import pipeline_of
from accel.storage import dtype_name
from accel.tensors import full_tensor, is_dtensor, state_tensors, stored_values


class StagedTensors:
    """The tensors of all stages of a model.

    Attributes:
        facts: tensors on the meta device by name, in the order of the whole model.
        aliases: of each tied name but the first one of its tensor, that first name.
    """

    def __init__(self, ctx: DistContext, comm: Comm, ranks: list[dict[str, Facts]], order: Mapping[str, int]) -> None:
        self._ctx = ctx
        self._comm = comm
        self._owners: dict[str, int] = {}
        found: dict[str, torch.Tensor] = {}
        for rank, held in enumerate(ranks):
            for name, (dtype, shape) in held.items():
                if self._owners.setdefault(name, rank) == rank:
                    found[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
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
    mine = {name: (dtype_name(each.dtype), tuple(each.shape)) for name, each in own.items()}
    ranks = exchange_values(pipeline.comm, Call("tensors of stages"), mine, dict[str, Facts])
    order = {name: at for at, name in enumerate(pipeline.order)}
    found = StagedTensors(ctx, pipeline.comm, ranks, order)
    for names in pipeline.names:
        first, *others = sorted(names, key=lambda name: order.get(name, len(order)))
        found.aliases |= dict.fromkeys(others, first)
    return found


@overload
def get_state_dict(ctx: DistContext, model: nn.Module, *, dst: None) -> dict[str, torch.Tensor]: ...


@overload
def get_state_dict(ctx: DistContext, model: nn.Module, *, dst: int = 0) -> dict[str, torch.Tensor] | None: ...


@context_first
def get_state_dict(ctx: DistContext, model: nn.Module, *, dst: int | None = 0) -> dict[str, torch.Tensor] | None:
    """Return a model's parameters and persistent buffers whole, on the CPU. A collective.

    Names are the names in the model without wrappers. Sharded tensors are gathered one at a time, so a rank without the
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
        StepError: a line `parameter.data = values` had no effect, as on a sharded parameter.
    """
    site = call_site()
    with shared_failure(ctx.comm, Call("get_state_dict", f"dst={dst}", site)):
        check_rank(ctx, dst, "get_state_dict, dst=")
        model = whole_model(ctx, model)
        check_filled(model, where="get_state_dict")
        refuse_assigned(model.parameters(), "get_state_dict")
        tensors = live_tensors(model)
    stages = staged_tensors(ctx, model, tensors)
    named = tensors if stages is None else stages.facts
    barrier(ctx.comm, Call("get_state_dict", "\n".join([f"dst={dst}", *facts(named)]), site))
    kept, aliases, whole = distinct_tensors(tensors, stages)
    keeps = dst in (None, ctx.rank)
    found: dict[str, torch.Tensor] = {}
    for name in kept:
        tensor = whole(name)
        if keeps:
            found[name] = tensor.cpu()
    return {name: found[aliases.get(name, name)] for name in named} if keeps else None


def distinct_tensors(
    own: Mapping[str, torch.Tensor], stages: StagedTensors | None
) -> tuple[dict[str, torch.Tensor], dict[str, str], Callable[[str], torch.Tensor]]:
    """List a model's tensors once each, under their first names in its order.

    Args:
        own: this rank's tensors, of `live_tensors`.
        stages: the tensors of all stages, for a model with a pipeline.

    Returns:
        The tensors, some on the meta device; the first name of each other name; and a function that returns a tensor
        whole, a collective that every rank calls alike.
    """
    live = own if stages is None else stages.facts
    kept: dict[str, torch.Tensor] = {}
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    plain = {name: tensor for name, tensor in live.items() if not is_dtensor(tensor)}
    groups = tied(plain) if stages is None else stages.aliases
    for name, tensor in live.items():
        group = id(tensor) if is_dtensor(tensor) else groups.get(name, name)
        if (known := first.setdefault(group, name)) == name:
            kept[name] = tensor
        else:
            aliases[name] = known
    if stages is not None:
        return kept, aliases, partial(stages.whole, own=own)
    return kept, aliases, lambda name: full_tensor(kept[name])


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
        elif raw.rpartition(".")[2] == EXTRA_STATE:
            logger = logging.getLogger("accel.checkpoint")
            logger.warning("%s is left out: it is extra state, and no tensor", name)
    return tensors


def facts(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the facts that ranks must agree on, a line for each tensor."""
    return [f"{name} {dtype_name(tensor.dtype)} {list(tensor.shape)}" for name, tensor in tensors.items()]
