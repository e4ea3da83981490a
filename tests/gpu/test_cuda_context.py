# SPDX-License-Identifier: Apache-2.0
"""Kernels of context parallelism on a CUDA device, against scores that are written out: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from planned_parts import WRITTEN_OUT, Masked, kernel_of

from accel.parallel.axes.context._kernels import Kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def merged(kernel: Kernel, tensors: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of causal attention, the gradients block by block from the attention to all keys."""
    q, k, v = tensors
    attended = kernel.forward(q, k, v, Masked(causal=True), 0.2)
    attended = attended._replace(lse=attended.lse.contiguous())
    half = q.shape[2] // 2
    late = attended._replace(out=attended.out[:, :, half:], lse=attended.lse[:, :, half:].contiguous())
    early = attended._replace(out=attended.out[:, :, :half], lse=attended.lse[:, :, :half].contiguous())
    whole = [torch.zeros_like(each, dtype=torch.float32) for each in tensors]
    blocks = [
        (slice(0, half), slice(0, half), early, Masked(causal=True)),
        (slice(half, None), slice(0, half), late, Masked(causal=False)),
        (slice(half, None), slice(half, None), late, Masked(causal=True)),
    ]
    for rows, columns, part, masked in blocks:
        keys, values = k[:, :, columns], v[:, :, columns]
        grads = kernel.backward(grad[:, :, rows].contiguous(), q[:, :, rows], keys, values, part, masked, 0.2)
        for each, at, share in zip(whole, (rows, columns, columns), grads, strict=True):
            each[:, :, at] += share
    return [attended.out.float(), attended.lse.float(), *whole]


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.1), (torch.float32, 1e-3)])
def test_fused_blocks_add_up_to_the_whole(dtype: torch.dtype, most: float) -> None:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, 3, 96, 64, generator=generator).to("cuda", dtype) for _ in range(4)]
    q, k, v, grad = made
    kernel = kernel_of(q, k, v, Masked(causal=True))
    assert kernel is not WRITTEN_OUT
    for mine, theirs in zip(merged(kernel, [q, k, v], grad), merged(WRITTEN_OUT, [q, k, v], grad), strict=True):
        assert (mine - theirs).abs().max().item() < most
