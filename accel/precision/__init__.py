# SPDX-License-Identifier: Apache-2.0
"""Mixed precision by the context's record. Begin with `_support.py`: which device supports which format.

`_model.py` gives a model its formats, once, in `prepare`; `_amp.py` those of a block's arithmetic, at each step, and
the scale that `backward` multiplies by and `optimizer_step` updates. `_fp8.py` converts layers.
"""

from accel.precision._amp import (
    LossScale as LossScale,
    autocast as autocast,
    loss_scale as loss_scale,
    matmul_precision as matmul_precision,
)
from accel.precision._fp8 import convert_qat as convert_qat
from accel.precision._model import apply_precision as apply_precision
