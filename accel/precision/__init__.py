# SPDX-License-Identifier: Apache-2.0
"""Mixed precision as the context's record says: autocast, formats of a model's parts, fp8, the loss scale."""

from accel.precision._autocast import autocast as autocast, matmul_precision as matmul_precision
from accel.precision._fp8 import convert_qat as convert_qat
from accel.precision._loss_scale import LossScale as LossScale, loss_scale as loss_scale
from accel.precision._model import apply_precision as apply_precision
