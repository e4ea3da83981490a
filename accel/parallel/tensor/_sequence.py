# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism: between the layers that ranks share, each works on a part of the tokens. Pure.

Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from accel.errors import PrepareError
from accel.parallel._paths import named_modules
from accel.parallel.tensor._styles import COLWISE
from accel.topology import TensorStyle


def with_sequence(model: nn.Module, styles: Mapping[str, TensorStyle]) -> dict[str, TensorStyle]:
    """Return styles by which the blocks of a model work on parts of the tokens.

    The first block divides the tokens; attention and MLP gather them, and scatter what they sum; norms between work on
    the parts; the norm that follows the blocks gathers them, so that all others see the whole sequence.

    Args:
        model: of blocks in one ModuleList, between embeddings and a norm.
        styles: by path, without the sequence.

    Raises:
        PrepareError: the model is of another form, or has parameters between its layers that are not a norm's.
    """
    blocks = _blocks(model, styles)
    problems: list[str] = []
    found = dict(styles)
    for at, path in enumerate(blocks):
        block = model.get_submodule(path)
        for name, child in block.named_children():
            own = _of_child(f"{path}.{name}", child, styles)
            if own is None:
                problems.append(f"{path}.{name}")
            found |= own or {}
        if at == 0:
            found[path] = "split_sequence"
    if not blocks:
        problems.append("no ModuleList of blocks that the plan divides")
    else:
        found |= _after(model, blocks[0].rpartition(".")[0].rpartition(".")[0], problems)
    if problems:
        raise PrepareError(
            "the tokens of this model cannot be shared between its layers",
            expected="blocks in one ModuleList, of norms and of modules that the tensor-parallel plan divides, and one"
            " norm after them",
            got="; ".join(problems),
            where="tensor_plan, sequence=True",
            fix="Leave sequence out, or write the styles: accel.Plan(tensor={...}).",
        )
    return found


def _blocks(model: nn.Module, styles: Mapping[str, TensorStyle]) -> list[str]:
    """Paths of the blocks of the outermost ModuleList in which layers are divided; none where there are several."""
    lists = [
        path
        for path, module in named_modules(model)
        if isinstance(module, nn.ModuleList) and any(each.startswith(f"{path}.") for each in styles)
    ]
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        return []
    return [f"{outer[0]}.{name}" for name, _ in model.get_submodule(outer[0]).named_children()]


def _of_child(path: str, child: nn.Module, styles: Mapping[str, TensorStyle]) -> dict[str, TensorStyle] | None:
    """Styles of a part of a block; None for one that cannot work on a part of the tokens."""
    if not any(True for _ in child.parameters()):
        return {}
    if _is_norm(child):
        return {path: "sequence_parallel"}
    inside = {each: style for each, style in styles.items() if each.startswith(f"{path}.")}
    ends = [each for each, style in inside.items() if style == "rowwise"]
    starts = [style for style in inside.values() if style in COLWISE - {"colwise_gather_output"}]
    holders = {name.rpartition(".")[0] for name, _ in child.named_parameters()}
    named = all(any(f"{path}.{each}.".startswith(f"{name}.") for name in inside) for each in holders)
    if len(ends) != 1 or not starts or not named:
        return None
    return {path: "gather_sequence", ends[0]: "rowwise_sequence"}


def _after(model: nn.Module, holder: str, problems: list[str]) -> dict[str, TensorStyle]:
    """The norm beside the list of blocks."""
    module = model.get_submodule(holder)
    norms = [name for name, child in module.named_children() if _is_norm(child)]
    if len(norms) != 1:
        problems.append(f"{len(norms)} norms beside the blocks")
        return {}
    others = [
        name
        for name, child in module.named_children()
        if name not in norms
        and not isinstance(child, nn.Embedding | nn.ModuleList)
        and any(True for _ in child.parameters())
    ]
    problems += [f"{holder}.{name}".strip(".") for name in others]
    return {f"{holder}.{norms[0]}".strip("."): "sequence_parallel_gather_output"}


def _is_norm(module: nn.Module) -> bool:
    """Whether a module normalizes each token for itself."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    own = [each.ndim for each in module.parameters()]
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm")) and own in ([], [1], [1, 1])  # none in other stages
