# SPDX-License-Identifier: Apache-2.0
"""Parts: a rank's rows of a tensor, which report the shape of the whole.

Begin with `_layout.py`, pure arithmetic: a layout is a dimension and the cut of its rows, repeated segments of (length,
ways); rank r of n holds piece `r * ways // n` of each. `_part.py` has the tensor, and how tensors enter and leave a
region of parts. `_rules.py` has the table of torch's functions; one without a rule raises `NoRuleError`. The law: a
rank's rows of what a function makes of the whole are what its rule makes of the rank's rows. `_local_map.py` calls
functions as users declare. `_nested.py` has parts of two axes, `_region.py` modules that torch compiles,
and buffers.
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
    keep_buffers_whole as keep_buffers_whole,
    refuse_hidden as refuse_hidden,
)
