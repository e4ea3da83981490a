# SPDX-License-Identifier: Apache-2.0
"""Context parallelism by an all-gather of the keys and values; torch's own attention does the rest."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from accel.comm import gathered, gathered_summed
from accel.parallel.context._sdpa import attend
from accel.parallel.context._zigzag import natural_order, pieces


def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, *, causal: bool, scale: float, documents: Tensor | None
) -> Tensor:
    """Return the attention of this rank's queries to all keys. A collective, as its backward.

    Keys and values travel in one message, before heads are repeated. Under a causal mask each half of the queries is
    multiplied with the keys up to its own end, so no rank has more work than another.

    Args:
        q, k, v, causal, scale: as of `attend`, of this rank's positions.
        group: ranks that share the sequence.
        documents: numbers of the documents of this rank's positions, [batch, own]; None without.
    """
    both = gathered_summed(torch.cat((k, v), -1), 2, group)
    all_documents = None if documents is None else gathered(documents, 1, group)
    if not causal:
        keys, values = torch.split(both, [k.shape[-1], v.shape[-1]], -1)
        pair = None if documents is None or all_documents is None else (documents, all_documents)
        return attend(q, keys, values, causal=False, scale=scale, documents=pair)
    both = sorted_positions(both, 2, group.size())
    all_documents = None if all_documents is None else sorted_positions(all_documents, 1, group.size())
    keys, values = torch.split(both, [k.shape[-1], v.shape[-1]], -1)
    own = q.shape[2] // 2
    halves: list[Tensor] = []
    for at, piece in enumerate(pieces(group.rank(), group.size())):
        end = (piece + 1) * own
        rows = slice(at * own, (at + 1) * own)
        pair = None
        if documents is not None and all_documents is not None:
            pair = documents[:, rows], all_documents[:, :end]
        queries = q[:, :, rows]
        halves.append(attend(queries, keys[:, :, :end], values[:, :, :end], causal=True, scale=scale, documents=pair))
    return torch.cat(halves, 2)


def sorted_positions(x: Tensor, dim: int, size: int) -> Tensor:
    """Return parts that are concatenated by rank in the order of the sequence.

    Args:
        x: parts of all ranks along `dim`, each of two pieces.
        dim: dimension of the positions.
        size: number of ranks.
    """
    parts = x.chunk(2 * size, dim)
    return torch.cat([parts[at] for at in natural_order(size)], dim)
