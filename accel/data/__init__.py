# SPDX-License-Identifier: Apache-2.0
"""Data: `prepare_loader` makes a `Loader`, `batches` reads it from a cursor.

Begin with `_batches.py`, the loop. `_loader.py` turns torch's DataLoader into a plan: `_epoch.py` has the order of an
epoch as arithmetic, `_shards.py` its cut into steps and ranks, both free of torch.distributed. `_requests.py` sends a
rank's samples to workers, `_transfer.py` moves batches to the device, a step ahead. Each batch carries the cursor
(`accel/loop_state.py`) that follows it. `stream/` does the same for datasets without a length.
"""

from accel.data._epoch import order
from accel.data._progress import progress
from accel.data._shards import SampleCount
from accel.data.stream import StreamLoader

__all__ = [
    "SampleCount",
    "StreamLoader",
    "order",
    "progress",
]
__dir__ = __all__.copy
