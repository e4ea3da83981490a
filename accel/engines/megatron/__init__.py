# SPDX-License-Identifier: Apache-2.0
"""Megatron-core: a context on its parallel state, and its model and optimizer as items of a checkpoint.

Begin with `_context.py`, which describes Megatron's groups as one mesh. `_items.py` makes items of a model and of an
optimizer, with tensors by global name (`_sharded.py`). Megatron prepares, schedules and steps its own model; batches,
collectives, checkpoints and launches are accel's. Names resolve on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import declared, exports

if TYPE_CHECKING:
    from accel.engines.megatron._context import (
        RankMesh,
        from_megatron,
        megatron_mesh,
        mesh_of_groups,
    )
    from accel.engines.megatron._items import megatron_items

__all__ = [
    "RankMesh",
    "from_megatron",
    "megatron_items",
    "megatron_mesh",
    "mesh_of_groups",
]

__getattr__ = exports(__name__, declared())
__dir__ = __all__.copy
