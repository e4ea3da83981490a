# SPDX-License-Identifier: Apache-2.0
"""Models as callers give them, checked before anything else is."""

from __future__ import annotations

from torch import nn

from accel.errors import ConfigError


def check_model(model: object, *, where: str) -> None:
    """Refuse other things than models, such as its class or the function that builds it.

    Raises:
        ConfigError: no module.
    """
    if isinstance(model, nn.Module):
        return
    raise ConfigError(
        "not a model",
        expected="a torch.nn.Module",
        got=getattr(model, "__name__", type(model).__name__),
        where=where,
        fix="Build it first: accel.init_empty_weights(make) takes the function." if callable(model) else "",
    )
