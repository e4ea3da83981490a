# SPDX-License-Identifier: Apache-2.0
"""Mixed precision by the context's record. Begin with `_amp.py`.

`_model.py` gives a model its formats, once, in `prepare`. `_amp.py` sets the formats of a block's arithmetic, at each
step, and makes the first scale of losses. `_fp8.py` converts layers.
"""

from accel.formats import Fp8, Precision, Qat
from accel.precision._fp8 import convert_qat
from accel.precision._model import apply_precision

__all__ = [
    "Fp8",
    "Precision",
    "Qat",
    "apply_precision",
    "convert_qat",
]
__dir__ = __all__.copy
