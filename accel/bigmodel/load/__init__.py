# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints into models: headers first, then bytes straight to where they belong.

Begin with `_load.py`, which finds the files at a path. `_files.py` reads their headers and their bytes, `_targets.py`
compares them with the model's tensors. The model changes last, once nothing can fail any more.
"""

from accel.bigmodel._arguments import dtype_of as weight_dtype, name_of as weight_dtype_name
from accel.bigmodel.load._files import FileWeights as FileWeights
from accel.bigmodel.load._load import (
    Rename as Rename,
    load_checkpoint_in_model as load_checkpoint_in_model,
    open_weights as open_weights,
)
from accel.bigmodel.load._targets import (
    Destination as Destination,
    DeviceChoice as DeviceChoice,
    Match as Match,
    Patterns as Patterns,
    TensorFacts as TensorFacts,
    expert_recipes as expert_recipes,
    find_destinations as find_destinations,
    match as match,
    refusal as refusal,
)

__all__ = [
    "Destination",
    "DeviceChoice",
    "FileWeights",
    "Match",
    "Patterns",
    "Rename",
    "TensorFacts",
    "expert_recipes",
    "find_destinations",
    "load_checkpoint_in_model",
    "match",
    "open_weights",
    "refusal",
    "weight_dtype",
    "weight_dtype_name",
]
