# SPDX-License-Identifier: Apache-2.0
"""Styles of low-rank adapters (LoRA), from the style of the layer that they adapt. Pure.

Hu et al. 2021, arXiv:2106.09685; the layers of peft, by the names of their parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from accel.parallel.tensor._styles import COLWISE, ROWWISE

_UNKNOWN = ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def with_lora(model: nn.Module, styles: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    """Return styles in which those of adapted layers have become those of their parts.

    Of a column-wise layer the second factor is divided as the layer is; of a row-wise one the first is, whose few
    outputs are summed as the layer's are.

    Args:
        model: the model.
        styles: by path.
        problems: gets adapters that cannot be divided.
    """
    found: dict[str, str] = {}
    for path, style in styles.items():
        module = model.get_submodule(path)
        if not is_adapted(module):
            found[path] = style
            continue
        problems += [f"{path}: {each}" for each in _problems(module, style)]
        found |= {f"{path}.{part}": each for part, each in _parts(module, style)}
        if style in COLWISE:
            found[path] = "copy_input"
    return found


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a layer beside its adapters, as peft puts it in the place of the layer."""
    children = dict(module.named_children())
    return {"base_layer", "lora_A", "lora_B"} <= children.keys()


def _parts(module: nn.Module, style: str) -> Iterator[tuple[str, str]]:
    yield "base_layer", style
    if style in COLWISE:
        first, second = "replicated_with_grad_allreduce", style
    else:
        first, second = style, "replicated_with_grad_allreduce" if style == "rowwise_sequence" else "replicated"
    for name, of_each in (("lora_A", first), ("lora_B", second)):
        for key, _ in module.get_submodule(name).named_children():
            yield f"{name}.{key}", of_each


def _problems(module: nn.Module, style: str) -> Iterator[str]:
    if style not in COLWISE | ROWWISE:
        yield f"an adapter of a layer of style {style}"
    for name in _UNKNOWN:
        part = getattr(module, name, None)
        if isinstance(part, nn.Module) and any(True for _ in part.parameters()):
            yield f"an adapter with {name}"
