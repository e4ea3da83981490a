# SPDX-License-Identifier: Apache-2.0
"""The head of a language model, whose outputs are as many as its embedding has rows: its style, and the embedding's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import nn

from accel.errors import PrepareError, check_choice
from accel.parallel._paths import named_modules
from accel.parallel.tensor._styles import is_linear
from accel.topology import TensorStyle

HeadStyle = Literal["colwise", "colwise_gather_output"]


def with_head(model: nn.Module, styles: Mapping[str, TensorStyle], head: HeadStyle) -> dict[str, TensorStyle]:
    """Return styles in which the head has one, and an embedding that is tied to it the one that divides its rows.

    Args:
        model: the model.
        styles: by path.
        head: style of the head.

    Raises:
        PrepareError: no layer is the head, or several may be.
        ConfigError: an unknown style.
    """
    check_choice(head, get_args(HeadStyle), "not a style of a head", where="tensor_plan(head=)")
    modules = dict(named_modules(model))
    paths = _declared(model, modules) or _of_as_many_outputs(modules)
    if len(paths) != 1:
        raise PrepareError(
            "the head of the model is not known",
            expected="one linear layer with as many outputs as an embedding has rows, or a model's own"
            " get_output_embeddings",
            got=", ".join(paths) or "none",
            where="tensor_plan(head=)",
            fix=f'Leave head out, and add its style to the plan: accel.Plan(tensor={{**styles, "head": {head!r}}}).',
        )
    path = paths[0]
    weight = modules[path].get_parameter("weight")
    tied = [name for name, each in modules.items() if isinstance(each, nn.Embedding) and each.weight is weight]
    return {**styles, **dict.fromkeys(tied, "embedding_rowwise"), path: head}


def _declared(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    """The path of the head that a model of transformers names."""
    ask: Any = getattr(model, "get_output_embeddings", None)
    named: object = ask() if callable(ask) else None
    return [path for path, each in modules.items() if each is named and is_linear(each)]


def _of_as_many_outputs(modules: Mapping[str, nn.Module]) -> list[str]:
    """Paths of linear layers with as many outputs as an embedding has rows; tied ones alone, where there are any."""
    weights = [each.weight for each in modules.values() if isinstance(each, nn.Embedding)]
    rows = {len(each) for each in weights}
    linear = {path: each.weight for path, each in modules.items() if isinstance(each, nn.Linear)}
    tied = [path for path, own in linear.items() if any(own is each for each in weights)]
    return tied or [path for path, own in linear.items() if len(own) in rows]
