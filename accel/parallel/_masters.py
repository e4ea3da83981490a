# SPDX-License-Identifier: Apache-2.0
"""Models whose 16-bit parameters have master weights: where their float32 gradients can be exchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.context import DistContext
from accel.errors import ConfigError, PrepareError
from accel.parallel._spread import Spread
from accel.tensors import has_wide_gradient


def check_masters(ctx: DistContext, waiting: Iterable[Spread]) -> None:
    """Raise `ConfigError` for master weights where parameters are about to be sharded, cut or divided."""
    others = [each.dimension for each in waiting if each.dimension != "replicate"]
    if ctx.precision.master_weights is not None and others:
        raise ConfigError(
            "master weights are for replicated parameters",
            expected="the strategy ddp, and a mesh of replicas",
            got=f"parameters spread along {', '.join(others)}",
            where="Precision.master_weights",
            fix='Keep parameters in float32, which are sharded then: precision="bf16" gathers and computes in bf16.',
        )


def check_buckets(*, find_unused_parameters: bool, static_graph: bool) -> None:
    """Raise `ConfigError` for options under which DDP cannot arrange its buckets in float32 before the first step."""
    if find_unused_parameters or static_graph:
        raise ConfigError(
            "DDP does not exchange float32 gradients of 16-bit parameters so",
            expected="master weights, or find_unused_parameters and static_graph",
            got="both",
            where="prepare_model",
            fix='Keep parameters in float32 instead: precision="bf16" computes in bf16.',
        )


def refuse_foreign(replica: DistributedDataParallel) -> None:
    """Raise `PrepareError` for a DDP of the user's around parameters with float32 gradients."""
    module = cast(nn.Module, cast(Any, replica).module)
    if any(has_wide_gradient(each) for each in module.parameters()):
        raise PrepareError(
            "this DDP was made before the parameters got master weights, and exchanges 16 bits",
            expected="the model without DDP",
            got="DistributedDataParallel",
            where="prepare_model",
            fix="Pass the module itself: prepare_model wraps it.",
        )
