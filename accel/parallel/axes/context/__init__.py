# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: ranks along cp share the positions of a sequence, and attention crosses them.

Begin with `_split.py`: each rank takes its positions of a batch; `_attention.py` computes attention over all of them,
by the kernels of `_kernels.py`. `_spread.py` is the answer for models: `_forward.py` lets them compute with the parts
of `_positions.py`, and `_transformers.py` has the attention and the masks of models of transformers. `_proof.py`
compares the first call with all positions, and `_stages.py` has parts in stages of a pipeline. `_checks.py` refuses
what cannot be cut.
"""

from accel.parallel.axes.context._attention import context_attention as context_attention
from accel.parallel.axes.context._split import (
    ALL_POSITIONS as ALL_POSITIONS,
    check_context_used as check_context_used,
    sequence_positions as sequence_positions,
    split_sequence as split_sequence,
)
from accel.parallel.axes.context._spread import CONTEXT as CONTEXT
