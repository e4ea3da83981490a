# SPDX-License-Identifier: Apache-2.0
"""Rules of a plan: the computation of each module on the ranks along tp, and the modules that compute so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
from torch import nn

from accel.errors import PrepareError
from accel.errors._checks import did_you_mean
from accel.mixins import Mixin, add_mixin
from accel.parallel._blocks import block_groups, outermost_groups
from accel.parallel._modules import RANKS, has_parameters, is_in, matching, named_modules, note_module
from accel.parallel.axes.tensor._dependence import pattern_of
from accel.parallel.axes.tensor._layers import Layer, ReadList, Recurrent, mixin_for
from accel.parallel.axes.tensor._part_layers import GraphedCall, LayerRanks, PartParameters, RegionEnd, exchanges_of
from accel.parallel.axes.tensor._styles import (
    ADAPTER,
    COLWISE,
    ROWWISE,
    STYLES,
    Regions,
    Rule,
    heads_in,
    is_adapted,
    is_linear,
    layouts_of_attention,
    output_dim,
    problems_of,
    rule_for,
    uneven_heads,
    with_lora,
)
from accel.parallel.axes.tensor._tokens import SequenceRanks
from accel.parallel.parts import PartRegion, RowLayout, keep_buffers_whole
from accel.tensors import is_dtensor, word_layers
from accel.topology import TensorStyle

WHERE = "prepare_model, plan.tensor"
_OF_TOKENS = ("embedding_rowwise", *COLWISE, *ROWWISE)  # take or give tokens
_FAST_PATHS: Mapping[type[nn.Module], Mapping[str, int]] = {
    # torch's fused inference reads the parameters of modules that it never calls
    nn.TransformerEncoderLayer: {"activation_relu_or_gelu": 0},
    nn.TransformerEncoder: {"use_nested_tensor": 0},
}


def rules_of(
    model: nn.Module,
    plan: Mapping[str, TensorStyle],
    size: int,
    *,
    regions: Regions | None = None,
    shares_tokens: bool = False,
    is_stage: bool = False,
    skips_experts: bool = False,
) -> dict[str, Rule]:
    """Return the rule of each module that has parameters or that the plan names, by path.

    Raises `PrepareError` with all problems. `shares_tokens`: between the regions, each rank holds its tokens.
    `is_stage`: modules without parameters are other stages', without a rule. `skips_experts`: experts that ranks along
    ep hold get none, as a plan that no user wrote may name them.
    """
    styles, problems = match(plan, [path for path, _ in named_modules(model)])
    if is_stage:
        full = (path for path in styles if any(True for _ in model.get_submodule(path).parameters()))
        styles = {path: styles[path] for path in full}
    if skips_experts:
        styles = {path: style for path, style in styles.items() if not _is_sharded(model.get_submodule(path))}
    styles = with_lora(model, _with_attention_outputs(model, styles, problems), problems)
    known = {path: cast(TensorStyle, style) for path, style in styles.items() if style in STYLES}
    complete = {**{path: _unnamed(module) for path, module in named_modules(model) if _holds(module)}, **known}
    blocks = [path for group in outermost_groups(block_groups(model)) for path, _ in group.entries]
    heads = _heads(model, known)
    rules: dict[str, Rule] = {}
    for path, style in cast("dict[str, TensorStyle]", complete).items():
        module = model.get_submodule(path)
        own, most = heads.get(path, (0, 0))
        is_shared = own % size > 0 and size % own == most % size == 0  # heads of keys, each for several queries
        found = list(problems_of(module, style, size))
        found += [uneven_heads(own, size)] if own % size and not is_shared else []
        problems += [f"{path or 'the model'}: {each}" for each in found]
        if not found:
            rules[path] = rule_for(module, style, own if is_shared else size)
    rules = _with_aliases(model, _with_words(model, _with_ends(rules, blocks)), known)
    problems += _tied_problems(model, rules)
    if problems:
        raise _refused(problems, size)
    rules = _with_regions(model, rules, {**_attentions(model, rules, size), **(regions or {})})
    return _with_tokens(model, rules, known) if shares_tokens else rules


def _with_ends(rules: Mapping[str, Rule], blocks: Sequence[str]) -> dict[str, Rule]:
    """Rules of the modules that return whole tensors: the model, and the block around each layer that computes with
    parts."""
    found = dict(rules)
    in_parts = [path for path, rule in rules.items() if (rule.layouts or rule.summands) and not rule.ends]
    ends = [each for each in blocks if any(path != each and is_in(path, each) for path in in_parts)]
    for path in ("", *ends):
        found[path] = msgspec.structs.replace(found.get(path) or Rule(style="replicated"), ends="features")
    return found


def _with_words(model: nn.Module, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules of the model and of its heads that are column-wise, from which this rank's words leave."""
    heads = [path for path in word_layers(model).heads if path in rules and rules[path].style == "colwise"]
    totals = {path: rules[path].layouts["weight"].cut.total for path in heads}
    found = dict(rules)
    for path, words in [*((path, {total}) for path, total in totals.items()), ("", set(totals.values()))]:
        found[path] = msgspec.structs.replace(found[path], words=tuple(sorted(words)))
    return found


def _heads(model: nn.Module, styles: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """The number of heads in the outputs of each column-wise layer, and the largest number in the layers of its
    attention."""
    counted: dict[str, tuple[str, int]] = {}
    for path, style in styles.items():
        if style == "colwise" and is_linear(model.get_submodule(path)):
            holder = _holder_of(model, path)
            layer = model.get_submodule(path)
            outputs = layer.get_parameter("weight").shape[output_dim(layer)]
            counted[path] = holder, heads_in(model.get_submodule(holder), outputs)
    most: dict[str, int] = {}
    for holder, number in counted.values():
        most[holder] = max(number, most.get(holder, 0))
    return {path: (number, most[holder]) for path, (holder, number) in counted.items()}


def _holder_of(model: nn.Module, path: str) -> str:
    """The path of the module that calls a layer, or calls what adapts it."""
    holder = path.rpartition(".")[0]
    while holder and (
        is_adapted(model.get_submodule(holder)) or isinstance(model.get_submodule(holder), nn.ModuleDict)
    ):
        holder = holder.rpartition(".")[0]
    return holder


def _with_regions(model: nn.Module, rules: Mapping[str, Rule], regions: Regions) -> dict[str, Rule]:
    """Rules that make some parameters parts, in modules that their styles do not divide."""
    found = dict(rules)
    for path, layouts in regions.items():
        parameters = {
            id(model.get_parameter(name)): layout for name, layout in layouts.items() if _is_here(model, name)
        }
        if not parameters:
            continue
        found[path] = msgspec.structs.replace(found.get(path) or Rule(style="replicated"), ends="features")
        for owner, module in named_modules(model):  # tied ones everywhere
            own = {
                name: parameters[id(each)]
                for name, each in module.named_parameters(recurse=False)
                if id(each) in parameters
            }
            if own:
                rule = found[owner]
                dims = {name: layout.dim for name, layout in own.items()}
                found[owner] = msgspec.structs.replace(
                    rule, dims={**rule.dims, **dims}, layouts={**rule.layouts, **own}
                )
    return found


def _with_tokens(model: nn.Module, rules: Mapping[str, Rule], styles: Container[str]) -> dict[str, Rule]:
    """Rules of a model in which ranks share the tokens. Vectors, such as the weights of norms, meet parts of tokens.
    Modules that styles name as replicated, and layers that are not divided, have plain parameters with complete
    gradients."""
    found = {"": Rule(style="replicated"), **rules}
    for path, rule in found.items():
        own = list(model.get_submodule(path).parameters(recurse=False))
        has_vectors = rule.style == "replicated" and path not in styles and all(each.dim() < 2 for each in own)
        if rule.layouts or has_vectors or rule.style in _OF_TOKENS:
            found[path] = msgspec.structs.replace(rule, tokens=True)
    return {**found, "": msgspec.structs.replace(found[""], ends="all")}


def _is_here(model: nn.Module, name: str) -> bool:
    """Whether this stage has a parameter, which is not sharded yet, as experts are."""
    path, _, own = name.rpartition(".")
    parameter = dict(model.get_submodule(path).named_parameters(recurse=False)).get(own)
    return parameter is not None and not is_dtensor(parameter)


def match(plan: Mapping[str, str], paths: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return styles by path, and the problems of patterns, where `*` is one component of a path."""
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
    """Whether a module has parameters that are not sharded yet. Expert parallelism, for example, shards the experts."""
    return any(not is_dtensor(each) for each in module.parameters(recurse=False))


def _is_sharded(module: nn.Module) -> bool:
    """Whether all parameters of a module, and of modules in it, are sharded already, as experts are."""
    own = list(module.parameters())
    return bool(own) and all(map(is_dtensor, own))


def _unnamed(module: nn.Module) -> TensorStyle:
    """The style of a module that no plan names. Whoever holds a list or dict of parameters reads them."""
    return "replicated_local" if isinstance(module, nn.ParameterList | nn.ParameterDict) else "replicated"


def _with_attention_outputs(model: nn.Module, styles: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    """Styles without the projection that ends an nn.MultiheadAttention with divided heads, which is divided with them;
    of a whole one the forward reads the parameters."""
    found = dict(styles)
    for path, each in named_modules(model):
        if not isinstance(each, nn.MultiheadAttention) or not _holds(each.out_proj):
            continue
        output = f"{path}.out_proj".lstrip(".")
        if styles.get(path) != "multihead_attention":
            found.setdefault(output, "replicated_local")
        elif (style := found.pop(output, "rowwise")) != "rowwise":
            problems.append(f"{output}: {style}, of an attention with divided heads, which sums its outputs (rowwise)")
    return found


def _attentions(model: nn.Module, rules: Mapping[str, Rule], size: int) -> Regions:
    """Layouts of the parameters of each nn.MultiheadAttention with divided heads."""
    found: dict[str, dict[str, RowLayout]] = {}
    for path, rule in rules.items():
        if rule.style == "multihead_attention":
            layouts = layouts_of_attention(cast(nn.MultiheadAttention, model.get_submodule(path)), size)
            found[path] = {f"{path}.{name}".lstrip("."): layout for name, layout in layouts.items()}
    return found


def passed_over(model: nn.Module, declared: Iterable[str], styles: Mapping[str, str]) -> list[str]:
    """Return the paths of modules of several linear layers in the blocks that a declared plan divides, without those
    that styles name, or any module around or in them."""
    named = {*styles, *modules_around(styles)}
    around = modules_around(declared)
    divided = (group for group in block_groups(model) if any(path in around for path, _ in group.entries))
    found: list[str] = []
    for group in sorted(outermost_groups(divided), key=lambda group: group.holder):
        for path, block in group.entries:
            inside = {f"{path}.{name}": child for name, child in block.named_children()}
            several = (each for each, child in inside.items() if sum(map(is_linear, child.modules())) > 1)
            if {group.holder, path}.isdisjoint(styles):
                found += [each for each in several if each not in named]
    return found


def modules_around(paths: Iterable[str]) -> set[str]:
    """Return the paths of the modules in which others are."""
    split = [path.split(".") for path in paths]
    return {".".join(parts[:end]) for parts in split for end in range(len(parts))}


def _with_aliases(model: nn.Module, rules: Mapping[str, Rule], styles: Mapping[str, str]) -> dict[str, Rule]:
    """Rules where a module that only names a parameter of a divided layer inside of it, as heads do with the bias of
    their decoder, has it divided alike."""
    dims: dict[int, tuple[str, int]] = {}
    for path, rule in rules.items():
        for name, dim in rule.dims.items():
            dims[id(model.get_submodule(path).get_parameter(name))] = path, dim
    found = dict(rules)
    for path, rule in rules.items():
        own = model.get_submodule(path).named_parameters(recurse=False)
        named = {name: dims[id(each)] for name, each in own if id(each) in dims}
        if path not in styles and named and all(each != path and is_in(each, path) for each, _ in named.values()):
            found[path] = msgspec.structs.replace(rule, dims={name: dim for name, (_, dim) in named.items()})
    return found


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
                found.append(f"{own}: tied to {first}, but {_split(dim)} instead of {_split(other)}")
    return found


def _split(dim: int | None) -> str:
    return "whole" if dim is None else f"split along dimension {dim}"


def _refused(problems: list[str], size: int) -> PrepareError:
    listed = list(dict.fromkeys(problems))
    shown = "; ".join(listed[:20]) + (f"; and {len(listed) - 20} more" if len(listed) > 20 else "")
    return PrepareError(
        "the model cannot be spread by this tensor-parallel plan",
        expected=f"styles of its modules that {size} ranks along tp can share",
        got=shown,
        where=WHERE,
        fix='Adapt linear layers alone, without DoRA: peft.LoraConfig(target_modules="all-linear", use_dora=False). Or'
        ' shard the model in place of tp: ctx = accel.replace(ctx, mesh="", strategy="fsdp").'
        if all(f": {ADAPTER} " in each for each in listed)
        else "Print accel.parallel.tensor_plan(model), change it, and pass it as accel.parallel.Plan(tensor=...).",
    )


def share_of(model: nn.Module, rules: Mapping[str, Rule]) -> float:
    """Return the share of a model's parameters that ranks divide."""
    divided: dict[int, int] = {}
    for path, rule in rules.items():
        for name, each in model.get_submodule(path).named_parameters(recurse=False):
            if name in rule.dims:
                divided[id(each)] = each.numel()
    return sum(divided.values()) / max(sum(each.numel() for each in model.parameters()), 1)


def lines_of(left: Mapping[str, str]) -> list[str]:
    """Return a line for each module that stays whole, with the reason; one for blocks of a list that have the same."""
    alike: dict[tuple[str, str], list[str]] = {}
    for path, problem in left.items():
        alike.setdefault((pattern_of(f"{path}."), problem), []).append(path or "the model")
    more = {key: f" and {len(paths) - 1} like it" if len(paths) > 1 else "" for key, paths in alike.items()}
    return [f"{paths[0]}{more[key]}: {key[1]}" for key, paths in alike.items()]


def log_share(model: nn.Module, rules: Mapping[str, Rule], size: int, way: str, left: Mapping[str, str]) -> None:
    """Log the share of the parameters that ranks divide, and what stays whole."""
    listed = lines_of(left)
    whole = f"; whole: {'; '.join(listed[:5])}" if listed else ""
    text = "%s: %.0f%% of the parameters are divided along tp=%d, by %s%s"
    name = type(model).__name__
    logging.getLogger("accel.parallel").warning(text, name, 100 * share_of(model, rules), size, way, whole)


def _without_fast_paths(model: nn.Module, rules: Mapping[str, Rule]) -> None:
    divided = [path for path, rule in rules.items() if rule.dims or rule.layouts]
    for path, module in named_modules(model):
        for kind, values in _FAST_PATHS.items():
            if isinstance(module, kind) and any(is_in(each, path) for each in divided):
                for name, value in values.items():
                    setattr(module, name, value)


def install(
    model: nn.Module,
    rules: Mapping[str, Rule],
    layer_of: Callable[[Rule], Layer],
    ranks: LayerRanks | None = None,
    *,
    nests: bool = False,
) -> LayerRanks | None:
    """Let modules compute by their rules, each with a separate `Layer`. Modules of one class keep one class, so that
    torch.compile compiles once. Return the ranks of their parts, `ranks` if given; None without any. `nests`: tensors
    may be parts of positions too."""
    _without_fast_paths(model, rules)
    modules: dict[type[Mixin], list[nn.Module]] = {}
    for path, rule in rules.items():
        module = model.get_submodule(path)
        cast(Any, module).accel_layer = layer_of(rule)
        if rule.overlap:
            note_module(module, overlaps=True)
        mixin = ReadList if isinstance(module, nn.ParameterList) else mixin_for(rule)
        mixin = Recurrent if isinstance(module, nn.RNNBase) else mixin
        if rule.layouts or rule.summands or (rule.tokens and rule.style == "replicated"):
            mixin = PartParameters
        if has_parameters(module):
            modules.setdefault(mixin, []).append(module)
    in_parts = [path for path, rule in rules.items() if rule.layouts or rule.summands or rule.ends or rule.tokens]
    within = [model.get_submodule(path) for path in in_parts]
    if ranks is None and within:
        kind = SequenceRanks if any(rule.tokens for rule in rules.values()) else LayerRanks
        with_parameters = [model.get_submodule(path) for path, rule in rules.items() if rule.layouts]
        ranks = kind(cast(Any, [*with_parameters, *within][0]).accel_layer, nests=nests)
    for module in map(model.get_submodule, rules):
        setattr(module, RANKS, ranks)
    for module in within:
        layer: Layer = cast(Any, module).accel_layer
        note_module(module, exchanges=exchanges_of(layer.rule.layouts, layer.rank, layer.size))
    for mixin, own in modules.items():
        add_mixin(own, mixin)
    ends = {path for path, rule in rules.items() if rule.ends or rule.layouts}
    if ranks is not None:
        keep_buffers_whole(model)
    add_mixin(list(map(model.get_submodule, ends)), RegionEnd)
    if isinstance(ranks, SequenceRanks):
        of_tokens = {path for path, rule in rules.items() if rule.tokens}
        # torch may compile any of them alone, as the head of a stage
        regions = [model.get_submodule(path) for path in rules.keys() | modules_around(of_tokens)]
        for module in regions:
            setattr(module, RANKS, ranks)
        add_mixin(regions, PartRegion)
    elif ranks is not None:
        around = [model.get_submodule(path) for path in modules_around(ends)]
        for module in around:
            setattr(module, RANKS, ranks)
        add_mixin(around, GraphedCall)
    return ranks
