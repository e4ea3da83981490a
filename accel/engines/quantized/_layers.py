# SPDX-License-Identifier: Apache-2.0
"""Linear layers of bitsandbytes that keep no state between calls, so that their weights may be anywhere.

The package's own layers keep a second reference to a weight, pack it anew for a CPU, or cast a bias in place. These
are subclasses, so that adapters of peft know them. Imported only once the package is.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

_bitsandbytes: Any = importlib.import_module("bitsandbytes")


class Linear4bit(_bitsandbytes.nn.Linear4bit):
    """A linear layer with a weight of 4 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply in the layer's compute dtype; return the input's dtype."""
        computed = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        weight = self.weight
        return _bitsandbytes.matmul_4bit(computed, weight, bias=bias, quant_state=weight.quant_state).to(x.dtype)


class Linear8bit(_bitsandbytes.nn.Linear8bitLt):
    """A linear layer with a weight of 8 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize the input's rows, and multiply; return the input's dtype."""
        state = _bitsandbytes.MatmulLtState()
        state.threshold = self.state.threshold
        state.use_pool = self.state.use_pool
        state.has_fp16_weights = False
        state.is_training = self.training
        state.CB, state.SCB = self.weight.detach(), self.weight.SCB
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _bitsandbytes.matmul(x, self.weight, bias=bias, state=state)


def empty_layer(old: nn.Linear, *, bits: int, compute_dtype: torch.dtype, threshold: float) -> nn.Linear:
    """Return a layer with the bias of another one, and without a weight."""
    sizes = {"input_features": old.in_features, "output_features": old.out_features, "bias": False, "device": "meta"}
    new: Any = None
    if bits == 4:
        new = Linear4bit(**sizes, compute_dtype=compute_dtype)
    else:
        new = Linear8bit(**sizes, has_fp16_weights=False, threshold=threshold)
    new.bias = old.bias
    return new.train(old.training)
