# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: tokens are routed to experts and sent to the ranks that hold them, and back.

Begin with `_spread.py`. `_expert_plan.py` finds a model's experts and their mesh. In the forward, `_routing.py` chooses
experts for tokens, dispatches tokens and combines outputs; `_layer.py` and `_listed.py` run a model's own experts in
it, and prove in the first call that they compute each row alone.
"""

from accel.parallel.axes.experts._expert_plan import (
    LISTS as LISTS,
    exchange_mesh as exchange_mesh,
    expert_modules as expert_modules,
    expert_plan as expert_plan,
    holds_experts as holds_experts,
    is_expert_parameter as is_expert_parameter,
    is_sorted_experts as is_sorted_experts,
    listed_prefixes as listed_prefixes,
    moe_modules as moe_modules,
    shard_experts as shard_experts,
)
from accel.parallel.axes.experts._listed import ExpertCalls as ExpertCalls, calls_around as calls_around
from accel.parallel.axes.experts._routing import (
    WITH_OWN_TOKENS as WITH_OWN_TOKENS,
    DispatchedTokens as DispatchedTokens,
    Routing as Routing,
    balance_loss as balance_loss,
    balanced_bias as balanced_bias,
    combine_tokens as combine_tokens,
    dispatch_tokens as dispatch_tokens,
    expert_counts as expert_counts,
    route_tokens as route_tokens,
)
from accel.parallel.axes.experts._spread import EXPERT as EXPERT
