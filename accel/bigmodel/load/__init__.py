# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints into models: headers first, then bytes straight to where they belong."""

from accel.bigmodel.load._experts import expert_recipes as expert_recipes
from accel.bigmodel.load._load import load_checkpoint_in_model as load_checkpoint_in_model
from accel.bigmodel.load._match import Patterns as Patterns
from accel.bigmodel.load._open import Rename as Rename, open_weights as open_weights
