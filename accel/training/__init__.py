# SPDX-License-Identifier: Apache-2.0
"""The training loop's verbs: where data, precision, models and optimizers meet.

Begin with `_train_step.py`, a window's life on one page: `TrainState.next` (`_train_state.py`) takes a batch,
`_forward_backward.py` computes its losses (`_loss_sums.py`) and their gradients (`_backward.py`), and where the window
(`_window.py`) ends `_step.py` divides, clips and steps, unless `_refused.py` refuses. Before the loop come
`_prepare.py` and `_resume.py`; apart from it are `_clip.py`, `_fused.py`, `_evaluating.py` and `_generate.py`.
"""

from accel.lazy import exports
from accel.training._backward import accumulate as accumulate, backward as backward
from accel.training._clip import (
    clip_grad_norm_ as clip_grad_norm_,
    clip_grad_value_ as clip_grad_value_,
    unscale_gradients as unscale_gradients,
)
from accel.training._evaluating import Ema as Ema, ema_decay as ema_decay, evaluating as evaluating
from accel.training._forward_backward import forward as forward, forward_backward as forward_backward
from accel.training._fused import fused_step as fused_step
from accel.training._generate import generate as generate
from accel.training._prepare import (
    prepare as prepare,
    prepare_optimizer as prepare_optimizer,
    prepare_scheduler as prepare_scheduler,
)
from accel.training._resume import resume as resume
from accel.training._step import StepResult as StepResult, optimizer_step as optimizer_step
from accel.training._train_state import TrainState as TrainState, discard as discard, train_state as train_state
from accel.training._train_step import train_step as train_step

_MOVED = (
    "Loaded",
    "Part",
    "Stored",
    "TrainableOnly",
    "export_dcp",
    "get_state_dict",
    "import_accelerate",
    "import_dcp",
    "load_accelerate_state",
    "load_state",
    "save",
    "save_model",
    "save_state",
)

__getattr__ = exports(__name__, {}, dict.fromkeys(_MOVED, "It is imported from accel.items."))
