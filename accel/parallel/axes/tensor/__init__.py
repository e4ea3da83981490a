# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism: ranks along tp share the products of a layer, by a plan of styles.

Begin with `_spread.py`. `_tensor_plan.py` finds the styles of a model and `_pairs.py` those of plain ones; `_styles.py`
divides the parameters, `_layers.py` computes on the parts, `_dropout.py` draws alike where ranks hold the same values.
"""

from accel.parallel.axes.tensor._layers import vocab_cross_entropy as vocab_cross_entropy
from accel.parallel.axes.tensor._spread import TENSOR as TENSOR
from accel.parallel.axes.tensor._tensor_plan import tensor_plan as tensor_plan
