# SPDX-License-Identifier: Apache-2.0
"""Layers that compute on this rank's part of their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional

from accel.comm import (
    ThreadGroup,
    copied,
    exchanged,
    gathered,
    summed,
)
from accel.parallel._local import local_of
from accel.parallel._modules import RANKS, KeepsParameters, note_tensor
from accel.parallel._private import runs_in_backward
from accel.parallel.axes.tensor._overlap import (
    copied_product,
    gathered_product,
    is_beside,
)
from accel.parallel.axes.tensor._styles import (
    RowExchange,
    Rule,
    is_transposed,
    part_length,
)
from accel.parallel.parts import RowCut
from accel.parallel.parts._contractions import own_ids, own_place
from accel.parallel.parts._layout import even
from accel.tensors import is_dtensor

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from accel.parallel.axes.tensor._part_layers import LayerRanks
    from accel.parallel.axes.tensor._tokens import SequenceRanks


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
        own = cast(Any, self).__dict__
        stored = own["_parameters"]
        own["_parameters"] = self.parameters_here(stored)
        try:
            return super().forward(*args, **kwargs)
        finally:
            own["_parameters"] = stored

    def __getattr__(self, name: str) -> Any:
        """Return a local part in the place of a parameter that is read outside of the forward."""
        value = cast(Any, super().__getattr__(name))  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        if isinstance(value, nn.Parameter) and self.is_read_local(value):
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
        return {name: None if each is None else local(each, rule) for name, each in stored.items()}


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


class GatheredLayer(LocalParameters):
    """A column-parallel linear layer that gives plain tensors of all outputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs."""
        layer = self.accel_layer
        if is_beside(layer.rule):
            here = self.parameters_here(cast(Any, self)._parameters)
            weight = cast(torch.Tensor, here["weight"])
            weight = weight.t() if is_transposed(cast(nn.Module, self)) else weight
            output = entered_product(self, _input_of(args, kwargs), weight, here.get("bias"))[0]
        else:
            args, kwargs = _with_input(args, kwargs, partial(entered, self))
            output = super().forward(*args, **kwargs)
        if not layer.rule.uneven:
            return gathered(output, -1, layer.group).contiguous()  # as models expect of their layers
        missing = part_length(layer.rule.uneven, layer.size) - output.shape[-1]
        padded = functional.pad(output, (0, missing))  # the last rank's, as messages are of one length
        return gathered(padded, -1, layer.group)[..., : layer.rule.uneven].contiguous()


class Embedding(LocalParameters):
    """A row-sharded embedding."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        """Return the embeddings of all ids on every rank."""
        layer = self.accel_layer
        ranks = _ranks_of_tokens(self)
        input = input if ranks is None else ranks.entered_whole(input)
        ids = own_ids(input, self._cut, layer.rank)
        summand = super().forward(ids.places).masked_fill(ids.others.unsqueeze(-1), 0)
        return summed(summand, layer.group) if ranks is None else ranks.ended(summand)

    @property
    def padding_idx(self) -> int | None:
        """The row without gradients among this rank's rows."""
        return own_place(cast(Any, self).__dict__["padding_idx"], self._cut, self.accel_layer.rank)

    @property
    def _cut(self) -> RowCut:
        """The rows of all ranks."""
        return even(cast(nn.Embedding, self).num_embeddings, self.accel_layer.size)


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


def entered(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the input of divided layers as a plain tensor of all tokens; its gradient is summed over ranks."""
    ranks = _ranks_of_tokens(module)
    return copied(x, module.accel_layer.group) if ranks is None else ranks.entered_whole(x)


def entered_product(
    module: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's outputs of a layer, and its input as `entered` gives it, by messages that overlap with the
    matmul."""
    group = module.accel_layer.group
    ranks = _ranks_of_tokens(module)
    if ranks is None:
        return copied_product(x, weight, bias, group)
    rows = ranks.even_rows(x)
    if rows is not None:
        return gathered_product(rows, weight, bias, group)
    whole = ranks.entered_whole(x)
    return functional.linear(whole, weight, bias), whole


def _ranks_of_tokens(module: Any) -> SequenceRanks | None:
    """The ranks that share the tokens around a layer, while the model runs; None where each has all of them."""
    ranks: SequenceRanks | None = getattr(module, RANKS) if module.accel_layer.rule.tokens else None
    return ranks if ranks is not None and ranks.runs else None


def is_computed_again() -> bool:
    """Return whether a checkpoint computes a forward again, in a backward."""
    return runs_in_backward() and torch.is_grad_enabled()


def _is_along_one_axis(parameter: torch.Tensor) -> bool:
    return is_dtensor(parameter) and parameter.device_mesh.ndim == 1


def local(parameter: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return this rank's part of a parameter, from which gradients flow back to the whole."""
    return local_of(parameter, summands=rule.summands, fresh=rule.fresh)


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
    others = [rank for rank in range(layer.size) if rank != layer.rank]
    to, back = [0] * layer.size, [0] * layer.size
    sent: list[torch.Tensor] = []
    shapes: list[Sequence[int]] = []  # of the rows that come, by rank and tensor
    for other in others:
        rows = [own[at].flatten() for own, by in zip(pieces, exchanges, strict=True) for at in by.sent[other]]
        coming = [(by.back[other], *rows.shape[1:]) for rows, by in zip(first, exchanges, strict=True)]
        to[other], back[other] = sum(map(torch.numel, rows)), sum(map(math.prod, coming))
        sent += rows
        shapes += coming
    # a rank that sends nothing has a history too, as its backward is a message
    flat = torch.cat(sent) if sent else first[0][:0].flatten()
    received = torch.split(exchanged(flat, to, back, layer.group), list(map(math.prod, shapes)))
    arrived = [each.view(shape) for each, shape in zip(received, shapes, strict=True)]
    needed: list[torch.Tensor] = []
    for at, (own, by) in enumerate(zip(pieces, exchanges, strict=True)):
        rows = arrived[at :: len(first)]  # also where there are none, as the backward is a message
        kept = [own[each] for each in by.kept]
        needed.append(torch.cat([*rows[: layer.rank], *kept, *rows[layer.rank :]]))
    return [each if dim == 0 else each.movedim(0, dim) for each, dim in zip(needed, dims, strict=True)]


def mixin_for(rule: Rule) -> type[LocalParameters]:
    """Return the class to put before the class of a module without parts."""
    return {
        "colwise_gather_output": GatheredLayer,
        "embedding_rowwise": Embedding,
        "replicated_local": ReadParameters,
    }.get(rule.style, LocalParameters)


def _input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return args[0] if args else next(iter(kwargs.values()))


def _with_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a layer with another input, its first argument."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name, x = next(iter(kwargs.items()))
    return args, {**kwargs, name: change(x)}
