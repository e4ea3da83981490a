# SPDX-License-Identifier: Apache-2.0
"""Styles by pattern become a rule for each module; everything wrong with a plan is told at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec
from torch import nn

from accel.errors import PrepareError, did_you_mean
from accel.parallel._paths import matching, named_modules
from accel.parallel.tensor._lora import is_adapted, with_lora
from accel.parallel.tensor._styles import (
    COLWISE,
    COPYING,
    STYLES,
    Rule,
    is_linear,
    is_transposed,
    output_dim,
    problems_of,
    rule_for,
    uneven_heads,
)
from accel.tensors import is_dtensor
from accel.topology import TensorStyle

_WHERE = "prepare_model, plan.tensor"
_FAST_PATHS: Mapping[type[nn.Module], Mapping[str, int]] = {
    # torch's fused inference reads the parameters of modules that it never calls
    nn.TransformerEncoderLayer: {"activation_relu_or_gelu": 0},
    nn.TransformerEncoder: {"use_nested_tensor": 0},
}


def rules_of(
    model: nn.Module, plan: Mapping[str, TensorStyle], size: int, *, is_stage: bool = False
) -> dict[str, Rule]:
    """Return the rule of each module that has parameters or that the plan names, by path.

    Args:
        model: without wrappers.
        plan: styles by pattern.
        size: number of ranks along tp, more than one.
        is_stage: whether modules without parameters are those of other pipeline stages, which get no rule.

    Raises:
        PrepareError: a pattern that matches nothing, a module that two match, an unknown style, or a module that cannot
            be divided among so many ranks; all of them in one error.
    """
    styles, problems = match(plan, [path for path, _ in named_modules(model)])
    if is_stage:
        full = (path for path in styles if any(True for _ in model.get_submodule(path).parameters()))
        styles = {path: styles[path] for path in full}
    styles = with_lora(model, {**_attention_outputs(model, styles), **styles}, problems)
    known = {path: cast(TensorStyle, style) for path, style in styles.items() if style in STYLES}
    complete = {**{path: "replicated" for path, module in named_modules(model) if _holds(module)}, **known}
    rules: dict[str, Rule] = {}
    attributes: dict[str, dict[str, int]] = {}
    for path, style in cast("dict[str, TensorStyle]", complete).items():
        module = model.get_submodule(path)
        found = list(problems_of(module, style, size))
        heads, local, wrong = _heads(model, path, style, size)
        problems += [f"{path or 'the model'}: {each}" for each in (*found, *wrong)]
        if not found and not wrong:
            rules[path] = rule_for(module, style, size, copied=_is_copied(path, known), heads=heads)
            for holder, values in local.items():
                attributes.setdefault(holder, {}).update(values)
    problems += _tied_problems(model, rules)
    if problems:
        raise _refused(problems, size)
    return _with_attributes(model, rules, attributes)


def match(plan: Mapping[str, str], paths: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return styles by path, and what is wrong with the patterns.

    Args:
        plan: styles by pattern, in which `*` stands for one component of a path.
        paths: of all modules.
    """
    listed = list(paths)
    found: dict[str, str] = {}
    by: dict[str, str] = {}
    problems: list[str] = []
    for pattern, style in plan.items():
        if style not in STYLES:
            hint = did_you_mean(str(style), STYLES) or f"Styles are {', '.join(STYLES)}."
            problems.append(f"{pattern}: unknown style {style!r}. {hint}".rstrip("."))
        hits = matching(listed, pattern)
        if not hits:
            problems.append(f"{pattern}: matches no module")
        for path in hits:
            if path in found:
                problems.append(f"{path}: both {by[path]!r} and {pattern!r} match it")
            found[path], by[path] = style, pattern
    return found, problems


def _holds(module: nn.Module) -> bool:
    """Whether a module has parameters that nothing has spread, as expert parallelism spreads those of experts."""
    return any(not is_dtensor(each) for each in module.parameters(recurse=False))


def _attention_outputs(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """The projection that ends an nn.MultiheadAttention, which nobody needs to name."""
    paths = [path for path, style in styles.items() if style == "multihead_attention"]
    named = {path: model.get_submodule(path) for path in paths}
    return {f"{path}.out_proj": "rowwise" for path, each in named.items() if isinstance(each, nn.MultiheadAttention)}


def _is_copied(path: str, styles: Mapping[str, str]) -> bool:
    """Whether the nearest module around it that the plan names sums the gradients of its input."""
    while path:
        path = path.rpartition(".")[0]
        if path in styles:
            return styles[path] in COPYING
    return False


def _heads(model: nn.Module, path: str, style: str, size: int) -> tuple[int, dict[str, dict[str, int]], list[str]]:
    """Heads that a projection's outputs are of, attributes of the attention around it, and what is wrong with both.

    Attention divides outputs by its `head_dim`; heads are then the least that a rank can have.
    """
    module = model.get_submodule(path)
    holder = _holder(model, path)
    around = model.get_submodule(holder)
    if is_transposed(module) and style in COLWISE:
        local = {path: {"nf": cast(int, module.nf) // size}}
        if style.startswith("packed") and type(getattr(around, "split_size", None)) is int:
            local[holder] = {"split_size": cast(int, around.split_size) // size}
        return 0, local, []
    width: Any = getattr(around, "head_dim", None) or getattr(around, "attention_head_size", None)
    if style != "colwise" or type(width) is not int or not is_linear(module):
        return 0, {}, []
    outputs = module.get_parameter("weight").shape[output_dim(module)]
    heads = outputs // width
    if outputs % width or not heads or heads % size == 0:
        return 0, {}, []
    groups: Any = getattr(around, "num_key_value_groups", None)
    if size % heads == 0 and outputs % size == 0 and type(groups) is int and heads * groups % size == 0:
        # a rank has heads * groups / size queries for one head of keys
        return heads, {holder: {"num_key_value_groups": heads * groups // size}}, []
    return 0, {}, [uneven_heads(heads, size)]


def _holder(model: nn.Module, path: str) -> str:
    """The path of the module that calls a layer, or calls what adapts it."""
    holder = path.rpartition(".")[0]
    while holder and (
        is_adapted(model.get_submodule(holder)) or isinstance(model.get_submodule(holder), nn.ModuleDict)
    ):
        holder = holder.rpartition(".")[0]
    return holder


def _tied_problems(model: nn.Module, rules: Mapping[str, Rule]) -> list[str]:
    """Parameters that two modules share must be divided alike."""
    seen: dict[int, tuple[str, int | None]] = {}
    found: list[str] = []
    for path, rule in rules.items():
        for name, parameter in model.get_submodule(path).named_parameters(recurse=False):
            own = f"{path}.{name}" if path else name
            dim = rule.dims.get(name)
            first, other = seen.setdefault(id(parameter), (own, dim))
            if other != dim:
                found.append(f"{own}: tied to {first}, and {_split(dim)} beside {_split(other)}")
    return found


def _split(dim: int | None) -> str:
    return "whole" if dim is None else f"split along dimension {dim}"


def _with_attributes(
    model: nn.Module, rules: Mapping[str, Rule], attributes: Mapping[str, Mapping[str, int]]
) -> dict[str, Rule]:
    found = {path: dict(values) for path, values in attributes.items()}
    styled = [path for path, rule in rules.items() if rule.style != "replicated"]
    for path, module in named_modules(model):
        for kind, values in _FAST_PATHS.items():
            if isinstance(module, kind) and any(each.startswith(f"{path}." if path else "") for each in styled):
                found.setdefault(path, {}).update(values)
    bare = {path: rules.get(path) or Rule(style="replicated") for path in (*rules, *found)}
    return {path: msgspec.structs.replace(rule, attributes=found.get(path, {})) for path, rule in bare.items()}


def _refused(problems: list[str], size: int) -> PrepareError:
    listed = list(dict.fromkeys(problems))
    shown = "; ".join(listed[:20]) + (f"; and {len(listed) - 20} more" if len(listed) > 20 else "")
    return PrepareError(
        "the model cannot be spread by this tensor-parallel plan",
        expected=f"styles of its modules that {size} ranks along tp can share",
        got=shown,
        where=_WHERE,
        fix="Print accel.tensor_plan(model), change it, and pass it as accel.Plan(tensor=...).",
    )
