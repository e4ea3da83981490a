# SPDX-License-Identifier: Apache-2.0
"""Models spread over ranks, and the way back to the plain model.

Begin with `_prepare_model.py`: a model is refused (`_refused.py`) or spread along each dimension of the mesh in one
order, by a record of functions (`_spread.py`) of each folder in `axes/`, and labelled (`_labels.py`), so that later
calls know it. `_sync.py` decides when gradients are exchanged, `_leftovers.py` finds those of another window.
`_engines.py` is for libraries that do all of it themselves.
"""

from accel.parallel._compile import (
    checkpoint_activations as checkpoint_activations,
    compile_model as compile_model,
)
from accel.parallel._empty import check_filled as check_filled, is_unknown as is_unknown
from accel.parallel._engines import (
    ENGINES as ENGINES,
    Engine as Engine,
    EngineOutcome as EngineOutcome,
    StepRequest as StepRequest,
    engine_items as engine_items,
    engine_loaded as engine_loaded,
    engine_of as engine_of,
    whole_model as whole_model,
)
from accel.parallel._labels import (
    check_exchanged as check_exchanged,
    heir_of as heir_of,
    is_dropped as is_dropped,
    micro_batches_of as micro_batches_of,
    name_of as name_of,
    runs_without_autocast as runs_without_autocast,
    steps_alone as steps_alone,
)
from accel.parallel._leftovers import (
    check_kept as check_kept,
    clear_gradients as clear_gradients,
    clear_parameters as clear_parameters,
    drop_unused as drop_unused,
    found_gradient as found_gradient,
    note_gradients as note_gradients,
)
from accel.parallel._modules import (
    EMPTIED as EMPTIED,
    HELD as HELD,
    WRAPS as WRAPS,
    Select as Select,
    emptied_by as emptied_by,
    follow_stages as follow_stages,
    is_divided as is_divided,
    is_pipelined as is_pipelined,
    named_modules as named_modules,
    repeated as repeated,
    selected as selected,
    stage_modules as stage_modules,
    unwrap_model as unwrap_model,
    wrapped_name as wrapped_name,
)
from accel.parallel._prepare_model import (
    check_model as check_model,
    compile_as_set as compile_as_set,
    prepare_model as prepare_model,
    refuse_plan as refuse_plan,
    replaces_parameters as replaces_parameters,
)
from accel.parallel._refused import check_sparse as check_sparse
from accel.parallel._spread import average_ as average_
from accel.parallel._sync import (
    check_prepared as check_prepared,
    exchanging as exchanging,
    no_sync as no_sync,
    raise_lost_peer as raise_lost_peer,
    trigger_sync_in_backward as trigger_sync_in_backward,
)
from accel.parallel.axes.context import (
    check_context_used as check_context_used,
    context_attention as context_attention,
    sequence_positions as sequence_positions,
    split_sequence as split_sequence,
)
from accel.parallel.axes.experts import (
    DispatchedTokens as DispatchedTokens,
    Routing as Routing,
    balance_loss as balance_loss,
    combine_tokens as combine_tokens,
    dispatch_tokens as dispatch_tokens,
    expert_plan as expert_plan,
    route_tokens as route_tokens,
)
from accel.parallel.axes.pipeline import stage_plan as stage_plan
from accel.parallel.axes.replicate._comm_hooks import PowerSgd as PowerSgd
from accel.parallel.axes.replicate._ddp import join_uneven_inputs as join_uneven_inputs
from accel.parallel.axes.replicate._local_sgd import (
    LocalSgd as LocalSgd,
    local_sgd_step as local_sgd_step,
    prepare_local_model as prepare_local_model,
)
from accel.parallel.axes.tensor import tensor_plan as tensor_plan, vocab_cross_entropy as vocab_cross_entropy
