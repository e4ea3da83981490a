# SPDX-License-Identifier: Apache-2.0
"""The tensors of a tree, checked before they are sent, and their description, which ranks compare."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from numbers import Number
from typing import Any, NamedTuple, cast

import torch

from accel import tree as trees
from accel.collectives._packing import KEPT_PLANS
from accel.comm import Call, tagged
from accel.context import DistContext
from accel.errors import ConfigError, TreeError

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
             torch.uint64)  # fmt: skip

_LINE = re.compile(r"(?P<kind>.*: \w+)\[(?P<sizes>[^\[\]]*)\](?P<place>.*)")


class TreeTensors(NamedTuple):
    """The tensors of a tree in order, with facts that are looked up once.

    Attributes:
        tensors: the tensors.
        dtypes, shapes, device_types: of each tensor.
        on_cpu: whether all are on the CPU.
        structure: containers and keys as text.
    """

    tensors: list[torch.Tensor]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    device_types: tuple[str, ...]
    on_cpu: bool
    structure: str


def read_tensors(ctx: DistContext, tree: object) -> TreeTensors:
    """List the tensors of a tree, once all can be sent. No communication.

    Raises:
        TreeError: a leaf that is no tensor, other than None; or a tensor that cannot be sent; by its path.
    """
    found, structure = trees.flatten(tree, ctx.containers)
    tensors = [leaf for leaf in found if leaf is not None]
    classes: set[type[object]] = set(map(type, tensors))
    if classes != {torch.Tensor}:
        if any(not issubclass(kind, torch.Tensor) or _is_wrapper(kind) for kind in classes):
            _refuse(ctx, tree)
        tensors = [leaf.as_subclass(torch.Tensor) for leaf in tensors]
    dtypes = tuple([leaf.dtype for leaf in tensors])
    on_cpu = all(leaf.is_cpu for leaf in tensors)
    here = on_cpu or {leaf.device for leaf in tensors} <= {ctx.device, torch.device("cpu")}
    dense = {leaf.layout for leaf in tensors} <= {torch.strided} and all(map(_is_plain, set(dtypes)))
    if not (here and dense):
        _refuse(ctx, tree)
    device_types = ("cpu",) * len(tensors) if on_cpu else tuple([leaf.device.type for leaf in tensors])
    return TreeTensors(tensors, dtypes, tuple([leaf.shape for leaf in tensors]), device_types, on_cpu, structure)


def make_call(
    ctx: DistContext,
    name: str,
    tree: object,
    leaves: TreeTensors,
    options: str,
    *,
    tag: str | None,
    open_dim: int | None = None,
) -> Call:
    """Describe a call on a tree, for ranks to compare.

    Args:
        ctx: the context.
        name: name of the public function.
        tree: its argument.
        leaves: the tree's tensors.
        options: further arguments that must agree.
        tag: the user's name for the call, which must agree as well; None without one.
        open_dim: dimension whose size may differ between ranks, as the first one's may then; None for none.
    """

    options = tagged(options, tag)

    def explain() -> str:
        lines = [
            f"{path}: {_describe(node, open_dim) if isinstance(node, torch.Tensor) else type(node).__name__}"
            for path, node, _ in trees.nodes(tree, ctx.containers)
        ]
        return "\n".join([options, *lines])

    detail = _detail(options, leaves.structure, leaves.dtypes, leaves.device_types, leaves.shapes, open_dim)
    return Call(name, detail, explain=explain, ordered=tag is None, hint=None if open_dim is None else _padding)


def _padding(ours: str, theirs: str) -> str:
    """Return the fix for tensors that differ in a size alone, from lines such as "$.logits: float32[*, 7]"."""
    mine = _LINE.fullmatch(ours)
    other = _LINE.fullmatch(theirs)
    if mine is None or other is None or mine["kind"] != other["kind"] or mine["place"] != other["place"]:
        return ""
    sizes = mine["sizes"].split(", ")
    others = other["sizes"].split(", ")
    differing = [dim for dim, (a, b) in enumerate(zip(sizes, others, strict=False)) if a != b]
    if len(sizes) != len(others) or not differing:
        return ""
    if len(differing) > 1:
        return "Fill the tensors up to one shape first, with sizes that all ranks know, such as from accel.reduce."
    return f"Make the sizes equal first: tree = accel.pad_across_processes(ctx, tree, dim={differing[0]})."


@functools.lru_cache(maxsize=KEPT_PLANS)
def _detail(
    options: str,
    structure: str,
    dtypes: tuple[torch.dtype, ...],
    device_types: tuple[str, ...],
    shapes: tuple[torch.Size, ...],
    open_dim: int | None,
) -> str:
    compared: Sequence[object] = shapes
    if open_dim == 0:
        compared = [shape[1:] if len(shape) > 1 else len(shape) for shape in shapes]
    elif open_dim is not None:
        compared = [_closed(shape, open_dim) for shape in shapes]
    return repr((options, structure, _summary(dtypes), _summary(device_types), compared))


def _closed(shape: torch.Size, open_dim: int) -> list[int]:
    """Return a shape without the sizes that may differ between ranks."""
    sizes = list(shape)
    sizes[0] = sizes[open_dim] = -1
    return sizes


def check_rank(ctx: DistContext, rank: int | None, where: str) -> None:
    """Raise `ConfigError` unless the rank exists; None is fine."""
    if rank is not None and (type(rank) is not int or not 0 <= rank < ctx.world_size):
        raise ConfigError("no such rank", expected=f"0 to {ctx.world_size - 1}", got=repr(rank), where=where)


def _refuse(ctx: DistContext, tree: object) -> None:
    """Raise for the first leaf that cannot be sent, by its path."""
    for path, leaf in trees.leaves(tree, ctx.containers):
        if not isinstance(leaf, torch.Tensor | None):
            raise TreeError(
                "only tensors are combined over ranks",
                expected="a tensor",
                got=f"{type(leaf).__name__} {leaf!r:.40}",
                where=path,
                fix=_sendable(leaf),
            )
        if leaf is not None:
            check_packable(path, leaf, ctx.device)


def _sendable(leaf: object) -> str:
    """Return the fix for a leaf that is no tensor."""
    if isinstance(leaf, Number) or hasattr(leaf, "__array__"):
        return "Pass torch.as_tensor(...) of it."
    return "Send it with accel.gather_object(ctx, ...) or accel.broadcast_object_list(ctx, ...), or leave it out."


def check_packable(path: str, leaf: torch.Tensor, device: torch.device) -> None:
    """Raise `TreeError` for a tensor that has no plain memory, or lies on neither the CPU nor the rank's device."""
    if _is_wrapper(type(leaf)) or leaf.layout is not torch.strided or not _is_plain(leaf.dtype):
        raise TreeError(
            "a tensor that cannot be sent",
            expected="a dense tensor with memory of its own",
            got=f"{type(leaf).__name__}, {leaf.layout}, {leaf.dtype}",
            where=path,
            fix="Send its dense parts, of a DTensor to_local() or full_tensor().",
        )
    if leaf.device.type != "cpu" and leaf.device != device:
        raise TreeError(
            "a tensor on a device that is not this rank's",
            expected=f"{device} or cpu",
            got=str(leaf.device),
            where=path,
            fix="Move it with .to(ctx.device).",
        )


def _is_wrapper(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of a class, such as DTensor, stand for others."""
    plain = cast(Any, torch.Tensor)
    own = cast(Any, kind)
    return own.__torch_dispatch__ is not plain.__torch_dispatch__


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex or dtype in _INTEGERS


def _summary(values: Sequence[object]) -> object:
    return values[0] if len(set(values)) == 1 else values


def _describe(leaf: torch.Tensor, open_dim: int | None) -> str:
    """Return dtype, shape and type of device as text; a dimension that may differ between ranks is `*`."""
    shape = list(map(str, leaf.shape))
    if open_dim is not None and shape:
        shape[0] = shape[open_dim] = "*"
    place = "" if leaf.device.type == "cpu" else f" on {leaf.device.type}"
    return f"{str(leaf.dtype).removeprefix('torch.')}[{', '.join(shape)}]{place}"
