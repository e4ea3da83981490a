# SPDX-License-Identifier: Apache-2.0
"""`tensor_plan`: the tensor-parallel styles of a model, from what it declares or from layers that are known. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import nn

from accel.errors import PrepareError
from accel.parallel._paths import matching, named_modules
from accel.parallel.tensor._fuse import with_copies
from accel.parallel.tensor._head import HeadStyle, with_head
from accel.parallel.tensor._known import known_styles
from accel.parallel.tensor._sequence import with_sequence
from accel.topology import TensorStyle

_EXPERTS = "moe_tp_experts"  # transformers' style of modules that are left to expert parallelism
# Styles of transformers by the names that it gives them.
_DECLARED: Mapping[str, TensorStyle] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather_output",
    "colwise_rep": "colwise_gather_output",
    "rowwise_split_input": "rowwise_split_input",
    "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "embedding_rowwise",
    "replicated_with_grad_allreduce": "replicated_with_grad_allreduce",
    "replicate": "replicated",
}


def tensor_plan(model: nn.Module, *, sequence: bool = False, head: HeadStyle | None = None) -> dict[str, TensorStyle]:
    """Return the styles by which `prepare` divides a model among the ranks along tp. Pure, no communication.

    They are those that a model of transformers declares in its `tp_plan`. Of other models they are found where the
    layers leave no doubt: torch's nn.MultiheadAttention, nn.Transformer and its layers, linear layers that follow each
    other in an nn.Sequential with element-wise layers between, and GPT-2. Where several column-wise layers share an
    input, the module around them sums its gradient once ("copy_input"). Experts are left out: every rank along tp holds
    them whole, unless they are spread along ep.

    Args:
        model: without wrappers; adapters of peft may be in it.
        sequence: whether ranks share the tokens between these layers; for models of transformers with a `tp_plan`, and
            GPT-2.
        head: style of the layer that gives the logits: "colwise" leaves each rank those of its part of the vocabulary,
            for `vocab_cross_entropy`, and "colwise_gather_output" gathers them. An embedding tied to it is divided too.
            None for the style that the model declares.

    Returns:
        Styles by pattern, in which `*` stands for one component of a path; empty where nothing is known. Change it and
        pass it as `Plan(tensor=...)`.

    Raises:
        PrepareError: the model declares styles that are unknown here, its tokens cannot be shared, or no layer is known
            as its head.
        ConfigError: an unknown style of the head.

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> accel.tensor_plan(net)
        {'0': 'colwise', '2': 'rowwise'}
    """
    styles = known_styles(model)
    for path, declared in _declarations(model):
        styles |= _from_declared(model, path, declared)
    styles = with_copies(model, styles)
    if sequence:
        styles = with_sequence(model, styles)
    if head is not None:
        styles = with_head(model, styles, head)
    return _collapsed(styles, [path for path, _ in named_modules(model)])


def _declarations(module: nn.Module, path: str = "") -> Iterator[tuple[str, Mapping[str, str]]]:
    """The plans of the outermost modules that have one."""
    declared: Any = getattr(module, "tp_plan", None) if hasattr(type(module), "tp_plan") else None
    if isinstance(declared, Mapping) and declared:
        yield path, cast("Mapping[str, str]", declared)
        return
    for key, child in module.named_children():
        yield from _declarations(child, f"{path}.{key}" if path else key)


def _from_declared(model: nn.Module, path: str, declared: Mapping[str, str]) -> dict[str, TensorStyle]:
    """Styles of a declared plan, without its patterns for modules that this model does not have."""
    inner = model.get_submodule(path)
    paths = [name for name, _ in named_modules(inner)]
    unknown: list[str] = []
    found: dict[str, TensorStyle] = {}
    experts = [pattern for pattern, style in declared.items() if style == _EXPERTS]
    for pattern, style in declared.items():
        if any(f"{pattern}.".startswith(f"{each}.") for each in experts):
            continue
        hits = matching(paths, pattern)
        parameters = matching((name for name, _ in inner.named_parameters()), pattern)
        if (hits or parameters) and style not in _DECLARED:
            unknown.append(f"{pattern}: {style}")
            continue
        found |= {f"{path}.{name}" if path else name: _DECLARED[style] for name in hits}
    if unknown:
        raise PrepareError(
            "the model declares tensor-parallel styles that have no counterpart here",
            expected=", ".join(_DECLARED),
            got="; ".join(unknown),
            where="tensor_plan, model.tp_plan",
            fix="Pass a plan of your own that leaves these modules out: accel.Plan(tensor={...}).",
        )
    return found


def _collapsed(styles: Mapping[str, TensorStyle], paths: list[str]) -> dict[str, TensorStyle]:
    """Put `*` for numbers in paths, where all modules that it matches have the same style."""
    found: dict[str, TensorStyle] = {}
    for path, style in styles.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
        alike = all(styles.get(hit) == style for hit in matching(paths, pattern))
        found[pattern if alike else path] = style
    return found
