# SPDX-License-Identifier: Apache-2.0
"""The items of a run: how modules, optimizers, stateful objects and values are saved, compared and restored.

Begin with `_kinds.py`, the table of kinds: each is one `ItemHandler` (`_source.py`), the shortest ones in `_values.py`.
`_saving.py` captures live items as the content of a checkpoint; `_loading.py` compares stored items with live ones,
reads, and applies. `_bases.py` has partly frozen models, `_rng.py` random streams. `_models.py` writes
for other libraries, from whole tensors (`_whole.py`); `foreign/` reads theirs.
"""

from accel.items._folder_files import Folder
from accel.items._kinds import Part, TrainableOnly
from accel.items._loading import Loaded
from accel.items._source import Stored
from accel.items.foreign import export_dcp, import_dcp, load_accelerate_state

__all__ = [
    "Folder",
    "Loaded",
    "Part",
    "Stored",
    "TrainableOnly",
    "export_dcp",
    "import_dcp",
    "load_accelerate_state",
]
__dir__ = __all__.copy
