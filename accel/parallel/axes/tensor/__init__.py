# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism: layers that the ranks along tp share, by a plan of styles."""

from accel.parallel.axes.tensor._layers import vocab_cross_entropy as vocab_cross_entropy
from accel.parallel.axes.tensor._plan import tensor_plan as tensor_plan
from accel.parallel.axes.tensor._spread import TENSOR as TENSOR
