# SPDX-License-Identifier: Apache-2.0
"""`split_sequence`: a rank's positions of a batch of sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from accel.context import DistContext, context_first
from accel.errors import ConfigError, DataError, did_you_mean
from accel.parallel.context._notes import note_cut
from accel.parallel.context._zigzag import places

_POSITIONS = "position_ids"
_LABELS = ("labels",)


@context_first
def split_sequence(
    ctx: DistContext,
    batch: Mapping[str, Tensor],
    *,
    dim: int = 1,
    shift: Sequence[str] = _LABELS,
    ignore: float = -100,
    pad: Mapping[str, float] | None = None,
    multiple_of: int = 1,
) -> dict[str, Tensor]:
    """Return this rank's positions of a batch of sequences, for a model that uses `context_attention`.

    Labels are shifted before the sequence is cut, since the next token of a part's last position lies on another rank:
    the model's output at a position is to be compared with the label there. Without an axis cp all positions stay, and
    labels are shifted all the same. No communication.

    Args:
        ctx: the context.
        batch: tensors by name, [batch, length, ...] with `dim=1`; alike on ranks that share samples.
        dim: dimension of the positions.
        shift: names of tensors whose value at a position is to be predicted from the one before. "labels" may be
            missing; nothing is shifted with `()`.
        ignore: value for the last position, which has no next one, and for padding, in the tensors of `shift`.
        pad: values by name that fill up the other tensors at the end, to the next length that can be cut. Under a full
            mask, number padding as a document of its own. None for no padding.
        multiple_of: number that divides the length of a rank's part: the size of tp under sequence parallelism.

    Returns:
        The parts by name, and "position_ids", int64 of shape [batch, own], unless the batch has some, as of packed
        documents.

    Raises:
        DataError: a length that cannot be cut, or tensors of different lengths.
        ConfigError: names that the batch does not have, or a tensor without a value of padding.

    Example:
        >>> part = accel.split_sequence(ctx, {"ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])})
        >>> part["labels"], part["position_ids"]
        (tensor([[   6,    7, -100]]), tensor([[0, 1, 2]]))
    """
    if type(multiple_of) is not int or multiple_of < 1:
        raise ConfigError(
            "not a divisor", expected="1 or more", got=repr(multiple_of), where="split_sequence, multiple_of="
        )
    length = _check(batch, dim, shift, pad)
    rank, size = ctx.axis("cp")
    multiple = size * math.lcm(2, multiple_of) if size > 1 else multiple_of
    missing = -length % multiple
    if missing and pad is None:
        raise DataError(
            "a sequence that ranks cannot share equally",
            expected=f"a multiple of {multiple} positions",
            got=str(length),
            where=f"split_sequence, cp={size}",
            fix=f"Pad it to {length + missing}, or let pad={{name: value}} do it.",
        )
    whole = dict(batch)
    if _POSITIONS not in whole:
        whole[_POSITIONS] = _positions(next(iter(batch.values())), dim, length + missing)
    for name in shift:
        if name in whole:
            whole[name] = _shifted(whole[name], dim, ignore)
    if missing:
        values = {**dict.fromkeys(shift, ignore), **(pad or {})}
        filled = {name: _padded(each, dim, missing, values[name]) for name, each in whole.items() if name in batch}
        whole.update(filled)
    if size > 1:
        note_cut(ctx)
        whole = {name: _own(each, dim, rank, size) for name, each in whole.items()}
    return whole


@context_first
def sequence_positions(ctx: DistContext, length: int) -> Tensor:
    """Return the places of this rank's positions in a sequence, in the order of `split_sequence`. No communication.

    For data that are cut before a batch is made, as where no rank can hold whole sequences.

    Args:
        ctx: the context.
        length: of the whole sequence, a multiple of twice the size of cp.

    Returns:
        int64 of shape [own], on the CPU.

    Raises:
        DataError: a length that cannot be cut.
    """
    rank, size = ctx.axis("cp")
    if length < 0 or (size > 1 and length % (2 * size)):
        raise DataError(
            "a sequence that ranks cannot share equally",
            expected=f"a multiple of {2 * size} positions",
            got=str(length),
            where=f"sequence_positions, cp={size}",
        )
    if size == 1:
        return torch.arange(length)
    note_cut(ctx)
    return torch.cat([torch.arange(run.start, run.stop) for run in places(length, rank, size)])


def _check(batch: Mapping[str, Tensor], dim: int, shift: Sequence[str], pad: Mapping[str, float] | None) -> int:
    """Return the length of the sequences; raise for names and shapes that do not fit."""
    if not isinstance(batch, Mapping) or not batch:  # pyright: ignore[reportUnnecessaryIsInstance] - users pass tensors
        raise ConfigError("not a batch", expected="tensors by name", got=type(batch).__name__, where="split_sequence")
    lengths: dict[str, int] = {}
    for name, each in batch.items():
        if not isinstance(each, Tensor) or not -each.ndim <= dim < each.ndim:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = f"shape {list(each.shape)}" if isinstance(each, Tensor) else type(each).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                "nothing that has positions",
                expected=f"a tensor with a dimension {dim}",
                got=got,
                where=f"split_sequence, {name}",
                fix="Leave it out of the mapping.",
            )
        lengths[name] = each.shape[dim]
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError("sequences of different lengths", expected="one length", got=got, where="split_sequence")
    _check_names(batch, () if tuple(shift) == _LABELS else shift, "shift=")
    if pad is not None:
        _check_names(batch, pad, "pad=")
        if unfilled := [name for name in batch if name not in pad and name not in shift]:
            raise ConfigError(
                "no value of padding",
                expected="one for each tensor that is not shifted",
                got=f"none for {', '.join(unfilled)}",
                where="split_sequence, pad=",
            )
    return next(iter(lengths.values()))


def _check_names(batch: Mapping[str, Tensor], names: Sequence[str] | Mapping[str, float], where: str) -> None:
    for name in names:
        if name not in batch:
            fix = did_you_mean(name, list(batch)) or f"The batch has {', '.join(batch)}."
            raise ConfigError("no such tensor", got=repr(name), where=f"split_sequence, {where}", fix=fix)


def _positions(like: Tensor, dim: int, length: int) -> Tensor:
    before = like.shape[: dim % like.ndim]
    return torch.arange(length, device=like.device).expand(*before, length)


def _shifted(x: Tensor, dim: int, ignore: float) -> Tensor:
    if not x.shape[dim]:
        return x
    following = x.narrow(dim, 1, x.shape[dim] - 1)
    return _padded(following, dim, 1, ignore)


def _padded(x: Tensor, dim: int, count: int, value: float) -> Tensor:
    shape = list(x.shape)
    shape[dim] = count
    return torch.cat([x, x.new_full(shape, value)], dim)


def _own(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    runs = places(x.shape[dim], rank, size)
    return torch.cat([x.narrow(dim, run.start, len(run)) for run in runs], dim)
