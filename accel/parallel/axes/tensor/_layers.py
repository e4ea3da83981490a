# SPDX-License-Identifier: Apache-2.0
"""Layers that compute on this rank's part of their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional

from accel.comm import (
    copied,
    exchanged,
    gathered,
    gathered_summed,
    own_part,
    scattered,
    summed,
)
from accel.errors import ConfigError, PrepareError
from accel.mixins import Mixin
from accel.parallel._labels import name_of
from accel.parallel.axes.tensor._dropout import Streams
from accel.parallel.axes.tensor._heads import with_own_heads
from accel.parallel.axes.tensor._styles import (
    COLWISE,
    ROWWISE,
    RowExchange,
    Rule,
    output_dim,
    part_length,
    row_exchange,
)
from accel.tensors import is_dtensor, local_part

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


SEQUENCE_DIM = 1  # of activations, [batch, sequence, features]


class Layer:
    """The rule of a module, and the ranks along tp that it shares its work with. Copies and pickles share the mesh.

    Attributes:
        rule: of the module.
        mesh: of one axis, tp.
        group: of the ranks along tp.
        rank: of this rank along tp.
        exchange: rows to exchange before the module computes; None where it computes with those that are stored.
    """

    __slots__ = ("exchange", "group", "mesh", "rank", "rule")

    def __init__(self, rule: Rule, mesh: DeviceMesh) -> None:
        self.rule = rule
        self.mesh = mesh
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.exchange: RowExchange | None = row_exchange(rule.rows, rule.needed, self.rank) if rule.needed else None

    @property
    def size(self) -> int:
        """Number of ranks along tp."""
        return self.group.size()

    def __deepcopy__(self, memo: object) -> Layer:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Layer, (self.rule, self.mesh)


class LocalParameters(Mixin):
    """Computes with the local parts of its parameters."""

    accel_layer: Layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        if self.accel_layer.rule.shares:
            args, kwargs = with_own_heads(self.accel_layer.rule, self.accel_layer.group, args, kwargs)
        own = cast(Any, self).__dict__
        stored = own["_parameters"]
        own["_parameters"] = self.parameters_here(stored)
        try:
            return cast(Any, super()).forward(*args, **kwargs)
        finally:
            own["_parameters"] = stored

    def parameters_here(self, stored: Mapping[str, nn.Parameter | None]) -> dict[str, torch.Tensor | None]:
        """Return the tensors that forward uses in place of the parameters."""
        rule = self.accel_layer.rule
        return {name: None if each is None else local(each, rule) for name, each in stored.items()}


class ReadParameters(LocalParameters):
    """A module whose parameters others read without calling it."""

    def __getattr__(self, name: str) -> Any:
        """Return a plain tensor in the place of a parameter, for whoever asks."""
        value: Any = cast(Any, super()).__getattr__(name)
        if not is_dtensor(value) or value.device_mesh.ndim > 1:  # `fully_shard` asks for what it has sharded
            return value
        return local(value, self.accel_layer.rule)


class GatherOutput(LocalParameters):
    """Works on a part of the sequence, and gathers its output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the whole sequence on every rank."""
        return _gathered(super().forward(*args, **kwargs), SEQUENCE_DIM, self.accel_layer)


class Colwise(LocalParameters):
    """A column-parallel linear layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's outputs, or all of them where the style gathers them."""
        layer = self.accel_layer
        if not layer.rule.copied:
            args, kwargs = _with_first(layer.rule, args, kwargs, lambda x: copied(x, layer.group))
        output = super().forward(*args, **kwargs)
        if layer.rule.style != "colwise_gather_output":
            return output
        if not layer.rule.uneven:
            return _gathered(output, -1, layer)
        missing = part_length(layer.rule.uneven, layer.size) - output.shape[-1]
        padded = nn.functional.pad(output, (0, missing))  # the last rank's, as messages are of one length
        return gathered(padded, -1, layer.group)[..., : layer.rule.uneven].contiguous()

    def parameters_here(self, stored: Mapping[str, nn.Parameter | None]) -> dict[str, torch.Tensor | None]:
        """Return this rank's rows, after an exchange where it stores others than it needs."""
        layer = self.accel_layer
        here = super().parameters_here(stored)
        if layer.exchange is None:
            return here
        dim = output_dim(cast(nn.Module, self))
        weight = cast(torch.Tensor, here["weight"]).movedim(dim, 0)
        bias = here.get("bias")
        if bias is not None:
            weight = torch.cat([weight, bias[:, None]], 1)  # one message for both
        weight = needed_rows(weight, layer, layer.exchange)
        if bias is not None:
            here["bias"] = weight[:, -1]
            weight = weight[:, :-1]
        here["weight"] = weight.movedim(0, dim)
        return here


class Rowwise(LocalParameters):
    """A row-parallel linear layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sum of the ranks' outputs, of the whole sequence or of this rank's part of it."""
        layer = self.accel_layer
        style = layer.rule.style
        if style == "rowwise_split_input":
            args, kwargs = _with_first(layer.rule, args, kwargs, lambda x: own_part(x, -1, layer.group))
        output = super().forward(*args, **kwargs)
        scatters = style == "rowwise_sequence"
        output = scattered(output, SEQUENCE_DIM, layer.group) if scatters else summed(output, layer.group)
        bias = cast(Any, self)._parameters.get("bias")
        return output if bias is None else output + local(bias, layer.rule).to(output.dtype)

    def parameters_here(self, stored: Mapping[str, nn.Parameter | None]) -> dict[str, torch.Tensor | None]:
        """Return the local parts without the bias, which is added to the sum."""
        bias = stored.get("bias")
        here = super().parameters_here({name: each for name, each in stored.items() if name != "bias"})
        if bias is not None and not isinstance(self, nn.Linear):
            return {**here, "bias": torch.zeros_like(local_part(bias))}  # others need not know of layers without one
        return {**here, "bias": None} if "bias" in stored else here


class Embedding(LocalParameters):
    """A row-sharded embedding."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        """Return the embeddings of all ids on every rank."""
        layer = self.accel_layer
        first, rows = _rows_here(cast(nn.Embedding, self), layer)
        at = input - first
        others = (at < 0) | (at >= rows)
        own = super().forward(at.masked_fill(others, 0))
        return summed(own.masked_fill(others.unsqueeze(-1), 0), layer.group)

    @property
    def padding_idx(self) -> int | None:
        """The row without gradients among those of this rank."""
        own = cast(Any, self).__dict__["padding_idx"]
        first, rows = _rows_here(cast(nn.Embedding, self), self.accel_layer)
        return own - first if own is not None and first <= own < first + rows else None


class Around(Mixin):
    """A module whose input is prepared for those inside of it."""

    accel_layer: Layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        layer = self.accel_layer
        if layer.rule.shares:
            args, kwargs = with_own_heads(layer.rule, layer.group, args, kwargs)
        args, kwargs = _with_first(layer.rule, args, kwargs, lambda x: _entered(x, layer))
        return cast(Any, super()).forward(*args, **kwargs)


class WholeSequence(Around):
    """A module that works on all the tokens, alike on every rank, between others that work on parts of them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's part of the output, the first of several."""
        output = super().forward(*args, **kwargs)
        group = self.accel_layer.group
        if isinstance(output, tuple):
            first, *others = cast("tuple[Any, ...]", output)
            return own_part(first, SEQUENCE_DIM, group), *others
        return own_part(output, SEQUENCE_DIM, group)


def local(parameter: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return this rank's part of a parameter, from which gradients flow back to the whole.

    Under a rule with summands, a replicated parameter's gradient awaits its sum over ranks.
    """
    if not is_dtensor(parameter):
        return parameter
    if parameter.device_mesh.ndim > 1:
        raise PrepareError(
            "a layer computes with a parameter that is not gathered along dp",
            expected="the forward of the unit of fully_shard around it, which gathers its parameters",
            got=name_of(parameter) or f"a parameter of shape {list(parameter.shape)}",
            where="forward",
            fix="Call the unit itself, not another method; or choose other units: plan=accel.parallel.Plan(units=...).",
        )
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return local_part(parameter)
    if rule.summands and parameter.placements[0].is_replicate():
        from torch.distributed.tensor import Partial

        return parameter.to_local(grad_placements=[Partial()])
    return parameter.to_local()


def needed_rows(stored: torch.Tensor, layer: Layer, exchange: RowExchange) -> torch.Tensor:
    """Return the rows, [rows, ...], that this rank computes with, from those that ranks store. A collective, as its
    backward."""
    order = torch.tensor(exchange.order, device=stored.device)
    return exchanged(stored.index_select(0, order), exchange.to, exchange.back, layer.group)


def mixin_for(rule: Rule) -> type[LocalParameters | Around] | None:
    """Return the class to put before that of a module with a rule; None for attention, which has its own."""
    if rule.style in COLWISE:
        return Colwise
    if rule.style in ROWWISE:
        return Rowwise
    return {
        "embedding_rowwise": Embedding,
        "multihead_attention": None,
        "replicated_local": ReadParameters,
        "sequence_parallel_gather_output": GatherOutput,
        "copy_input": Around,
        "split_sequence": Around,
        "gather_sequence": Around,
        "whole_sequence": WholeSequence,
    }.get(rule.style, LocalParameters)


def _rows_here(embedding: nn.Embedding, layer: Layer) -> tuple[int, int]:
    """This rank's first row, and the number of its rows."""
    most = part_length(embedding.num_embeddings, layer.size)
    return layer.rank * most, min(most, embedding.num_embeddings - layer.rank * most)


def _entered(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The input of a module of one of the styles that change nothing else."""
    style = layer.rule.style
    if style == "gather_sequence":
        return gathered_summed(x, SEQUENCE_DIM, layer.group).contiguous()
    if style == "whole_sequence":
        return _gathered(x, SEQUENCE_DIM, layer)
    if style == "copy_input":
        return x if layer.rule.copied else copied(x, layer.group)
    if x.ndim < 3 or x.shape[SEQUENCE_DIM] % layer.size:
        raise ConfigError(
            "the sequence cannot be divided among the ranks along tp",
            expected=f"an input of shape [batch, sequence, features], and a multiple of {layer.size} tokens",
            got=f"shape {list(x.shape)}",
            where="plan.sequence",
            fix="Pad the batch where it is collated.",
        )
    return own_part(x, SEQUENCE_DIM, layer.group)


def _gathered(x: torch.Tensor, dim: int, layer: Layer) -> torch.Tensor:
    """The ranks' parts in one; contiguous, as models expect of their layers."""
    return gathered(x, dim, layer.group).contiguous()


def _with_first(
    rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with another first one."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, rule.first: change(kwargs[rule.first])}


class Attention(LocalParameters):
    """An nn.MultiheadAttention with heads divided among ranks."""

    accel_streams: Streams

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return outputs and weights as nn.MultiheadAttention does; `is_causal` is a hint there, which needs no use."""
        own = cast(nn.MultiheadAttention, self)
        group = self.accel_layer.group
        copies = {id(each): copied(each, group) for each in (query, key, value)}
        inputs = [_batch_first(copies[id(each)], own) for each in (query, key, value)]
        width = cast(int, cast(Any, own).head_dim)
        projected = [
            _by_head(functional.linear(each, weight, bias), width)
            for each, (weight, bias) in zip(inputs, self._projections(), strict=True)
        ]
        mask = self._mask(key_padding_mask, attn_mask, projected[0])
        dropout = own.dropout if own.training else 0.0
        weights = None
        with self.accel_streams.divided() if dropout else nullcontext():
            if need_weights:
                heads, weights = _weighted(projected, mask, dropout)
            else:
                query_, key_, value_ = projected
                heads = functional.scaled_dot_product_attention(query_, key_, value_, attn_mask=mask, dropout_p=dropout)
        if weights is not None:
            weights = self._joined(weights, average=average_attn_weights)
        output = own.out_proj(heads.transpose(1, 2).flatten(2))
        if query.ndim == 2:
            return output[0], None if weights is None else weights[0]
        return output if own.batch_first else output.transpose(0, 1), weights

    def _projections(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """This rank's weight and bias for queries, keys and values."""
        layer = self.accel_layer
        assert layer.exchange is not None
        here = self.parameters_here(cast(Any, self)._parameters)
        weight, bias = here["in_proj_weight"], here["in_proj_bias"]
        if weight is None:  # keys or values of another width
            weights = [cast(torch.Tensor, here[name]) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
            biases = None if bias is None else needed_rows(bias, layer, layer.exchange)
        else:
            both = weight if bias is None else torch.cat([weight, bias[:, None]], 1)  # one message for both
            both = needed_rows(both, layer, layer.exchange)
            weights = list((both if bias is None else both[:, :-1]).chunk(3))
            biases = None if bias is None else both[:, -1]
        return list(zip(weights, [None] * 3 if biases is None else biases.chunk(3), strict=True))

    def _mask(
        self, padding: torch.Tensor | None, mask: torch.Tensor | None, query: torch.Tensor
    ) -> torch.Tensor | None:
        """Both masks as summands of this rank's scores, shape [batch or 1, heads or 1, queries or 1, keys]."""
        parts: list[torch.Tensor] = []
        if padding is not None:
            padding = padding if padding.ndim == 2 else padding[None]
            parts.append(_additive(padding, query.dtype)[:, None, None])
        if mask is not None:
            mask = _additive(mask, query.dtype)
            if mask.ndim == 3:  # one for each head of each sample
                layer = self.accel_layer
                by_sample = mask.view(query.shape[0], -1, *mask.shape[1:])
                mask = by_sample.chunk(layer.size, 1)[layer.rank]
            parts.append(mask)
        return sum(parts[1:], parts[0]) if parts else None

    def _joined(self, weights: torch.Tensor, *, average: bool) -> torch.Tensor:
        """The weights of all ranks' heads."""
        group = self.accel_layer.group
        if average:
            return summed(weights.sum(1), group) / cast(nn.MultiheadAttention, self).num_heads
        return gathered(weights, 1, group)


def _batch_first(x: torch.Tensor, own: nn.MultiheadAttention) -> torch.Tensor:
    if x.ndim == 2:
        return x[None]
    return x if own.batch_first else x.transpose(0, 1)


def _by_head(x: torch.Tensor, width: int) -> torch.Tensor:
    """From shape [batch, tokens, features] to [batch, heads, tokens, features of a head]."""
    return x.view(*x.shape[:-1], -1, width).transpose(1, 2)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as summands of scores; True in one of bools keeps a key out."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _weighted(
    projected: list[torch.Tensor], mask: torch.Tensor | None, dropout: float
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = projected
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = functional.dropout(weights, dropout) if dropout else weights
    return weights @ value, weights
