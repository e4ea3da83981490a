# SPDX-License-Identifier: Apache-2.0
"""Parameters of stage 3: a scope in which they are whole, and models that are sharded as they are built."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

import torch
from torch import nn

from accel.context import DistContext, context_first
from accel.engines.deepspeed._facts import config_of, read_facts
from accel.engines.deepspeed._package import connected
from accel.engines.deepspeed._resolve import resolve
from accel.errors import ConfigError
from accel.parallel import EMPTIED

M = TypeVar("M", bound=nn.Module)


@context_first
@contextlib.contextmanager
def gathered(ctx: DistContext, parameters: Iterable[torch.Tensor], *, changed_by: int | None = None) -> Generator[None]:
    """Make sharded parameters whole for a block. A collective; at stages 1 and 2 parameters are whole in any case.

    Args:
        ctx: the context.
        parameters: of a model that DeepSpeed shards.
        changed_by: the rank whose changes all ranks get; None if nothing is changed. The optimizer's fp32 weights are
            its own, and do not follow.
    """
    with connected().zero.GatheredParameters(list(parameters), modifier_rank=changed_by):
        yield


@context_first
def build_sharded(ctx: DistContext, make: Callable[[], M]) -> M:
    """Build a model whose parameters are shared out as each module is made. A collective; every rank calls it.

    Args:
        ctx: the context, with stage 3.
        make: builds the model; the same on every rank.

    Returns:
        The model, for `prepare`.

    Raises:
        ConfigError: another stage than 3.
        MissingExtraError: DeepSpeed is missing.

    Example:
        >>> model = build_sharded(ctx, lambda: Llama(config))
    """
    config = config_of(ctx)
    if config.stage != 3:
        raise ConfigError(
            "parameters are shared out at stage 3 alone",
            expected="stage 3",
            got=f"stage {config.stage}",
            where="build_sharded",
            fix="Call make() itself, or pass deepspeed=accel.DeepSpeed(stage=3).",
        )
    settings = resolve(config, read_facts(ctx, ())).settings
    with connected().zero.Init(config_dict_or_path=settings):
        model = make()
    mark_emptied(model)
    return model


def mark_emptied(model: nn.Module) -> None:
    """Note on a model and its modules that their parameters are empty between passes. Mutates them."""
    for each in model.modules():
        vars(each)[EMPTIED] = "DeepSpeed's stage 3"
