# SPDX-License-Identifier: Apache-2.0
"""Whether a state is worth saving: inf or NaN in it would outlive the run that made them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from accel.checkpoint import Content, local_part
from accel.errors import NonFiniteError
from accel.optim import norms

_SHOWN = 3


def check_finite(content: Content) -> None:
    """Raise unless what a checkpoint would hold is finite. No communication; one pass over the tensors.

    Parameters and optimizer state must be finite. Other tensors may hold -inf, which attention masks are made of.

    Raises:
        NonFiniteError: the tensors that are not, by name.
    """
    strict = {**content.shared, **content.own}
    bad = sorted([*_nonfinite(strict, masks=False), *_nonfinite({**content.main, **content.loose}, masks=True)])
    if not bad:
        return
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    raise NonFiniteError(
        "the state is not finite, so nothing was saved",
        expected="no inf and no NaN",
        got=f"{len(bad)} tensors with some",
        where=", ".join(bad[:_SHOWN]) + more,
        fix="Go on from the newest checkpoint, or pass allow_non_finite=True to keep this state, as for a post-mortem.",
    )


def _nonfinite(tensors: Mapping[str, torch.Tensor], *, masks: bool) -> Iterator[str]:
    """The names of tensors that hold what they may not."""
    kinds: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, tensor in ((name, local_part(tensor)) for name, tensor in tensors.items()):
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # nothing is computed in fp8
            kinds.setdefault((wide.device, wide.dtype), {})[name] = wide
    for same in kinds.values():
        for (name, tensor), finite in zip(same.items(), _surely_finite(list(same.values())), strict=True):
            if not finite and not _allowed(tensor, masks=masks):
                yield name


def _surely_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether the norm of each is finite: one fast pass, which finds inf and NaN, and also what is merely huge."""
    flags = torch.stack([norm.isfinite() for norm in norms(tensors)])
    return [bool(flag) for flag in flags.cpu()]


def _allowed(tensor: torch.Tensor, *, masks: bool) -> bool:
    fine = torch.isfinite(tensor)
    if masks and not tensor.is_complex():
        fine |= tensor == -torch.inf
    return bool(fine.all())
