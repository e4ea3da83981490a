# SPDX-License-Identifier: Apache-2.0
"""The training loop's verbs: where data, precision, models and optimizers meet."""

from accel.training._backward import accumulate as accumulate
from accel.training._backward import backward as backward
from accel.training._bases import TrainableOnly as TrainableOnly
from accel.training._clip import clip_grad_norm_ as clip_grad_norm_
from accel.training._clip import clip_grad_value_ as clip_grad_value_
from accel.training._clip import unscale_gradients as unscale_gradients
from accel.training._ema import Ema as Ema
from accel.training._ema import ema_decay as ema_decay
from accel.training._evaluating import evaluating as evaluating
from accel.training._fused import fused_step as fused_step
from accel.training._models import save as save
from accel.training._models import save_model as save_model
from accel.training._parts import Part as Part
from accel.training._prepare import prepare_optimizer as prepare_optimizer
from accel.training._prepare import prepare_scheduler as prepare_scheduler
from accel.training._prepare_typed import prepare as prepare
from accel.training._renaming import Stored as Stored
from accel.training._resume import resume as resume
from accel.training._state import Loaded as Loaded
from accel.training._state import load_state as load_state
from accel.training._state import save_state as save_state
from accel.training._step import StepResult as StepResult
from accel.training._step import optimizer_step as optimizer_step
from accel.training._train_state import TrainState as TrainState
from accel.training._train_state import discard as discard
from accel.training._train_state import train_state as train_state
from accel.training._whole import get_state_dict as get_state_dict
from accel.training.foreign import export_dcp as export_dcp
from accel.training.foreign import import_accelerate as import_accelerate
from accel.training.foreign import import_dcp as import_dcp
from accel.training.foreign import load_accelerate_state as load_accelerate_state
