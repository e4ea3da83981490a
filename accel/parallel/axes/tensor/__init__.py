# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism: ranks along tp share the products of a layer, by a plan of styles.

Begin with `_spread.py`. `_tensor_plan.py` has the styles of a model, from its own declaration, from plain layers
(`_pairs.py`), or found: `_trace.py` records a forward without values, `_found.py` reads candidates in it, `_prove.py`
compares simulated ranks with the whole module. What styles leave whole is divided by `accel.parallel.parts`:
`_part_search.py` takes layouts from `_dependence.py` to the same proof, and `_part_layers.py` has the modules.
`_rules.py` makes a rule of each style, `_styles.py` and `_heads.py` the numbers in it. `_layers.py` and `_attention.py`
compute on this rank's rows, `_overlap.py` in chunks beside their messages, `_vocabulary.py` on parts of logits, and
`_dropout.py` draws alike where ranks hold the same values. `_head_loss.py` has the loss of a head without its logits.
"""

from accel.parallel.axes.tensor._head_loss import linear_cross_entropy as linear_cross_entropy
from accel.parallel.axes.tensor._spread import TENSOR as TENSOR
from accel.parallel.axes.tensor._tensor_plan import tensor_plan as tensor_plan
from accel.parallel.axes.tensor._vocabulary import vocab_cross_entropy as vocab_cross_entropy
