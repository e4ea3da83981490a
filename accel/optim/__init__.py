# SPDX-License-Identifier: Apache-2.0
"""Around an optimizer. Begin with `_accumulation.py`, the window of micro-batches as a record.

`optimizer_step` sums its weights, divides, un-scales and clips gradients in one pass (`_gradients.py`), and steps, on
float32 copies where there are any (`_stepping.py`).
"""

from accel.optim._accumulation import (
    Accumulation as Accumulation,
    check_latest as check_latest,
    check_scale as check_scale,
    keep_losses as keep_losses,
    next_micro_batch as next_micro_batch,
)
from accel.optim._gradients import (
    Carried as Carried,
    KeptNorms as KeptNorms,
    clamp_ as clamp_,
    elements_of as elements_of,
    first_nonfinite as first_nonfinite,
    gradients as gradients,
    norms as norms,
    parameters_of as parameters_of,
    reduce_power as reduce_power,
    scale_ as scale_,
    total_norm as total_norm,
    wide_norm as wide_norm,
)
from accel.optim._stepping import (
    CLOSURE_LINE as CLOSURE_LINE,
    MASTER as MASTER,
    guard_closures as guard_closures,
    note_complex as note_complex,
    step_of as step_of,
    within_closure as within_closure,
)
