# SPDX-License-Identifier: Apache-2.0
"""The rule of a collective along another axis: ranks exchange the rows that each holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accel.comm import Passage, passed
from accel.parallel.parts._elementwise import same
from accel.parallel.parts._layout import no_rule
from accel.parallel.parts._part import Args, Named, make, part_of, plain_of

_OF_ELEMENTS = ("copied", "summed")


def exchanged_rows(func: Any, args: Args, kwargs: Named) -> Tensor:
    """A collective of ranks that hold the same rows of a part, along a dimension that the part does not divide."""
    part = part_of(func, args)
    by: Passage = args[1]
    if part.division is not None and by.kind not in _OF_ELEMENTS and by.dim % part.dim() == part.division.dim:
        raise no_rule(f"{by.kind} along the divided dimension")
    return make(passed(plain_of(part), by, args[2]), part.division, part.ranks)


RULES = {"passed": exchanged_rows, "weighted": same}
