# SPDX-License-Identifier: Apache-2.0
"""torch.compile and activation checkpointing in place: names, checkpoints and types stay as they are."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from accel.mixins import Mixin, add_mixin
from accel.parallel._blocks import Select, selected
from accel.parallel._modules import (
    is_elsewhere,
    is_pipelined,
    named_modules,
    notes_of,
    stage_modules,
    unwrap_model,
    written_class,
)
from accel.parallel._private import REGION
from accel.parallel._recomputed_run import RecomputedRun

M = TypeVar("M", bound=nn.Module)
Keep: TypeAlias = Literal["products"] | Sequence[str]

_MOST_GRAPHS = 32  # of one region: kinds of rows, inputs with gradients, training, autocast; torch's own limit is 8

_WHOLE = (
    "%s: fully_shard leaves parameters of it whole, such as scalars, and its graph breaks there in another way when it "
    "is computed again, so that torch compiles nothing of it"
)
_KEPT = (
    "%s: its graph breaks, so that torch compiles nothing of a block that keeps outputs; leave keep= out, or compile "
    "modules inside of it: accel.compile_model(model, Mlp)"
)

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
    """Stands before the class of a block that is computed again in backward."""

    kept: tuple[str, ...] = ()  # names of the operators that keep their outputs
    accel_region: _Inside | None = None  # of `compile_model`, around the block; None outside of regions

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward, remembering its inputs and kept outputs only."""
        # an early stop would leave what torch has compiled in its middle, before tensors are put back
        stops = self.accel_region is None
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return recomputed_call(self.accel_inside, self.kept, *args, early_stop=stops, **kwargs)
        call = RecomputedRun(self, self.accel_inside, args, kwargs)
        try:
            return recomputed_call(call, self.kept, *args, early_stop=stops, **kwargs)
        except ConfigError as error:
            # torch 2.12 takes its hooks away with its frame, which a traceback keeps
            raise error.with_traceback(None) from error.__cause__

    def accel_inside(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward; in a region of `compile_model`, compiled.

        torch compiles a checkpoint in one graph with what is around it. Where the block's graph breaks, it leaves the
        whole of it alone, and calls this.
        """
        region = self.accel_region
        if torch.compiler.is_compiling() or region is None:
            return super().forward(*args, **kwargs)
        if self.kept or notes_of(self).get("plain"):
            region.note_uncompiled(self, _KEPT if self.kept else _WHOLE)
            return super().forward(*args, **kwargs)
        return region.call(self, args, kwargs)

    def accel_behind(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward, the unit of compilation."""
        return super().forward(*args, **kwargs)


class _Inside:
    """The compilation of the recomputed blocks of a region by themselves, once for each class.

    Args:
        settings: options of torch.compile.

    Attributes:
        fullgraph: whether a graph break is an error.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self.fullgraph: bool = settings["fullgraph"]
        self._compiled: dict[type, Callable[..., Any]] = {}
        self._has_noted = False

    def call(self, block: Recomputed, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a block's own forward, compiled."""
        kind = type(block)
        if kind not in self._compiled:
            self._compiled[kind] = cast(Any, torch).compile(kind.accel_behind, **self._settings)
        return self._compiled[kind](block, *args, **kwargs)

    def note_uncompiled(self, block: Recomputed, reason: str) -> None:
        """Log once the class of a block that stays uncompiled, and why."""
        if not self._has_noted:
            self._has_noted = True
            logging.getLogger("accel.parallel").warning(reason, written_class(block).__name__)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inside, (self._settings,)


def recomputed_call(
    forward: Callable[..., Any], kept: Sequence[str], *args: Any, early_stop: bool = True, **kwargs: Any
) -> Any:
    """Call a function that runs again in backward, remembering its inputs and the outputs of the named operators.

    `early_stop`: whether it ends there as soon as all that backward needs is made, by an exception.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # torch.compile takes names as constants, and operators not
    contexts: dict[str, Any] = {"context_fn": functools.partial(_keeping, tuple(kept))} if kept else {}
    contexts |= {"use_reentrant": False, "early_stop": early_stop}
    return checkpoint(forward, *args, **contexts, **kwargs)  # pyright: ignore[reportUnknownVariableType]


def _keeping(kept: tuple[str, ...]) -> Any:
    """The contexts of a forward and of its second run, between which outputs of the named operators are kept."""
    return create_selective_checkpoint_contexts([_operator(name) for name in kept])


def checkpoint_activations(model: M, select: Select = "repeated", *, keep: Keep = ()) -> M:
    """Trade time for memory: keep only the inputs of the chosen blocks for backward. No communication. Mutates them.

    In backward each block runs its forward again, with the random numbers and autocast of the first time. Gradients are
    the same. Nothing is wrapped: names, checkpoints and `isinstance` stay as they are. Before or after `compile_model`
    and `prepare_model` is the same.

    Args:
        model: plain, or from `prepare_model`.
        select: "repeated" for blocks with a sibling of their class, in a list or by numbered attributes;
            a class or a tuple of classes; or a predicate of a module's name and the module. Of nested blocks the outer
            one counts, so the model's own class is all of it.
        keep: names of operators that keep their outputs and do not run again, such as "aten.mm.default"; "products"
            for matmuls, convolutions and attention, which take most of the time and little of the memory.

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
                fix="Choose the blocks of each call separately, by select=.",
            )
    add_mixin(chosen.values(), Recomputed, kept=kept)
    _mark_inside(unwrap_model(model))
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
    graph where DDP's buckets end, so that gradients are sent while others are computed (for a `bucket_cap_mb` from 1).
    Recomputed blocks with graph breaks are compiled between the breaks.

    Args:
        model: plain, or from `prepare_model`.
        regions: None for the whole; "repeated" for blocks with a sibling of their class, in a list or by
            numbered attributes; a class or a tuple of classes; or a predicate of a module's name and the module. Of
            nested regions the outer one counts. For a model that is cut into stages, None means the modules of this
            rank's stages, each one a region.
        backend, mode, fullgraph, dynamic, options: as in torch.compile.

    Returns:
        The model that was passed.

    Raises:
        ConfigError: torch has no such backend, nothing is chosen, mode together with options, the eager backend for
            blocks that `checkpoint_activations` recomputes, or layers that `Plan(overlap=True)` divides.

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
            expected="another backend with checkpoint_activations",
            got="eager",
            where="compile_model, backend=",
            fix="To debug, use aot_eager.",
        )
    settings: dict[str, Any] = {"backend": backend, "mode": mode, "fullgraph": fullgraph, "dynamic": dynamic}
    settings |= {"options": options, **_limit()}
    chosen = _whole(inner) if regions is None else list(selected(inner, regions, "compile_model").values())
    chosen = [module for module in chosen if not is_elsewhere(module)]
    _check_eager(inner, chosen)
    for sizes, alike in _by_size(chosen).items():
        add_mixin(alike, _Traced, accel_sizes=sizes)
    inside = _Inside(settings)
    for module in chosen:
        cast(Any, module).compile(**settings)
        vars(module)[REGION] = inside
    _mark_inside(inner)
    return model


def _by_size(regions: Iterable[nn.Module]) -> dict[str, list[nn.Module]]:
    """Regions that must not share torch's graphs by class, by the sizes of their parameters. They are regions of
    torch's classes, because torch would not trace their forward, and of classes with several sizes."""
    found: dict[type, dict[str, list[nn.Module]]] = {}
    for each in regions:
        sizes = ", ".join("x".join(map(str, parameter.shape)) for parameter in each.parameters())
        found.setdefault(type(each), {}).setdefault(sizes, []).append(each)
    made: dict[str, list[nn.Module]] = {}
    for kind, alike in found.items():
        if len(alike) > 1 or cast(Any, kind).forward.__module__.startswith("torch."):
            for sizes, modules in alike.items():
                made.setdefault(sizes, []).extend(modules)
    return made


def _mark_inside(model: nn.Module) -> None:
    """Let recomputed blocks know the options of the region that they are in."""
    for region in list(model.modules()):
        inside: _Inside | None = vars(region).get(REGION)
        if inside is not None:
            for each in region.modules():
                if isinstance(each, Recomputed):
                    vars(each)[REGION] = inside


def _limit() -> dict[str, int]:
    """The most graphs of a region, for a torch that takes it."""
    if "recompile_limit" not in inspect.signature(cast(Any, torch).compile).parameters:
        return {}
    return {"recompile_limit": max(_MOST_GRAPHS, cast(Any, torch.compiler).config.recompile_limit)}


def _whole(model: nn.Module) -> list[nn.Module]:
    """The regions of a whole model: itself, or the modules of this rank's stages, which nothing calls as one."""
    if not is_pipelined(model):
        return [model]
    stages = cast("Sequence[Any]", stage_modules(model))
    return [stage.module.get_submodule(path) for stage in stages for path in stage.own]


def _check_eager(model: nn.Module, regions: Iterable[nn.Module]) -> None:
    """Raise `ConfigError` for regions with layers that only run eagerly."""
    inside = {id(each) for region in regions for each in region.modules() if notes_of(each).get("overlaps")}
    if inside:
        raise ConfigError(
            "torch does not compile layers that overlap messages with matmuls",
            expected="a plan without overlap, or regions without layers that ranks along tp divide",
            got=", ".join([path or "the model" for path, each in named_modules(model) if id(each) in inside][:5]),
            where="compile_model",
            fix="Leave overlap out: plan=accel.parallel.Plan(overlap=False).",
        )
