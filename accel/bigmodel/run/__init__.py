# SPDX-License-Identifier: Apache-2.0
"""Running a model with weights elsewhere: correct wherever a weight is used, fast where blocks run in turn.

Begin with `_dispatch.py`. `_install.py` replaces weights (`_places.py`) by absent ones (`_absent.py`), which fetch
themselves, and hooks the blocks. Around a block's call `_stream.py` holds its weights in a slot (`_slots.py`), and
fills the next slot meanwhile, from `_supplies.py`; `_sources.py` writes files for "disk". `_crossings.py` moves inputs
between devices, `_stats.py` counts, `_auto.py` infers maps, `_swap.py` lets whole models take turns.
"""

from accel.bigmodel.run._dispatch import (
    Dispatched as Dispatched,
    cpu_offload as cpu_offload,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
)
from accel.bigmodel.run._stats import RunStats as RunStats, SegmentStats as SegmentStats
from accel.bigmodel.run._swap import Swap as Swap, swap_models as swap_models
