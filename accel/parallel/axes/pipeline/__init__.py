# SPDX-License-Identifier: Apache-2.0
"""Pipelines: a model cut into stages, and torch's schedules that run micro-batches through them.

Begin with `_pipeline.py`. `_stage_plan.py` assigns modules to stages, `_stages.py` cuts the model, `_boundaries.py`
finds the shapes between stages, `_schedule.py` runs a batch, `_stage_module.py` is a stage as schedules call it. Models
that are no chain of modules: `_trial.py` tries a cut by tracing, `_traced.py` and the files `_trace_*.py` make it.
"""

from accel.parallel.axes.pipeline._pipeline import (
    Pipeline as Pipeline,
    is_tied_copy as is_tied_copy,
    is_traced as is_traced,
    pipeline_of as pipeline_of,
    sum_tied_gradients as sum_tied_gradients,
    take_summed as take_summed,
)
from accel.parallel.axes.pipeline._stage_module import (
    ByStage as ByStage,
    MicroBatch as MicroBatch,
    StageModule as StageModule,
    Work as Work,
    first_rows as first_rows,
    first_tensor as first_tensor,
    split_batch as split_batch,
)
from accel.parallel.axes.pipeline._stage_plan import SPLIT_BACKWARDS as SPLIT_BACKWARDS, stage_plan as stage_plan
from accel.parallel.axes.pipeline._stages import PIPELINE as PIPELINE
