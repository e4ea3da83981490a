# SPDX-License-Identifier: Apache-2.0
"""Batches of later training forwards of ranks that share samples: folded into figures, and compared by the step.

A fold takes a few kernels for all tensors of a forward together, whatever their size, and waits for no device. The
step's norm takes the figures along: one sum over ranks has them and their squares.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from accel.comm import Call, Comm, exchange_values
from accel.context import DistContext, group_of
from accel.devices import wide_dtype
from accel.errors import DataError

AXES = ("tp", "pp")
TOLERANCE = 1e-3  # of absolute sums: outputs of an encoder differ in their last digits between ranks
FIX = (
    "Take the batches of accel.prepare_loader(ctx, loader); a sampler of your own chooses by "
    "ctx.data_parallel, (index, count), where it has ctx.rank and ctx.world_size."
)
_CALL = Call("optimizer_step", "batches", ordered=False)

# odd numbers of 64 bits, which spread the bits of a product
_PLACE, _MIX, _NEXT = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_EXACT_BITS = 20  # sums of squares over 4096 ranks are exact in float64
_FIGURES = 8  # batches that differ are alike to one of them once in 20 to 30
_MOST_SAMPLED = 2048
_ROW = 2**14
_GOLDEN = 0.6180339887
_torch = cast(Any, torch)  # names that torch's stubs lack


class LaterBatches:
    """Figures of the batches that a context's models of one group were given since the latest step."""

    __slots__ = (
        "_comm",
        "_count",
        "_exact",
        "_is_read",
        "_known",
        "_rank",
        "_sizes",
        "_sums",
        "_tables",
        "_text",
        "is_wanted",
    )

    def __init__(self, comm: Comm, rank: int) -> None:
        self._comm = comm
        self._rank = rank
        self._tables: dict[torch.device, _Tables] = {}
        self._known: tuple[object, torch.Tensor] = None, torch.empty(0)
        self._is_read = False
        self.is_wanted = True
        self.clear()

    def clear(self) -> None:
        """Forget the batches."""
        self._text = self._count = 0
        self._exact: dict[torch.device, torch.Tensor] = {}
        self._sums: dict[torch.device, list[torch.Tensor]] = {}
        self._sizes: dict[torch.device, list[torch.Tensor]] = {}

    def ignore(self) -> None:
        """Forget the batches in a step that reads none. While no step has read some, later forwards note none."""
        self.is_wanted = self._is_read
        self.clear()

    @torch.no_grad()
    def add(self, leaves: Sequence[tuple[str, object]]) -> None:
        """Fold the leaves of one batch, with their paths. No communication, and no wait for a device."""
        words: dict[torch.device, list[torch.Tensor]] = {}
        reals: dict[torch.device, list[torch.Tensor]] = {}
        for path, leaf in leaves:
            text, values = text_of(path, leaf)
            self._text = zlib.crc32(text.encode() + values, self._text)
            if not isinstance(leaf, torch.Tensor) or not is_plain(leaf):
                continue
            if leaf.is_floating_point() or leaf.is_complex():
                self._count += 1
                reals.setdefault(leaf.device, []).append(flat_reals(leaf))
            else:
                words.setdefault(leaf.device, []).append(_words(leaf))
        for at, each in words.items():
            found = _checksum(each, self._on(at))
            self._exact[at] = torch.add(found, self._exact[at], alpha=_NEXT) if at in self._exact else found
        for at, each in reals.items():
            samples, waves = _samples(each, self._on(at))
            self._sums.setdefault(at, []).append(samples @ waves)
            self._sizes.setdefault(at, []).append(_torch.linalg.vector_norm(samples, 1, 1, keepdim=True))

    def take(self, device: torch.device) -> torch.Tensor:
        """Return the figures of this rank as one tensor for a sum over ranks, and forget the batches."""
        tables = self._on(device)
        text = float(self._text >> (32 - _EXACT_BITS))
        known = (1.0, sum(_leaf_weights(self._count)), text, text * text)
        if self._known[0] != (device, known):  # alike in most steps
            self._known = (device, known), torch.tensor(known, dtype=tables.wide).to(device, non_blocking=True)
        parts = [self._exact_on(device, tables), self._figures_on(device, tables)]
        self._is_read = self.is_wanted = True
        self.clear()
        squares = [zeros if zeros is each else each.square() for each, zeros in zip(parts, tables.nothing, strict=True)]
        return torch.cat([self._known[1], *parts, *squares])

    def _exact_on(self, device: torch.device, tables: _Tables) -> torch.Tensor:
        """Return the highest bits of the sums of integers, shape [1]."""
        found = [each.to(device, non_blocking=True) for each in self._exact.values()]
        if not found:
            return tables.nothing[0]
        return (sum(found[1:], found[0]) >> (63 - _EXACT_BITS)).to(tables.wide).reshape(1)

    def _figures_on(self, device: torch.device, tables: _Tables) -> torch.Tensor:
        """Return the weighted sums of floating-point tensors' figures, shape [_FIGURES].

        A figure is a sum of waves over a sample as part of the sample's absolute sum, with the logarithm of that.
        """
        if not self._count:
            return tables.nothing[1]
        sums = _joined(self._sums, device)
        sizes = _joined(self._sizes, device)
        # what is not finite on every rank is alike
        figures = torch.addcdiv(sizes.log(), sums, sizes).nan_to_num_(3.0, 5.0, -5.0)
        return tables.leaf_weights(self._count) @ figures

    def _on(self, device: torch.device) -> _Tables:
        if device not in self._tables:
            self._tables[device] = _Tables(device)
        return self._tables[device]

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
            fix=FIX,
        )


def later_batches(ctx: DistContext) -> LaterBatches | None:
    """Return the figures of batches that this rank shares along tp and pp; None where no model shares them."""
    found = ctx.comm.later_batches
    return cast("LaterBatches | None", found.get(group_of(ctx, *AXES))) if found else None


def text_of(path: str, leaf: object) -> tuple[str, bytes]:
    """Return path, dtype and shape, or type; and the bytes of a value that is no tensor and is compared exactly."""
    if not isinstance(leaf, torch.Tensor):
        exact = isinstance(leaf, bool | int | str | bytes)
        return f"{path} {type(leaf).__name__}", repr(leaf).encode() if exact else b""
    # a ragged dimension of a nested tensor has a number of its process
    sizes = ", ".join(str(size) if type(size) is int else "*" for size in cast("Sequence[object]", leaf.shape))
    return f"{path} {str(leaf.dtype).removeprefix('torch.')} [{sizes}]", b""


def is_plain(leaf: torch.Tensor) -> bool:
    """Return whether a tensor's values can be compared: dense ones of torch's own class."""
    plain = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided and not leaf.is_meta
    return plain and not leaf.is_quantized


def flat_reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return floating-point elements in one dimension; complex ones as two, those of one byte in float32."""
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    return flat.float() if flat.itemsize == 1 else flat  # torch has no sum of them


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements side by side. One element is contiguous to torch with any stride, but has no view."""
    flat = tensor.contiguous().reshape(-1)
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


class _Tables:
    """Constants on a device, which every fold takes.

    Attributes:
        wide: dtype of figures.
        zeros: shape [_MOST_SAMPLED + 1].
        nothing: the figures of no integer tensor, shape [1], and of no other one, shape [_FIGURES].
        waves: shape [_MOST_SAMPLED + 1, _FIGURES]; the first is constant.
    """

    __slots__ = ("_device", "_factors", "_weights", "nothing", "waves", "wide", "zeros")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.wide = wide_dtype(device)
        places = torch.arange(_MOST_SAMPLED + 1, dtype=self.wide, device=device)
        self.zeros = torch.zeros_like(places)
        self.nothing = self.zeros[:1], self.zeros[:_FIGURES]
        rates = torch.arange(_FIGURES, dtype=self.wide, device=device) * 1.2
        self.waves = torch.outer(places, rates).cos_()
        self._factors = torch.empty(0, dtype=torch.int64, device=device)
        self._weights = self.zeros[:0]

    def factors(self, count: int) -> torch.Tensor:
        """Return odd numbers of 64 bits, shape [count], alike on all kinds of devices."""
        if len(self._factors) < count:
            mixed = torch.arange(1, _at_least(count) + 1, device=self._device).mul_(_PLACE)
            # high bits go into low ones between two products
            mixed = (mixed ^ (mixed >> 29)).mul_(_MIX)
            mixed = (mixed ^ (mixed >> 32)).mul_(_NEXT)
            self._factors = (mixed ^ (mixed >> 29)) | 1
        return self._factors[:count]

    def leaf_weights(self, count: int) -> torch.Tensor:
        """Return `_leaf_weights` on the device, shape [count]."""
        if len(self._weights) < count:
            places = torch.arange(1, _at_least(count) + 1, dtype=self.wide, device=self._device)
            self._weights = (places * _GOLDEN).remainder_(1.0).add_(1.0)
        return self._weights[:count]


def _at_least(count: int) -> int:
    return 1 << count.bit_length()


def _leaf_weights(count: int) -> list[float]:
    """Return a weight of its own for each tensor, so that two in each other's place are noticed."""
    return [1.0 + at * _GOLDEN % 1.0 for at in range(1, count + 1)]


def _joined(found: Mapping[torch.device, list[torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Return rows of several forwards and devices in one tensor."""
    rows = [each.to(device, wide_dtype(device), non_blocking=True) for here in found.values() for each in here]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers in one dimension."""
    flat = flattened(tensor)
    if flat.itemsize == 8:
        return flat.view(torch.int64)
    if flat.nbytes % 4:
        return flat.view(torch.uint8)
    aligned = flat.storage_offset() * flat.itemsize % 4 == 0
    return (flat if aligned else flat.clone()).view(torch.int32)


def _checksum(words: Sequence[torch.Tensor], tables: _Tables) -> torch.Tensor:
    """Return a number of 64 bits, shape [], that depends on every bit and its place, above all its highest bits.

    A sum of products with factors of 64 bits; of long ones with a factor for the row and one for the place in it.
    """
    every = words[0] if len(words) == 1 else torch.cat(list(words))
    count = every.numel()
    if count <= _ROW:
        return (every * tables.factors(count)).sum()
    rows = -(-count // _ROW)
    factors = tables.factors(_ROW + rows)
    table = nn.functional.pad(every, (0, rows * _ROW - count)).view(rows, _ROW) * factors[:_ROW]
    return table.mul_(factors[_ROW:].unsqueeze(1)).sum()


def _samples(flats: Sequence[torch.Tensor], tables: _Tables) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sample of each tensor, shape [tensors, places], filled up with zeros, and the waves of these places.

    Large batches of one distribution have nearly equal sums, samples of them have not. Elements lie at a distance that
    divides no dimension, so a sample is not of one column.
    """
    own = [flat[:: _distance(flat.numel())] for flat in flats]
    if len(own) == 1:
        return own[0].to(tables.wide).unsqueeze(0), tables.waves[: own[0].numel()]
    width = max(each.numel() for each in own) + 1
    # each has a zero at least, which makes the result wide
    parts = [part for each in own for part in (each, tables.zeros[: width - each.numel()])]
    return torch.cat(parts).view(len(own), width), tables.waves[:width]


def _distance(count: int) -> int:
    """Return the distance of sampled elements."""
    distance = max(1, -(-count // _MOST_SAMPLED))
    while math.gcd(distance, count) > 1:
        distance += 1
    return distance


def _differ(sums: Sequence[float]) -> bool:
    """Return whether sums of figures and of their squares are those of ranks that differ."""
    ranks, weights, text, texts, *rest = sums
    (exact, *figures), (exacts, *squares) = rest[: _FIGURES + 1], rest[_FIGURES + 1 :]
    if ranks * texts != text * text or ranks * exacts != exact * exact:
        return True
    bound = (TOLERANCE * weights / ranks) ** 2
    return any(square - each * each / ranks > bound for each, square in zip(figures, squares, strict=True))
