# SPDX-License-Identifier: Apache-2.0
"""The training loop's verbs: where data, precision, models and optimizers meet."""

from accel.training._backward import accumulate as accumulate
from accel.training._backward import backward as backward
from accel.training._clip import clip_grad_norm_ as clip_grad_norm_
from accel.training._clip import clip_grad_value_ as clip_grad_value_
from accel.training._clip import unscale_gradients as unscale_gradients
from accel.training._ema import Ema as Ema
from accel.training._ema import ema_decay as ema_decay
from accel.training._evaluating import evaluating as evaluating
from accel.training._fused import fused_step as fused_step
from accel.training._prepare import prepare as prepare
from accel.training._prepare import prepare_optimizer as prepare_optimizer
from accel.training._prepare import prepare_scheduler as prepare_scheduler
from accel.training._resume import resume as resume
from accel.training._step import StepResult as StepResult
from accel.training._step import optimizer_step as optimizer_step
from accel.training._train_state import TrainState as TrainState
from accel.training._train_state import discard as discard
from accel.training._train_state import train_state as train_state
