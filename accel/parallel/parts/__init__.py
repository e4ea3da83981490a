# SPDX-License-Identifier: Apache-2.0
"""Parts: a rank's rows of a tensor, which report the shape of the whole.

Begin with `_layout.py`, which is pure arithmetic: a layout is a dimension and the cut of its rows, a row of segments
of (length, ways), repeated. Rank r of n holds piece `r * ways // n` of each segment. `_part.py` has the tensor, and
how plain tensors enter a region of parts and how a region ends. `_rules.py` has the table: each function of torch has
a rule in a file of its family, and a function without one raises `NoRuleError` with its name. The law of every rule:
a rank's rows of what a function makes of the whole are what its rule makes of the rank's rows. `_local_map.py` calls
functions without a rule as users declare. `_nested.py` has parts of two axes, `_region.py` modules that torch compiles.
"""

from accel.parallel.parts._layout import (
    NoRuleError as NoRuleError,
    RowCut as RowCut,
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
from accel.parallel.parts._region import (
    PartRegion as PartRegion,
    PartsInGraph as PartsInGraph,
)
