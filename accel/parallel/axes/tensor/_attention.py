# SPDX-License-Identifier: Apache-2.0
"""torch's nn.MultiheadAttention with heads divided among ranks, and its recurrent layers, whole on each rank."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from accel.comm import copied, gathered, own_part, summed
from accel.parallel.axes.tensor._dropout import Streams
from accel.parallel.axes.tensor._layers import LocalParameters, entered, entered_product, needed_rows
from accel.parallel.axes.tensor._overlap import is_beside


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
        width = cast(int, cast(Any, own).head_dim)
        projected = [_by_head(each, width) for each in self._projected(query, key, value)]
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

    def _projected(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """This rank's queries, keys and values, shape [batch, tokens, features]."""
        layer = self.accel_layer
        own = cast(nn.MultiheadAttention, self)
        copies: dict[int, torch.Tensor] = {}  # inputs are often one tensor; its gradient is summed once
        found: list[torch.Tensor] = []
        for each, (weight, bias) in zip(inputs, self._projections(), strict=True):
            if id(each) in copies:
                output = functional.linear(copies[id(each)], weight, bias)
            elif is_beside(layer.rule):
                output, copies[id(each)] = entered_product(self, _batch_first(each, own), weight, bias)
            else:
                copies[id(each)] = _batch_first(entered(self, each), own)
                output = functional.linear(copies[id(each)], weight, bias)
            found.append(output)
        return found

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
        """Both masks as summands of this rank's scores, shape [batch or 1, heads or 1, queries or 1, keys]. Those that
        are learned get the gradients of all ranks' heads."""
        parts: list[torch.Tensor] = []
        group = self.accel_layer.group
        if padding is not None:
            padding = padding if padding.ndim == 2 else padding[None]
            parts.append(copied(_additive(padding, query.dtype), group)[:, None, None])
        if mask is not None:
            mask = _additive(mask, query.dtype)
            if mask.ndim == 3:  # one for each head of each sample
                mask = own_part(mask.view(query.shape[0], -1, *mask.shape[1:]), 1, group)
            else:
                mask = copied(mask, group)
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
