# SPDX-License-Identifier: Apache-2.0
"""Optimizers for sharded parameters, and what is around an optimizer. Begin with `_gradients.py`.

`optimizer_step` sums a window's weights, divides, un-scales and clips gradients in one pass (`_gradients.py`), and
steps, on float32 copies where there are any (`_substitutes.py`). `_muon.py` steps whole matrices, which `_matrices.py`
gives to their owners; `_adafactor.py` sums over rows and columns. `_streamed_state.py` keeps state on the host.
"""

from accel.optim._adafactor import Adafactor
from accel.optim._gradients import (
    CLOSURE_LINE as CLOSURE_LINE,
    KeptNorms as KeptNorms,
    begun_here as begun_here,
    clamp_ as clamp_,
    elements_of as elements_of,
    first_nonfinite as first_nonfinite,
    gradients as gradients,
    guard_closures as guard_closures,
    norm_dtype as norm_dtype,
    norm_over as norm_over,
    norms as norms,
    note_complex as note_complex,
    note_elsewhere as note_elsewhere,
    precision_of as precision_of,
    scale_ as scale_,
    step_of as step_of,
    take_step as take_step,
    total_norm as total_norm,
    wide_norm as wide_norm,
    within_closure as within_closure,
)
from accel.optim._muon import Muon
from accel.optim._streamed_state import settle_state as settle_state, streamed_state as streamed_state
from accel.optim._substitutes import MASTER as MASTER

__all__ = ["Adafactor", "Muon"]
__dir__ = __all__.copy
