# SPDX-License-Identifier: Apache-2.0
"""`pad_across_processes`: equal sizes on all ranks, without changing a dtype."""

from __future__ import annotations

import math
from typing import TypeVar

import torch

from accel import tree as trees
from accel.collectives._tree_tensors import TreeTensors, make_call, read_tensors
from accel.comm import Call, check_tag, reduce_ints, shared_failure
from accel.context import DistContext, context_first
from accel.errors import ConfigError, TreeError

T = TypeVar("T")


@context_first
def pad_across_processes(
    ctx: DistContext,
    tree: T,
    *,
    dim: int = 0,
    pad_index: complex = 0,
    pad_first: bool = False,
    tag: str | None = None,
) -> T:
    """Pad each tensor of a tree to its largest size on any rank. A collective.

    Only sizes travel. `gather` needs no padding; this is for tensors that must have one shape everywhere.

    Args:
        ctx: the context.
        tree: nested containers of None and of tensors, which differ between ranks in `dim` and in the first dimension
            only, as the rows of a batch may that `gather` takes next.
        dim: the dimension to pad; negative to count from the last.
        pad_index: the fill value, a number that every tensor's dtype can hold.
        pad_first: whether to pad at the beginning instead of the end.
        tag: name of the call, compared between ranks. It tells apart calls of one kind and shape, whose order could
            differ between ranks by mistake, as in a loop over keys.

    Returns:
        The same containers with new tensors of the same dtypes and devices. Padding is local arithmetic, so they belong
        to the autograd graphs of the tensors that went in.

    Raises:
        CollectiveMismatch: ranks differ in structure, dtype, another dimension or the options; on every rank.
        ConfigError: `pad_index` is no number, `dim` no int, or `tag` no text; on every rank.
        TreeError: a tensor without that dimension, or whose dtype cannot hold `pad_index`; what `gather` refuses; by
            its path, on every rank.
    """
    with shared_failure(ctx.comm, Call("pad_across_processes")):
        check_tag(tag, "pad_across_processes")
        if not isinstance(pad_index, int | float | complex):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "not a number", expected="a number", got=repr(pad_index), where="pad_across_processes, pad_index="
            )
        if type(dim) is not int:
            raise ConfigError("not a dimension", expected="an int", got=repr(dim), where="pad_across_processes, dim=")
        leaves = read_tensors(ctx, tree)
        for path, leaf in trees.tensors(tree, ctx.containers):
            _check(path, leaf, dim, pad_index)
    options = f"dim={dim}, pad_index={pad_index!r}, pad_first={pad_first}"
    call = make_call(ctx, "pad_across_processes", tree, leaves, options, tag=tag, open_dim=dim)
    most = reduce_ints(ctx.comm, call, [shape[dim] for shape in leaves.shapes], "max")
    return trees.replace_tensors(tree, _padded(leaves, dim, most, pad_index, pad_first=pad_first), ctx.containers)


def _padded(leaves: TreeTensors, dim: int, most: list[int], value: complex, *, pad_first: bool) -> list[torch.Tensor]:
    padded: list[torch.Tensor] = []
    for leaf, size in zip(leaves.tensors, most, strict=True):
        own = leaf.shape[dim]
        shape = list(leaf.shape)
        shape[dim] = size
        whole = leaf.new_full(shape, value)
        padded.append(whole)
        _ = whole.narrow(dim, size - own if pad_first else 0, own).copy_(leaf)
    return padded


def _check(path: str, leaf: torch.Tensor, dim: int, value: complex) -> None:
    if not -leaf.ndim <= dim < leaf.ndim:
        raise TreeError(
            "a tensor without the dimension to pad",
            expected=f"dim={dim} to be one of {leaf.ndim} dimensions",
            got=f"shape {list(leaf.shape)}",
            where=path,
            fix="Pad it in another call, or leave it out.",
        )
    if not _fits(value, leaf.dtype):
        raise TreeError(
            "a value to pad with that the dtype cannot hold",
            expected=f"a number of {leaf.dtype}",
            got=repr(value),
            where=path,
            fix="Choose another pad_index, or convert the tensor first.",
        )


def _fits(value: complex, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return True
    if isinstance(value, complex):
        return False
    if dtype == torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point:
        stored = float(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype))
        rounded = math.isfinite(stored) and abs(value) <= torch.finfo(dtype).max
        return rounded or stored == value or math.isnan(value)  # not every format has infinities
    limits = torch.iinfo(dtype)
    return math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max
