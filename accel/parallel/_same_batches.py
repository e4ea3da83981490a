# SPDX-License-Identifier: Apache-2.0
"""Batches of ranks that share samples: compared in the first training and the first evaluation forward of a model.

A loader with a sampler that counts all ranks gives each rank along tp and pp another batch. Nothing fails then, and
products of parts of different samples train something else than the model. Later batches come from the same loader, so
they are not compared; a model that a checkpoint was loaded into compares its next ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import starmap, zip_longest
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel.comm import Call, Comm, adopt, agreed_values, as_bytes
from accel.context import DistContext, group_of
from accel.devices import wide_dtype
from accel.errors import DataError, TreeError
from accel.mixins import Mixin, add_mixin
from accel.parallel._modules import is_pipelined, note_prepared, prepared_of
from accel.parallel._private import in_function_transform, is_no_parameter, mixes_dtensors
from accel.parallel._sharded import load_plain
from accel.parallel._spread import ModelView
from accel.parallel._watches import computed_as_kept
from accel.tensors import mesh_of, split_dims
from accel.topology import Dimension, dimension_of
from accel.tree._walk import Containers, leaves

AXES = ("tp", "pp")
SHARING: frozenset[Dimension] = frozenset({"tensor", "pipeline"})  # ranks along these get one batch

_SAMPLED = 1024
_TOLERANCE = 1e-3  # of absolute sums: outputs of an encoder differ in their last digits between ranks


class _Leaf(NamedTuple):
    """Facts of one leaf to compare."""

    text: str  # path, dtype and shape, or type
    digest: str = ""  # of values that are equal on all ranks
    # Sum and absolute sum of all elements; then, of a sample, the sum weighted by place and the absolute sum. None for
    # one that is not finite.
    # Large batches of one distribution have nearly equal sums, samples of them have not.
    figures: tuple[float | None, ...] = ()


class SameBatches:
    """Compares the batches of ranks that share samples, once in training and once in evaluation.

    Attributes:
        modes: the modes that compare their first forward.
        awaited: the modes without a forward so far.
    """

    __slots__ = ("_comm", "_containers", "_rank", "awaited", "modes")

    def __init__(self, comm: Comm, rank: int, containers: Containers, modes: Sequence[str]) -> None:
        self._comm = comm
        self._rank = rank
        self._containers = containers
        self.modes = modes
        self.awaited = set(modes)

    def __deepcopy__(self, memo: object) -> SameBatches:
        return self  # ranks copy a model together, and a handle has no copy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a model read from a file is compared no more

    def begin_again(self) -> None:
        """Compare the next forward of each mode, as after a checkpoint was loaded into the model."""
        self.awaited = set(self.modes)

    def compare(self, batch: Any, *, trains: bool) -> None:
        """Compare a batch in the first forward of a mode, a collective then; different batches are a `DataError` on
        every rank."""
        mode = "training" if trains else "evaluation"
        if mode not in self.awaited:
            return
        self.awaited.remove(mode)
        call = Call("forward", f"the first in {mode}", ordered=False)

        def known() -> tuple[int, list[_Leaf]]:
            with torch.no_grad():
                return self._rank, [_of_leaf(path, leaf) for path, leaf in _leaves(batch, self._containers)]

        found = agreed_values(self._comm, call, known, tuple[int, list[_Leaf]])
        ranks = [rank for rank, _ in found]
        for rank, listed in found:
            for left, right in zip_longest(found[0][1], listed):
                if not _are_alike(left, right):
                    raise _different(ranks, left, rank, right, mode)


def _different(ranks: Sequence[int], left: _Leaf | None, other: int, right: _Leaf | None, mode: str) -> DataError:
    """Return the error of a leaf that differs on the first rank and another; None for no leaf."""
    one, two = ("nothing" if each is None else each.text for each in (left, right))
    return DataError(
        "ranks that share samples were given different batches",
        expected=f"one batch on the ranks {', '.join(map(str, ranks))}, which share a model along tp or pp",
        got=f"{one} on rank {ranks[0]}, {'other values' if one == two else two} on rank {other}",
        where=f"the model's first forward in {mode}",
        fix="Use the batches of accel.prepare_loader(ctx, loader); a sampler of your own chooses by "
        "ctx.data_parallel, (index, count), where it has ctx.rank and ctx.world_size.",
    )


class _Compared(Mixin, nn.Module):
    """Stands before the class of a model on ranks that share samples.

    A call, and no hook: torch.compile makes hooks part of a model's graph, which cannot communicate in this way.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        watch: SameBatches | None = prepared_of(self).get("same_batches")
        if watch is not None and watch.awaited and not in_function_transform():  # values that no message has
            watch.compare(_listed(args, kwargs), trains=self.training)
        try:
            return super().__call__(*args, **kwargs)
        except (RuntimeError, AttributeError) as error:
            if mixes_dtensors(error) or is_no_parameter(error):
                raise computed_as_kept(error) from error
            raise

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict, or refuse one of plain tensors."""
        return load_plain(super().load_state_dict, *args, **kwargs)


def compare_batches(ctx: DistContext, view: ModelView) -> None:
    """Let a model compare its first batches on the ranks that share them. Mutates it. A collective at first.

    A model that its user has sharded along tp may get parts of a batch, so it is not checked.
    """
    group = group_of(ctx, *AXES)
    if group is None:
        return
    inner = view.inner.model
    # If each rank has the full model, a single rank may evaluate.
    modes = ("training", "evaluation") if is_pipelined(inner) or _is_cut(view.inner) else ("training",)
    note_prepared(inner, same_batches=SameBatches(adopt(group, ctx.device), ctx.rank, ctx.containers, modes))
    if not is_pipelined(inner):
        add_mixin([inner], _Compared)


def _is_cut(view: ModelView) -> bool:
    """Return whether ranks along tp hold parts of parameters, so that no forward is possible without the others."""
    for each in view.parameters.values():
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


def _of_leaf(path: str, leaf: object) -> _Leaf:
    text, values = _text_of(path, leaf)
    if not isinstance(leaf, torch.Tensor) or not _is_plain(leaf):
        return _Leaf(text, _digest(values))
    if leaf.is_floating_point() or leaf.is_complex():
        return _Leaf(text, figures=_figures(leaf.detach()))
    return _Leaf(text, _digest(as_bytes(_flattened(leaf.detach().cpu()).view(torch.uint8))))


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
    """Return floating-point elements in one dimension; complex ones as two, elements of one byte in float32."""
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    return flat.float() if flat.itemsize == 1 else flat  # torch has no sum of them


def _flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements side by side. One element is contiguous to torch with any stride, but has no view."""
    flat = tensor.contiguous().reshape(-1)
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


def _figures(tensor: torch.Tensor) -> tuple[float | None, ...]:
    """Return the figures of a floating-point tensor, in one wait for its device."""
    flat = _flat_reals(tensor)
    wide = wide_dtype(flat.device)
    sums = [flat.sum(dtype=wide), flat.abs().sum(dtype=wide), *_sampled(flat)]
    listed = cast("list[float]", cast(Any, torch.stack(sums)).tolist())
    return tuple(each if math.isfinite(each) else None for each in listed)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _are_alike(left: _Leaf | None, right: _Leaf | None) -> bool:
    """Return whether a leaf is alike on two ranks; None for no leaf."""
    if left is None or right is None or left[:2] != right[:2] or len(left.figures) != len(right.figures):
        return False
    scales = [max(one or 0.0, other or 0.0) for one, other in zip(left.figures, right.figures, strict=True)]
    triples = zip(left.figures, right.figures, (scales[at | 1] for at in range(len(scales))), strict=True)
    return all(starmap(_are_close, triples))


def _are_close(left: float | None, right: float | None, scale: float) -> bool:
    if left is None or right is None:
        return left is right
    return abs(left - right) <= _TOLERANCE * scale


def _sampled(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of a sample of elements weighted by place, and the sample's absolute sum."""
    wide = wide_dtype(flat.device)
    sample = flat[:: max(1, flat.numel() // _SAMPLED)].to(wide)
    places = torch.linspace(0, 1, sample.numel(), dtype=wide, device=flat.device)
    return (sample * places).sum(), sample.abs().sum()
