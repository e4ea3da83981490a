# SPDX-License-Identifier: Apache-2.0
"""Data: `prepare_loader` makes a `Loader`, `batches` reads it from a cursor.

Begin with `_batches.py`, the loop. `_loader.py` turns torch's DataLoader into a plan: `_epoch.py` has the order of an
epoch as arithmetic, `_plan.py` its cut into steps and ranks, both free of torch.distributed. `_requests.py` sends a
rank's samples to workers, `_transfer.py` moves batches to the device, a step ahead. Each batch carries the cursor
(`_cursor.py`) that follows it. `stream/` does the same for datasets without a length.
"""

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
