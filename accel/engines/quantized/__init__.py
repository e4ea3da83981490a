# SPDX-License-Identifier: Apache-2.0
"""Quantized weights, by bitsandbytes or torchao: loaded tensor by tensor, streamed, saved and trained with adapters."""

from accel.engines.quantized._config import Bitsandbytes as Bitsandbytes, Torchao as Torchao
from accel.engines.quantized._describe import describe_quantized as describe_quantized, take_apart as take_apart
from accel.engines.quantized._load import load_quantized as load_quantized
