# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of tensors and values: planned purely, written by all ranks, committed by one rename.

Begin with `_save.py`. Ranks' statements (`_snapshot.py`, from `_live_tensors.py`, values by `_encoding.py`) become a
plan (`_boxes.py`) and the manifest (`_manifest.py`); each rank writes its share, rank 0 commits, and `_retention.py`
deletes. `_read.py` finds the checkpoint to load, and reads boxes of its tensors, by `_recipes.py` under other names.
`_background.py` saves in a thread; `_hosts.py` has what a save asks of its folder, of all ranks or of each
host. Names for listing and checking load without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import declared, exports

if TYPE_CHECKING:
    from accel.checkpoint._background import Saving
    from accel.checkpoint._merge import merge
    from accel.checkpoint._recipes import Recipe
    from accel.checkpoint._retention import Keep, best_checkpoint
    from accel.storage import HostFolder, RemotePath

__all__ = [
    "HostFolder",
    "Keep",
    "Recipe",
    "RemotePath",
    "Saving",
    "best_checkpoint",
    "merge",
]

__getattr__ = exports(__name__, declared())
__dir__ = __all__.copy
