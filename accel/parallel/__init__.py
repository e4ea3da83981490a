# SPDX-License-Identifier: Apache-2.0
"""Models spread over ranks, and the way back to the plain model."""

from accel.parallel._autocast_seen import runs_without_autocast as runs_without_autocast
from accel.parallel._checkpointing import checkpoint_activations as checkpoint_activations
from accel.parallel._comm_hooks import PowerSgd as PowerSgd
from accel.parallel._compile import compile_as_set as compile_as_set, compile_model as compile_model
from accel.parallel._empty import is_unknown as is_unknown
from accel.parallel._engines import (
    ENGINES as ENGINES,
    Engine as Engine,
    StepOutcome as StepOutcome,
    StepRequest as StepRequest,
    engine_items as engine_items,
    engine_loaded as engine_loaded,
    engine_of as engine_of,
    whole_model as whole_model,
)
from accel.parallel._join import join_uneven_inputs as join_uneven_inputs
from accel.parallel._labels import (
    check_exchanged as check_exchanged,
    heir_of as heir_of,
    is_dropped as is_dropped,
    name_of as name_of,
)
from accel.parallel._leftovers import (
    check_kept as check_kept,
    clear_gradients as clear_gradients,
    clear_parameters as clear_parameters,
    found_gradient as found_gradient,
    note_gradients as note_gradients,
)
from accel.parallel._local_sgd import (
    LocalSgd as LocalSgd,
    local_sgd_step as local_sgd_step,
    prepare_local_model as prepare_local_model,
)
from accel.parallel._micro_batches import micro_batches_of as micro_batches_of
from accel.parallel._paths import named_modules as named_modules
from accel.parallel._prepare_model import (
    check_model as check_model,
    prepare_model as prepare_model,
    refuse_plan as refuse_plan,
    replaces_parameters as replaces_parameters,
)
from accel.parallel._replicas import average_ as average_
from accel.parallel._select import Select as Select, repeated as repeated, selected as selected
from accel.parallel._sync import (
    check_prepared as check_prepared,
    exchanging as exchanging,
    no_sync as no_sync,
    raise_lost_peer as raise_lost_peer,
    trigger_sync_in_backward as trigger_sync_in_backward,
)
from accel.parallel._unwrap import (
    EMPTIED as EMPTIED,
    HELD as HELD,
    WRAPS as WRAPS,
    emptied_by as emptied_by,
    follow_stages as follow_stages,
    is_divided as is_divided,
    is_pipelined as is_pipelined,
    stage_modules as stage_modules,
    unwrap_model as unwrap_model,
    wrapped_name as wrapped_name,
)
from accel.parallel.context import (
    check_context_used as check_context_used,
    context_attention as context_attention,
    sequence_positions as sequence_positions,
    split_sequence as split_sequence,
)
from accel.parallel.experts import (
    DispatchedTokens as DispatchedTokens,
    Routing as Routing,
    balance_loss as balance_loss,
    combine_tokens as combine_tokens,
    dispatch_tokens as dispatch_tokens,
    expert_plan as expert_plan,
    route_tokens as route_tokens,
)
from accel.parallel.pipeline import stage_plan as stage_plan
from accel.parallel.tensor import tensor_plan as tensor_plan, vocab_cross_entropy as vocab_cross_entropy
