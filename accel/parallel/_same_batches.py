# SPDX-License-Identifier: Apache-2.0
"""Batches of ranks that share samples: compared in the first training and the first evaluation forward of a model.

A loader whose sampler counts all ranks gives each rank along tp and pp a batch of its own. Nothing fails then, and
products of parts of different samples train something else than the model.

Batches of later training forwards are folded into a few figures on their devices, which the step's norm takes along. No
forward reads them, so none waits for its device. One sum over ranks has the figures' sums and those of their squares.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel.comm import Call, Comm, adopt, as_bytes, as_tensor, exchange, exchange_values, shared_failure
from accel.context import DistContext, group_of
from accel.devices import wide_dtype
from accel.errors import DataError, TreeError
from accel.mixins import Mixin, add_mixin
from accel.parallel._modules import is_pipelined, unwrap_model
from accel.parallel._private import runs_in_backward
from accel.tensors import mesh_of, split_dims
from accel.topology import Dimension, dimension_of
from accel.tree._walk import Containers, leaves

SHARING: frozenset[Dimension] = frozenset({"tensor", "pipeline"})  # ranks along these get one batch
_AXES = ("tp", "pp")

_WATCH = "accel_same_batches"  # attribute of a prepared model
_HEAD = struct.Struct("<q16s")  # the context's rank, a digest of the batch's structure
_LEAF = struct.Struct("<8s4d")  # a digest of what must be equal, and the figures of a floating-point tensor
_MOST_LEAVES = 23  # that fit into the smallest first message; the rest counts as one
_NO_FIGURES = (0.0, 0.0, 0.0, 0.0)
_TOLERANCE = 1e-3  # of absolute sums: outputs of an encoder differ in their last digits between ranks
_SAMPLED = 1024
_FIX = (
    "Take the batches of accel.prepare_loader(ctx, loader); a sampler of your own chooses by "
    "ctx.data_parallel, (index, count), where it has ctx.rank and ctx.world_size."
)
_CALL = Call("optimizer_step", "batches", ordered=False)

# odd numbers of 64 bits, which spread the bits of a product
_PLACE, _MIX, _NEXT = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_EXACT_BITS = 20  # sums of squares over 4096 ranks are exact in float64
_FIGURES = 3
_TINY = 1e-300


class _Known(NamedTuple):
    """Facts of one leaf to compare.

    Attributes:
        text: path, dtype and shape, or type.
        values: bytes to be equal on all ranks.
        figures: sum and absolute sum of all elements; then, of a sample, the sum weighted by place and the absolute
            sum. Large batches of one distribution have nearly equal sums, samples of them have not.
    """

    text: str
    values: bytes = b""
    figures: tuple[float, ...] = _NO_FIGURES


class SameBatches:
    """Compares the batches of ranks that share samples, once in training and once in evaluation; later ones at steps.

    Attributes:
        awaited: the modes whose first forward has not come.
    """

    __slots__ = ("_comm", "_containers", "_later", "_rank", "awaited")

    def __init__(
        self, comm: Comm, rank: int, containers: Containers, awaited: Sequence[str], later: LaterBatches | None
    ) -> None:
        self._comm = comm
        self._rank = rank
        self._containers = containers
        self._later = later
        self.awaited = set(awaited)

    def __deepcopy__(self, memo: object) -> SameBatches:
        return self  # ranks copy a model together, and a handle has no copy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a model read from a file is compared no more

    def looks(self, *, trains: bool) -> bool:
        """Return whether a forward's batch is of use."""
        return bool(self.awaited) or (trains and self._later is not None)

    def look(self, batch: Any, *, trains: bool) -> None:
        """Compare a batch in the first forward of a mode, a collective then; different batches are a `DataError` on
        every rank. In later training forwards note it for the step."""
        mode = "training" if trains else "evaluation"
        if mode not in self.awaited:
            # a backward that computes a forward again was given nothing
            if trains and self._later is not None and torch.is_grad_enabled() and not runs_in_backward():
                self._later.add(_leaves(batch, self._containers))
            return
        self.awaited.remove(mode)
        call = Call("forward", f"the first in {mode}", ordered=False)
        with shared_failure(self._comm, call), torch.no_grad():
            known = _known(batch, self._containers)
            mine = as_tensor(_packed(self._rank, known))
        rows = [as_bytes(row) for row in exchange(self._comm, call, mine)]
        if (other := _first_other(rows)) is not None:
            raise self._different(call, rows, other, mode, known)

    def _different(self, call: Call, rows: Sequence[bytes], other: int, mode: str, known: list[_Known]) -> DataError:
        """Name the first leaf that differs. A collective."""
        texts = exchange_values(self._comm, call, [each.text for each in known], list[str])
        ranks = [_HEAD.unpack_from(row)[0] for row in rows]
        at = _leaf_that_differs(rows[0], rows[other])
        left, right = ((text[at] if at < len(text) else "nothing") for text in (texts[0], texts[other]))
        if left == right:
            right = "other values"
        return DataError(
            "ranks that share samples were given different batches",
            expected=f"one batch on the ranks {', '.join(map(str, ranks))}, which share a model along tp or pp",
            got=f"{left} on rank {ranks[0]}, {right} on rank {ranks[other]}",
            where=f"the model's first forward in {mode}",
            fix=_FIX,
        )


class _Compared(Mixin, nn.Module):
    """Stands before the class of a model whose ranks share samples.

    A call, and no hook: torch.compile makes hooks part of a model's graph, which cannot communicate in this way.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watch = cast("SameBatches | None", vars(self).get(_WATCH))
        if watch is not None and not torch.compiler.is_compiling() and watch.looks(trains=self.training):
            watch.look(_listed(args, kwargs), trains=self.training)
        return cast(Any, super()).__call__(*args, **kwargs)


def compare_batches(ctx: DistContext, model: nn.Module) -> None:
    """Let a model compare its first batches on the ranks that share them. Mutates it. A collective at first.

    A model that its user has spread along tp may get parts of a batch, so it is left alone.
    """
    group = group_of(ctx, *_AXES)
    if group is None:
        return
    inner = unwrap_model(model)
    # Where each rank has the whole model, one of them may evaluate alone.
    modes = ("training", "evaluation") if is_pipelined(inner) or _is_cut(inner) else ("training",)
    later = None
    if len(modes) > 1:  # each rank computes a part of every forward, so none has forwards of its own
        later = ctx.comm.later_batches.setdefault(group, LaterBatches(adopt(group, ctx.device), ctx.rank))
    vars(inner)[_WATCH] = SameBatches(adopt(group, ctx.device), ctx.rank, ctx.containers, modes, later)
    if not is_pipelined(inner):
        add_mixin([inner], _Compared)


def same_batches(model: nn.Module) -> SameBatches | None:
    """Return what compares the batches of a pipelined model, which is not called itself; None for nothing."""
    return cast("SameBatches | None", vars(model).get(_WATCH))


def _is_cut(model: nn.Module) -> bool:
    """Return whether ranks along tp hold parts of parameters, so that no forward is possible without the others."""
    for each in model.parameters():
        mesh = mesh_of(each)
        if mesh is not None:
            names = mesh.mesh_dim_names or ("tp",)
            if any(dimension_of(names[at]) == "tensor" for at in split_dims(cast(Any, each))):
                return True
    return False


def _listed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**{f"argument {at}": each for at, each in enumerate(args)}, **kwargs}


def _leaves(batch: Any, containers: Containers) -> list[tuple[str, object]]:
    """List the leaves of a forward's arguments, with their paths."""
    found: list[tuple[str, object]] = []
    for name, argument in cast("dict[str, Any]", batch).items():
        try:
            parts = leaves(argument, containers)
        except TreeError:  # a container that only its user knows
            parts = [("$", argument)]
        found += [(f"{name}{path[1:]}", leaf) for path, leaf in parts]
    return found


def _known(batch: Any, containers: Containers) -> list[_Known]:
    return [_of_leaf(path, leaf) for path, leaf in _leaves(batch, containers)]


def _of_leaf(path: str, leaf: object) -> _Known:
    text, values = _text_of(path, leaf)
    if not isinstance(leaf, torch.Tensor) or not _is_plain(leaf):
        return _Known(text, values)
    if leaf.is_floating_point() or leaf.is_complex():
        return _Known(text, figures=_figures(leaf.detach()))
    return _Known(text, as_bytes(_flat(leaf.detach().cpu()).view(torch.uint8)))


def _figures(tensor: torch.Tensor) -> tuple[float, ...]:
    """Return the figures of a floating-point tensor, in one wait for its device."""
    flat = _flat_reals(tensor)
    wide = wide_dtype(flat.device)
    sums = [flat.sum(dtype=wide), flat.abs().sum(dtype=wide), *_sampled(flat)]
    return tuple(cast("list[float]", cast(Any, torch.stack(sums)).tolist()))


def _packed(rank: int, known: Sequence[_Known]) -> bytes:
    """Pack the compared facts into a message of one size."""
    listed = list(known)
    if len(listed) > _MOST_LEAVES:
        rest = listed[_MOST_LEAVES - 1 :]
        figures = tuple(map(sum, zip(*(each.figures for each in rest), strict=True)))
        values = b"".join(_digest(each.values, 8) for each in rest)
        listed = [*listed[: _MOST_LEAVES - 1], _Known("", values, figures)]
    structure = _digest("\n".join(each.text for each in known).encode(), 16)
    packed = [_LEAF.pack(_digest(each.text.encode() + each.values, 8), *each.figures) for each in listed]
    return (_HEAD.pack(rank, structure) + b"".join(packed)).ljust(_HEAD.size + _MOST_LEAVES * _LEAF.size, b"\0")


def _digest(data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()


def _first_other(rows: Sequence[bytes]) -> int | None:
    """Return the first row that is not like row 0."""
    structures = [_HEAD.unpack_from(row)[1] for row in rows]
    for at, row in enumerate(rows):
        if structures[at] != structures[0] or _leaf_that_differs(rows[0], row) < _MOST_LEAVES:
            return at
    return None


def _leaf_that_differs(left: bytes, right: bytes) -> int:
    pairs = zip(*(_LEAF.iter_unpack(row[_HEAD.size :]) for row in (left, right)), strict=True)
    return next((at for at, pair in enumerate(pairs) if not _alike(*pair)), _MOST_LEAVES)


def _alike(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    (digest, *figures), (other, *others) = left, right
    scales = [max(figures[at], others[at]) for at in (1, 1, 3, 3)]
    return digest == other and all(map(_close, figures, others, scales))


def _close(left: float, right: float, scale: float) -> bool:
    if left == right or (math.isnan(left) and math.isnan(right)):
        return True
    return abs(left - right) <= _TOLERANCE * scale < math.inf


class LaterBatches:
    """Figures of the batches that a context's models of one group were given since the latest step."""

    __slots__ = ("_comm", "_count", "_exact", "_figures", "_rank", "_text", "_weights")

    def __init__(self, comm: Comm, rank: int) -> None:
        self._comm = comm
        self._rank = rank
        self.clear()

    def clear(self) -> None:
        """Forget the batches."""
        self._text = self._count = 0
        self._weights = 0.0
        self._exact: dict[torch.device, torch.Tensor] = {}
        self._figures: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, leaves: Sequence[tuple[str, object]]) -> None:
        """Fold the leaves of one batch, with their paths. No communication, and no wait for a device."""
        for path, leaf in leaves:
            text, values = _text_of(path, leaf)
            self._text = zlib.crc32(text.encode() + values, self._text)
            if not isinstance(leaf, torch.Tensor) or not _is_plain(leaf):
                continue
            tensor, at = leaf.detach(), leaf.device
            if not (tensor.is_floating_point() or tensor.is_complex()):
                found = _checksum(tensor)
                self._exact[at] = torch.add(found, self._exact[at], alpha=_NEXT) if at in self._exact else found
                continue
            # a weight of its own for each, so that two in each other's place are noticed
            self._count += 1
            weight = 1.0 + self._count * 0.6180339887 % 1.0
            self._weights += weight
            figures = _parts(tensor) * weight
            self._figures[at] = self._figures[at].add_(figures) if at in self._figures else figures

    def take(self, device: torch.device) -> torch.Tensor:
        """Return the figures of this rank as one tensor for a sum over ranks, and forget the batches."""
        wide = wide_dtype(device)
        figures = [each.to(device, wide, non_blocking=True) for each in self._figures.values()]
        total = sum(figures[1:], figures[0]) if figures else torch.zeros(_FIGURES, dtype=wide, device=device)
        text = _signed(self._text * _MIX)
        exact = list(self._exact.values())
        weights = self._weights
        self.clear()
        if exact:
            known = torch.full((1,), text, dtype=torch.int64, device=device)
            for each in exact:
                known += each.to(device, non_blocking=True)
            values = torch.cat([_folded(known).to(wide), total])
            rest = torch.tensor([1.0, weights], dtype=wide).to(device, non_blocking=True)
            return torch.cat([rest, values, values.square()])
        # known on the host: one copy, in place of ten kernels
        number = float(_folded(text))
        rest = torch.tensor([1.0, weights, number, number * number], dtype=wide).to(device, non_blocking=True)
        return torch.cat([rest[:3], total, rest[3:], total.square()])

    def check(self, own: torch.Tensor, sums: Sequence[float], step: int | None) -> None:
        """Raise `DataError` if sums over ranks show different batches: alike on all ranks that took part."""
        if not _differ(sums):
            return
        ranks = f"the ranks along tp or pp of rank {self._rank}"
        got = "others on some of them"
        if int(sums[0]) == self._comm.size:  # so all of them are here
            rows = exchange_values(
                self._comm, _CALL, [float(self._rank), *cast("list[float]", cast(Any, own).tolist())], list[float]
            )
            ranks = f"the ranks {', '.join(str(int(row[0])) for row in rows)}"
            others = [row for row in rows if _differ([a + b for a, b in zip(rows[0][1:], row[1:], strict=True)])]
            if others:
                named = ", ".join(str(int(row[0])) for row in others)
                got = f"others on rank {named} than on rank {int(rows[0][0])}"
        raise DataError(
            "ranks that share samples were given different batches",
            expected=f"one batch on {ranks}, which share a model along tp or pp",
            got=got,
            where="the model's training forwards since the step before"
            if step is None
            else f"the model's training forwards of step {step}",
            fix=_FIX,
        )


def later_batches(ctx: DistContext) -> LaterBatches | None:
    """Return the figures of batches that this rank shares along tp and pp; None where no model shares them."""
    found = ctx.comm.later_batches
    return cast("LaterBatches | None", found.get(group_of(ctx, *_AXES))) if found else None


def _text_of(path: str, leaf: object) -> tuple[str, bytes]:
    """Return path, dtype and shape, or type; and the bytes of a value that is no tensor and is compared exactly."""
    if not isinstance(leaf, torch.Tensor):
        exact = isinstance(leaf, bool | int | str | bytes)
        return f"{path} {type(leaf).__name__}", repr(leaf).encode() if exact else b""
    # a ragged dimension of a nested tensor has a number of its process
    sizes = ", ".join(str(size) if type(size) is int else "*" for size in cast("Sequence[object]", leaf.shape))
    return f"{path} {str(leaf.dtype).removeprefix('torch.')} [{sizes}]", b""


def _is_plain(leaf: torch.Tensor) -> bool:
    """Return whether a tensor's values can be compared: dense ones of torch's own class."""
    plain = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided and not leaf.is_meta
    return plain and not leaf.is_quantized


def _flat_reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return floating-point elements in one dimension; complex ones as two, those of one byte in float32."""
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    return flat.float() if flat.itemsize == 1 else flat  # torch has no sum of them


def _sampled(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of a sample of elements weighted by place, and the sample's absolute sum."""
    wide = wide_dtype(flat.device)
    sample = flat[:: max(1, flat.numel() // _SAMPLED)].to(wide)
    places = torch.linspace(0, 1, sample.numel(), dtype=wide, device=flat.device)
    return (sample * places).sum(), sample.abs().sum()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements side by side. One element is contiguous to torch with any stride, but has no view."""
    flat = tensor.contiguous().reshape(-1)
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number of 64 bits, shape [1], that depends on every bit and its place, alike on all kinds of devices."""
    flat = _flat(tensor)
    if flat.nbytes % 8 == 0:
        aligned = flat.storage_offset() * flat.itemsize % 8 == 0
        words = (flat if aligned else flat.clone()).view(torch.int64)
    else:
        words = flat.view(torch.uint8).long()
    mixed = torch.arange(words.numel(), device=flat.device).mul_(_PLACE).add_(words).mul_(_MIX)
    # high bits go into low ones between two products: else the sum of all would be nearly that of the words
    mixed = (mixed ^ (mixed >> 29)).mul_(_NEXT)
    return (mixed ^ (mixed >> 32)).sum().reshape(1)


def _signed(number: int) -> int:
    """Wrap an integer as products of 64 bits do."""
    return (number + 2**63) % 2**64 - 2**63


def _folded(number: Any) -> Any:
    """Return the bits of an integer, or of a tensor of them, that ranks compare."""
    product = (number ^ (number >> 31)) * _MIX
    return ((_signed(product) if isinstance(product, int) else product) >> 40) & (2**_EXACT_BITS - 1)


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's sum, and that of a sample weighted by place, as parts of the absolute sums; and the logarithm
    of the absolute sum. Large batches of one distribution have nearly equal sums, samples of them have not."""
    flat = _flat_reals(tensor)
    wide = wide_dtype(tensor.device)
    near = torch.float32 if flat.itemsize < 4 else flat.dtype
    by_place, size = _sampled(flat)
    sizes = torch.stack([flat.abs().sum(dtype=near).to(wide), size])
    sizes += _TINY if wide is torch.float64 else 1e-30
    sums = torch.stack([flat.sum(dtype=near).to(wide), by_place])
    # what is not finite on every rank is alike
    return torch.cat([sums / sizes, sizes[:1].log()]).nan_to_num_(3.0, 5.0, -5.0)


def _differ(sums: Sequence[float]) -> bool:
    """Return whether sums of figures and of their squares are those of ranks that differ."""
    ranks, weights, exact, *rest = sums
    figures, (exact_squares, *squares) = rest[:_FIGURES], rest[_FIGURES:]
    if ranks * exact_squares != exact * exact:
        return True
    bound = (_TOLERANCE * weights / ranks) ** 2
    return any(square - each * each / ranks > bound for each, square in zip(figures, squares, strict=True))
