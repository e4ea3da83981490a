# SPDX-License-Identifier: Apache-2.0
"""Post-training: losses as sums with the weight of `accel.backward`, log-probabilities, and packed rows of tokens.

Imported by name: `from accel import post_training`. Begin with `_losses.py`: how tokens and sequences are averaged, and
losses of pairs. `_policy.py` has policy gradients and their advantages, `_packing.py` packs rows of tokens,
`_logprobs.py` scores them, and `_reference.py` has the model without its adapters.
"""

from accel.post_training._logprobs import token_logprobs
from accel.post_training._losses import (
    LossSum,
    PairLoss,
    dpo_loss,
    loss_weight,
    reward_loss,
    sequence_sums,
    weighted_sum,
)
from accel.post_training._packing import PackedRows, PackedTokens, TokenRow, pack
from accel.post_training._policy import (
    PolicyLoss,
    gae,
    group_advantages,
    policy_loss,
    value_loss,
    whiten,
)
from accel.post_training._reference import reference

__all__ = [
    "LossSum",
    "PackedRows",
    "PackedTokens",
    "PairLoss",
    "PolicyLoss",
    "TokenRow",
    "dpo_loss",
    "gae",
    "group_advantages",
    "loss_weight",
    "pack",
    "policy_loss",
    "reference",
    "reward_loss",
    "sequence_sums",
    "token_logprobs",
    "value_loss",
    "weighted_sum",
    "whiten",
]


def __dir__() -> list[str]:
    return __all__
