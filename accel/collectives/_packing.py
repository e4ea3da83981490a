# SPDX-License-Identifier: Apache-2.0
"""The tensors of a tree, checked and described before they are sent, and packed to bytes and back."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from numbers import Number
from typing import Any, NamedTuple, cast

import torch

import accel.tree._walk as trees
from accel.comm import Call, tagged
from accel.context import DistContext
from accel.errors import ConfigError, TreeError

_LARGE_BYTES = 64 * 1024  # from this size on, a tensor is sent by itself: that costs less than a copy

KEPT_PLANS = 64  # training repeats few calls, and plans only depend on dtypes and shapes

_ALIGN = 16  # the widest dtype's size


class DtypeGroup(NamedTuple):
    """The tensors of one dtype in a packed buffer."""

    dtype: torch.dtype  # dtype of all
    members: tuple[int, ...]  # their numbers in the packed list
    counts: tuple[int, ...]  # elements of each
    start: int  # first byte of their range in the buffer
    stop: int  # first byte behind that range


class Packing(NamedTuple):
    """Layout of tensors in a packed buffer of `nbytes` bytes."""

    groups: tuple[DtypeGroup, ...]
    nbytes: int


def is_large(dtype: torch.dtype, count: int) -> bool:
    """Return whether a tensor of `count` elements is sent by itself."""
    return count * dtype.itemsize >= _LARGE_BYTES


def plan_buckets(
    dtypes: Sequence[torch.dtype], counts: Sequence[int], device_types: Sequence[str]
) -> list[tuple[int, ...]]:
    """Put tensors of one message into buckets, by number: small ones by type of device, each large one separately."""
    small: dict[str, list[int]] = {}
    large: list[tuple[int, ...]] = []
    for i, (dtype, count, place) in enumerate(zip(dtypes, counts, device_types, strict=True)):
        if is_large(dtype, count):
            large.append((i,))
        else:
            small.setdefault(place, []).append(i)
    return [*map(tuple, small.values()), *large]


@functools.lru_cache(maxsize=KEPT_PLANS)
def plan_packing(
    dtypes: tuple[torch.dtype, ...], counts: tuple[int, ...], chosen: tuple[int, ...] | None = None
) -> Packing:
    """Lay out the chosen tensors of a list, by number; None for all."""
    chosen = tuple(range(len(counts))) if chosen is None else chosen
    members: dict[torch.dtype, list[int]] = {}
    for i in chosen:
        members.setdefault(dtypes[i], []).append(i)
    groups: list[DtypeGroup] = []
    at = 0
    for dtype, same in members.items():
        own = [counts[i] for i in same]
        stop = at + sum(own) * dtype.itemsize
        groups.append(DtypeGroup(dtype, tuple(same), tuple(own), at, stop))
        at = aligned(stop)
    return Packing(tuple(groups), at if len(chosen) > 1 else sum(group.stop for group in groups))


def to_bytes(packing: Packing, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors into a new buffer: uint8, shape [packing.nbytes], on the device of the first."""
    device = tensors[packing.groups[0].members[0]].device if packing.groups else "cpu"
    buffer = torch.empty(packing.nbytes, dtype=torch.uint8, device=device)
    for group, elements in sections(packing, buffer):
        _copy(group, tensors, elements)
    return buffer


def write(packing: Packing, tensors: Sequence[torch.Tensor], message: bytearray, at: int) -> None:
    """Copy tensors on the CPU into a message from byte `at`, a multiple of 16."""
    for group in packing.groups:
        if count := sum(group.counts):
            room = torch.frombuffer(message, dtype=group.dtype, count=count, offset=at + group.start)
            _copy(group, tensors, room)


def bytes_of(packing: Packing, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `to_bytes`, but a single tensor in contiguous memory is viewed and not copied."""
    if not packing.nbytes or len(packing.groups) != 1 or len(packing.groups[0].members) != 1:
        return to_bytes(packing, tensors)  # an empty tensor's strides need not allow a view
    return flat_bytes(tensors[packing.groups[0].members[0]])


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the bytes of a tensor that is not empty, shape [bytes]; copied unless it is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride


def sections(packing: Packing, buffer: torch.Tensor) -> Iterator[tuple[DtypeGroup, torch.Tensor]]:
    """View the parts of a uint8 buffer, shape [..., packing.nbytes or more], by dtype: each group with its elements."""
    for group in packing.groups:
        yield group, buffer[..., group.start : group.stop].view(group.dtype)


def split(group: DtypeGroup, elements: torch.Tensor, *, give: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
    """Split the elements of a group, each tensor into separate memory; yield numbers and elements, [..., count].

    With `give`, a single tensor may keep the memory of `elements`, if that holds nothing else.
    """
    if len(group.members) == 1:
        own = give and elements.untyped_storage().nbytes() == elements.nbytes
        yield group.members[0], elements if own else elements.clone(memory_format=torch.contiguous_format)
    else:
        parts = cast(Any, torch).split_with_sizes_copy(elements, group.counts, dim=-1)  # its stub forgets the result
        yield from zip(group.members, parts, strict=True)


def _copy(group: DtypeGroup, tensors: Sequence[torch.Tensor], elements: torch.Tensor) -> None:
    if len(group.members) == 1:  # either way resolves conjugation and strides
        single = tensors[group.members[0]].detach()
        _ = elements.view(single.shape).copy_(single)
        return
    chosen = [tensors[i] for i in group.members]
    with torch.no_grad():
        torch.cat([each if each.ndim == 1 else each.reshape(-1) for each in chosen], out=elements)


def pack(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Copy tensors into one new uint8 tensor on a device; `unpack` finds them there by their dtypes and shapes."""
    dtypes = tuple([tensor.dtype for tensor in tensors])
    counts = tuple([tensor.numel() for tensor in tensors])
    packing = plan_packing(dtypes, counts)
    return to_bytes(packing, [tensor.to(device) for tensor in tensors])


def unpack(buffer: torch.Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """View the tensors that `pack` copied into a buffer; they plan its memory."""
    counts = tuple([math.prod(shape) for shape in shapes])
    found: dict[int, torch.Tensor] = {}
    for group, elements in sections(plan_packing(tuple(dtypes), counts), buffer):
        found.update(zip(group.members, torch.split(elements, list(group.counts)), strict=True))
    return [found[i].view(tuple(shape)) for i, shape in enumerate(shapes)]


def aligned(size: int) -> int:
    """Round a number of bytes up so that any dtype may follow."""
    return -(-size // _ALIGN) * _ALIGN


_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
             torch.uint64)  # fmt: skip

_LINE = re.compile(r"(?P<kind>.*: \w+)\[(?P<sizes>[^\[\]]*)\](?P<place>.*)")


class TreeTensors(NamedTuple):
    """The tensors of a tree in order, with facts that are looked up once."""

    tensors: list[torch.Tensor]
    dtypes: tuple[torch.dtype, ...]  # of each tensor
    shapes: tuple[torch.Size, ...]  # of each tensor
    device_types: tuple[str, ...]  # of each tensor
    on_cpu: bool  # whether all are on the CPU
    structure: str  # containers and keys as text


def read_tensors(ctx: DistContext, tree: object) -> TreeTensors:
    """List the tensors of a tree; `TreeError`, by path, for other leaves but None and tensors that are not plain."""
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
    try:
        shapes = tuple([leaf.shape for leaf in tensors])
    except RuntimeError:  # a nested tensor has none, and its layout may be strided
        _refuse(ctx, tree)
        raise
    return TreeTensors(tensors, dtypes, shapes, device_types, on_cpu, structure)


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
    """Describe a call on a tree, with its options and tag, for ranks to compare.

    `open_dim` may differ in size between ranks, and the first dimension may then, too; None for no such dimension.
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
    """Return the fix for tensors that only differ in a size, from lines such as "$.logits: float32[*, 7]"."""
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
        raise ConfigError("there is no such rank", expected=f"0 to {ctx.world_size - 1}", got=repr(rank), where=where)


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
    """Raise `TreeError` for a tensor without plain memory, or on neither the CPU nor the rank's device."""
    if leaf.is_nested or _is_wrapper(type(leaf)) or leaf.layout is not torch.strided or not _is_plain(leaf.dtype):
        raise TreeError(
            "a tensor that cannot be sent",
            expected="a dense tensor with separate memory",
            got=f"{'a nested ' if leaf.is_nested else ''}{type(leaf).__name__}, {leaf.layout}, {leaf.dtype}",
            where=path,
            fix=_dense_form(leaf),
        )
    if leaf.device.type != "cpu" and leaf.device != device:
        raise TreeError(
            "a tensor on a device that is not this rank's",
            expected=" or ".join(dict.fromkeys((str(device), "cpu"))),
            got=str(leaf.device),
            where=path,
            fix="Move it with .to(ctx.device).",
        )


def _dense_form(leaf: torch.Tensor) -> str:
    """Return the sentence with the line that makes a tensor dense."""
    if leaf.is_nested:
        return "Send its padded values, tensor.to_padded_tensor(0.0), and its lengths."
    if leaf.layout is not torch.strided:
        return "Send tensor.to_dense()."
    if leaf.is_quantized:
        return "Send tensor.dequantize()."
    return "Send its dense parts, of a DTensor to_local() or full_tensor()."


def _is_wrapper(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of a class, such as DTensor, wrap others."""
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
