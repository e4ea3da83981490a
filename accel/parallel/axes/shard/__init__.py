# SPDX-License-Identifier: Apache-2.0
"""Sharding by torch's `fully_shard`: meshes, units, and how each rank gets its part."""

from accel.parallel.axes.shard._fully_shard import SHARD as SHARD
