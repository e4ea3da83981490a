# SPDX-License-Identifier: Apache-2.0
"""`cpu_offload` and `disk_offload`: dispatch by maps with every movable segment elsewhere."""

from __future__ import annotations

import os
from typing import TypeVar

import torch
from torch import nn

from accel.bigmodel._describe import describe
from accel.bigmodel.plan import DeviceMap, Skeleton
from accel.bigmodel.run._dispatch import dispatch_model
from accel.bigmodel.run._dispatched import Dispatched
from accel.errors import ConfigError

M = TypeVar("M", bound=nn.Module)


def cpu_offload(
    model: M, device: int | str | torch.device, *, slots: int = 2, storage_dtype: torch.dtype | None = None
) -> Dispatched[M]:
    """Run a model on a device while its blocks stay in host memory. Mutates the model until the result is closed.

    Args:
        model: the model, with its values.
        device: the computing device, a number for a CUDA device; "cpu:0" rehearses with slots on the host.
        slots: number of blocks that the device holds at a time.
        storage_dtype: dtype of matrices in host memory, such as torch.float8_e4m3fn, as for `describe`; the model's
            values are rounded to it, and their memory is given free. None for the model's own.

    Returns:
        The handle; close it, or use it in a `with` block.

    Raises:
        ConfigError: the device is the host, or weights have no values.
    """
    if str(device) == "cpu":
        raise ConfigError(
            "nothing to offload: the host computes",
            expected="an accelerator's device",
            got=repr(device),
            where="cpu_offload",
            fix="Call the model as it is, or use disk_offload; device='cpu:0' streams as an accelerator would.",
        )
    return dispatch_model(model, _all_at(describe(model, storage_dtype=storage_dtype), "cpu", device, slots))


def disk_offload(
    model: M,
    path: str | os.PathLike[str] | None,
    device: int | str | torch.device,
    *,
    slots: int = 2,
    scratch: str | os.PathLike[str] | None = None,
) -> Dispatched[M]:
    """Run a model on a device while its blocks stay in files: those that hold them, or new ones. Mutates the model.

    Weights that stay on the device are taken from the model if it has values, else from the files.

    Args:
        model: the model, best an empty one.
        path: the checkpoint, as `open_weights` takes it. None for a model with values, all written to `scratch`.
        device: the computing device, a number for a CUDA device; "cpu" for the host.
        slots: number of blocks that the device holds at a time.
        scratch: an existing folder on a local disk for the values that the model has, as for `dispatch_model`; None
            writes nothing.

    Returns:
        The handle; close it, or use it in a `with` block.

    Raises:
        CheckpointError: the files lack weights, or cannot be read.
    """
    return dispatch_model(model, _all_at(describe(model), "disk", device, slots), source=path, scratch=scratch)


def _all_at(skeleton: Skeleton, home: str, device: int | str | torch.device, slots: int) -> DeviceMap:
    """Return the map with one home for every movable segment."""
    runs = f"cuda:{device}" if isinstance(device, int) else str(device)
    homes = {segment.name: home if segment.movable else runs for segment in skeleton.segments}
    return DeviceMap(skeleton=skeleton, home=homes, runs=dict.fromkeys(homes, runs), slots=slots)
