# SPDX-License-Identifier: Apache-2.0
"""Axes of a mesh of ranks, as plain values, free of torch.

Begin with `_axes.py`. A text such as "dp=2,tp=4" becomes `Axes`, the sizes; these give rows of ranks and a rank's
`MeshPosition`; `Plan` is the user's choice of how a model is spread along them. `divide` gives blocks to stages.
"""

from accel.topology._axes import (
    AXES as AXES,
    AXIS_NAMES as AXIS_NAMES,
    DATA_DIMS as DATA_DIMS,
    FACTORS as FACTORS,
    MESH_TEXT as MESH_TEXT,
    SHARED_DIMS as SHARED_DIMS,
    STATE_BUCKET as STATE_BUCKET,
    STRATEGY_DIMENSION as STRATEGY_DIMENSION,
    Axes as Axes,
    Axis as Axis,
    Balance as Balance,
    ContextMethod as ContextMethod,
    Dimension as Dimension,
    ExpertStyle as ExpertStyle,
    HeadStyle as HeadStyle,
    MeshPosition as MeshPosition,
    Plan as Plan,
    TensorStyle as TensorStyle,
    WireDtype as WireDtype,
    axes_position as axes_position,
    axis_of as axis_of,
    coordinates as coordinates,
    data_dimension as data_dimension,
    dimension_of as dimension_of,
    fit_axes as fit_axes,
    has_unknown_axis as has_unknown_axis,
    mesh_position as mesh_position,
    mesh_sizes as mesh_sizes,
    names_of as names_of,
    rank_rows as rank_rows,
    without_mesh as without_mesh,
)
from accel.topology._division import (
    SCHEDULES_IN_A_V as SCHEDULES_IN_A_V,
    CallCosts as CallCosts,
    begins_of as begins_of,
    divide as divide,
    stages_of_rank as stages_of_rank,
)
