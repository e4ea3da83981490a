# SPDX-License-Identifier: Apache-2.0
"""The configuration that a context carries, and facts of the context, of loaders, models and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from accel.context import DistContext
from accel.data import StreamLoader
from accel.data._loader import Loader
from accel.data._plan import EpochPlan
from accel.engines.deepspeed._record import DeepSpeed, RunFacts, from_setting

_WIDTHS = ("hidden_size", "hidden_sizes", "n_embd", "d_model", "dim")


def config_of(ctx: DistContext) -> DeepSpeed:
    """Return the configuration of a context's setting `deepspeed`; the default one if it has none. May read a file."""
    return from_setting(ctx.settings.deepspeed, ctx.launched.get("deepspeed", "deepspeed="))


def read_facts(ctx: DistContext, objects: Iterable[object], *, accumulation: int | None = None) -> RunFacts:
    """Return the facts of a context and of prepared objects. No communication.

    The first of several loaders gives the size of a micro-batch; optimizers and models follow the same rule.
    """
    facts: dict[str, Any] = {}
    for each in objects:
        if isinstance(each, Loader | StreamLoader):
            facts.setdefault("rows", _rows(each))
        elif isinstance(each, nn.Module):
            facts.setdefault("hidden_size", width_of(each))
        elif isinstance(each, Optimizer) and "optimizer" not in facts:
            values = {name: value for name, value in each.param_groups[0].items() if name != "params"}
            facts |= {"optimizer": type(each).__name__, "optimizer_values": values}
    if accumulation is None and (ctx.accumulation > 1 or "accumulation" in ctx.launched):
        accumulation = ctx.accumulation
    return RunFacts(
        ranks=ctx.data_parallel[1],
        precision=ctx.precision,
        accumulation=accumulation,
        places=dict(ctx.launched),
        **facts,
    )


def width_of(model: nn.Module) -> int | None:
    """Return the width in a model's configuration; None without one."""
    config: Any = getattr(model, "config", None)
    for inner in (config, _get(config, "text_config")):
        for name in _WIDTHS:
            found = _get(inner, name)
            widths = cast(list[Any], found) if isinstance(found, list | tuple) else [found]
            if widths and all(type(width) is int for width in widths):
                return max(widths)
    return None


def _get(config: Any, name: str) -> Any:
    return cast(Mapping[str, Any], config).get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _rows(loader: Loader | StreamLoader) -> int | None:
    """Return the most samples of a rank's batch; None where batches differ in size."""
    if isinstance(loader, StreamLoader):
        if loader.batch_size is not None or loader.global_batch is None:
            return loader.batch_size
        return -(-loader.global_batch // loader.world_size)
    plan = loader.source.plan
    return -(-plan.global_batch // loader.world_size) if isinstance(plan, EpochPlan) else None
