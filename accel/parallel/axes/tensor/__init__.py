# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism: ranks along tp split each layer's matmuls, by a plan of styles.

Begin with `_spread.py`. `_tensor_plan.py` has the styles of a model: declared, or of plain layers. Other plans are
found: `_trace.py` records a forward, `_dependence.py` reads a rank's rows in gradients, and `_found.py` has layouts
proved on simulated ranks by `_prove.py`. `_styles.py` and `_rules.py` make layouts of styles. Modules compute with
parts (`_part_layers.py`, with shared tokens `_tokens.py`) of this rank's parameters (`_layers.py`). `_overlap.py`
overlaps messages.
"""

from accel.parallel.axes.tensor._spread import TENSOR as TENSOR
from accel.parallel.axes.tensor._tensor_plan import tensor_plan as tensor_plan
