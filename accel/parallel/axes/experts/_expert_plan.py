# SPDX-License-Identifier: Apache-2.0
"""Styles of a model's experts by path, the mesh of experts, and experts as units of `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from accel.comm import grid_mesh
from accel.context import DistContext
from accel.errors import PrepareError
from accel.errors._checks import did_you_mean
from accel.parallel._modules import listed_modules, matching, named_modules
from accel.tensors import is_dtensor
from accel.topology import ExpertStyle, data_dimension, rank_rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


STYLES = get_args(ExpertStyle)
STYLE = "accel_style"  # attribute of spread experts: one of STYLES, or LISTED
LISTED = "listed"
LISTS = (nn.ModuleList, nn.ModuleDict)  # kinds that hold experts as modules, which a loop above calls
_OF_TRANSFORMERS = "ep_dispatch_experts"  # their name of "dispatch"; their other styles are of single parameters
_SORTED = "Llama4TextExperts"  # class that transformers lists in no plan: tokens come scaled and sorted by expert
_WHERE = "prepare_model, Plan.experts"


_STACK = (
    "Give one module parameters of shape [experts, ...], as torch.stack makes them of the experts' own: every rank"
    " along ep has a part of each, under one name. Or name a ModuleList or ModuleDict of experts alike, with the style"
    " dispatch."
)
_MOVE = (
    'Move the stacked parameters of {} into a module "experts" of it, with a forward(tokens, indices, weights), and'
    " name that: plan=accel.parallel.Plan(experts={{{}}})."
)


def expert_plan(model: nn.Module) -> dict[str, str]:
    """Return the styles that a model declares for its modules of experts, by path. No communication.

    These are the modules that the model, or one inside of it, lists in `ep_plan` for tokens to be dispatched to, as
    models of transformers do, and the experts of Llama 4, by their class. The result is a value for `Plan(experts=)`:
    print it, change it, pass it.

    Args:
        model: not yet spread.

    Examples:
        >>> accel.parallel.expert_plan(torch.nn.Linear(2, 2))
        {}
    """
    found: dict[str, str] = {}
    for holder, module in named_modules(model):
        if is_sorted_experts(module):
            found[holder] = "sorted"
        listed = getattr(module, "ep_plan", None)
        if not isinstance(listed, Mapping):
            continue
        for pattern, style in cast("Mapping[str, object]", listed).items():
            if style == _OF_TRANSFORMERS:
                paths = matching(_paths(model), f"{holder}.{pattern}" if holder else pattern)
                found.update(dict.fromkeys(paths, "dispatch"))
    return found


def is_sorted_experts(module: nn.Module) -> bool:
    """Return whether a module of experts is called with all tokens for each expert, zeros where it is not chosen."""
    kinds = type(module).__mro__
    return any(kind.__name__ == _SORTED for kind in kinds) or getattr(module, STYLE, "") == "sorted"


def moe_modules(model: nn.Module) -> dict[str, int]:
    """Return the number of experts by path of the modules of experts: sharded ones, and modules in `expert_plan`."""
    spread = [path for path, module in named_modules(model) if holds_experts(module)]
    counts = {path: _number(model.get_submodule(path)) for path in dict.fromkeys((*expert_plan(model), *spread))}
    return {path: count for path, count in counts.items() if count}


def _number(module: nn.Module) -> int:
    """Return the number of experts of a module; 0 for one of another pipeline stage."""
    if isinstance(module, LISTS):
        return len(module) if any(True for _ in module.parameters()) else 0
    return next((each.shape[0] for each in module.parameters(recurse=False) if each.ndim), 0)


def resolve_experts(model: nn.Module, experts: Mapping[str, str] | Literal["model"], ranks: int) -> dict[str, str]:
    """Return the style of each module of experts, by path; `experts` has styles by pattern, "model" is `expert_plan`.

    Raises `PrepareError` with every problem at once.
    """
    if experts != "model" and not isinstance(experts, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
        raise _refused(ranks, f"{experts!r}", fix='Pass styles by pattern, or "model".')
    styles = _styles(model, experts)
    problems = [] if experts == "model" else list(_pattern_problems(model, experts))
    lists = [path for path, style in styles.items() if _is_listed(model, path, style)]
    stacked = {path: style for path, style in styles.items() if path not in lists}
    problems += [each for path in lists for each in _listed_problems(model, path, ranks)]
    problems += [each for path in lists for each in _other_experts(path, styles)]
    problems += [each for path in stacked for each in _module_problems(model, path, ranks)]
    problems += [each for path, style in stacked.items() if style != "local" for each in _buffer_problems(model, path)]
    problems += [each for path, style in stacked.items() if style == "sorted" for each in _bias_problems(model, path)]
    if problems:
        listed = any(_holds_modules(model, path) for path in styles)
        around = [path for path in stacked if _stacks_experts(model.get_submodule(path))]
        raise _refused(ranks, "; ".join(problems), fix=_STACK if listed else _move(model, around))
    if not styles:
        raise _refused(ranks, "a model that names none", fix=_suggestion(model))
    return styles


def _is_listed(model: nn.Module, path: str, style: str) -> bool:
    return style == "dispatch" and isinstance(model.get_submodule(path), LISTS)


def held_experts(model: nn.Module, experts: Mapping[str, str] | Literal["model"]) -> dict[str, str]:
    """Return the styles that `resolve_experts` has found in a model, for a pipeline stage of it, perhaps none."""
    styles = _styles(model, experts)
    return {path: style for path, style in styles.items() if any(True for _ in model.get_submodule(path).parameters())}


def _styles(model: nn.Module, experts: Mapping[str, str] | Literal["model"]) -> dict[str, str]:
    if experts == "model":
        return expert_plan(model)
    return {path: style for pattern, style in experts.items() for path in matching(_paths(model), pattern)}


def _refused(ranks: int, got: str, *, fix: str = "") -> PrepareError:
    return PrepareError(
        f"no experts can be spread over {ranks} ranks by this plan",
        expected=f"modules of matrices stacked as [experts, rows, columns], a number of experts that {ranks} divides",
        got=got,
        where=_WHERE,
        fix=fix,
    )


def _pattern_problems(model: nn.Module, experts: Mapping[str, str]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for pattern, style in experts.items():
        if style not in STYLES:
            yield f"{pattern}: style {style!r}, which is none of {', '.join(STYLES)}"
        paths = matching(_paths(model), pattern)
        if not paths:
            near = did_you_mean(pattern, [_pattern(path) for path, _ in named_modules(model) if path])
            yield f"{pattern}: matches no module. {near}".strip()
        for path in paths:
            if path in seen:
                yield f"{path}: matches {seen[path]} and {pattern}"
            seen[path] = pattern


def _module_problems(model: nn.Module, path: str, ranks: int) -> Iterator[str]:
    """Yield the reasons that keep the experts of a module from being spread."""
    module = model.get_submodule(path)
    own = dict(module.named_parameters(recurse=False))
    name = path or "the model"
    if inner := _inner_parameters(module):
        yield f"{name}: holds {inner[0]} in a separate module, and not stacked with other experts' in one parameter"
        return
    sizes = {each.shape[0] if each.ndim else 0 for each in own.values()}
    if len(sizes) != 1 or all(each.ndim < 3 for each in own.values()):
        shapes = ", ".join(f"{key} {list(each.shape)}" for key, each in own.items())
        yield f"{name}: has {shapes or 'no parameters'}"
    elif (count := sizes.pop()) % ranks or not count:
        yield f"{name}: has {count} experts"
    if any(map(is_dtensor, own.values())):
        yield f"{name}: is spread already"
    others = {id(each) for other in model.modules() if other is not module for each in other.parameters(recurse=False)}
    if tied := [key for key, each in own.items() if id(each) in others]:
        yield f"{name}: shares {', '.join(tied)} with another module"


def _buffer_problems(model: nn.Module, path: str) -> Iterator[str]:
    """Yield the buffers that have all experts, where the module's forward counts this rank's from 0."""
    module = model.get_submodule(path)
    counts = {each.shape[0] for each in module.parameters(recurse=False) if each.ndim}
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.ndim and buffer.shape[0] in counts:
            yield f"{path or 'the model'}: has all experts in the buffer {name}; make it a frozen parameter"


def _listed_problems(model: nn.Module, path: str, ranks: int) -> Iterator[str]:
    """Yield the reasons that keep a list or dict of experts from being divided."""
    listed = model.get_submodule(path)
    experts = listed_modules(listed)
    if len(experts) != len(cast("nn.ModuleList | nn.ModuleDict", listed)):
        yield f"{path}: has None in the place of experts"
    holder = model.get_submodule(path.rpartition(".")[0])
    if len(experts) % ranks or not experts:
        yield f"{path}: has {len(experts)} experts"
    if type(holder).forward is nn.Module.forward:
        yield f"{path}: is in a {type(holder).__name__}, which has no loop over it in its forward"
    kinds = {tuple((name, each.shape, each.dtype) for name, each in expert.named_parameters()) for expert in experts}
    if len(kinds) > 1:
        yield f"{path}: has experts of other parameters or shapes than their neighbours"
    if buffers := [name for name, _ in listed.named_buffers()]:
        yield f"{path}: has the buffer {buffers[0]}, which ranks would change separately"
    own = dict(listed.named_parameters(remove_duplicate=False))
    if whole := [name for name, each in own.items() if shard_dim(each, ranks) is None]:
        yield f"{path}: has {whole[0]} {list(own[whole[0]].shape)}, without a dimension that {ranks} divides"
    if any(map(is_dtensor, own.values())):
        yield f"{path}: is spread already"
    inside = {id(each) for each in listed.modules()}
    ids = [id(each) for each in own.values()]
    others = {id(each) for other in model.modules() if id(other) not in inside for each in _direct(other)}
    if tied := [name for name, each in own.items() if id(each) in others or ids.count(id(each)) > 1]:
        yield f"{path}: shares {tied[0]} with another module"


def _other_experts(path: str, styles: Iterable[str]) -> Iterator[str]:
    """Yield the other experts in the block of a list. The block's forward runs twice."""
    block = path.rpartition(".")[0]
    for other in styles:
        if other != path and (not block or other.startswith(f"{block}.")):
            yield f"{path}: is in a module that holds {other}, too"


def _direct(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def shard_dim(parameter: Tensor, ranks: int) -> int | None:
    """Return the first dimension that ranks can divide; None without one."""
    return next((dim for dim, size in enumerate(parameter.shape) if size and size % ranks == 0), None)


def _bias_problems(model: nn.Module, path: str) -> Iterator[str]:
    """Yield the biases of experts that leave out rows of zeros because their outputs are zeros."""
    for name, each in model.get_submodule(path).named_parameters(recurse=False):
        if each.ndim < 3:
            yield f"{path or 'the model'}: has {name} {list(each.shape)}, so outputs of zeros may not be zeros"


def _holds_modules(model: nn.Module, path: str) -> bool:
    """Whether experts are modules of a list, so that ranks would have other parameters."""
    return any(isinstance(each, LISTS) for each in model.get_submodule(path).modules())


def _suggestion(model: nn.Module) -> str:
    """Return the line to write for the modules that look like stacked experts."""
    lists = [path for path, each in named_modules(model) if _lists_experts(path, each)]
    stacks = [path for path, each in named_modules(model) if path and _stacks_experts(each)]
    alone = [path for path in stacks if not _inner_parameters(model.get_submodule(path))]
    if named := [*lists, *alone]:
        return f"Name them: plan=accel.parallel.Plan(experts={{{_entries(map(_pattern, named))}}})."
    none = "Leave ep out of the mesh: the model has no module with stacked experts, and no list of experts."
    return _move(model, stacks) or none


def _move(model: nn.Module, paths: Iterable[str]) -> str:
    """Return what to do with modules that hold stacked experts next to other modules; nothing for none."""
    around = dict.fromkeys(_pattern(path) for path in paths if _inner_parameters(model.get_submodule(path)))
    return _MOVE.format(", ".join(around), _entries(f"{each}.experts" for each in around)) if around else ""


def _entries(patterns: Iterable[str]) -> str:
    return ", ".join(f'"{pattern}": "dispatch"' for pattern in dict.fromkeys(patterns))


def _inner_parameters(module: nn.Module) -> list[str]:
    own = dict(module.named_parameters(recurse=False))
    return [name for name, _ in module.named_parameters() if name not in own]


def _lists_experts(path: str, module: nn.Module) -> bool:
    return isinstance(module, LISTS) and path.rpartition(".")[2] == "experts" and len(module) > 1


def _stacks_experts(module: nn.Module) -> bool:
    shapes = [each.shape for each in module.parameters(recurse=False) if each.ndim == 3]
    return not isinstance(module, LISTS) and len(shapes) > 1 and len({shape[0] for shape in shapes}) == 1


def _paths(model: nn.Module) -> list[str]:
    return [path for path, _ in named_modules(model)]


def _pattern(path: str) -> str:
    """Return a path with `*` for its numbers."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


EP = "ep"
_ROWS = ("dp_replicate", "efsdp", EP)  # along the first two, ranks hold the same experts


def open_expert_mesh(ctx: DistContext) -> DeviceMesh:
    """Return the mesh of this rank's pipeline stage for parameters of experts. A collective at first.

    Its dimensions are "dp_replicate" where there are replicas, "efsdp" for shards, and "ep".
    """
    sizes = expert_mesh_sizes(ctx)
    return grid_mesh(ctx.comm, rank_rows(ctx.axes, *_ROWS), sizes, ctx.device.type, ctx.timeout_s)


def expert_mesh_sizes(ctx: DistContext) -> Mapping[str, int]:
    """Return the sizes of the mesh of experts, by dimension."""
    axes = ctx.axes
    shards = axes.expert_ranks // axes.ep
    replicas = axes.dp_replicate
    if data_dimension(ctx.strategy) == "replicate":
        replicas *= shards
        shards = 1
    names = {"dp_replicate": replicas, "efsdp": shards, EP: axes.ep}
    return {name: size for name, size in names.items() if size > 1 or name != "dp_replicate"}


def exchange_mesh(ctx: DistContext) -> DeviceMesh:
    """Return the part of the mesh of experts along which their gradients are exchanged. A collective at first."""
    mesh = open_expert_mesh(ctx)
    return cast(Any, mesh)[tuple(name for name in mesh.mesh_dim_names or () if name != EP)]


def gradient_ranks(ctx: DistContext) -> int:
    """Return the number of ranks that average their losses: the ranks of a pipeline stage with different tokens."""
    axes = ctx.axes
    return axes.dp * axes.dp_replicate * axes.dp_shard * axes.cp


def is_expert_parameter(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is spread along `ep`. No communication."""
    return is_dtensor(parameter) and EP in (parameter.device_mesh.mesh_dim_names or ())


def holds_experts(module: nn.Module) -> bool:
    """Return whether `prepare` has divided a module's experts along `ep`. No communication."""
    return bool(getattr(module, STYLE, ""))


def expert_modules(modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return the names of the modules with parameters sharded along `ep`, inner ones first. No communication."""
    lists = listed_prefixes(modules)
    found = [
        name
        for name, module in modules.items()
        if any(map(is_expert_parameter, module.parameters(recurse=f"{name}." in lists))) and not name.startswith(lists)
    ]
    return tuple(reversed(found))


def listed_prefixes(modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return the beginnings of the names of parameters of experts in lists that are spread. No communication."""
    return tuple(f"{name}." for name, module in modules.items() if getattr(module, STYLE, "") == LISTED)


def shard_experts(ctx: DistContext, module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Call `fully_shard` on a module of experts, spread along `ep`. Mutates it."""
    from torch.distributed.fsdp import fully_shard  # its import takes most of a second
    from torch.distributed.tensor import Shard

    shards = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard | None:
        """Divide the experts where they can be, then the rows of each: no rank is left without a shard."""
        own = cast(Any, parameter).to_local().shape
        return None if own[0] % shards == 0 or len(own) < 2 or own[1] % shards else Shard(1)

    _ = fully_shard(module, mesh=mesh, shard_placement_fn=placement, **options)
    # fewer ranks average gradients of experts than others, and each has the tokens of several ranks
    factor = mesh.size() / gradient_ranks(ctx)

    def rescale(shard: Tensor) -> None:
        _ = shard.mul_(factor)

    if factor != 1:  # set_gradient_divide_factor divides twice where a mesh has one rank along its shards
        cast(Any, module).set_all_reduce_hook(rescale)
