# SPDX-License-Identifier: Apache-2.0
"""Models spread over ranks, and the way back to the plain model.

Begin with `_prepare_model.py`: a model is refused (`_refused.py`) or spread along each dimension of the mesh in one
order, by a record of functions (`_spread.py`) of each folder in `axes/`, and labelled (`_labels.py`), so that later
calls know it. `_sync.py` decides when gradients are exchanged, `_leftovers.py` finds gradients of another window.
`_engines.py` is for libraries that do all of it themselves.
"""

from accel.parallel.axes.context import context_attention, sequence_positions, split_sequence
from accel.parallel.axes.experts import (
    DispatchedTokens,
    Routing,
    balance_loss,
    balanced_bias,
    combine_tokens,
    dispatch_tokens,
    expert_counts,
    expert_plan,
    route_tokens,
)
from accel.parallel.axes.pipeline import stage_plan
from accel.parallel.axes.replicate._comm_hooks import PowerSgd
from accel.parallel.axes.replicate._local_sgd import LocalSgd, local_sgd_step, prepare_local_model
from accel.parallel.axes.tensor import tensor_plan
from accel.parallel.logits import linear_cross_entropy, vocab_cross_entropy
from accel.parallel.parts._local_map import local_map
from accel.topology import Axes, Plan

__all__ = [
    "Axes",
    "DispatchedTokens",
    "LocalSgd",
    "Plan",
    "PowerSgd",
    "Routing",
    "balance_loss",
    "balanced_bias",
    "combine_tokens",
    "context_attention",
    "dispatch_tokens",
    "expert_counts",
    "expert_plan",
    "linear_cross_entropy",
    "local_map",
    "local_sgd_step",
    "prepare_local_model",
    "route_tokens",
    "sequence_positions",
    "split_sequence",
    "stage_plan",
    "tensor_plan",
    "vocab_cross_entropy",
]
__dir__ = __all__.copy
