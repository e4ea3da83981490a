# SPDX-License-Identifier: Apache-2.0
"""PowerSGD of whole buckets: the gradients of a bucket as one square matrix, sent as two thin ones.

torch's own hook of this kind orthogonalizes matrices of two dimensions by a function that takes batches alone: it ends
in an AssertionError at its first compressed step, for any bucket and any option.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage] - a documented name
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


class BatchedPowerSgd:
    """State and exchange of one replica. Ranks hold equal bases, and errors of their own.

    Args:
        group: process group of the replicas.
        matrix_rank, start_step, min_compression, error_feedback, warm_start: as of `PowerSgd`.
        wire: dtype that the matrices travel in; None for that of the arithmetic.

    Reference: Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression", arXiv:1905.13727, algorithm 1.
    """

    def __init__(
        self,
        group: Any,
        *,
        matrix_rank: int,
        start_step: int,
        min_compression: float,
        error_feedback: bool,
        warm_start: bool,
        wire: torch.dtype | None,
    ) -> None:
        self._group = group
        self._matrix_rank = matrix_rank
        self._start_step = start_step
        self._min_compression = min_compression
        self._error_feedback = error_feedback
        self._warm_start = warm_start
        self._wire = wire
        self._step = 0
        self._errors: dict[int, torch.Tensor] = {}
        self._bases: dict[int, torch.Tensor] = {}

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Replace a bucket's gradients by an approximation of their mean over ranks. A collective.

        The thin matrices are exchanged before this returns.
        """
        step = self._step
        self._step += bucket.is_last()
        flat = bucket.buffer()
        side = math.ceil(math.sqrt(flat.numel()))
        columns = min(self._matrix_rank, side)
        if step < self._start_step or flat.numel() <= self._min_compression * 2 * side * columns:
            return default_hooks.allreduce_hook(self._group, bucket)
        self._compress(bucket.index(), step, flat, side, columns)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(flat)
        return done

    def _compress(self, index: int, step: int, flat: torch.Tensor, side: int, columns: int) -> None:
        matrix = flat.new_zeros(side, side, dtype=torch.promote_types(flat.dtype, torch.float32))
        entries = matrix.view(-1)[: flat.numel()]  # the last elements of the square stay 0
        _ = entries.copy_(flat)
        error = self._errors.get(index)
        if error is not None:
            _ = entries.add_(error)
        basis = self._bases.get(index)
        if basis is None:
            basis = _random_basis(matrix, columns, seed=step * 1_000_003 + index)
        left = _orthonormal(self._mean(matrix @ basis))
        right = self._mean(matrix.mH @ left)
        sent = (left @ right.mH).view(-1)[: flat.numel()]
        # without a wait for the device: an overflow reaches the gradients, but not what the next step begins with
        is_finite = right.isfinite().all()
        if self._error_feedback:
            before = torch.zeros_like(entries) if error is None else error
            self._errors[index] = torch.where(is_finite, entries - sent, before)
        if self._warm_start:
            self._bases[index] = torch.where(is_finite, _orthonormal(right), basis)
        _ = flat.copy_(sent)

    def _mean(self, thin: torch.Tensor) -> torch.Tensor:
        travelling = thin.to(self._wire or thin.dtype) / self._group.size()
        cast(Any, dist).all_reduce(travelling, group=self._group)
        return travelling.to(thin.dtype)


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return a basis of what columns span, filled up to their number where they depend on each other."""
    return cast(Any, torch).linalg.qr(columns).Q


def _random_basis(like: torch.Tensor, columns: int, seed: int) -> torch.Tensor:
    """Return orthonormal columns, equal on all ranks. Draws from no stream of the process."""
    generator = torch.Generator().manual_seed(seed)
    return _orthonormal(torch.randn(like.shape[0], columns, generator=generator, dtype=like.dtype).to(like.device))
