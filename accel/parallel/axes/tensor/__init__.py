# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism: ranks along tp split each layer's matmuls, by a plan of styles.

Begin with `_spread.py`. `_tensor_plan.py` has the styles of a model: declared, of plain layers (`_pairs.py`), or found:
`_trace.py` records a forward, `_dependence.py` reads in gradients which rows of parameters belong to a rank, and
`_found.py` has them proved on simulated ranks by `_prove.py`, as styles or as layouts of `accel.parallel.parts`.
`_rules.py` makes a rule of each style, `_styles.py` and `_heads.py` the numbers in it. `_layers.py`, `_attention.py`
and `_part_layers.py` compute on this rank's rows. `_overlap.py` overlaps matmuls with communication. `_dropout.py`
draws the same random numbers on all ranks where it must. Losses of divided logits are in `accel.parallel.logits`.
"""

from accel.parallel.axes.tensor._spread import TENSOR as TENSOR
from accel.parallel.axes.tensor._tensor_plan import tensor_plan as tensor_plan
