# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: autocast by the context's precision, and the loss scale as a record."""

from accel.precision._autocast import autocast as autocast
from accel.precision._loss_scale import LossScale as LossScale
from accel.precision._loss_scale import loss_scale as loss_scale
