# SPDX-License-Identifier: Apache-2.0
"""Megatron's sharded tensors as tensors by global name, which a checkpoint stores and loads at any layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.engines.megatron._context import initialized_state, megatron_core
from accel.errors import CheckpointError
from accel.tensors import local_part


class ShardNames:
    """Names and DTensors of sharded tensors on this rank."""

    def __init__(self, device_type: str) -> None:
        state = initialized_state()
        self._device_type = device_type
        self._groups: list[dist.ProcessGroup] = [
            state.get_tensor_model_parallel_group(),
            state.get_expert_tensor_parallel_group(),
            state.get_expert_model_parallel_group(),
            state.get_tensor_and_context_parallel_group(),
            state.get_data_parallel_group(),
        ]
        self._meshes: dict[int, DeviceMesh] = {}

    def tensors(self, leaves: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
        """Return name and live tensor of each sharded tensor: a DTensor where other ranks hold other parts.

        `leaves` are all of this rank's `ShardedTensor`s with the same keys.
        """
        offsets = dict[tuple[str, tuple[int, ...]], set[tuple[int, ...]]]()
        for leaf in leaves:
            offsets.setdefault(_row(leaf), set()).add(_offset(leaf))
        return [self._tensor(leaf, sorted(offsets[_row(leaf)])) for leaf in leaves]

    def _tensor(self, leaf: Any, held: Sequence[tuple[int, ...]]) -> tuple[str, torch.Tensor]:
        """Return name and tensor of a part.

        `held`: offsets of its row's parts on this rank. Several, as in a gated layer, are a tensor each.
        """
        key, index = _row(leaf)
        name = key + "".join(f"[{each}]" for each in index)
        shape = list(leaf.global_shape[leaf.prepend_axis_num :])
        offset = list(_offset(leaf))
        if len(held) > 1:
            axes = [axis for axis in range(len(shape)) if len({each[axis] for each in held}) > 1]
            axis = axes[0]
            portion = shape[axis] // len(held)
            at = held.index(tuple(offset))
            places = [each[axis] // max(portion, 1) for each in held]
            if len(axes) > 1 or shape[axis] % len(held) or places != list(range(len(held))):
                raise _unknown(leaf, f"parts at {held}")
            name, shape[axis], offset[axis] = f"{name}#{at}", portion, offset[axis] - at * portion
        return name, self._spread(leaf, shape, offset)

    def _spread(self, leaf: Any, shape: Sequence[int], offset: Sequence[int]) -> torch.Tensor:
        """Return the live tensor whole, or as part of a DTensor."""
        from torch.distributed.tensor import DTensor, Shard

        local = leaf.data.detach()
        split = [axis for axis, size in enumerate(shape) if local.shape[axis] != size]
        if not split:
            return local
        axis = split[0]
        extent = local.shape[axis]
        if len(split) > 1 or not extent or shape[axis] % extent or offset[axis] % extent:
            raise _unknown(leaf, f"a part of {list(local.shape)} at {list(offset)} of {list(shape)}")
        place = shape[axis] // extent, offset[axis] // extent
        for at, group in enumerate(self._groups):
            if (group.size(), group.rank()) == place:
                if at not in self._meshes:
                    self._meshes[at] = DeviceMesh.from_group(group, self._device_type)
                stride = torch.empty(tuple(shape), device="meta").stride()
                whole = torch.Size(shape)
                return DTensor.from_local(
                    local, self._meshes[at], [Shard(axis)], run_check=False, shape=whole, stride=stride
                )
        raise _unknown(leaf, f"part {place[1] + 1} of {place[0]} along dimension {axis}")


def sharded_leaves(nested: Any) -> Iterator[Any]:
    """Yield the `ShardedTensor`s in a sharded state dict, those that factories make of parameters included.

    An object that only its own code can read back, such as the state of fp8 layers, is a `CheckpointError`.
    """
    mapping = megatron_core("dist_checkpointing.mapping")
    if isinstance(nested, mapping.ShardedTensorFactory):
        nested = _built(nested)
    if isinstance(nested, mapping.ShardedTensor):
        yield nested
    elif isinstance(nested, mapping.ShardedObject):
        _check_object(nested)
    else:
        for child in _children(nested):
            yield from sharded_leaves(child)


def filled(nested: Any, take: Callable[[], torch.Tensor]) -> Any:
    """Return a sharded state dict with the tensors that `take` returns, in the order of `sharded_leaves`."""
    mapping = megatron_core("dist_checkpointing.mapping")
    if isinstance(nested, mapping.ShardedTensorFactory):
        return nested.merge_fn(filled(_built(nested), take))
    if isinstance(nested, mapping.ShardedTensor):
        return take()
    if isinstance(nested, mapping.LocalNonpersistentObject):
        return nested.unwrap()
    if isinstance(nested, mapping.ShardedObject):
        return nested.data
    if isinstance(nested, dict):
        return {key: filled(child, take) for key, child in cast("dict[Any, Any]", nested).items()}
    if isinstance(nested, list | tuple):
        children = [filled(child, take) for child in cast("Sequence[Any]", nested)]
        return children if isinstance(nested, list) else tuple(children)
    return nested


def copy_into(nested: Any, take: Callable[[], torch.Tensor]) -> None:
    """Copy the tensors that `take` returns into a model's live ones, in the order of `sharded_leaves`. Mutates them."""
    mapping = megatron_core("dist_checkpointing.mapping")
    if isinstance(nested, mapping.ShardedTensorFactory | mapping.ShardedTensor):
        with torch.no_grad():
            nested.data.copy_(filled(nested, take))
        return
    for child in _children(nested):
        copy_into(child, take)


def in_order(names: Sequence[str], state: Mapping[str, Any]) -> Callable[[], torch.Tensor]:
    """Return a function that returns this rank's parts of named values one after another."""
    parts = (local_part(state[name]) for name in names)
    return lambda: next(parts)


def _built(factory: Any) -> Any:
    """Return what a factory makes of its tensor, without autograd's record."""
    with torch.no_grad():
        return factory.build()


def _children(nested: Any) -> Iterator[Any]:
    if isinstance(nested, dict):
        return iter(cast("dict[Any, Any]", nested).values())
    return iter(cast("Sequence[Any]", nested)) if isinstance(nested, list | tuple) else iter(())


def _row(leaf: Any) -> tuple[str, tuple[int, ...]]:
    """Return the key of a part, and its index along axes that the local tensor lacks, such as the axis of layers."""
    return leaf.key, tuple(itertools.islice(leaf.global_offset, leaf.prepend_axis_num))


def _offset(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.global_offset[leaf.prepend_axis_num :])


def _check_object(held: Any) -> None:
    data = held.data
    size = data.numel() if isinstance(data, torch.Tensor) else len(data.getvalue()) if hasattr(data, "getvalue") else -1
    if data is not None and size != 0:
        raise CheckpointError(
            "a state that only the code of its layer can read back",
            expected="tensors by name and offset",
            got=type(data).__name__,
            where=held.key,
            fix="Train in bf16, in which layers keep no such state, or store it by megatron.core.dist_checkpointing.",
        )


def _unknown(leaf: Any, got: str) -> CheckpointError:
    return CheckpointError(
        "a part of a tensor that matches no group of Megatron's",
        expected="one part for each rank of its tensor, expert or data group, along one dimension",
        got=got,
        where=leaf.key,
        fix="Store it by megatron.core.dist_checkpointing.",
    )
