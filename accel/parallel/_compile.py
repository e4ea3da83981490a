# SPDX-License-Identifier: Apache-2.0
"""torch.compile and activation checkpointing in place: names, checkpoints and types stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,  # pyright: ignore[reportUnknownVariableType] - dynamo knows the name
    create_selective_checkpoint_contexts,  # pyright: ignore[reportUnknownVariableType]
)

from accel.errors import ConfigError
from accel.errors._checks import check_choice
from accel.formats import CompileMode
from accel.mixins import Mixin, add_mixin, remove_mixin
from accel.parallel._modules import (
    OVERLAPS,
    Select,
    compile_graphs,
    is_elsewhere,
    is_pipelined,
    named_modules,
    selected,
    stage_modules,
    unwrap_model,
)

M = TypeVar("M", bound=nn.Module)
Keep: TypeAlias = Literal["products"] | Sequence[str]

# Products and attention: most of a block's time, and few of the tensors that it makes.
_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


class Recomputed(Mixin, nn.Module):
    """Stands before the class of a block that is computed again in backward.

    Attributes:
        kept: names of the operators whose outputs are kept.
    """

    kept: tuple[str, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward, remembering its inputs and kept outputs only."""
        return recomputed_call(super().forward, self.kept, *args, **kwargs)


def recomputed_call(forward: Callable[..., Any], kept: Sequence[str], *args: Any, **kwargs: Any) -> Any:
    """Call a function that runs again in backward, remembering its inputs and the outputs of the named operators."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts: dict[str, Any] = {}
    if kept:
        operators = [_operator(name) for name in kept]
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, operators)
    return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)  # pyright: ignore[reportUnknownVariableType]


def add_within(modules: Iterable[nn.Module], mixin: type[Mixin]) -> None:
    """Put a class before those of modules, behind `Recomputed`, so that recomputation goes through it too."""
    modules = list(modules)
    again = [(each, each.kept) for each in modules if isinstance(each, Recomputed)]
    remove_mixin([each for each, _ in again], Recomputed)
    add_mixin(modules, mixin)
    for kept in dict.fromkeys(kept for _, kept in again):
        add_mixin([each for each, own in again if own == kept], Recomputed, kept=kept)


def checkpoint_activations(model: M, select: Select = "repeated", *, keep: Keep = ()) -> M:
    """Trade time for memory: keep only the inputs of the chosen blocks for backward. No communication. Mutates them.

    In backward each block runs its forward again, with the random numbers and autocast of the first time. Gradients are
    the same. Nothing is wrapped: names, checkpoints and `isinstance` stay as they are. Call it before `compile_model`;
    before or after `prepare_model` is the same.

    Args:
        model: plain, or from `prepare_model`.
        select: "repeated" for the blocks that a ModuleList or Sequential holds at least two of, of one class; a class
            or a tuple of classes; or a predicate of a module's name and the module. Of nested blocks the outer one
            counts, so the model's own class is all of it.
        keep: names of operators whose outputs are kept and not computed again, such as "aten.mm.default"; "products"
            for matrix products, convolutions and attention, which take most of the time and little of the memory.

    Returns:
        The model that was passed.

    Raises:
        ConfigError: nothing is chosen, something in `keep` is no operator, or a block keeps others already.

    Reference: Chen et al. 2016, "Training deep nets with sublinear memory cost", arXiv:1604.06174;
        torch.utils.checkpoint. Of `keep`: Korthikanti et al. 2022, "Reducing activation recomputation in large
        transformer models", arXiv:2205.05198.
    """
    kept = _names(keep)
    chosen = selected(unwrap_model(model), select, "checkpoint_activations")
    for name, block in chosen.items():
        if isinstance(block, Recomputed) and block.kept != kept:
            raise ConfigError(
                "a block keeps the outputs of other operators already",
                expected=", ".join(block.kept) or "none",
                got=", ".join(kept) or "none",
                where=f"checkpoint_activations, keep=, {name or type(model).__name__}",
                fix="Choose the blocks of each call apart, by select=.",
            )
    add_mixin(chosen.values(), Recomputed, kept=kept)
    return model


def _names(keep: Keep) -> tuple[str, ...]:
    if keep == "products":
        return tuple(f"aten.{name}.default" for name in _PRODUCTS)
    names = () if isinstance(keep, str) else tuple(keep)
    unknown = [keep] if isinstance(keep, str) else [name for name in names if _operator(name) is None]
    if unknown:
        raise ConfigError(
            "no such operator",
            expected="'products', or names such as 'aten.mm.default'",
            got=", ".join(map(repr, unknown)),
            where="checkpoint_activations, keep=",
            fix="torch.ops lists them, each with its overloads.",
        )
    return names


def _operator(name: str) -> Any:
    """Return the operator of a name such as "aten.mm.default"; None if torch has none."""
    parts = name.split(".") if isinstance(name, str) else []  # pyright: ignore[reportUnnecessaryIsInstance] - users pass operators
    if len(parts) != 3:
        return None
    return functools.reduce(lambda found, part: getattr(found, part, None), parts, cast(Any, torch.ops))


class _Traced(Mixin, nn.Module):
    """Stands before torch's own containers: torch compiles their forward only where somebody else's calls it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def compile_model(
    model: M,
    regions: Select | None = None,
    *,
    backend: str = "inductor",
    mode: CompileMode | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
) -> M:
    """Let torch compile the model, or parts of it, at their first call. No communication. Mutates the model.

    A region is compiled for its class, not for each block, so that a deep model starts as fast as a shallow one. Before
    or after `prepare_model` is the same: the model inside of DDP is compiled, and when DDP calls it, torch cuts the
    graph where DDP's buckets end, so that gradients travel while others are computed (for a `bucket_cap_mb` from 1).

    Args:
        model: plain, or from `prepare_model`.
        regions: None for the whole; "repeated" for the blocks that a ModuleList or Sequential holds at least two of,
            of one class; a class or a tuple of classes; or a predicate of a module's name and the
            module. Of nested regions the outer one counts. For a model that is cut into stages, None means the modules
            of this rank's stages, each one a region; both None and "repeated" mean the graphs of traced stages.
        backend, mode, fullgraph, dynamic, options: as in torch.compile.

    Returns:
        The model that was passed.

    Raises:
        ConfigError: torch has no such backend, nothing is chosen, mode beside options, the eager backend for blocks
            that `checkpoint_activations` recomputes, or layers that `Plan(overlap=True)` divides.

    Reference: torch.nn.Module.compile.
    """
    known = cast(Any, torch.compiler).list_backends(exclude_tags=())
    check_choice(backend, sorted(known), "unknown backend", where="backend=")
    if mode is not None and options is not None:
        raise ConfigError("a mode is a set of options", expected="mode or options", got="both", where="compile_model")
    inner = unwrap_model(model)
    if backend == "eager" and any(isinstance(module, Recomputed) for module in inner.modules()):
        raise ConfigError(
            "this backend draws other random numbers when a block is computed again, which makes gradients wrong",
            expected="another backend beside checkpoint_activations",
            got="eager",
            where="compile_model, backend=",
            fix="To debug, use aot_eager.",
        )
    settings: dict[str, Any] = {"backend": backend, "mode": mode, "fullgraph": fullgraph, "dynamic": dynamic}
    settings["options"] = options
    if regions in (None, "repeated") and compile_graphs(inner, settings):
        return model
    chosen = _whole(inner) if regions is None else list(selected(inner, regions, "compile_model").values())
    chosen = [module for module in chosen if not is_elsewhere(module)]
    _check_overlap(inner, chosen)
    add_mixin([module for module in chosen if type(module).forward.__module__.startswith("torch.")], _Traced)
    for module in chosen:
        cast(Any, module).compile(**settings)
    return model


def _whole(model: nn.Module) -> list[nn.Module]:
    """The regions of a whole model: itself, or the modules of this rank's stages, which nothing calls as one."""
    if not is_pipelined(model):
        return [model]
    stages = cast("Sequence[Any]", stage_modules(model))
    return [stage.module.get_submodule(path) for stage in stages for path in stage.own]


def _check_overlap(model: nn.Module, regions: Iterable[nn.Module]) -> None:
    """Raise `ConfigError` for regions with layers that send beside their products: a graph has no place for both."""
    inside = {id(each) for region in regions for each in region.modules() if OVERLAPS in vars(each)}
    if inside:
        raise ConfigError(
            "torch does not compile layers that send beside their products",
            expected="a plan without overlap, or regions without layers that ranks along tp divide",
            got=", ".join([path for path, each in named_modules(model) if id(each) in inside][:5]),
            where="compile_model",
            fix="Leave overlap out: plan=accel.parallel.Plan(overlap=False).",
        )
