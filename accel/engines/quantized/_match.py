# SPDX-License-Identifier: Apache-2.0
"""Stored weights beside those of a model that is to be quantized: what is read, what is quantized, what differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from accel.bigmodel import WeightSource
from accel.bigmodel.load import Facts, Match, Patterns, match, weight_dtype, weight_dtype_name
from accel.engines.quantized import _bitsandbytes
from accel.engines.quantized._config import Bitsandbytes, Quantization
from accel.engines.quantized._describe import Layer, Plan
from accel.tensors import Packed

_FLOATS = ("F64", "F32", "F16", "BF16")


class Other(NamedTuple):
    """A tensor that is not quantized.

    Attributes:
        names: its names in the model.
        tensor: the tensor.
        dtype: dtype that it will have.
        stored: name in the source; "" where it may be missing.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    dtype: torch.dtype
    stored: str


class Found(NamedTuple):
    """Weights of a source for a model.

    Attributes:
        matched: all differences.
        stored: facts of the source's tensors by name.
        others: tensors that are not quantized.
        templates: the weight without values by name of a layer that is stored quantized.
        known: parts of those that the source has in another form, by full name.
    """

    matched: Match
    stored: Mapping[str, Facts]
    others: list[Other]
    templates: Mapping[str, Packed]
    known: Mapping[str, torch.Tensor]


def find_weights(
    model: nn.Module, plan: Plan, source: WeightSource, config: Quantization, allow_missing: Patterns
) -> Found:
    """Compare names, shapes and dtypes of a source with those of a model."""
    stored = {name: Facts((name,), each.dtype, each.shape, each.where) for name, each in source.entries.items()}
    wanted: list[Facts] = []
    templates: dict[str, Packed] = {}
    known: dict[str, torch.Tensor] = {}
    constants: set[str] = set()
    problems: list[str] = []
    for layer in plan.layers:
        if not _is_quantized(layer, source):
            dtype = weight_dtype_name(layer.dtype)
            wanted.append(Facts((f"{layer.name}.weight",), dtype, tuple(layer.module.weight.shape)))
            continue
        template, told, problem = _template(layer, source, config, constants)
        problems += [problem] if problem else []
        templates[layer.name] = template
        known |= {f"{layer.name}.{name}": tensor for name, tensor in told.items()}
        for name, part in template.parts.items():
            if name not in told:
                wanted.append(Facts((f"{layer.name}.{name}",), weight_dtype_name(part.dtype), tuple(part.shape)))
    others = _others(model, plan)
    wanted += [Facts(each.names, weight_dtype_name(each.dtype), tuple(each.tensor.shape)) for each in others]
    matched = match(wanted, stored, allow_missing)
    unused = [name for name in matched.unused if name not in constants | known.keys()]
    names = matched.found[len(matched.found) - len(others) :]
    others = [each._replace(stored=name[0] if name else "") for each, name in zip(others, names, strict=True)]
    matched = matched._replace(unused=unused, problems=problems + matched.problems)
    return Found(matched, stored, others, templates, known)


def _is_quantized(layer: Layer, source: WeightSource) -> bool:
    """Return whether a source holds a layer's weight quantized."""
    plain = source.entries.get(f"{layer.name}.weight")
    if plain is not None:
        return plain.dtype not in _FLOATS
    return f"{layer.name}.{layer.template.first}" in source.entries


def _template(
    layer: Layer, source: WeightSource, config: Quantization, constants: set[str]
) -> tuple[Packed, dict[str, torch.Tensor], str]:
    """Return a stored weight without values, the parts that its format states, and how it differs from the record.

    Args:
        layer: the layer.
        source: the weights.
        config: the way to quantize.
        constants: receives the names of the tensors that state the format.
    """
    root = f"{layer.name}."
    given: dict[str, torch.Tensor] = {}
    for name, entry in source.entries.items():
        if name.startswith(root) and _is_format(name.removeprefix(root)):
            tensor = torch.empty(entry.shape, dtype=weight_dtype(entry.dtype))
            source.read([(name, tensor)])
            given[name.removeprefix(root)] = tensor
            constants.add(name)
    if not isinstance(config, Bitsandbytes):
        expected = layer.template.constants()
        same = all(torch.equal(expected[name], given.get(name, torch.empty(0))) for name in expected)
        return layer.template, {}, "" if same else f"{root}weight is quantized otherwise than {config!r}"
    if config.bits == 8:
        by_rows = "weight_format" not in given or not given["weight_format"].any()
        return layer.template, {}, "" if by_rows else f"{root}weight is not stored by rows"
    facts = _bitsandbytes.stored_format(given, layer.name)
    if facts is None:
        return layer.template, {}, f"{root}weight has no format of 4 bits"
    if not facts.agrees(config):
        return layer.template, {}, f"{root}weight is quantized otherwise than {config!r}: {facts}"
    shape = tuple(layer.module.weight.shape)
    if facts.shape != shape:  # a transposed matrix has as many packed elements
        return layer.template, {}, f"{root}weight: expected shape {list(shape)}, got {list(facts.shape)}"
    template, known = _bitsandbytes.with_facts(layer.template, facts)
    return template, known, ""


def _is_format(name: str) -> bool:
    return name in ("weight.format", "weight_format") or name.startswith("weight.quant_state.")


def _others(model: nn.Module, plan: Plan) -> list[Other]:
    """List parameters and persistent buffers that are not quantized, tied ones once."""
    quantized = {f"{layer.name}.weight" for layer in plan.layers}
    weights = {id(layer.module.weight) for layer in plan.layers}
    named: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and name not in quantized and id(value) not in weights:
            named.setdefault(id(value), []).append(name)
            tensors[id(value)] = value
    return [
        Other(tuple(names), tensors[key], plan.dtypes.get(key, tensors[key].dtype), "") for key, names in named.items()
    ]
