# SPDX-License-Identifier: Apache-2.0
"""Around an optimizer: the accumulation window as a record, and passes over gradients."""

from accel.optim._accumulation import Accumulation as Accumulation, keep_losses as keep_losses
from accel.optim._foreach import norms as norms
from accel.optim._gradients import (
    clamp_ as clamp_,
    elements_of as elements_of,
    first_nonfinite as first_nonfinite,
    gradients as gradients,
    parameters_of as parameters_of,
    scale_ as scale_,
    total_norm as total_norm,
)
from accel.optim._masters import MASTER as MASTER, step_masters as step_masters
