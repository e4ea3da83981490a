# SPDX-License-Identifier: Apache-2.0
"""Tensors of a pipelined model, whole, on every rank along the pipeline: one at a time, from the rank of its stage."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import nn

from accel.comm import Call, Comm, broadcast_flat, exchange_values
from accel.context import DistContext
from accel.parallel import unwrap_model
from accel.parallel.pipeline import pipeline_of
from accel.storage import dtype_name
from accel.tensors import full_tensor


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
        """Return a tensor whole. A collective along the pipeline, and of the mesh of a DTensor.

        Args:
            name: one of `facts`.
            own: tensors of this rank.
        """
        fact = self.facts[name]
        if self._comm.rank == self._owners[name]:
            found = full_tensor(own[name]).to(self._ctx.device).contiguous()  # one that streams is on the host
        else:
            found = torch.empty(fact.shape, dtype=fact.dtype, device=self._ctx.device)
        if found.numel():
            broadcast_flat(self._comm, found, source=self._owners[name])
        return found


def staged_tensors(ctx: DistContext, model: nn.Module, own: Mapping[str, torch.Tensor]) -> StagedTensors | None:
    """Return the tensors of all stages of a model; None of a model without a pipeline. A collective along it.

    Args:
        ctx: the context.
        model: from `prepare_model`.
        own: tensors of this rank, by name.
    """
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
