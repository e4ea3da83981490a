# SPDX-License-Identifier: Apache-2.0
"""Data: order by arithmetic, sharding as a pure plan, and batches that know where the run stands after them."""

from accel.data._accumulators import Mean as Mean
from accel.data._accumulators import Sum as Sum
from accel.data._batches import Batch as Batch
from accel.data._batches import batches as batches
from accel.data._cursor import Cursor as Cursor
from accel.data._cursor import Positioned as Positioned
from accel.data._cursor import StreamPosition as StreamPosition
from accel.data._cursor import WorkerPosition as WorkerPosition
from accel.data._epoch import Order as Order
from accel.data._epoch import order as order
from accel.data._loader import Loader as Loader
from accel.data._loader import prepare_loader as prepare_loader
from accel.data._loader import skip_first_batches as skip_first_batches
from accel.data._loader import total_steps as total_steps
from accel.data._metrics import gather_for_metrics as gather_for_metrics
from accel.data._plan import BatchPlan as BatchPlan
from accel.data._plan import Plan as Plan
from accel.data._plan import SampleCount as SampleCount
from accel.data._plan import Shard as Shard
from accel.data._plan import shard as shard
from accel.data._progress import progress as progress
from accel.data.stream import StreamLoader as StreamLoader
