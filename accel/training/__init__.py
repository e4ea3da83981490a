# SPDX-License-Identifier: Apache-2.0
"""The training loop's verbs: where data, precision, models and optimizers meet.

Begin with `_train_step.py`, a window's life on one page: `TrainState.next` (`_train_state.py`) takes a batch,
`_forward_backward.py` computes its losses (`_loss_sums.py`) and their gradients (`_backward.py`), and where the window
(`_window.py`) ends `_step.py` divides, clips and steps, unless `_refused.py` refuses; `_deferred.py` lets the device
decide. `parts.py` has the same verbs for a loss scale and an accumulation alone. Before the loop come `_prepare.py` and
`_resume.py`; next to it are `_clip.py`, `_fused.py`, `_evaluating.py` and `_generate.py`.
"""

from accel.parallel._leftovers import clear_gradients
from accel.training import parts as parts
from accel.training._evaluating import Ema
from accel.training._expert_load import ExpertCounts, ExpertLoad
from accel.training._forward_backward import forward
from accel.training._fused import fused_step
from accel.training._generate import generate
from accel.training._train_state import discard

__all__ = [
    "Ema",
    "ExpertCounts",
    "ExpertLoad",
    "clear_gradients",
    "discard",
    "forward",
    "fused_step",
    "generate",
]
__dir__ = __all__.copy
