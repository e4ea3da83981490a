# SPDX-License-Identifier: Apache-2.0
"""Post-training: losses as sums with the weight of `accel.backward`, log-probabilities, and packed rows of tokens.

Imported by name: `from accel import post_training`. Begin with `_losses.py`: how tokens and sequences are averaged, and
losses of pairs. `_policy.py` has policy gradients and their advantages, `_packing.py` packs rows of tokens,
`_logprobs.py` scores them, also by the model without its adapters. `_samples.py` holds sequences that a model drew,
`_sample.py` asks servers for them, `_local.py` draws them, `_buffer.py` has the states of their prompts, `_publish.py`
sends weights.
"""

from accel.post_training import servers
from accel.post_training._buffer import FinishedPrompt, RolloutBuffer, RolloutGroup, StartedPrompt, group_samples
from accel.post_training._logprobs import reference, token_logprobs
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
from accel.post_training._publish import Published, publish
from accel.post_training._sample import (
    PendingSamples,
    SampleOptions,
    SampleRequest,
    SampleServer,
    sample,
    sample_later,
)
from accel.post_training._samples import SampleRow, Samples, Version, join_samples

__all__ = [
    "FinishedPrompt",
    "LossSum",
    "PackedRows",
    "PackedTokens",
    "PairLoss",
    "PendingSamples",
    "PolicyLoss",
    "Published",
    "RolloutBuffer",
    "RolloutGroup",
    "SampleOptions",
    "SampleRequest",
    "SampleRow",
    "SampleServer",
    "Samples",
    "StartedPrompt",
    "TokenRow",
    "Version",
    "dpo_loss",
    "gae",
    "group_advantages",
    "group_samples",
    "join_samples",
    "loss_weight",
    "pack",
    "policy_loss",
    "publish",
    "reference",
    "reward_loss",
    "sample",
    "sample_later",
    "sequence_sums",
    "servers",
    "token_logprobs",
    "value_loss",
    "weighted_sum",
    "whiten",
]
__dir__ = __all__.copy
