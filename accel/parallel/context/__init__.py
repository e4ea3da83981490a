# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: ranks along the axis cp share the positions of a sequence, and attention crosses them."""

from accel.parallel.context._attention import context_attention as context_attention
from accel.parallel.context._notes import check_context_used as check_context_used
from accel.parallel.context._split import (
    sequence_positions as sequence_positions,
    split_sequence as split_sequence,
)
from accel.parallel.context._spread import CONTEXT as CONTEXT
