# SPDX-License-Identifier: Apache-2.0
"""Models as their authors write them, each with its batches and its loss, for laws over "any model".

Sizes are tiny: a forward and a backward in float64 take some milliseconds. `Handwritten.tags` names traits that a test
selects by; `TAGS` explains them.
"""

from ._entry import LENGTH, TAGS, WIDTH, WORDS, Batch, Handwritten, tensors_of
from .decoders import DECODERS
from .encoders import ENCODERS
from .further_manners import FURTHER_MANNERS
from .manners import MANNERS
from .other_decoders import OTHER_DECODERS
from .other_manners import OTHER_MANNERS
from .repositories import REPOSITORIES
from .towers import TOWERS
from .vision import VISION

__all__ = ["LENGTH", "MODELS", "TAGS", "WIDTH", "WORDS", "Batch", "Handwritten", "named", "tensors_of"]

MODELS: tuple[Handwritten, ...] = (
    *DECODERS,
    *OTHER_DECODERS,
    *ENCODERS,
    *TOWERS,
    *VISION,
    *MANNERS,
    *OTHER_MANNERS,
    *FURTHER_MANNERS,
    *REPOSITORIES,
)


def named(*names: str) -> list[Handwritten]:
    """The entries of some names, in their order."""
    by_name = {each.name: each for each in MODELS}
    return [by_name[name] for name in names]
