# SPDX-License-Identifier: Apache-2.0
"""Streams: datasets without a length, divided by the dataset itself, by accel, or read by one rank for all.

Begin with `_loader.py`, which chooses. `_reader.py` cuts a stream into steps, in a worker or here; `_prefetch.py` reads
several ahead, to agree on them in one message. `_batches.py` has the loop where each rank reads, `_dispatch.py` sends
batches from readers to the others.
"""

from accel.data.stream._loader import StreamLoader as StreamLoader
