# SPDX-License-Identifier: Apache-2.0
"""Models of timm by name, built without their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel.errors import MissingExtraError
from accel.estimate._build import Input, measure
from accel.estimate._plan import Model

if TYPE_CHECKING:
    from torch import nn


def from_timm(name: str, inputs: Sequence[Input] = ()) -> Model:
    """Return the model that timm has under a name, without its weights. Takes the extra `timm`.

    Args:
        name: such as "resnet50" or "vit_base_patch16_224.augreg_in1k".
        inputs: images, to count activations.

    Raises:
        MissingExtraError: timm is not installed.
        ConfigError: timm has no such model, or the model cannot run without values.
    """
    return measure(timm_maker(name), f"timm/{name}", inputs)


def timm_maker(name: str) -> Callable[[], nn.Module]:
    """Return the function that builds a model of timm.

    Raises:
        MissingExtraError: timm is not installed.
    """
    try:
        timm: Any = import_module("timm")
    except ImportError as error:
        raise MissingExtraError(
            "a model of timm needs timm, which does not import",
            got=str(error),
            where=f"timm/{name}",
            fix="Run `pip install 'accel[timm]'`.",
        ) from error
    return lambda: timm.create_model(name, pretrained=False)
