# SPDX-License-Identifier: Apache-2.0
"""What a tree holds, by `accel.tree.map_tensors`: its tensors in order, and its form without their values."""

from __future__ import annotations

import torch

import accel


def tensors_of(tree: object) -> list[torch.Tensor]:
    """Return the tensors of a tree, in order."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _ = accel.tree.map_tensors(keep, tree)
    return found


def form_of(tree: object) -> str:
    """Return containers, keys and other leaves as text, the same for trees that differ in tensors alone."""
    return repr(accel.tree.map_tensors(lambda _: torch.Tensor, tree))
