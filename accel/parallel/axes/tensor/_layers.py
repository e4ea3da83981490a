# SPDX-License-Identifier: Apache-2.0
"""Layers that compute on this rank's part of their parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from accel.comm import (
    ThreadGroup,
    exchanged,
)
from accel.parallel._local import local_of
from accel.parallel._modules import RANKS, KeepsParameters, note_tensor, notes_of
from accel.parallel._private import runs_in_backward
from accel.parallel.axes.tensor._styles import (
    RowExchange,
    Rule,
)
from accel.parallel.parts._layout import refuse_transform
from accel.tensors import is_dtensor

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from accel.parallel.axes.tensor._part_layers import LayerRanks


class Layer:
    """The rule of a module, and the ranks along tp that it shares its work with. Copies and pickles share the mesh.

    Attributes:
        rule: of the module.
        mesh: of one axis, tp.
        group: of the ranks along tp.
        rank: of this rank along tp.
    """

    __slots__ = ("group", "mesh", "rank", "rule")

    def __init__(self, rule: Rule, mesh: DeviceMesh) -> None:
        self.rule = rule
        self.mesh = mesh
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank = mesh.get_local_rank()

    @property
    def size(self) -> int:
        """Number of ranks along tp."""
        return self.group.size()

    def __deepcopy__(self, memo: object) -> Layer:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Layer, (self.rule, self.mesh)


class GroupLayer(Layer):
    """A layer of a group that is no part of a mesh, of threads."""

    __slots__ = ()

    def __init__(self, rule: Rule, group: ThreadGroup) -> None:
        self.rule = rule
        self.group = cast(Any, group)
        self.rank = group.rank()


class LocalParameters(KeepsParameters):
    """Computes with the local parts of its parameters."""

    accel_layer: Layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        own = self.__dict__
        stored = own["_parameters"]
        here = own["_parameters"] = self.parameters_here(stored)
        if absent := notes_of(cast(nn.Module, self)).get("absent"):  # placeholders of what other stages hold
            here.update({name: each for name, each in absent.items() if name in here})
        own.update(here)  # read without `__getattr__`
        try:
            return super().forward(*args, **kwargs)
        finally:
            own["_parameters"] = stored
            for name in here:
                own.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        """Return a local part in the place of a parameter that is read outside of the forward."""
        value = cast(Any, super().__getattr__(name))  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        if name in vars(self)["_parameters"] and isinstance(value, nn.Parameter) and self.is_read_local(value):
            part = self.parameters_here({name: value})[name]
            return part if torch.compiler.is_compiling() else _noted(value, cast(torch.Tensor, part))
        return value

    def is_read_local(self, parameter: nn.Parameter) -> bool:
        """Return whether who reads a parameter outside of the forward gets its local part.

        Another module does in the model's forward, if ranks do not divide the parameter. A backward does, as a
        checkpoint runs a method of the module again; its hooks, without gradients, do not. `fully_shard` asks for what
        it has sharded.
        """
        ranks: LayerRanks | None = vars(self).get(RANKS)
        is_read = ranks is not None and ranks.depth > 0 and not self.accel_layer.rule.dims
        return _is_along_one_axis(parameter) and (is_read or is_computed_again())

    def parameters_here(self, stored: Mapping[str, nn.Parameter | None]) -> dict[str, torch.Tensor | None]:
        """Return the tensors that forward uses in place of the parameters."""
        rule = self.accel_layer.rule
        if rule.dims:
            refuse_transform(f"a layer of style {rule.style}", is_layer=True)
        return {
            name: None if each is None else local_of(each, summands=rule.summands, fresh=rule.fresh)
            for name, each in stored.items()
        }


class ReadParameters(LocalParameters):
    """A module with parameters that others read without calling it."""

    def is_read_local(self, parameter: nn.Parameter) -> bool:
        """Return whether `fully_shard` has not sharded it."""
        return _is_along_one_axis(parameter)


class ReadList(ReadParameters):
    """A list of parameters. torch would make its slices lists of copies."""

    def __getitem__(self, index: Any) -> Any:
        """Return the tensor at an index, or a list of the tensors of a slice."""
        own: Any = super()
        if isinstance(index, slice):
            return [own.__getitem__(at) for at in range(*index.indices(len(cast(Any, self))))]
        return own.__getitem__(index)


class Recurrent(LocalParameters):
    """A recurrent layer of torch, which computes with a list of its parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward."""
        own = vars(self)
        stored = {name: own[name] for name in ("_parameters", "_flat_weights", "_flat_weight_refs")}
        here = self.parameters_here(stored["_parameters"])
        listed = [here.get(name) for name in own["_flat_weights_names"]]
        # without references torch does not make the list anew, which moves the memory of parameters on CUDA
        own.update(_parameters=here, _flat_weights=listed, _flat_weight_refs=[None] * len(listed))
        try:
            return super(LocalParameters, self).forward(*args, **kwargs)
        finally:
            own.update(stored)


def is_computed_again() -> bool:
    """Return whether a checkpoint computes a forward again, in a backward."""
    return runs_in_backward() and torch.is_grad_enabled()


def _is_along_one_axis(parameter: torch.Tensor) -> bool:
    return is_dtensor(parameter) and parameter.device_mesh.ndim == 1


def _noted(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Note on the part of a replicated parameter that it is whole. Losses take other plain tensors for parts."""
    if type(part) is not torch.Tensor or not is_dtensor(parameter) or not parameter.placements[0].is_replicate():
        return part
    part = part if part.requires_grad else part.detach()  # else the parameter's own memory would get the note
    note_tensor(part, replicated=True)
    return part


def needed_rows(
    stored: Sequence[torch.Tensor], dims: Sequence[int], exchanges: Sequence[RowExchange], layer: Layer
) -> list[torch.Tensor]:
    """Return the rows that this rank computes with, from those that ranks store, each along a dimension.

    Tensors of one dtype share a message, which rows that stay are no part of. A collective, as its backward.
    """
    first = [each if dim == 0 else each.movedim(dim, 0) for each, dim in zip(stored, dims, strict=True)]
    pieces = [by.pieces(rows) for rows, by in zip(first, exchanges, strict=True)]
    size = layer.size  # which asks the group
    others = [rank for rank in range(size) if rank != layer.rank]
    to, back = [0] * size, [0] * size
    sent: list[torch.Tensor] = []
    shapes: list[Sequence[int]] = []  # of the rows that come, by rank and tensor
    for other in others:
        for own, by in zip(pieces, exchanges, strict=True):
            for at in by.sent[other]:
                to[other] += own[at].numel()
                sent.append(own[at].flatten())
            shape = (by.back[other], *own[0].shape[1:])
            back[other] += math.prod(shape)
            shapes.append(shape)
    if len(sent) > 1:  # one alone is sent without a copy
        sent = [torch.cat(sent)]
    # a rank that sends nothing has a history too, as its backward is a message
    flat = sent[0] if sent else first[0][:0].flatten()
    received = exchanged(flat, to, back, layer.group).split_with_sizes(list(map(math.prod, shapes)))
    arrived = [each.view(shape) for each, shape in zip(received, shapes, strict=True)]
    needed: list[torch.Tensor] = []
    for at, (own, by) in enumerate(zip(pieces, exchanges, strict=True)):
        rows = arrived[at :: len(first)]  # also where there are none, as the backward is a message
        kept = [own[each] for each in by.kept]
        needed.append(torch.cat([*rows[: layer.rank], *kept, *rows[layer.rank :]]))
    return [each if dim == 0 else each.movedim(0, dim) for each, dim in zip(needed, dims, strict=True)]


def mixin_for(rule: Rule) -> type[LocalParameters]:
    """Return the class to put before the class of a module without parts."""
    return ReadParameters if rule.style == "replicated_local" else LocalParameters
