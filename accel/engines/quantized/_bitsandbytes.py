# SPDX-License-Identifier: Apache-2.0
"""Weights of bitsandbytes as plain tensors, under the names that its own state dicts have, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from accel.engines.quantized._config import Bitsandbytes, dtype_named, package
from accel.errors import CheckpointError
from accel.tensors import Packed, integers

_BLOCK, _NESTED_BLOCK = 64, 256  # weights, and scales, that share a scale
_LAYERS = "accel.engines.quantized._layers"  # which imports the package
_OFFSET = "weight.nested_offset"
_ROOM = 48  # characters for the offset


class StoredFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a checkpoint states of a weight of 4 bits, by the package's own names."""

    quant_type: str
    blocksize: int
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: tuple[int, ...]
    nested_blocksize: int = 0
    nested_offset: float | None = None

    def agrees(self, config: Bitsandbytes) -> bool:
        """Return whether a record makes weights of this format."""
        nested = _NESTED_BLOCK if config.double else 0
        return (self.quant_type, self.blocksize, self.nested_blocksize) == (config.kind, _BLOCK, nested)


def empty_layer(old: nn.Linear, config: Bitsandbytes) -> nn.Linear:
    """Return a layer of bitsandbytes with another one's bias and no weight."""
    dtype = dtype_named(config.compute_dtype)
    return package(_LAYERS).empty_layer(old, bits=config.bits, compute_dtype=dtype, threshold=config.threshold)


def quantize(weight: torch.Tensor, config: Bitsandbytes) -> Packed:
    """Quantize a matrix on its device."""
    functional = package("bitsandbytes").functional
    if config.bits == 8:
        rows, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        return _eight({"weight": rows, "SCB": scales})
    data, state = functional.quantize_4bit(
        weight.contiguous(), blocksize=_BLOCK, compress_statistics=config.double, quant_type=config.kind
    )
    return _four(data, state)


def empty(shape: tuple[int, int], dtype: torch.dtype, config: Bitsandbytes) -> Packed:
    """Return a weight without values: its parts on the meta device."""
    rows, columns = shape
    meta = partial(torch.empty, device="meta")
    if config.bits == 8:
        return _eight({"weight": meta(shape, dtype=torch.int8), "SCB": meta(rows, dtype=torch.float32)})
    count = -(-rows * columns // _BLOCK)
    state: Any = package("bitsandbytes").functional.QuantState(
        absmax=meta(count, dtype=torch.uint8 if config.double else torch.float32),
        shape=torch.Size(shape),
        code=meta(16, dtype=torch.float32),
        blocksize=_BLOCK,
        quant_type=config.kind,
        dtype=dtype,
    )
    if config.double:
        state.offset = meta((), dtype=torch.float32)
        state.state2 = type(state)(
            absmax=meta(-(-count // _NESTED_BLOCK), dtype=torch.float32),
            code=meta(256, dtype=torch.float32),
            blocksize=_NESTED_BLOCK,
            dtype=torch.float32,
        )
        state.nested = True
    return _four(meta((-(-rows * columns // 2), 1), dtype=torch.uint8), state)


def take_apart(module: nn.Module, tensor: Any) -> Packed | None:
    """Return a weight of a layer that `load_quantized` made as plain tensors; None for another one."""
    layers = package(_LAYERS)
    if isinstance(module, layers.Linear4bit) and getattr(tensor, "quant_state", None) is not None:
        return _four(tensor.data, tensor.quant_state)
    if isinstance(module, layers.Linear8bit) and getattr(tensor, "SCB", None) is not None:
        return _eight({"weight": tensor.data, "SCB": tensor.SCB})
    return None


def stored_format(constants: Mapping[str, torch.Tensor], where: str) -> StoredFormat | None:
    """Return the facts that a checkpoint states of a weight of 4 bits; None where it states none."""
    for name, tensor in constants.items():
        if name.startswith("weight.quant_state.bitsandbytes__"):
            try:
                return msgspec.convert(json.loads(bytes(integers(tensor))), StoredFormat)
            except ValueError as error:
                raise CheckpointError(
                    "bitsandbytes does not have this format", got=str(error), where=f"{where}, {name}"
                ) from error
    return None


def with_facts(template: Packed, facts: StoredFormat) -> tuple[Packed, dict[str, torch.Tensor]]:
    """Return a template for a weight by the facts of a checkpoint, and the parts that these hold."""
    made: Any = template.make(template.parts)
    made.quant_state.dtype = getattr(torch, facts.dtype)
    known = {} if facts.nested_offset is None else {_OFFSET: torch.tensor(facts.nested_offset)}
    return _four(made.data, made.quant_state), known


def _four(data: torch.Tensor, state: Any) -> Packed:
    parts = {"weight": data, "weight.absmax": state.absmax, "weight.quant_map": state.code}
    if state.nested:
        # the package shares one map between all weights
        parts |= {"weight.nested_absmax": state.state2.absmax, "weight.nested_quant_map": state.state2.code.clone()}
        parts |= {_OFFSET: state.offset}
    facts = {"blocksize": state.blocksize, "dtype": str(state.dtype).removeprefix("torch.")}
    facts |= {"quant_type": state.quant_type, "shape": list(state.shape)}
    if state.nested:
        facts |= {"nested_blocksize": state.state2.blocksize, "nested_dtype": "float32"}
    return Packed(parts, partial(_make_four, facts), partial(_four_constants, facts))


def _make_four(facts: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> nn.Parameter:
    bitsandbytes = package("bitsandbytes")
    make = bitsandbytes.functional.QuantState
    nested = "weight.nested_absmax" in parts
    inner = None
    if nested:
        absmax, code = parts["weight.nested_absmax"], parts["weight.nested_quant_map"]
        inner = make(absmax=absmax, code=code, blocksize=facts["nested_blocksize"], dtype=torch.float32)
    dtype, data = getattr(torch, facts["dtype"]), parts["weight"]
    state = make(
        absmax=parts["weight.absmax"],
        shape=torch.Size(facts["shape"]),
        code=parts["weight.quant_map"],
        blocksize=facts["blocksize"],
        quant_type=facts["quant_type"],
        dtype=dtype,
        offset=parts.get(_OFFSET),
        state2=inner,
    )
    shown = {"blocksize": facts["blocksize"], "quant_type": facts["quant_type"], "compress_statistics": nested}
    shown |= {"quant_state": state, "quant_storage": data.dtype, "bnb_quantized": True}
    if type(data) is torch.Tensor:
        return bitsandbytes.nn.Params4bit(data, requires_grad=False, **shown)
    return _marked(data, shown)


def _four_constants(facts: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stored = dict(facts)
    width = len(json.dumps(stored)) + _ROOM  # the same for two weights of one format
    if (offset := parts.get(_OFFSET)) is not None:
        stored["nested_offset"] = 0.0 if offset.is_meta else offset.item()
    text = json.dumps(stored).ljust(width).encode()
    return {f"weight.quant_state.bitsandbytes__{facts['quant_type']}": torch.tensor(list(text), dtype=torch.uint8)}


def _eight(parts: Mapping[str, torch.Tensor]) -> Packed:
    return Packed(parts, _make_eight, _eight_constants)


def _eight_constants(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"weight_format": torch.tensor(0, dtype=torch.uint8)}  # by rows, as all parts are


def _make_eight(parts: Mapping[str, torch.Tensor]) -> nn.Parameter:
    data, scales = parts["weight"], parts["SCB"]
    if type(data) is torch.Tensor:
        return package("bitsandbytes").nn.Int8Params(data, requires_grad=False, SCB=scales)
    return _marked(data, {"CB": None, "SCB": scales, "has_fp16_weights": False})


def _marked(data: torch.Tensor, shown: Mapping[str, Any]) -> nn.Parameter:
    """Return a parameter that is not in memory, with the attributes that the package's layers read."""
    made = nn.Parameter(data.detach(), requires_grad=False)
    vars(made).update(shown)
    return made
