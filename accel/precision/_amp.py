# SPDX-License-Identifier: Apache-2.0
"""Mixed precision while a model runs: `autocast`, the dtypes of a block's arithmetic, and the first loss scale.

Dynamic loss scaling: Micikevicius et al. 2018, "Mixed precision training", arXiv:1710.03740.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from accel.context import DistContext, context_first
from accel.formats import Precision, PrecisionName, precision as precision_of
from accel.loop_state import LossScale
from accel.precision._fp8 import DTYPES, check_compute, fp8_scope

_backends = cast(Any, torch.backends)


@contextlib.contextmanager
def fp32_products(device: torch.device, *, rounded: bool) -> Generator[None]:
    """Round the operands of fp32 products to tf32, or not, during the block. No effect on devices other than CUDA."""
    if device.type != "cuda":
        yield
        return
    # torch refuses to read the older settings where they differ from these
    newer = _newer()
    before = [each.fp32_precision for each in newer]
    older = _older()
    if older is None:
        for each in newer:
            each.fp32_precision = "tf32" if rounded else "ieee"
    else:
        _set_older("high" if rounded else "highest", rounded)
    try:
        yield
    finally:
        if older is not None:
            _set_older(*older)
        for each, value in zip(newer, before, strict=True):
            each.fp32_precision = value


def _newer() -> list[Any]:
    """Return the settings by kind of operation, which the older settings write."""
    return [_backends.cuda.matmul, _backends.cudnn.conv, _backends.cudnn.rnn, _backends.mkldnn.matmul]


def _older() -> tuple[str, bool] | None:
    try:
        return torch.get_float32_matmul_precision(), _backends.cudnn.allow_tf32
    except RuntimeError:
        return None


def _set_older(products: str, convolutions: bool) -> None:
    torch.set_float32_matmul_precision(products)
    _backends.cudnn.allow_tf32 = convolutions


_UNCHANGED = contextlib.nullcontext()


@context_first
def autocast(
    ctx: DistContext, precision: Precision | PrecisionName | None = None, *, cache: bool = True
) -> AbstractContextManager[object]:
    """Compute the block's eligible operations in the context's precision, or in another. Blocks nest.

    Outputs keep the computed dtype. A context in fp32 or tf32 leaves an autocast around the block as it
    is; `precision="fp32"` turns it off within, and tf32 too.

    Args:
        ctx: the context.
        precision: used in place of the context's.
        cache: whether low-precision copies of parameters are kept until the outermost block ends, as in torch.autocast;
            False for parameters that change within the block.

    Returns:
        A context manager for one block. No communication.

    Raises:
        DeviceError: the device does not support the precision.
        ConfigError: an unknown precision.

    Examples:
        >>> with accel.autocast(ctx, "bf16"):
        ...     outputs = model(inputs)
        >>> outputs.dtype
        torch.bfloat16
    """
    chosen = ctx.precision if precision is None else precision_of(precision, where="autocast(precision=)")
    if precision is None and chosen.compute == "fp32":
        return _UNCHANGED
    check_compute(ctx.device, chosen.compute)
    scope = _scope(ctx, chosen, cache)
    if precision is None and (chosen.compute == "tf32" or not torch.is_autocast_enabled(ctx.device.type)):
        return scope
    return _nested(ctx.device, scope)


def matmul_precision(ctx: DistContext) -> AbstractContextManager[None]:
    """Compute the block's fp32 products in the context's precision, as a backward in tf32 needs outside of `autocast`.

    torch's settings are global to the process, so blocks of several threads must not overlap.
    """
    if ctx.precision.compute != "tf32":
        return _UNCHANGED
    check_compute(ctx.device, "tf32")
    return fp32_products(ctx.device, rounded=True)


def _scope(ctx: DistContext, chosen: Precision, cache: bool) -> AbstractContextManager[object]:
    if chosen.compute in ("bf16", "fp16"):
        scope = torch.autocast(ctx.device.type, dtype=DTYPES[chosen.compute], cache_enabled=cache)
        return scope if chosen.fp8 is None else fp8_scope(ctx, chosen.fp8, scope)
    return fp32_products(ctx.device, rounded=chosen.compute == "tf32")


@contextlib.contextmanager
def _nested(device: torch.device, scope: AbstractContextManager[object]) -> Generator[None]:
    """Enter a scope within others. torch's cache of converted parameters ignores their dtype, so it is cleared."""
    available = torch.amp.is_autocast_available(device.type)
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device.type, enabled=False) if available else contextlib.nullcontext(), scope:
            yield
    finally:
        torch.clear_autocast_cache()


@context_first
def loss_scale(ctx: DistContext, *, initial: float = 2.0**16, growth_interval: int = 2000) -> LossScale:
    """Return the initial loss scale: dynamic for fp16, else fixed at 1.

    Args:
        ctx: the context, for its precision.
        initial: first scale under fp16.
        growth_interval: steps without an overflow between two doublings.

    Raises:
        ConfigError: a value outside its range.
        DeviceError: the device does not support the context's precision.

    Examples:
        >>> accel.loss_scale(ctx).scale
        1.0
        >>> accel.loss_scale(accel.replace(ctx, precision="fp16")).scale
        65536.0
    """
    check_compute(ctx.device, ctx.precision.compute)
    if ctx.precision.compute != "fp16":
        return LossScale()
    return LossScale(scale=initial, dynamic=True, growth_interval=growth_interval)
