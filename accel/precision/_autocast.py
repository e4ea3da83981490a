# SPDX-License-Identifier: Apache-2.0
"""`autocast`: torch's, with the dtype that the context's precision names."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from accel.context import DistContext


def autocast(ctx: DistContext) -> AbstractContextManager[object]:
    """Run the block's eligible operations in bf16 or fp16, as the context's precision says; fp32 changes nothing.

    Args:
        ctx: the context.

    Returns:
        A context manager for one block. No communication. See torch.autocast.
    """
    if ctx.precision == "fp32":
        return contextlib.nullcontext()
    dtype = torch.bfloat16 if ctx.precision == "bf16" else torch.float16
    return torch.autocast(ctx.device.type, dtype=dtype)
