# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other libraries. Only here are pickles read: as data, or by torch's weights-only loader.

Begin with `_accelerate.py`, for Hugging Face Accelerate's. `_dcp.py` converts torch's distributed checkpoints;
`_described.py` reads their metadata without running the pickle.
"""

from accel.items.foreign._accelerate import (
    import_accelerate as import_accelerate,
    load_accelerate_state as load_accelerate_state,
)
from accel.items.foreign._dcp import export_dcp as export_dcp, import_dcp as import_dcp
from accel.items.foreign._described import Described as Described, describe_pickle as describe_pickle
