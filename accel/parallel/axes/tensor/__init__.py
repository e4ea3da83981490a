# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism: ranks along tp split each layer's matmuls, by a plan of styles.

Begin with `_spread.py`. `_tensor_plan.py` has the styles of a model: declared, or of plain layers (`_pairs.py`). Other
plans are found: `_trace.py` records a forward, `_dependence.py` reads in gradients which rows of parameters belong to a
rank, and `_found.py` has layouts of them proved on simulated ranks by `_prove.py`. `_styles.py` and `_rules.py` make
layouts of styles. Modules compute with parts of `accel.parallel.parts` (`_part_layers.py`, and `_tokens.py` where ranks
share tokens); heads and embeddings that divide a vocabulary, with plain tensors (`_layers.py`). `_attention.py` gives
attention functions of transformers this rank's heads, and `_overlap.py` overlaps matmuls with communication. Losses of
divided logits are in `accel.parallel.logits`.
"""

from accel.parallel.axes.tensor._spread import TENSOR as TENSOR
from accel.parallel.axes.tensor._tensor_plan import tensor_plan as tensor_plan
