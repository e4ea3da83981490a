# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: ranks along the axis cp share the positions of a sequence, and attention crosses them."""

from accel.parallel.axes.context._attention import context_attention as context_attention
from accel.parallel.axes.context._split import (
    check_context_used as check_context_used,
    sequence_positions as sequence_positions,
    split_sequence as split_sequence,
)
from accel.parallel.axes.context._spread import CONTEXT as CONTEXT
