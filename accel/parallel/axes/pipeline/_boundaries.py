# SPDX-License-Identifier: Apache-2.0
"""Dtypes and shapes of the tensors between stages."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any, cast

import msgspec
import torch

from accel.parallel._private import is_view


class Boundary(msgspec.Struct, frozen=True):
    """Dtype and shape of a tensor that a stage passes on, and whether a gradient travels back."""

    dtype: str
    shape: tuple[int, ...]
    differentiable: bool = True

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return torch's dtype."""
        return getattr(torch, self.dtype)

    def tensor(self, *, requires_grad: bool) -> torch.Tensor:
        """Return a tensor like it on the meta device."""
        dtype = self.torch_dtype
        floats = dtype.is_floating_point or dtype.is_complex
        return torch.empty(
            self.shape, dtype=dtype, device="meta", requires_grad=requires_grad and floats and self.differentiable
        )


def boundary_of(tensor: torch.Tensor) -> Boundary:
    """Return a tensor's dtype and shape."""
    return Boundary(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


class _SameMemory(torch.autograd.Function):
    """A tensor of its own in the memory of another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - torch's own way
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


def detachable(output: torch.Tensor) -> torch.Tensor:
    """Return an output that schedules may detach in place, while operators of the stage need it for gradients of
    weights."""
    if is_view(output):
        return output.clone()
    return cast(Any, _SameMemory).apply(output) if output.requires_grad else output


def noise(like: Boundary, device: torch.device) -> torch.Tensor:
    """Return random numbers in the place of a tensor that a stage passes on; zeros for integers."""
    dtype: torch.dtype = getattr(torch, like.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(like.shape, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator).to(device, dtype)


@contextlib.contextmanager
def working(stages: Iterable[Any], work: Any) -> Generator[None]:
    """Give stages their work for the time of a block."""
    for each in stages:
        each.work = work
        if each.before_batch is not None:
            each.before_batch()
    try:
        yield
    finally:
        for each in stages:
            each.work = None
