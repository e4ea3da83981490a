# SPDX-License-Identifier: Apache-2.0
"""`load_checkpoint_and_dispatch`: a checkpoint goes where a map says, and the model runs from there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from accel.bigmodel._dtypes import dtype_of
from accel.bigmodel.load import Patterns, Rename, load_checkpoint_in_model, open_weights
from accel.bigmodel.plan import STORES, DeviceMap, check_map
from accel.bigmodel.run._dispatch import dispatch_model
from accel.bigmodel.run._dispatched import Dispatched
from accel.comm import Call, agreed, call_site
from accel.context import DistContext, context_first
from accel.storage import RemotePath
from accel.tensors import is_dtensor

M = TypeVar("M", bound=nn.Module)


@context_first
def load_checkpoint_and_dispatch(
    ctx: DistContext,
    model: M,
    path: str | os.PathLike[str] | RemotePath,
    device_map: DeviceMap,
    *,
    rename: Rename = (),
    allow_missing: Patterns = (),
    allow_unexpected: Patterns = (),
    readers: int = 4,
    advance: Callable[[int], object] | None = None,
    scratch: str | os.PathLike[str] | None = None,
    prefetch: bool = True,
) -> Dispatched[M]:
    """Load weights where a map says, and run the model from there. A collective. Mutates the model.

    The two steps in one: `load_checkpoint_in_model` for what the map keeps in memory, then `dispatch_model`, with the
    files of `path` for what it leaves there. Of a model that `prepare_model(allocate=False)` has divided, each rank
    reads and streams its own stage, or its parts of weights.

    Args:
        ctx: the context.
        model: built by `init_empty_weights`, or with values.
        path: the checkpoint, as `open_weights` takes it.
        device_map: homes and computing devices, such as `infer_device_map` gives; of this rank.
        rename: maps a stored name to the model's; or recipes, for models that are stored otherwise than they run.
        allow_missing: names of the model that may be missing, or patterns of such names.
        allow_unexpected: stored names that the model may lack, or patterns of such names.
        readers: number of threads that read.
        advance: called with numbers of bytes that this rank has read, for a progress bar.
        scratch: a folder for values that the model has and that the map puts on "disk", as for `dispatch_model`.
        prefetch: whether a thread fetches blocks ahead of their use.

    Returns:
        The handle; close it, or use it in a `with` block.

    Raises:
        CheckpointError: weights are missing, unexpected or of other shapes, all in one error; or a file cannot be read.
            The same on every rank.
        ConfigError: the map is of another model.
        StreamError: the model is dispatched already.
    """
    check_map(device_map, where="load_checkpoint_and_dispatch")
    site = call_site()
    load_checkpoint_in_model(
        ctx,
        model,
        path,
        device_map,
        dtype=_dtype(model, device_map),
        rename=rename,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        readers=readers,
        advance=advance,
    )
    with agreed(ctx.comm, Call("load_checkpoint_and_dispatch", site=site)):
        waits = any(is_dtensor(each) and each.is_meta for each in model.parameters())
        if not waits and not any(home in STORES for home in device_map.home.values()):
            return dispatch_model(model, device_map, prefetch=prefetch)
        source = open_weights(path, rename=rename, readers=readers)
        try:
            run = dispatch_model(model, device_map, source=source, scratch=scratch, prefetch=prefetch)
        except BaseException:
            source.close()
            raise
        run.call_last(source.close)
        return run


def _dtype(model: nn.Module, device_map: DeviceMap) -> torch.dtype | None:
    """Return the one dtype that a map gives the floating-point weights of an empty model; None to keep the model's."""
    dtypes = {dtype_of(weight.dtype) for weight in device_map.skeleton.weights()}
    floats = {dtype for dtype in dtypes if dtype.is_floating_point}
    return floats.pop() if len(floats) == 1 and any(each.is_meta for each in model.parameters()) else None
