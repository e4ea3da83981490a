# SPDX-License-Identifier: Apache-2.0
"""Pipelines: a model cut into stages, and torch's schedules that run micro-batches through them.

Begin with `_pipeline.py`. `_stages.py` cuts a model: `_replays.py` records its forward, `_cut.py` cuts the record,
`_held.py` drops the parameters of other stages. `_schedule.py` runs a batch through the stages of `_replayed.py`, which
replay the model's own forward. `_layout.py` has the ranks of stages.
"""

from accel.parallel.axes.pipeline._layout import SPLIT_BACKWARDS as SPLIT_BACKWARDS
from accel.parallel.axes.pipeline._pipeline import (
    Pipeline as Pipeline,
    is_tied_copy as is_tied_copy,
    keep_one_sum as keep_one_sum,
    pipeline_of as pipeline_of,
    sum_tied_gradients as sum_tied_gradients,
)
from accel.parallel.axes.pipeline._replayed import ReplayedModule as ReplayedModule
from accel.parallel.axes.pipeline._stages import PIPELINE as PIPELINE, stage_plan as stage_plan
from accel.parallel.axes.pipeline._work import Work as Work
