# SPDX-License-Identifier: Apache-2.0
"""Compare the first samples of ranks that read streams of their own: equal ones show a stream that nobody divided."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import torch

from accel.errors import TreeError
from accel.tree import Container, leaves

_MOST_BYTES = 1 << 16  # of each tensor


def digest(data: object, containers: Sequence[Container] = ()) -> str:
    """Return a short text that differs between different batches; empty for one that cannot be taken apart."""
    hashed = hashlib.blake2b(digest_size=8)
    try:
        for path, leaf in leaves(data, containers):
            hashed.update(path.encode())
            hashed.update(_bytes(leaf))
    except TreeError:
        return ""
    return hashed.hexdigest()


def warn_of_equal(firsts: Sequence[str], parts: Sequence[int]) -> None:
    """Log a warning if two parts of the data begin with the same samples.

    Args:
        firsts: the digest of each rank's first batch; empty where it is not known.
        parts: which part of the data each rank reads.
    """
    readers: dict[str, int] = {}
    for rank, (first, part) in enumerate(zip(firsts, parts, strict=True)):
        other = readers.setdefault(first, rank) if first else rank
        if parts[other] != part:
            logging.getLogger("accel.data").warning(
                'ranks %d and %d begin their streams with the same samples: stream="own" reads whatever the dataset of '
                "each rank gives, so one that does not divide itself is read in full by every rank; divide it by "
                'ctx.data_parallel, or use stream="shards", "elements" or "dispatch"',
                other,
                rank,
            )
            return


def _bytes(leaf: object) -> bytes:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf).encode()
    flat = leaf.detach().flatten()
    few = flat[: max(1, _MOST_BYTES // max(leaf.element_size(), 1))].cpu().contiguous()
    return f"{leaf.dtype} {list(leaf.shape)}".encode() + few.view(torch.uint8).numpy().tobytes()
