# SPDX-License-Identifier: Apache-2.0
"""Axes and plans of a mesh of ranks, as plain values. Free of torch."""

from accel.topology._axes import (
    AXES as AXES,
    FACTORS as FACTORS,
    MESH_TEXT as MESH_TEXT,
    Axes as Axes,
    coordinates as coordinates,
    fit_axes as fit_axes,
    mesh_sizes as mesh_sizes,
    rank_rows as rank_rows,
)
from accel.topology._plan import (
    ContextMethod as ContextMethod,
    Plan as Plan,
    TensorStyle as TensorStyle,
    WireDtype as WireDtype,
)
from accel.topology._position import (
    AXIS_NAMES as AXIS_NAMES,
    DATA_DIMS as DATA_DIMS,
    SHARED_DIMS as SHARED_DIMS,
    STRATEGY_DIMENSION as STRATEGY_DIMENSION,
    Axis as Axis,
    Dimension as Dimension,
    MeshPosition as MeshPosition,
    axes_position as axes_position,
    dimension_of as dimension_of,
    mesh_position as mesh_position,
    without_mesh as without_mesh,
)
