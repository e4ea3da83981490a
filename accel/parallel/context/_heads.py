# SPDX-License-Identifier: Apache-2.0
"""Context parallelism by heads: each rank attends over the whole sequence for some of the heads.

Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from accel.comm import exchanged, gathered
from accel.parallel.context._gather import sorted_positions
from accel.parallel.context._sdpa import attend, repeated
from accel.parallel.context._zigzag import rank_order


def heads_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, *, causal: bool, scale: float, documents: Tensor | None
) -> Tensor:
    """Return the attention of this rank's queries to all keys. A collective, as its backward.

    Queries, keys and values travel in one all-to-all, the output in another. Fewer key heads than ranks are repeated
    before, as often as needed for each rank to have one.

    Args:
        q, k, v, causal, scale: as of `attend`, of this rank's positions; the number of ranks divides that of the heads.
        group: ranks that share the sequence.
        documents: numbers of the documents of this rank's positions, [batch, own]; None without.
    """
    size = group.size()
    times = size // math.gcd(k.shape[1], size)
    k = repeated(k, k.shape[1] * times)
    v = repeated(v, v.shape[1] * times)
    whole = [sorted_positions(each, 2, size) for each in _heads_for_positions((q, k, v), group)]
    pair = None
    if documents is not None:
        everywhere = sorted_positions(gathered(documents, 1, group), 1, size)
        pair = everywhere, everywhere
    out = attend(*whole, causal=causal, scale=scale, documents=pair)
    return _positions_for_heads(out, group)


def _heads_for_positions(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> list[Tensor]:
    """Give away heads of the own positions for all positions of some heads, parts by rank. A collective."""
    size = group.size()
    parts = [torch.stack(each.chunk(size, 1)) for each in tensors]
    flat = torch.cat([each.reshape(size, -1) for each in parts], 1)
    received = exchanged(flat, [1] * size, [1] * size, group)
    columns = torch.split(received, [each[0].numel() for each in parts], 1)
    by_rank = [column.reshape(each.shape) for column, each in zip(columns, parts, strict=True)]
    return [torch.cat(list(each), 2) for each in by_rank]


def _positions_for_heads(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give away other ranks' positions of the own heads for all heads of the own positions. A collective."""
    size = group.size()
    cut = out.chunk(2 * size, 2)
    parts = torch.cat([cut[at] for at in rank_order(size)], 2).chunk(size, 2)
    stacked = torch.stack(parts)
    received = exchanged(stacked.reshape(size, -1), [1] * size, [1] * size, group)
    return torch.cat(list(received.view_as(stacked)), 1)
