# SPDX-License-Identifier: Apache-2.0
"""Parts: a rank's rows of a tensor, which report the shape of the whole.

A model's forward computes with parts as it does with whole tensors: views, splits, einsum and attention translate the
sizes that it writes into those of this rank. No attribute of a module changes, and no name is read. Two ideas carry it:

- **A layout** is a dimension and the cut of its rows: a row of segments of (length, ways), repeated. Rank r of n holds
  piece `r * ways // n` of each segment. Fused projections, groups of heads and keys that several ranks share are all
  layouts. See `_layout.py`, which is arithmetic alone.
- **Inside and outside.** A plain tensor has a complete gradient. It *enters* a region of parts by `copied`, whose
  backward sums over ranks, and is cut to the rows of the part that it meets. A region *ends* where the divided
  dimension is contracted or summed: the result is summed over ranks, and is plain again. A part whose division is None
  is alike on all ranks, but its gradient is a summand. See `_part.py`.

Each function of torch has a rule, in a file of its family; a function without one raises `NoRuleError` with its name.
`_rules.py` has the table. The law of every rule: a rank's rows of what a function makes of the whole are what its rule
makes of the rank's rows.
"""

from accel.parallel.parts._layout import (
    Cut as Cut,
    NoRuleError as NoRuleError,
    RowLayout as RowLayout,
    rows_of as rows_of,
)
from accel.parallel.parts._part import (
    PartTensor as PartTensor,
    Ranks as Ranks,
    leave as leave,
    make as make,
    plain_of as plain_of,
)
