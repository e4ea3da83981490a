# SPDX-License-Identifier: Apache-2.0
"""torch.compile in place: nothing is wrapped, so names of parameters, checkpoints and types stay as they are."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import nn

from accel.context import DistContext
from accel.errors import ConfigError, check_choice
from accel.formats import Compile, CompileMode
from accel.mixins import Mixin, add_mixin
from accel.parallel._checkpointing import Recomputed
from accel.parallel._private import is_compiled
from accel.parallel._select import Select, selected
from accel.parallel._unwrap import unwrap_model

M = TypeVar("M", bound=nn.Module)


class _Traced(Mixin, nn.Module):
    """Stands before torch's own containers: torch compiles their forward only where somebody else's calls it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return cast(Any, super()).forward(*args, **kwargs)


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
            module. Of nested regions the outer one counts.
        backend, mode, fullgraph, dynamic, options: as in torch.compile.

    Returns:
        The model that was passed.

    Raises:
        ConfigError: torch has no such backend, nothing is chosen, mode beside options, or the eager backend for
            blocks that `checkpoint_activations` recomputes.

    Reference: torch.nn.Module.compile.
    """
    known = cast(Any, torch.compiler).list_backends(exclude_tags=())
    check_choice(backend, sorted(known), "unknown backend", where="backend=")
    if mode is not None and options is not None:
        raise ConfigError("a mode stands for options", expected="mode or options", got="both", where="compile_model")
    inner = unwrap_model(model)
    if backend == "eager" and any(isinstance(module, Recomputed) for module in inner.modules()):
        raise ConfigError(
            "this backend draws other random numbers when a block is computed again, which makes gradients wrong",
            expected="another backend beside checkpoint_activations",
            got="eager",
            where="compile_model, backend=",
            fix="To debug, use aot_eager.",
        )
    chosen = [inner] if regions is None else list(selected(inner, regions, "compile_model").values())
    add_mixin([module for module in chosen if type(module).forward.__module__.startswith("torch.")], _Traced)
    for module in chosen:
        cast(Any, module).compile(backend=backend, mode=mode, fullgraph=fullgraph, dynamic=dynamic, options=options)
    return model


def compile_as_set(ctx: DistContext, model: nn.Module) -> None:
    """Let torch compile a model as the context's settings say. No communication. Mutates the model.

    A model with a compiled part stays as it is: the script has chosen.

    Raises:
        ConfigError: as `compile_model`.
    """
    asked = ctx.settings.compile
    if isinstance(asked, Compile) and not any(is_compiled(module) for module in model.modules()):
        _ = compile_model(
            model,
            "repeated" if asked.regions == "repeated" else None,
            backend=asked.backend,
            mode=asked.mode,
            fullgraph=asked.fullgraph,
            dynamic=asked.dynamic,
        )
