# SPDX-License-Identifier: Apache-2.0
"""Small inputs for a model of transformers, as its forward and its config describe them. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_ROWS, _TOKENS, _FRAMES, _SAMPLES = 2, 7, 64, 4000  # 7 tokens, as few models have 7 heads


def example_of(model: nn.Module) -> Mapping[str, Any] | None:
    """Return inputs without values for a model with a config of transformers; None for another."""
    outer: Any = model
    inner: Any = outer.get_base_model() if hasattr(outer, "get_base_model") else outer  # of peft
    config: Any = getattr(inner, "config", None)
    main: object = getattr(inner, "main_input_name", None)
    if config is None or not isinstance(main, str):
        return None
    names = list(inspect.signature(inner.forward).parameters)
    found = {name: each for name in names if (each := _input(name, inner, config)) is not None}
    if main not in found:
        return None
    switches = {"use_cache": False, "output_attentions": False, "return_dict": True}
    return {**found, **{name: value for name, value in switches.items() if name in names}}


def _input(name: str, model: Any, config: Any) -> Tensor | None:
    if name == "input_ids" and model.main_input_name in ("input_ids", "pixel_values"):
        return torch.empty(_ROWS, _TOKENS, dtype=torch.long, device="meta")
    if name == "decoder_input_ids":
        return torch.empty(_ROWS, _TOKENS - 2, dtype=torch.long, device="meta")
    if name == "pixel_values":
        return _pixels(config)
    if name == "input_features":
        length = 2 * int(getattr(config, "max_source_positions", _FRAMES // 2))
        return torch.empty(_ROWS, int(getattr(config, "num_mel_bins", 80)), length, device="meta")
    if name == "input_values":
        return torch.empty(_ROWS, _SAMPLES, device="meta")
    return None


def _pixels(config: Any) -> Tensor:
    own = getattr(config, "vision_config", config)
    size: Any = getattr(own, "image_size", 224)
    height, width = (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
    return torch.empty(_ROWS, int(getattr(own, "num_channels", 3)), height, width, device="meta")
