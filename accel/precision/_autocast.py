# SPDX-License-Identifier: Apache-2.0
"""`autocast`: the formats of a block's arithmetic, and nothing left behind after it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from accel.context import DistContext
from accel.formats import Precision, PrecisionName
from accel.formats import precision as precision_of
from accel.precision._fp8 import fp8_scope
from accel.precision._support import DTYPES, check_compute


def autocast(
    ctx: DistContext, precision: Precision | PrecisionName | None = None, *, cache: bool = True
) -> AbstractContextManager[object]:
    """Compute the block's eligible operations in the context's precision, or in another. Blocks nest.

    Outputs keep the format they were computed in. A context in fp32 or tf32 leaves an autocast around the block as it
    is; `precision="fp32"` turns it off within.

    Args:
        ctx: the context.
        precision: instead of the context's.
        cache: whether the low-precision copies of parameters are kept until the outermost block ends, as in
            torch.autocast; without it a parameter that changes within the block is read anew.

    Returns:
        A context manager for one block. No communication.

    Raises:
        DeviceError: the device does not compute in that format.
        ConfigError: an unknown precision.
    """
    chosen = ctx.precision if precision is None else precision_of(precision, where="autocast(precision=)")
    if precision is None and chosen.compute == "fp32":
        return contextlib.nullcontext()
    check_compute(ctx.device, chosen.compute)
    scope = _scope(ctx, chosen, cache)
    if precision is None and (chosen.compute == "tf32" or not torch.is_autocast_enabled(ctx.device.type)):
        return scope
    return _nested(ctx.device, scope)


def matmul_precision(ctx: DistContext) -> AbstractContextManager[None]:
    """Compute the block's fp32 products as the context says: what a backward in tf32 needs outside of `autocast`.

    torch has one such setting for the whole process, so blocks of several threads must not overlap.
    """
    if ctx.precision.compute != "tf32":
        return contextlib.nullcontext()
    check_compute(ctx.device, "tf32")
    return _matmul_precision("high", ctx.device)


def _scope(ctx: DistContext, chosen: Precision, cache: bool) -> AbstractContextManager[object]:
    if chosen.compute in ("bf16", "fp16"):
        scope = torch.autocast(ctx.device.type, dtype=DTYPES[chosen.compute], cache_enabled=cache)
        return scope if chosen.fp8 is None else fp8_scope(ctx, chosen.fp8, scope)
    return _matmul_precision("high" if chosen.compute == "tf32" else "highest", ctx.device)


@contextlib.contextmanager
def _nested(device: torch.device, scope: AbstractContextManager[object]) -> Generator[None]:
    """Enter a scope within others: torch keeps converted parameters whatever format they were converted to."""
    available = torch.amp.is_autocast_available(device.type)
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device.type, enabled=False) if available else contextlib.nullcontext(), scope:
            yield
    finally:
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _matmul_precision(wanted: str, device: torch.device) -> Generator[None]:
    if device.type != "cuda":
        yield
        return
    settings = cast(Any, torch.backends.cuda.matmul)
    new = getattr(settings, "fp32_precision", None)  # since torch 2.9, beside the setting of old
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:  # which refuses once a script has used the new one
        old = None
    if old is None:
        settings.fp32_precision = "tf32" if wanted == "high" else "ieee"
    else:
        torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        if old is not None:
            torch.set_float32_matmul_precision(old)
        if new is not None:
            settings.fp32_precision = new
