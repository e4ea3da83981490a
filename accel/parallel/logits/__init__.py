# SPDX-License-Identifier: Apache-2.0
"""Losses of a linear head: without the logits of all rows, and of classes that ranks along tp divide.

Begin with `_head_chunks.py`, which computes a loss by chunks of rows. `linear_cross_entropy` of `_head_loss.py` takes
the head's input. In a model as it is, `_deferred.py` lets the head return a placeholder (`_logits.py`) that keeps the
call (`_head_calls.py`) until a loss asks for it. `_vocabulary.py` has scores and losses of logits that are there.
"""

from accel.parallel.logits._head_loss import linear_cross_entropy as linear_cross_entropy
from accel.parallel.logits._vocabulary import (
    check_logits as check_logits,
    check_split as check_split,
    divided_words as divided_words,
    own_words as own_words,
    row_scores as row_scores,
    vocab_cross_entropy as vocab_cross_entropy,
)
