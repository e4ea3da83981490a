# SPDX-License-Identifier: Apache-2.0
"""Batches as trees of tensors: moved, cut, joined, measured, converted and compared. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from accel.errors import TreeError
from accel.tree._walk import Containers, flatten, map_movable, map_tensors, replace_tensors, tensors

T = TypeVar("T")


def send_to_device(
    tree: T,
    device: torch.device | str | int,
    *,
    non_blocking: bool = False,
    skip_keys: Sequence[str] = (),
    containers: Containers = (),
) -> T:
    """Return a copy of a tree with its tensors, and objects with `.to`, on a device.

    Args:
        tree: any nesting of containers; leaves that cannot be moved are kept.
        device: destination.
        non_blocking: whether copies of tensors may still be under way on return. From pinned memory to CUDA that is
            safe; read no other copy before a synchronisation. See `torch.Tensor.to`.
        skip_keys: keys of mappings and names of fields; their values stay where they are.
        containers: further kinds of containers.

    Raises:
        TreeError: a container of an unknown kind, without `.to`.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device)

    return map_movable(move, tree, containers, skip_keys=skip_keys)


def slice_tensors(tree: T, rows: slice | torch.Tensor, containers: Containers = ()) -> T:
    """Return a copy of a tree with rows of its tensors, as `tensor[rows]`; tensors without dimensions are kept.

    Args:
        tree: any nesting of containers.
        rows: a slice, or indices or a mask of rows.
        containers: further kinds of containers.

    Raises:
        TreeError: a container of an unknown kind, or a nested tensor, by its path.
    """
    for path, tensor in tensors(tree, containers):
        if tensor.is_nested:
            fix = "Slice its parts, which tensor.unbind() returns."
            raise TreeError("a nested tensor cannot be sliced", got=str(tensor.layout), where=path, fix=fix)
    return map_tensors(lambda tensor: tensor[rows] if tensor.dim() else tensor, tree, containers)


def concatenate(trees: Sequence[T], dim: int = 0, containers: Containers = ()) -> T:
    """Return a tree with the tensors of several trees of one structure, joined along a dimension.

    Args:
        trees: one tree or more; leaves other than tensors are the first tree's.
        dim: dimension to join along.
        containers: further kinds of containers.

    Raises:
        TreeError: no tree, trees of different structures, or a container of an unknown kind.
    """
    if not trees:
        raise TreeError("no trees to concatenate", expected="one or more", got="none", where="trees=")
    first = flatten(trees[0], containers)[1]
    for at, tree in enumerate(trees):
        if (other := flatten(tree, containers)[1]) != first:
            raise TreeError("trees differ in structure", expected=first, got=other, where=f"trees[{at}]")
    columns = zip(*([tensor for _, tensor in tensors(tree, containers)] for tree in trees), strict=True)
    return replace_tensors(trees[0], (torch.cat(column, dim) for column in columns), containers)


def find_batch_size(tree: object, containers: Containers = ()) -> int | None:
    """Return the number of rows of the tensors of a batch; None without a tensor that has rows.

    Args:
        tree: any nesting of containers; tensors without dimensions do not count.
        containers: further kinds of containers.

    Raises:
        TreeError: tensors differ in their number of rows, or a container is of an unknown kind.
    """
    rows = [(path, tensor.size(0)) for path, tensor in tensors(tree, containers) if tensor.dim()]
    for path, count in rows:
        if count != rows[0][1]:
            raise TreeError(
                "tensors of a batch differ in their number of rows",
                expected=f"{rows[0][1]} rows as at {rows[0][0]}",
                got=str(count),
                where=path,
                fix="Pass the tensors that have one row a sample.",
            )
    return rows[0][1] if rows else None


def convert_to_fp32(tree: T, containers: Containers = ()) -> T:
    """Return a copy of a tree with fp16 and bf16 tensors in float32; other leaves are kept.

    Args:
        tree: any nesting of containers.
        containers: further kinds of containers.

    Raises:
        TreeError: a container of an unknown kind.
    """
    half = (torch.float16, torch.bfloat16)
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype in half else tensor, tree, containers)


def tensors_equal(first: object, second: object, containers: Containers = ()) -> bool:
    """Return whether two trees have one structure, and equal tensors and leaves. No tensor equals one of another dtype.

    Args:
        first: any nesting of containers.
        second: another one. Tensors on other devices are compared on the CPU.
        containers: further kinds of containers.

    Raises:
        TreeError: a container of an unknown kind.
    """
    mine, shape = flatten(first, containers)
    theirs, other = flatten(second, containers)
    return shape == other and all(_equal(*pair) for pair in zip(mine, theirs, strict=True))


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    if one.is_nested or other.is_nested:
        same = one.is_nested == other.is_nested and one.layout == other.layout and one.size(0) == other.size(0)
        return same and all(map(_equal, one.unbind(), other.unbind()))
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.device != other.device:
        return torch.equal(one.cpu(), other.cpu())
    return torch.equal(one, other)
