# SPDX-License-Identifier: Apache-2.0
"""Sharding by torch's `fully_shard`. Begin with `_fully_shard.py`: each rank keeps its part of every parameter.

`_options.py` has the mesh and the dtypes, `_units.py` the modules that are gathered one at a time, `_whole.py` the
parameters that cannot be divided.
"""

from accel.parallel.axes.shard._fully_shard import SHARD as SHARD
