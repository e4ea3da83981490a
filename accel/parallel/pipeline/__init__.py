# SPDX-License-Identifier: Apache-2.0
"""Pipelines: a model cut into stages, and torch's schedules that run micro-batches through them."""

from accel.parallel.pipeline._pipeline import Pipeline as Pipeline, pipeline_of as pipeline_of
from accel.parallel.pipeline._placement import SPLIT_BACKWARDS as SPLIT_BACKWARDS
from accel.parallel.pipeline._split import (
    MicroBatch as MicroBatch,
    first_rows as first_rows,
    split_batch as split_batch,
)
from accel.parallel.pipeline._stage_module import (
    ByStage as ByStage,
    StageModule as StageModule,
    Work as Work,
    first_tensor as first_tensor,
)
from accel.parallel.pipeline._stage_plan import stage_plan as stage_plan
from accel.parallel.pipeline._stages import PIPELINE as PIPELINE
from accel.parallel.pipeline._ties import (
    is_tied_copy as is_tied_copy,
    sum_tied_gradients as sum_tied_gradients,
    take_summed as take_summed,
)
