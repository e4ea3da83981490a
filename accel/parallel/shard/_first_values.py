# SPDX-License-Identifier: Apache-2.0
"""Values that a model begins with: those of a stage's first rank on all of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from accel.comm import Comm, adopt, broadcast_flat
from accel.context import DistContext
from accel.tensors import is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def begin_alike(ctx: DistContext, stage: Comm, mesh: DeviceMesh, tensors: Iterable[torch.Tensor]) -> None:
    """Give the ranks of a stage its first rank's values; of a DTensor, those of the first with the same local part.

    A collective of one message for each tensor, which needs no memory for a second copy.

    Args:
        ctx: the context.
        stage: handle of the ranks of this rank's pipeline stage.
        mesh: of the ranks with the same parameters.
        tensors: of a model, in the same order on every rank of the stage; changed in place.
    """
    along = [adopt(mesh.get_group(dim), ctx.device) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    for tensor in tensors:
        if is_dtensor(tensor):
            part = local_part(tensor)
            for comm in along:
                broadcast_flat(comm, part, source=0)
        else:
            broadcast_flat(stage, tensor.detach(), source=0)
