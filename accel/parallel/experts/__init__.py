# SPDX-License-Identifier: Apache-2.0
"""Experts that ranks share: tokens are routed to them, dispatched and combined."""

from accel.parallel.experts._balance import balance_loss as balance_loss
from accel.parallel.experts._dispatch import (
    DispatchedTokens as DispatchedTokens,
    combine_tokens as combine_tokens,
    dispatch_tokens as dispatch_tokens,
)
from accel.parallel.experts._mesh import (
    exchange_mesh as exchange_mesh,
    expert_modules as expert_modules,
    is_expert_parameter as is_expert_parameter,
)
from accel.parallel.experts._plan import expert_plan as expert_plan
from accel.parallel.experts._routing import Routing as Routing, route_tokens as route_tokens
from accel.parallel.experts._shards import shard_experts as shard_experts
from accel.parallel.experts._spread import EXPERT as EXPERT
