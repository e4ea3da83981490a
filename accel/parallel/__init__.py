# SPDX-License-Identifier: Apache-2.0
"""Models spread over ranks, and the way back to the plain model."""

from accel.parallel._autocast_seen import runs_without_autocast as runs_without_autocast
from accel.parallel._checkpointing import checkpoint_activations as checkpoint_activations
from accel.parallel._comm_hooks import PowerSgd as PowerSgd
from accel.parallel._compile import compile_model as compile_model
from accel.parallel._engines import Engine as Engine
from accel.parallel._engines import StepOutcome as StepOutcome
from accel.parallel._engines import StepRequest as StepRequest
from accel.parallel._engines import engine_items as engine_items
from accel.parallel._engines import engine_of as engine_of
from accel.parallel._join import join_uneven_inputs as join_uneven_inputs
from accel.parallel._labels import check_exchanged as check_exchanged
from accel.parallel._labels import heir_of as heir_of
from accel.parallel._labels import name_of as name_of
from accel.parallel._leftovers import clear_gradients as clear_gradients
from accel.parallel._leftovers import clear_parameters as clear_parameters
from accel.parallel._leftovers import found_gradient as found_gradient
from accel.parallel._leftovers import note_gradients as note_gradients
from accel.parallel._local_sgd import LocalSgd as LocalSgd
from accel.parallel._local_sgd import local_sgd_step as local_sgd_step
from accel.parallel._local_sgd import prepare_local_model as prepare_local_model
from accel.parallel._prepare_model import check_model as check_model
from accel.parallel._prepare_model import prepare_model as prepare_model
from accel.parallel._prepare_model import replaces_parameters as replaces_parameters
from accel.parallel._replicas import average_ as average_
from accel.parallel._sync import check_prepared as check_prepared
from accel.parallel._sync import exchanging as exchanging
from accel.parallel._sync import no_sync as no_sync
from accel.parallel._sync import raise_lost_peer as raise_lost_peer
from accel.parallel._sync import trigger_sync_in_backward as trigger_sync_in_backward
from accel.parallel._unwrap import unwrap_model as unwrap_model
from accel.parallel._unwrap import wrapped_name as wrapped_name
