# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints into models: headers first, then bytes straight to where they belong."""

from accel.bigmodel._dtypes import dtype_of as weight_dtype, name_of as weight_dtype_name
from accel.bigmodel.load._destinations import (
    Destination as Destination,
    DeviceChoice as DeviceChoice,
    find_destinations as find_destinations,
)
from accel.bigmodel.load._experts import expert_recipes as expert_recipes
from accel.bigmodel.load._load import load_checkpoint_in_model as load_checkpoint_in_model
from accel.bigmodel.load._match import (
    Facts as Facts,
    Match as Match,
    Patterns as Patterns,
    match as match,
    refusal as refusal,
)
from accel.bigmodel.load._open import Rename as Rename, open_weights as open_weights
from accel.bigmodel.load._weights import FileWeights as FileWeights

__all__ = [
    "Destination",
    "DeviceChoice",
    "Facts",
    "FileWeights",
    "Match",
    "Patterns",
    "Rename",
    "expert_recipes",
    "find_destinations",
    "load_checkpoint_in_model",
    "match",
    "open_weights",
    "refusal",
    "weight_dtype",
    "weight_dtype_name",
]
