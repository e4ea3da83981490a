# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism: ranks along tp share the products of a layer, by a plan of styles.

Begin with `_spread.py`. `_tensor_plan.py` has the styles of a model: declared, of plain layers (`_pairs.py`), or found:
`_trace.py` records a forward, `_found.py` reads candidates in it, `_prove.py` compares simulated ranks with the whole.
What styles leave whole is divided by `accel.parallel.parts`: `_part_search.py` proves layouts of `_dependence.py`, and
`_part_layers.py` has the modules. `_rules.py` makes a rule of each style, `_styles.py` and `_heads.py` the numbers in
it. `_layers.py` and `_attention.py` compute on this rank's rows, `_overlap.py` beside messages, `_vocabulary.py`,
`_head_loss.py`, `_head_chunks.py` and `_deferred.py` losses with and without logits; `_dropout.py` draws alike.
"""

from accel.parallel.axes.tensor._head_loss import linear_cross_entropy as linear_cross_entropy
from accel.parallel.axes.tensor._spread import TENSOR as TENSOR
from accel.parallel.axes.tensor._tensor_plan import tensor_plan as tensor_plan
from accel.parallel.axes.tensor._vocabulary import (
    check_logits as check_logits,
    row_scores as row_scores,
    vocab_cross_entropy as vocab_cross_entropy,
)
