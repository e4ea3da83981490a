# SPDX-License-Identifier: Apache-2.0
"""Quantized weights, by bitsandbytes or torchao: loaded tensor by tensor, streamed, saved and trained with adapters.

Begin with `_load.py`: a record (`_config.py`) chooses layers (`_describe.py`), and each weight is read, quantized and
moved to its home on its own. `_bitsandbytes.py` and `_torchao.py` divide a package's weights into plain tensors, which
dispatch and checkpoints know; `_layers.py` has layers of bitsandbytes without state.
"""

from accel.engines.quantized._config import Bitsandbytes, Torchao
from accel.engines.quantized._describe import describe_quantized
from accel.engines.quantized._load import load_quantized

__all__ = [
    "Bitsandbytes",
    "Torchao",
    "describe_quantized",
    "load_quantized",
]
__dir__ = __all__.copy
