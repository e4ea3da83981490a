# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism: layers that the ranks along tp share, by a plan of styles."""

from accel.parallel.tensor._plan import tensor_plan as tensor_plan
from accel.parallel.tensor._spread import TENSOR as TENSOR
from accel.parallel.tensor._vocabulary import vocab_cross_entropy as vocab_cross_entropy
