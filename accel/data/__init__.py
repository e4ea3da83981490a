# SPDX-License-Identifier: Apache-2.0
"""Data: order by arithmetic, sharding as a pure plan, and batches that know where the run stands after them."""

from accel.data._batches import Batch as Batch, batches as batches
from accel.data._cursor import (
    Cursor as Cursor,
    Positioned as Positioned,
    StreamPosition as StreamPosition,
    WorkerPosition as WorkerPosition,
)
from accel.data._epoch import Order as Order, order as order
from accel.data._loader import (
    Loader as Loader,
    prepare_loader as prepare_loader,
    unwrapped_loader as unwrapped_loader,
)
from accel.data._plan import (
    BatchPlan as BatchPlan,
    EpochPlan as EpochPlan,
    SampleCount as SampleCount,
    Shard as Shard,
    shard as shard,
)
from accel.data._progress import (
    gather_for_metrics as gather_for_metrics,
    progress as progress,
    skip_first_batches as skip_first_batches,
    total_steps as total_steps,
)
from accel.data.stream import StreamLoader as StreamLoader
