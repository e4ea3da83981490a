# SPDX-License-Identifier: Apache-2.0
"""`apply_precision`: the dtypes of a model's parameters, submodules, outputs and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] - torch has no other name

from accel import tree as trees
from accel.context import DistContext, context_first
from accel.errors import ConfigError, PrepareError
from accel.errors._checks import with_article
from accel.formats import Precision
from accel.mixins import KeepsFormat, Mixin, add_mixin
from accel.precision._fp8 import (
    DTYPES,
    FP8_PACKAGES,
    QAT_PACKAGES,
    check_compute,
    check_fp8,
    convert_layers,
    fp8_layers,
    has_layers,
    matched,
    qat_layers,
    round_layers,
)
from accel.tensors import is_dtensor, is_half

_HALVES = (torch.bfloat16, torch.float16)


def check_masters(model: nn.Module, formats: Mapping[int, torch.dtype]) -> None:
    """Refuse master weights without an effect on the model, or of parameters that are sharded or do not fit float32."""
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


M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


class InFp32(KeepsFormat, nn.Module):
    """Mixin of submodules that compute in fp32 within an autocast."""

    _accel_device_type = "cpu"  # no name that a user's module may have
    _accel_containers: Sequence[trees.Container] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on fp32 inputs, without autocast."""
        with torch.autocast(self._accel_device_type, enabled=False):
            args, kwargs = _cast((args, kwargs), torch.float32, self._accel_containers)
            return super().forward(*args, **kwargs)


class WithOutputs(Mixin, nn.Module):
    """Mixin of models with converted outputs."""

    _accel_outputs = torch.float32
    _accel_containers: Sequence[trees.Container] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward and convert its outputs."""
        return _cast(super().forward(*args, **kwargs), self._accel_outputs, self._accel_containers)


@context_first
def apply_precision(ctx: DistContext, model: M) -> M:
    """Convert a model to the dtypes of the context's precision, in place. `prepare` calls it. No communication.

    Parameters are converted and stay the same objects, as an optimizer may hold them. (fp8 weights gathered in fp8 do
    not: build the optimizer after this call.) Buffers keep their dtype, and so do the parameters of batch norms, with
    statistics in fp32. Submodules named in `fp32_modules` get fp32 parameters and inputs. Names in `state_dict` stay.
    A second call changes nothing.

    Args:
        ctx: the context.
        model: without wrappers. Mutated.

    Returns:
        The model.

    Raises:
        ConfigError: a name that no submodule has, or no layer for fp8 or to quantize.
        DeviceError: the device does not support a dtype.
        MissingExtraError: a package for fp8 or quantization is missing.
        PrepareError: parameters to convert have gradients, or are sharded.
    """
    precision = ctx.precision
    if precision.compute != "fp32":  # which every device has
        check_compute(ctx.device, precision.compute)
    spared = _spared(model, precision)
    layers: list[str] = []
    if precision.fp8 is not None and not has_layers(model, FP8_PACKAGES):
        check_fp8(ctx.device, precision.fp8)
        layers = fp8_layers(model, precision.fp8, spared)
    rounded: list[str] = []
    if precision.qat is not None and not has_layers(model, QAT_PACKAGES):
        rounded = qat_layers(model, precision.qat, spared)
    formats = _formats(model, precision, spared)
    if precision.master_weights is not None:
        check_masters(model, {id(parameter): dtype for _, parameter, dtype in formats})
    _convert(formats)
    if precision.master_weights is not None:
        for parameter in filter(is_half, model.parameters()):
            parameter.grad_dtype = torch.float32  # autograd gives and sums gradients of 16-bit parameters in float32
    # nested ones too: a list of modules has no forward to cover its own
    in_fp32 = [model.get_submodule(name) for name in spared]
    if in_fp32:
        add_mixin(in_fp32, InFp32, _accel_device_type=ctx.device.type, _accel_containers=ctx.containers)
    if precision.fp8 is not None and layers:
        convert_layers(model, precision.fp8, layers)
    if precision.qat is not None and rounded:
        round_layers(model, precision.qat, rounded)
    if precision.outputs is not None:
        add_mixin([model], WithOutputs, _accel_outputs=DTYPES[precision.outputs], _accel_containers=ctx.containers)
    return model


def planned_formats(model: nn.Module, precision: Precision) -> dict[int, torch.dtype]:
    """Return the dtypes that `apply_precision` will give to parameters, by `id`; of those that it converts."""
    spared = _spared(model, precision)
    return {id(parameter): dtype for _, parameter, dtype in _formats(model, precision, spared)}


def _spared(model: nn.Module, precision: Precision) -> set[str]:
    """Return the submodules that keep float32, by name."""
    named = precision.fp32_modules
    return matched(model, named, "Precision.fp32_modules") if named else set()


def _formats(model: nn.Module, precision: Precision, spared: set[str]) -> list[tuple[str, nn.Parameter, torch.dtype]]:
    """List parameters to convert, each once; of modules that share one, the wider dtype wins."""
    wanted: dict[int, torch.dtype] = {}
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        for parameter in module.parameters(recurse=False):
            if name in spared:
                wanted[id(parameter)] = torch.float32
            elif precision.params is not None and not isinstance(module, _BatchNorm):
                wanted.setdefault(id(parameter), DTYPES[precision.params])
    return [
        (name, parameter, wanted[id(parameter)])
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and wanted.get(id(parameter), parameter.dtype) != parameter.dtype
    ]


def _convert(formats: list[tuple[str, nn.Parameter, torch.dtype]]) -> None:
    for name, parameter, dtype in formats:
        if is_dtensor(parameter):
            raise PrepareError(
                "a parameter that is to be converted is sharded",
                expected="a model before it is sharded",
                got=f"{with_article(type(parameter).__name__)} in {parameter.dtype}",
                where=f"apply_precision, {name}",
                fix="Call accel.precision.apply_precision(ctx, model) first, then shard the model.",
            )
        if parameter.grad is not None:
            raise PrepareError(
                "a parameter that is to be converted has a gradient",
                expected=f"a model before its first backward, or parameters in {dtype}",
                got=f"a gradient in {parameter.dtype}",
                where=f"apply_precision, {name}",
                fix="Call optimizer.zero_grad() first, or prepare the model before training it.",
            )
    for _, parameter, dtype in formats:
        parameter.data = parameter.data.to(dtype)  # optimizers hold the parameter object


def _cast(tree: T, dtype: torch.dtype, containers: Sequence[trees.Container]) -> T:
    return trees.map_tensors(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree, containers)
