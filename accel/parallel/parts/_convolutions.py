# SPDX-License-Identifier: Apache-2.0
"""Rules of convolutions by channels, of pooling and of resizing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accel.parallel.parts._contractions import added, contracted_cut, undivided
from accel.parallel.parts._layout import RowLayout, even, no_rule, scaled
from accel.parallel.parts._part import (
    Args,
    Named,
    PartTensor,
    Ranks,
    entered,
    layout_of,
    make,
    name_of,
    named,
    own_rows,
    part_of,
    ranks_of,
    whole_shape,
)

_NAMES = "input weight bias stride padding dilation groups"
_TURNED = "input weight bias stride padding output_padding groups dilation"
_TRANSPOSED = {f"conv_transpose{dims}d" for dims in (1, 2, 3)}  # torch.compile knows no look into a name


def convolved(func: Any, args: Args, kwargs: Named) -> Any:
    """conv1d to conv3d and their transposes: channels are contracted, made, or kept by groups."""
    turns = name_of(func) in _TRANSPOSED
    given = named(_TURNED if turns else _NAMES, args, kwargs)
    ranks = ranks_of(args, kwargs)
    x, weight, bias = (given.pop(name, None) for name in ("input", "weight", "bias"))
    channels = x.dim() - weight.dim() + 1
    out, into = (1, 0) if turns else (0, 1)
    other = layout_of(weight)
    if other is not None and other.dim == out and given.get("groups", 1) == 1:  # each output needs all channels
        x = undivided(x, channels)
    own = layout_of(x)
    if own is not None and own.dim > channels and other is None and _is_of_one_row(weight, own.dim - channels, given):
        return make(func(x, *(entered(each, ranks) for each in (weight, bias)), **given), own, ranks)
    if own is not None and own.dim != channels:
        raise no_rule("of a part along another dimension than channels")
    if own is None and other is None:
        return make(func(*(entered(each, ranks) for each in (x, weight, bias)), **given), None, ranks)
    if given.get("groups", 1) > 1:
        if turns or (own is None and (other is None or other.dim != out)):
            raise no_rule("of groups")
        if own is None:  # each rank takes the channels of its groups
            own = RowLayout(channels, even(whole_shape(x)[channels], ranks.size))
            x = own_rows(x, channels, own.cut, ranks)
        return _by_groups(func, x, weight, bias, own, given, ranks)
    if own is not None or (other is not None and other.dim == into):
        need = contracted_cut([each.cut for each in (own, other) if each is not None], ranks)
        found = func(own_rows(x, channels, need, ranks), own_rows(weight, into, need, ranks), None, **given)
        total = ranks.total(found)
        if bias is None:
            return total
        column = bias.view(-1, *[1] * (weight.dim() - 2))
        return added(total, make(column, bias.division, ranks) if isinstance(bias, PartTensor) else column)
    assert other is not None
    if other.dim != out:
        raise no_rule("of a divided kernel")
    rows = None if bias is None else own_rows(bias, 0, other.cut, ranks)
    return make(func(entered(x, ranks), weight, rows, **given), RowLayout(channels, other.cut), ranks)


def _is_of_one_row(weight: Tensor, place: int, given: Named) -> bool:
    """Whether a kernel reads one row along a dimension of the image, for each row that it makes."""

    def along(name: str, default: int) -> Any:
        found = given.get(name, default)
        return found if isinstance(found, int | str) else tuple(found)[(place - 1) % len(found)]

    is_padded = along("padding", 0) not in (0, "valid", "same") or along("output_padding", 0) != 0
    return weight.shape[place + 1] == 1 and along("stride", 1) == 1 and not is_padded


def _by_groups(
    func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, own: RowLayout, given: dict[str, Any], ranks: Ranks
) -> Any:
    """Groups of channels, full on each rank: groups of one channel each, or groups of one segment."""
    groups = given["groups"]
    channels, outputs = own.cut.total, whole_shape(weight)[0]
    of_one = groups == channels
    is_even = len(own.cut.listed) == 1 and not own.cut.is_shared(ranks.size) and groups % ranks.size == 0
    if outputs % channels or not (of_one or is_even):
        raise no_rule(f"of {groups} groups, not whole on each rank")
    need = scaled(own.cut, outputs // channels)
    rows = None if bias is None else own_rows(bias, 0, need, ranks)
    own_groups = own.cut.local if of_one else groups // ranks.size
    found = func(x, own_rows(weight, 0, need, ranks), rows, **{**given, "groups": own_groups})
    return make(found, RowLayout(own.dim, need), ranks)


def pooled(func: Any, args: Args, kwargs: Named) -> Any:
    """Pooling and interpolation, separate for each channel."""
    part = part_of(func, args)
    if part.division is not None and part.division.dim != 1:
        raise no_rule("of a part along another dimension than channels")
    return make(func(*args, **kwargs), part.division, part.ranks)


RULES = {
    **{f"conv{'_transpose' * turns}{dims}d": convolved for turns in (0, 1) for dims in (1, 2, 3)},
    **{f"{kind}_pool{dims}d": pooled for kind in ("avg", "max", "adaptive_avg") for dims in (1, 2, 3)},
    **dict.fromkeys(("interpolate", "upsample", "boolean_dispatch"), pooled),
}
