# SPDX-License-Identifier: Apache-2.0
"""`tensor_plan`: the tensor-parallel styles of a model, from its own declaration or from known layers. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, get_args

import torch
from torch import nn

from accel.errors import PrepareError
from accel.errors._checks import check_choice
from accel.mixins import Mixin
from accel.parallel._blocks import block_groups
from accel.parallel._modules import example_of, is_in, matching, named_modules
from accel.parallel.axes.tensor._found_plan import FoundPlan, found_plan
from accel.parallel.axes.tensor._rules import modules_around, passed_over
from accel.parallel.axes.tensor._styles import COLWISE, is_foreign, is_linear
from accel.tensors import word_layers
from accel.topology import HeadStyle, TensorStyle


def with_head(model: nn.Module, styles: Mapping[str, TensorStyle], head: HeadStyle) -> dict[str, TensorStyle]:
    """Return styles with one for the head, and for an embedding tied to it the one that divides its rows;
    `PrepareError` for no head, or several."""
    check_choice(head, get_args(HeadStyle), "the style of the head is unknown", where="tensor_plan(head=)")
    modules = dict(named_modules(model))
    paths = _linear_heads(model)
    if len(paths) != 1:
        raise PrepareError(
            "the head of the model is not known",
            expected="one linear layer with as many outputs as an embedding has rows, or a model's own"
            " get_output_embeddings",
            got=", ".join(paths) or "none",
            where="tensor_plan(head=)",
            fix="Leave head out, and add its style to the plan: "
            f'accel.parallel.Plan(tensor={{**styles, "head": {head!r}}}).',
        )
    path = paths[0]
    weight = dict(modules[path].named_parameters(recurse=False)).get("weight")  # none of one that is parametrized
    tied = [name for name, each in modules.items() if isinstance(each, nn.Embedding) and each.weight is weight]
    return {**styles, **dict.fromkeys(tied, "embedding_rowwise"), path: head}


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


def tensor_plan(
    model: nn.Module,
    *,
    head: HeadStyle | None = None,
    example: Mapping[str, Any] | Sequence[Any] | None = None,
) -> dict[str, TensorStyle]:
    """Return the styles by which `prepare` divides a model among the ranks along tp. Pure, no communication.

    A model of transformers declares styles for its blocks in its `tp_plan`. They are completed for embeddings tied to a
    head. Known layers get styles too: torch's
    nn.MultiheadAttention, nn.Transformer and its layers, and linear layers that follow each other in an nn.Sequential
    with element-wise layers between.

    Other styles are found in a forward without values: for other models of transformers, for modules in blocks that a
    declared plan passes over, and for any model with an `example`. They are proved for two ranks: a module that two
    simulated ranks divide must give the outputs and gradients of the full module, with other parameters, in float64, to
    1e-10. Modules without a proof stay replicated. Experts are left out: every rank along tp holds all of them, unless
    they are sharded along ep.

    Args:
        model: without wrappers; adapters of peft may be in it.
        head: style of the layer that computes the logits. "colwise" leaves each rank the logits of its part of the
            vocabulary, for `vocab_cross_entropy`; "colwise_gather_output" gathers them. An embedding tied to the head
            is divided too. None for the style that the model declares.
        example: arguments of the model's forward, by name or in order, to find the styles by; their values do not
            matter. None for the model's own plan, or small inputs by the config of a model of transformers.

    Returns:
        Styles by pattern, where `*` is one component of a path; empty where nothing is known. Change it and
        pass it as `Plan(tensor=...)`.

    Raises:
        PrepareError: the model declares styles that are unknown here, or no layer is known as its head.
        ConfigError: an unknown style of the head.

    Examples:
        >>> net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> accel.parallel.tensor_plan(net)
        {'0': 'colwise', '2': 'rowwise'}
    """
    styles: dict[str, TensorStyle] = {}
    is_seen = False
    if finds(model, example):
        plan = found_plan(model, 2, example, in_words=True)
        is_seen = plan.is_seen
        styles = {**(plan.styles if is_seen else known_styles(model))}
    if not styles and not is_seen:
        found = found_beside(model, 2, in_words=True).styles
        return _patterns(model, {**_own_styles(model, _declared_styles(model)), **found}, head)
    return _patterns(model, styles, head)


def declared_plan(
    model: nn.Module,
    *,
    head: HeadStyle | None = None,
) -> dict[str, TensorStyle]:
    """Return the styles that a model declares, and the styles of known layers. Pure."""
    return _patterns(model, _own_styles(model, _declared_styles(model)), head)


def _patterns(model: nn.Module, styles: Mapping[str, TensorStyle], head: HeadStyle | None) -> dict[str, TensorStyle]:
    styles = styles if head is None else with_head(model, styles, head)
    return collapsed(model, styles)


def _own_styles(model: nn.Module, declared: dict[str, TensorStyle]) -> dict[str, TensorStyle]:
    return known_styles(model) | _tied(model, declared) | declared


def found_beside(
    model: nn.Module,
    size: int,
    example: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    in_words: bool = False,
) -> FoundPlan:
    """Return the plan that is found and proved for what a declared plan leaves whole in its blocks, and why the rest
    stays so, by path. Pure."""
    left = left_whole(model)
    if not left:
        return FoundPlan({}, {})
    plan = found_plan(model, size, example, within=left, with_ends=False, in_words=in_words)
    names = [name for layouts in plan.regions.values() for name in layouts]
    whole = [path for path in left if not any(is_in(name, path) for name in names)]
    problem = plan.left.get("", "no known form")  # of a forward that failed, by all modules
    return plan._replace(left={path: plan.left.get(path, problem) for path in whole})


def left_whole(model: nn.Module) -> list[str]:
    """Return the paths of modules of several linear layers that a declared plan passes over in its blocks, such as
    attention through latents. Pure."""
    try:
        declared = _declared_styles(model)
    except PrepareError:  # styles that have no counterpart here
        return []
    return passed_over(model, declared, _own_styles(model, declared))


def found_for(
    model: nn.Module,
    size: int,
    example: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    shares_tokens: bool = False,
    divides_head: bool = False,
) -> FoundPlan:
    """Return the plan that is found and proved for so many ranks, and why modules stay whole, by path. With
    `shares_tokens` it is proved with ranks that share the tokens; with `divides_head` it leaves the outputs of the head
    to another style."""
    heads = _linear_heads(model) if divides_head else ()
    return found_plan(model, size, example, shares_tokens=shares_tokens, heads=heads)


def _linear_heads(model: nn.Module) -> list[str]:
    """The paths of the linear layers that may be heads; one of another stage has no parameters."""
    heads = word_layers(model).heads.items()
    return [path for path, each in heads if isinstance(each, nn.Linear) or is_linear(each)]


def finds(model: nn.Module, example: object = None) -> bool:
    """Return whether styles of a model are found in its forward, because it declares none that are known here, or only
    the style of its head. Pure."""
    return example is not None or (not declares(model) and example_of(model) is not None)


def declares(model: nn.Module) -> bool:
    """Return whether a model declares styles of its blocks that its modules can have: adapters, other than of linear
    layers, compute with more than their layer's parameters. Pure."""
    try:
        declared = _declared_styles(model)
    except PrepareError:  # styles that have no counterpart here
        return False
    if any(is_foreign(model.get_submodule(path), style) for path, style in _own_styles(model, declared).items()):
        return False
    around = modules_around(declared)
    return any(path in around for group in block_groups(model) for path, _ in group.entries)


def _tied(model: nn.Module, declared: Mapping[str, TensorStyle]) -> dict[str, TensorStyle]:
    """Styles of embeddings that are tied to layers with outputs that a plan divides."""
    modules = dict(named_modules(model))
    weights = [getattr(modules[path], "weight", None) for path, style in declared.items() if style in COLWISE]
    return {
        path: "embedding_rowwise"
        for path, each in modules.items()
        if isinstance(each, nn.Embedding) and any(each.weight is weight is not None for weight in weights)
    }


def _declared_styles(model: nn.Module) -> dict[str, TensorStyle]:
    found: dict[str, TensorStyle] = {}
    for path, declared in _declarations(model):
        found |= _from_declared(model, path, declared)
    return found


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
        if any(is_in(pattern, each) for each in experts):
            continue
        hits = matching(paths, pattern)
        parameters = matching((name for name, _ in inner.named_parameters()), pattern)
        if (hits or parameters) and style not in _DECLARED:
            unknown.append(f"{pattern}: {style}")
            continue
        found |= {f"{path}.{name}" if path else name: _DECLARED[style] for name in hits}
    unknown += [f"{each}: rowwise, for values of all heads" for each in _of_all_heads(model, found)]
    if unknown:
        raise PrepareError(
            "the model declares tensor-parallel styles that have no counterpart here",
            expected=", ".join(_DECLARED),
            got="; ".join(unknown),
            where="tensor_plan, model.tp_plan",
            fix="Pass a plan of your own that leaves these modules out: accel.parallel.Plan(tensor={...}).",
        )
    return found


def _of_all_heads(model: nn.Module, styles: Mapping[str, TensorStyle]) -> list[str]:
    """Row-wise layers before the one that ends an attention (Doge). They give every rank the values of all heads, but
    only its own queries."""
    ends: dict[str, list[str]] = {}
    for path, style in styles.items():
        if style == "rowwise" and is_linear(model.get_submodule(path)):
            ends.setdefault(path.rpartition(".")[0], []).append(path)
    found: list[str] = []
    for paths in ends.values():
        outputs = {path: len(model.get_submodule(path).get_parameter("weight")) for path in paths}
        found += [path for path, each in outputs.items() if each < max(outputs.values())]
    return found


def collapsed(model: nn.Module, styles: Mapping[str, TensorStyle]) -> dict[str, TensorStyle]:
    """Return styles by patterns, with `*` for numbers in paths, where all modules that one matches have the same style.
    Pure."""
    paths = [path for path, _ in named_modules(model)]
    found: dict[str, TensorStyle] = {}
    for path, style in styles.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
        is_alike = all(styles.get(hit) == style for hit in matching(paths, pattern))
        found[pattern if is_alike else path] = style
    return found


# --- layers with a known forward: torch's attention, and pairs of linear layers

# Layers that compute each element for itself, so that a part of the features stays a part.
_ELEMENTWISE = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanh, nn.Tanhshrink, nn.Dropout,
)  # fmt: skip


def known_styles(model: nn.Module) -> dict[str, TensorStyle]:
    """Return the styles of the layers with a known forward in a model, by path."""
    found: dict[str, TensorStyle] = {}
    modules = list(named_modules(model))
    places = _places(modules)
    for path, module in modules:
        for name, style in _styles_in(module, places):
            found.setdefault(f"{path}.{name}".strip("."), style)
    return found


def _places(modules: Iterable[tuple[str, nn.Module]]) -> Counter[int]:
    """The number of places of each module, by `id`."""
    return Counter(id(each) for _, module in modules for each in cast(Any, module)._modules.values())


def _styles_in(module: nn.Module, places: Counter[int]) -> Iterator[tuple[str, TensorStyle]]:
    """Styles of a module's own parts, by their names in it."""
    if isinstance(module, nn.MultiheadAttention) and _has_forward_of(module, nn.MultiheadAttention):
        yield "", "multihead_attention"
        yield "out_proj", "rowwise"
    elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        if _feeds_forward(module):
            yield "linear1", "colwise"
            yield "linear2", "rowwise"
    elif isinstance(module, nn.Sequential) and _has_forward_of(module, nn.Sequential):
        for first, last in _pairs(module, places):
            yield first, "colwise"
            yield last, "rowwise"


def _feeds_forward(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> bool:
    """Whether a layer has torch's own forward, with an activation of each element for itself."""
    kind = nn.TransformerEncoderLayer if isinstance(layer, nn.TransformerEncoderLayer) else nn.TransformerDecoderLayer
    own: Any = type(layer)
    activation: Any = layer.activation
    return own._ff_block is cast(Any, kind)._ff_block and _has_forward_of(layer, kind) and _is_elementwise(activation)


def _is_elementwise(activation: Any) -> bool:
    """Whether a part of the features stays a part behind an activation, which is called with a few numbers."""
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        return False
    probe = torch.linspace(-2, 2, 8, device="cpu")
    try:
        return torch.allclose(activation(probe)[:4], activation(probe[:4]))
    except Exception:
        return False  # one that needs another shape


def _pairs(sequence: nn.Sequential, places: Counter[int]) -> Iterator[tuple[str, str]]:
    """Names of each two linear layers, where the second takes the first's outputs element by element; a layer in
    several places is in none."""
    first = ""
    for name, module in cast(Any, sequence)._modules.items():
        if type(module) is nn.Linear and places[id(module)] == 1 and is_linear(module):
            if first:
                yield first, name
            first = "" if first else name
        elif not _has_forward_of(module, *_ELEMENTWISE):
            first = ""


def _has_forward_of(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module runs the forward of one of these classes, and not a subclass's or the instance's own."""
    if "forward" in vars(module):
        return False
    for own in type(module).__mro__:
        if "forward" in vars(own) and not issubclass(own, Mixin):
            return own in kinds
    return False
