# SPDX-License-Identifier: Apache-2.0
"""Modules whose column-wise layers share one input: its gradient is summed over ranks once, and not for each. Pure.

A layer of a Llama then takes four all-reduces and not seven: two forward, and two backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from torch import nn

from accel.topology import TensorStyle

_INSIDE = frozenset({"colwise", "rowwise", "replicated_with_grad_allreduce"})
# Arguments of a forward that layers inside of the module never take as their input. One that is not listed could be
# another input, such as the states of an encoder, whose gradient nobody would sum.
_NO_INPUTS = frozenset({
    "attention_mask", "position_embeddings", "position_ids", "past_key_values", "past_key_value", "layer_past",
    "cache_position", "use_cache", "output_attentions", "head_mask", "layer_head_mask", "kwargs", "cos", "sin",
})  # fmt: skip


def with_copies(model: nn.Module, styles: Mapping[str, TensorStyle]) -> dict[str, TensorStyle]:
    """Return styles with "copy_input" for each module that is the only one to feed several column-wise layers in it.

    Args:
        model: the model.
        styles: by path.
    """
    found: dict[str, TensorStyle] = {}
    for path, style in styles.items():
        holder = path.rpartition(".")[0]
        if (
            style == "colwise"
            and holder not in styles
            and holder not in found
            and _feeds_several(model, holder, styles)
        ):
            found[holder] = "copy_input"
        found[path] = style
    return found


def _feeds_several(model: nn.Module, holder: str, styles: Mapping[str, TensorStyle]) -> bool:
    module = model.get_submodule(holder)
    own = [styles.get(f"{holder}.{name}") for name, _ in module.named_children()]
    return own.count("colwise") > 1 and _takes_one_input(module) and _covers(module, holder, styles)


def _takes_one_input(module: nn.Module) -> bool:
    first, *others = inspect.signature(module.forward).parameters or ("",)
    return first in ("hidden_states", "hidden_state", "x") and _NO_INPUTS.issuperset(others)


def _covers(module: nn.Module, path: str, styles: Mapping[str, TensorStyle]) -> bool:
    """Whether all parameters inside are those of layers that work on a part of the features."""
    return all(
        any(styles.get(name) in _INSIDE for name in _around(f"{path}.{owner}", path))
        for owner in {name.rpartition(".")[0] for name, _ in module.named_parameters()}
    )


def _around(path: str, top: str) -> Iterator[str]:
    """A path and those of the modules around it, below a top one."""
    while len(path) > len(top):
        yield path
        path = path.rpartition(".")[0]
