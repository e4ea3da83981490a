# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a model, counted once by torch's counter, and the peak FLOP/s of accelerators from their data sheets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from accel.formats import Precision
from accel.tensors import is_dtensor
from accel.tree import map_tensors
from accel.tree._walk import tensors

_Shape = Sequence[int]
_Copy = Callable[[torch.Tensor], torch.Tensor]


class FlopCount(msgspec.Struct, frozen=True):
    """Floating-point operations of a model on one input, from `count_flops`. A multiply-add counts as two.

    Attributes:
        forward: of the forward pass; None if it could not be counted.
        total: of forward and backward; None if it could not be counted.
        unknown: reason why it could not be counted; empty if it was.
    """

    forward: int | None
    total: int | None
    unknown: str = ""

    def per_sample(self, samples: int) -> float | None:
        """Return the total of one of the input's `samples`, for `StepStatistics.read`; None if it is unknown."""
        return None if self.total is None else self.total / samples


def count_flops(model: nn.Module, *args: Any, **kwargs: Any) -> FlopCount:
    """Count the FLOPs of a model's forward and backward on an input. No communication; never raises.

    The model runs once on copies of its parameters on the meta device, without memory and computing. If that fails, as
    where code depends on values, it runs once with its own values. Parameters, gradients, buffers and torch's random
    streams stay as they are. Matrix products, convolutions and attention are counted, attention as if without a mask;
    other operations, custom kernels among them, are not. Recomputed activations count twice.

    Args:
        model: plain model, before `prepare`; on any device, the meta device included.
        args, kwargs: an input of the model, such as one batch.

    Returns:
        The count for this input; `StepStatistics.read(flops_per_sample=)` takes its `per_sample`.

    Examples:
        >>> accel.metrics.count_flops(torch.nn.Linear(16, 32, bias=False), torch.zeros(4, 16, requires_grad=True))
        FlopCount(forward=4096, total=12288, unknown='')

    Reference: torch.utils.flop_counter.
    """
    if isinstance(model, DistributedDataParallel):
        model = cast("nn.Module", cast(Any, model).module)
    if any(map(is_dtensor, model.parameters())):
        return FlopCount(None, None, "the model's parameters are sharded; count before prepare")
    failures: list[str] = []
    for copied in (_without_memory, torch.Tensor.detach):
        try:
            return _count(model, copied, args, kwargs)
        except Exception as error:  # the model's code: whatever it raises, the run continues
            failures.append(f"{type(error).__name__}: {error}".partition("\n")[0])
    return FlopCount(None, None, f"on the meta device {failures[0]}; with values {failures[1]}")


def _count(model: nn.Module, copied: _Copy, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlopCount:
    values = {name: copied(each).requires_grad_(each.requires_grad) for name, each in model.named_parameters()}
    values |= {name: copied(each).clone() for name, each in model.named_buffers()}
    inputs, named = map_tensors(lambda each: copied(each).requires_grad_(each.requires_grad), (args, dict(kwargs)))
    streams = [each.device for each in model.parameters() if each.device.type == "cuda"][:1]
    counter = FlopCounterMode(display=False, custom_mapping=_mapping())
    fork = cast(Any, torch.random).fork_rng
    with fork(streams), torch.enable_grad(), counter:
        output = torch.func.functional_call(model, values, inputs, named)
        forward = counter.get_total_flops()
        losses = [each.float().sum() for _, each in tensors(_plain(output)) if each.requires_grad]
        if losses:
            torch.autograd.backward(losses)
        return FlopCount(forward, counter.get_total_flops())


def _plain(output: Any) -> Any:
    """Return a model's output as containers that `accel.tree` knows; outputs of transformers are ordered dicts."""
    return dict(cast("Mapping[Any, Any]", output)) if isinstance(output, Mapping) else output


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("meta")


def _mapping() -> dict[Any, Any]:
    """Return counts for operators that torch's counter leaves out, or counts wrongly."""
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        aten.convolution_backward: _convolution_backward,
    }


def _attention(query: _Shape, key: _Shape, value: _Shape, *_: Any, out_val: Any = None, **__: Any) -> int:
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


def _attention_backward(
    _: _Shape, query: _Shape, key: _Shape, value: _Shape, *__: Any, out_val: Any = None, **___: Any
) -> int:
    """Gradients of both products; the scores that the kernel computes again do not count, as on the meta device."""
    return 2 * _attention(query, key, value)


def _convolution_backward(gradient: _Shape, inputs: _Shape, weights: _Shape, *rest: Any, **_: Any) -> int:
    """As many as the forward's for each gradient that is asked for; torch's own count ignores groups."""
    transposed, asked = rest[4], rest[7]
    positions = inputs if transposed else gradient
    return 2 * positions[0] * math.prod(positions[2:]) * math.prod(weights) * (bool(asked[0]) + bool(asked[1]))


class Peak(NamedTuple):
    """Peak rates of a device in 10**12 FLOP/s, without sparsity; 0 for a dtype that it does not have."""

    half: float  # bf16 and fp16
    tf32: float  # fp32 values rounded to tf32
    single: float  # fp32
    fp8: float = 0  # 8-bit floats


# The first name that occurs in the device's as words counts: an L40 is no L4.
_PEAKS = {
    "GB200": Peak(2500, 1250, 80, 5000),
    "B200": Peak(2250, 1120, 75, 4500),
    "GH200": Peak(989.4, 494.7, 66.9, 1978.9),
    "H200": Peak(989.4, 494.7, 66.9, 1978.9),
    "H100 PCIe": Peak(756, 378, 51, 1513),
    "H100 NVL": Peak(835, 417, 60, 1670),
    "H100": Peak(989.4, 494.7, 66.9, 1978.9),
    "A100": Peak(312, 156, 19.5),
    "A40": Peak(149.7, 74.8, 37.4),
    "A30": Peak(165, 82, 10.3),
    "L40S": Peak(362, 183, 91.6, 733),
    "L40": Peak(181, 90.5, 90.5, 362),
    "L4": Peak(121, 60, 30.3, 242.5),
    "V100": Peak(125, 0, 15.7),
    "T4": Peak(65, 0, 8.1),
    "MI300X": Peak(1307.4, 653.7, 163.4, 2614.9),
}


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Return the peak FLOP/s of a device by torch's name of it, in a run's compute dtype; None if it is not known."""
    found = next((peak for name, peak in _PEAKS.items() if re.search(rf"\b{name}\b", device_name)), None)
    if found is None:
        return None
    if precision.fp8 is not None:
        rate = found.fp8
    else:
        rate = {"fp32": found.single, "tf32": found.tf32}.get(precision.compute, found.half)
    return rate * 1e12 or None
