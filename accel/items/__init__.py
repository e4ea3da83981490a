# SPDX-License-Identifier: Apache-2.0
"""The items of a run: how modules, optimizers, stateful objects and values are saved, compared and restored.

Begin with `_kinds.py`, the table of kinds: each is one `ItemHandler` (`_source.py`) in a file of its own, such as
`_stateful.py`. `_saving.py` captures live items as the content of a checkpoint; `_loading.py` compares stored items
with live ones, reads, and applies. `_bases.py` has partly frozen models, `_rng.py` random streams. `_models.py` writes
for other libraries, from whole tensors (`_whole.py`); `foreign/` reads theirs.
"""

from accel.items._folder_files import Folder as Folder
from accel.items._kinds import (
    Part as Part,
    TrainableOnly as TrainableOnly,
    check_mapping as check_mapping,
    kind_of as kind_of,
)
from accel.items._loading import Loaded as Loaded, load_newest as load_newest, load_state as load_state
from accel.items._models import save as save, save_model as save_model
from accel.items._module import clean_name as clean_name, reshard as reshard
from accel.items._packed_state import is_zero as is_zero
from accel.items._saving import save_state as save_state
from accel.items._source import LoadOptions as LoadOptions, Stored as Stored
from accel.items._whole import get_state_dict as get_state_dict
from accel.items.foreign import (
    export_dcp as export_dcp,
    import_accelerate as import_accelerate,
    import_dcp as import_dcp,
    load_accelerate_state as load_accelerate_state,
)
