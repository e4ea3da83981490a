# SPDX-License-Identifier: Apache-2.0
"""The reference of a model: the model itself without its adapters, or a frozen one."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from accel.context import DistContext, context_first
from accel.errors import ConfigError
from accel.parallel._modules import unwrap_model
from accel.training._evaluating import evaluating


@contextlib.contextmanager
@context_first
def reference(ctx: DistContext, model: nn.Module) -> Generator[nn.Module]:
    """Turn adapters off during a block, so that a model with LoRA is its own reference. No communication by itself.

    In the block the model is in evaluation mode, and nothing records gradients. Adapters are layers of peft, in a
    `PeftModel` or in a model of transformers with `add_adapter`. Behind the block everything is as before. All ranks
    enter it, as all run the forward in it.

    Args:
        ctx: the context.
        model: a prepared model with adapters, or a frozen model, which is its own reference.

    Yields:
        The model, to be called in the block.

    Raises:
        ConfigError: a model without adapters that trains.

    Examples:
        >>> frozen = nn.Linear(4, 4).requires_grad_(False)
        >>> with post_training.reference(ctx, frozen) as model:
        ...     before = model(torch.ones(1, 4))
        >>> before.requires_grad
        False
    """
    plain = unwrap_model(model)
    layers = [each for each in plain.modules() if _has_adapters(each)]
    needs = [(each, each.requires_grad) for each in plain.parameters()]
    if not layers and any(trains for _, trains in needs):
        raise ConfigError(
            "a model that trains is no reference of itself",
            expected="adapters of peft, or a frozen model",
            got=f"{type(plain).__name__} without adapters",
            where="reference",
            fix="Before prepare: frozen = accel.prepare_model(ctx, copy.deepcopy(model).requires_grad_(False)), and"
            " pass frozen here.",
        )
    were_on = [each for each in layers if not each.disable_adapters]
    try:
        _switch(were_on, needs, on=False)
        with evaluating(model), torch.no_grad():
            yield model
    finally:
        _switch(were_on, needs, on=True)


def _has_adapters(module: nn.Module) -> Any:
    """Whether a module is a layer of peft, which can leave its adapters out."""
    return isinstance(getattr(module, "disable_adapters", None), bool) and hasattr(module, "enable_adapters")


def _switch(layers: list[Any], needs: list[tuple[nn.Parameter, bool]], *, on: bool) -> None:
    """Turn adapters on or off. Peft freezes adapters that are off: FSDP units would gather them frozen from then on."""
    for each in layers:
        each.enable_adapters(on)
    for parameter, trains in needs:
        _ = parameter.requires_grad_(trains)
