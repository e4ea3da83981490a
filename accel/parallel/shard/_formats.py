# SPDX-License-Identifier: Apache-2.0
"""Formats in which parameters and gradients travel: the context's, so that a sharded model computes as a whole one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage] - torch has no other name

from accel.errors import ConfigError, PrepareError
from accel.formats import Precision
from accel.mixins import KeepsFormat, Mixin, add_mixin
from accel.topology import WireDtype

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NARROW = (torch.bfloat16, torch.float16)
_NORMS = (nn.LayerNorm, nn.GroupNorm, _NormBase)  # not RMSNorm, which takes any format


class WireFormat(NamedTuple):
    """Formats in which a unit's tensors travel; None for their own.

    Attributes:
        gather: of parameters, and so of what the unit computes with.
        reduce: of gradients while they are summed.
    """

    gather: torch.dtype | None
    reduce: torch.dtype | None


def check_formats(gather: WireDtype, precision: Precision) -> None:
    """Raise for a format of gathered parameters in which the context does not compute.

    Raises:
        ConfigError: such a format.
    """
    if gather in ("auto", "fp32", precision.compute):
        return
    raise ConfigError(
        "parameters would be gathered in a format in which the context does not compute",
        expected=f"'auto' or 'fp32', or precision={gather!r} of the context",
        got=f"gather_dtype={gather!r} and a context that computes in {precision.compute}",
        where="Plan.gather_dtype",
        fix=f"Leave it out, or make the context with precision={gather!r}.",
    )


def wide_parameters(model: nn.Module) -> frozenset[int]:
    """Return the `id` of each parameter of modules that compute in the format in which it is stored."""
    wide = (each for each in model.modules() if isinstance(each, KeepsFormat))
    return frozenset(id(parameter) for module in wide for parameter in module.parameters(recurse=False))


def wire_format(
    parameters: Iterable[nn.Parameter], wide: frozenset[int], precision: Precision, gather: WireDtype, reduce: WireDtype
) -> WireFormat:
    """Return the formats for the parameters of one unit.

    Args:
        parameters: of the unit.
        wide: as of `wide_parameters`.
        precision: of the context.
        gather, reduce: as `gather_dtype` and `reduce_dtype` of `Plan`.
    """
    listed = [each for each in parameters if each.is_floating_point()]
    dtypes = {each.dtype for each in listed}
    narrow = _DTYPES[precision.compute] if precision.compute in ("bf16", "fp16") and gather != "fp32" else None
    # autocast leaves fp64 as it is
    if dtypes - {torch.float32, *_NARROW} or torch.float32 not in dtypes or any(id(each) in wide for each in listed):
        narrow = None
    if reduce != "auto":
        return WireFormat(narrow, _DTYPES[reduce])
    computed = narrow or next((each.dtype for each in listed if each.requires_grad), None)
    return WireFormat(narrow, torch.float32 if computed in _NARROW else None)


class InAutocast(Mixin, nn.Module):
    """Mixin of modules whose parameters are gathered in the format of autocast: their forward always runs in it."""

    _accel_device_type = "cpu"
    _accel_dtype = torch.bfloat16

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, in autocast.

        Raises:
            PrepareError: in a block that turns autocast off.
        """
        if torch.is_autocast_enabled(self._accel_device_type):
            return cast(Any, super()).forward(*args, **kwargs)
        if not torch.compiler.is_compiling() and _is_turned_off():
            raise PrepareError(
                "a module computes without autocast, but its parameters were gathered in a narrow format",
                expected="autocast around its forward",
                got=f"a block that turns it off, and parameters in {self._accel_dtype}",
                where=type(self).__name__,
                fix="Name it in Precision.fp32_modules, or prepare the model with Plan(gather_dtype='fp32').",
            )
        with torch.autocast(self._accel_device_type, dtype=self._accel_dtype):
            return cast(Any, super()).forward(*args, **kwargs)


class NormInFp32(Mixin, nn.Module):
    """Mixin of norms whose parameters are gathered in a narrow format: they compute with fp32 ones, as in autocast.

    Autocast converts them for some norms on some devices; elsewhere torch refuses parameters in another format than the
    inputs or the statistics.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the norm's own forward with its parameters in fp32."""
        stored = dict(self._parameters)
        for name, parameter in stored.items():
            if parameter is not None and parameter.dtype in _NARROW:
                self._parameters[name] = cast(Any, parameter.float())
        try:
            return cast(Any, super()).forward(*args, **kwargs)
        finally:
            self._parameters.update(stored)


def compute_in(dtype: torch.dtype, unit: nn.Module, device_type: str) -> None:
    """Let a unit compute with parameters in the format of autocast. Mutates its modules.

    Args:
        dtype: of autocast, and of the gathered parameters.
        unit: not sharded yet.
        device_type: of the autocast.
    """
    norms = [each for each in unit.modules() if isinstance(each, _NORMS) and not isinstance(each, KeepsFormat)]
    add_mixin(norms, NormInFp32)
    add_mixin([unit], InAutocast, _accel_device_type=device_type, _accel_dtype=dtype)


def _is_turned_off() -> bool:
    """Whether this is in a block of autocast, given that autocast is off."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1
