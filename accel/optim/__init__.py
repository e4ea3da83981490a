# SPDX-License-Identifier: Apache-2.0
"""What happens around an optimizer: the accumulation window as a record, and passes over gradients."""

from accel.optim._accumulation import Accumulation as Accumulation
from accel.optim._gradients import first_nonfinite as first_nonfinite
from accel.optim._gradients import gradients as gradients
from accel.optim._gradients import scale_ as scale_
from accel.optim._gradients import total_norm as total_norm
