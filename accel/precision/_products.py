# SPDX-License-Identifier: Apache-2.0
"""torch's settings for tf32 in fp32 matrix products and convolutions, for one block."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, cast

import torch

_backends = cast(Any, torch.backends)


@contextlib.contextmanager
def fp32_products(device: torch.device, *, rounded: bool) -> Generator[None]:
    """Round the operands of fp32 products to tf32, or not, during the block. No effect on devices other than CUDA.

    torch 2.9 added newer settings beside the older ones, and refuses to read the older where the two differ.
    """
    if device.type != "cuda":
        yield
        return
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
    if not hasattr(_backends.cuda.matmul, "fp32_precision"):
        return []
    cudnn = _backends.cudnn
    return [
        _backends.cuda.matmul,
        cudnn.conv,
        cudnn.rnn,
        _backends.mkldnn.matmul,
    ]  # written by the older settings


def _older() -> tuple[str, bool] | None:
    try:
        return torch.get_float32_matmul_precision(), _backends.cudnn.allow_tf32
    except RuntimeError:
        return None


def _set_older(products: str, convolutions: bool) -> None:
    torch.set_float32_matmul_precision(products)
    _backends.cudnn.allow_tf32 = convolutions
