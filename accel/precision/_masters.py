# SPDX-License-Identifier: Apache-2.0
"""Gradients in float32 for 16-bit parameters, whose float32 copies the optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from accel.errors import ConfigError, PrepareError
from accel.tensors import is_dtensor, is_half

_HALVES = (torch.bfloat16, torch.float16)


def check_masters(model: nn.Module, formats: Mapping[int, torch.dtype]) -> None:
    """Raise unless master weights have an effect on a model, and all of its gradients fit float32.

    Args:
        model: without wrappers.
        formats: dtypes that parameters will get, by `id`.

    Raises:
        ConfigError: no parameter in 16 bits.
        PrepareError: a sharded parameter in 16 bits, or a trainable one in another format than 16 or 32 bits.
    """
    halves = False
    for name, parameter in model.named_parameters():
        dtype = formats.get(id(parameter), parameter.dtype)
        halves = halves or dtype in _HALVES
        sharded = dtype in _HALVES and is_dtensor(parameter)
        other = parameter.requires_grad and dtype not in (*_HALVES, torch.float32)
        if sharded or other:
            raise PrepareError(
                "a parameter does not fit master weights",
                expected="replicated parameters in 16 or 32 bits",
                got=f"a sharded one in {dtype}" if sharded else f"one in {dtype}",
                where=f"Precision.master_weights, {name}",
                fix='Keep sharded parameters in float32: precision="bf16" gathers and computes in bf16.'
                if sharded
                else "Leave master_weights out.",
            )
    if not halves:
        raise ConfigError(
            "a setting that has no effect on this model",
            expected="parameters in 16 bits",
            got="none",
            where="Precision.master_weights",
            fix='Pass params="bf16" too, or leave it out.',
        )


def widen_gradients(model: nn.Module) -> None:
    """Let autograd give and sum the gradients of 16-bit parameters in float32. Mutates the parameters' `grad_dtype`."""
    for parameter in model.parameters():
        if is_half(parameter):
            parameter.grad_dtype = torch.float32
