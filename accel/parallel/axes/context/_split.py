# SPDX-License-Identifier: Apache-2.0
"""`split_sequence`: the positions of a sequence that each rank holds, and notes of the method in use."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from accel.comm import Call, exchange_values
from accel.context import DistContext, context_first
from accel.errors import ConfigError, DataError
from accel.errors._checks import check_count, did_you_mean
from accel.parallel.axes.context._kernels import allow_in_graphs
from accel.topology import Axis, ContextMethod, dimension_of

Halves = tuple[int, int]
BOTH: Halves = (0, 2)
FIRST: Halves = (0, 1)
SECOND: Halves = (1, 2)


class RingBlock(NamedTuple):
    """Queries and keys that a rank multiplies in one step of the ring."""

    queries: Halves  # halves of this rank's positions, from and to
    keys: Halves  # halves of the positions of the rank that sent these keys, from and to
    causal: bool  # whether a query only sees the keys up to its place in the block; else all of them


def pieces(rank: int, size: int) -> tuple[int, int]:
    """Return the two pieces of a rank, of the `2 * size` that a sequence is cut into."""
    return rank, 2 * size - 1 - rank


def places(length: int, rank: int, size: int) -> tuple[range, range]:
    """Return a rank's places in a sequence, a multiple of `2 * size` long, as two runs; a single rank has all."""
    each = length // (2 * size)
    early, late = pieces(rank, size)
    return range(early * each, (early + 1) * each), range(late * each, (late + 1) * each)


def natural_order(size: int) -> Sequence[int]:
    """Return the order that sorts the halves of all ranks, listed by rank, by their places in the sequence."""
    return sorted(range(2 * size), key=rank_order(size).__getitem__)


def rank_order(size: int) -> Sequence[int]:
    """Return the order that lists the pieces of a sequence by the rank that holds them: undoes `natural_order`."""
    return [piece for rank in range(size) for piece in pieces(rank, size)]


def ring_block(rank: int, source: int, size: int, *, causal: bool) -> RingBlock:
    """Return the work of a rank with the keys of another. Causal: over all sources, it is equal on all ranks."""
    if not causal or source == rank:
        return RingBlock(BOTH, BOTH, causal)
    if source < rank:  # its early half precedes both of ours, its late half follows both
        return RingBlock(BOTH, FIRST, causal=False)
    # our early half precedes both of its halves, our late half follows them
    return RingBlock(SECOND, BOTH, causal=False)


def seen_keys(queries: range, length: int, window: int | None, *, causal: bool) -> range:
    """Return the places of the keys that a run of queries sees, in a sequence of `length` keys."""
    if window is None:
        return range(queries.stop if causal else length)
    last = queries.stop if causal else min(length, queries.stop + window - 1)
    return range(max(0, queries.start - window + 1), last)


def near_keys(rank: int, source: int, size: int, length: int, window: int, *, causal: bool) -> list[range]:
    """Return the places of another rank's keys that a rank's queries see, a run in each of its pieces."""
    seen = [seen_keys(own, length, window, causal=causal) for own in places(length, rank, size)]
    runs: list[range] = []
    for piece in places(length, source, size):
        inside = [range(max(each.start, piece.start), min(each.stop, piece.stop)) for each in seen]
        inside = [each for each in inside if each]
        first = min([each.start for each in inside] or [0])
        runs.append(range(first, max([each.stop for each in inside] or [first])))
    return runs


def sorted_positions(x: Tensor, dim: int, size: int) -> Tensor:
    """Return parts, each of two pieces along `dim`, that are concatenated by rank in the order of the sequence."""
    parts = x.chunk(2 * size, dim)
    return torch.cat([parts[at] for at in natural_order(size)], dim)


_METHOD = "context: method"
_ATTENDED = "context: attention ran"
_STAGES = "context: attention ran in some stage"
_CUT = "context: own positions of sequences that were cut"
_DIMS = "context: dimensions along which sequences were cut"
_USED = Call("context", "attention of stages", ordered=False)
_LENGTHS = 256  # that are remembered
_CHANNELS_FIRST = 2  # dimension of the positions in [batch, channels, length]


def plan_method(ctx: DistContext, method: ContextMethod) -> None:
    """Note the method of a plan. Mutates the context's handle."""
    ctx.comm.notes[_METHOD] = method


def planned_method(ctx: DistContext) -> ContextMethod | None:
    """Return the method of the plan of a prepared model; None without one."""
    return cast("ContextMethod | None", ctx.comm.notes.get(_METHOD))


def note_attention(ctx: DistContext) -> None:
    """Note that attention crossed the ranks along cp. Mutates the context's handle."""
    if _ATTENDED not in ctx.comm.notes:  # a graph of torch.compile changes nothing outside of a recomputed block
        ctx.comm.notes[_ATTENDED] = "yes"


def note_cut(ctx: DistContext, own: int) -> None:
    """Note that a loop knows its own positions, and their number. Mutates the context's handle."""
    before = [each for each in ctx.comm.notes.get(_CUT, "").split() if each != str(own)]
    ctx.comm.notes[_CUT] = " ".join([*before[1 - _LENGTHS :], str(own)])
    allow_in_graphs()


def is_cut(ctx: DistContext, own: int) -> bool:
    """Return whether sequences of so many own positions were cut."""
    return str(own) in ctx.comm.notes.get(_CUT, "").split()


def note_cut_dim(ctx: DistContext, dim: int) -> None:
    """Note that sequences were cut along a dimension. Mutates the context's handle."""
    known = ctx.comm.notes.get(_DIMS, "").split()
    if str(dim) not in known:
        ctx.comm.notes[_DIMS] = " ".join([*known, str(dim)])


def is_cut_along(ctx: DistContext, dim: int) -> bool:
    """Return whether sequences were cut along a dimension."""
    return str(dim) in ctx.comm.notes.get(_DIMS, "").split()


def is_part(ctx: DistContext, tensor: Tensor) -> bool:
    """Return whether `split_sequence` has returned a tensor. Copies and what is computed of it are not known."""
    return ctx.comm.marks.find(tensor, "cut") is not None


class ForwardState:
    """A state of the forward that runs, as a note of the context's handle."""

    def __init__(self, note: str) -> None:
        self._note = note

    @contextlib.contextmanager
    def begun(self, ctx: DistContext) -> Generator[None]:
        """Begin the state, for a block. Mutates the context's handle."""
        is_outermost = self._note not in ctx.comm.notes
        ctx.comm.notes[self._note] = "yes"
        try:
            yield
        finally:
            if is_outermost:
                del ctx.comm.notes[self._note]

    def holds(self, ctx: DistContext) -> bool:
        """Return whether a forward in the state runs."""
        return self._note in ctx.comm.notes


# Inputs have all positions, and attention only sees these.
ALL_POSITIONS = ForwardState("context: inputs of all positions")
# A prepared model computes with inputs of no sequence that was cut.
UNCUT_INPUTS = ForwardState("context: inputs that were not cut")
# Losses are of this rank's positions, as in a model of transformers.
OWN_LOSSES = ForwardState("context: losses of own positions")


def position_axis(ctx: DistContext) -> Axis:
    """Return this rank's index along cp, and the size; (0, 1) in a forward of `ALL_POSITIONS`."""
    return Axis(0, 1) if ALL_POSITIONS.holds(ctx) else ctx.axis("cp")


def check_context_used(ctx: DistContext) -> None:
    """Refuse a step on an axis cp that nothing has used: its ranks computed the same, or with their positions alone.

    Stages of a pipeline may have no attention, so their first step asks all ranks: a collective.
    """
    if not ctx.position.opened:
        return
    axes = {name: axis.size for name, axis in ctx.position.axes if dimension_of(name) == "context"}
    shared = ",".join(f"{name}={size}" for name, size in axes.items() if size > 1)
    if shared and ctx.axis("pp").size > 1 and _STAGES not in ctx.comm.notes:
        answers = exchange_values(ctx.comm, _USED, ctx.comm.notes.get(_ATTENDED, ""), str)
        ctx.comm.notes[_STAGES] = "yes"
        if any(answers):
            note_attention(ctx)
    if not shared or (_ATTENDED in ctx.comm.notes and _CUT in ctx.comm.notes):
        return
    if _CUT not in ctx.comm.notes:
        raise ConfigError(
            "ranks that share a sequence computed the same positions",
            expected=f"a loop that cuts its sequences along {shared}",
            got="none that were cut",
            where="optimizer_step, ctx.mesh",
            fix="Pass each batch through accel.parallel.split_sequence; where your data come cut already, "
            "take the positions from accel.parallel.sequence_positions. For context parallelism of your own: "
            "accel.replace(ctx, mesh=ctx.mesh).",
        )
    raise ConfigError(
        "ranks that share a sequence did not see each other's positions",
        expected=f"attention across {shared}",
        got="none",
        where="optimizer_step, ctx.mesh",
        fix="Call the prepared model, or accel.parallel.context_attention. For context parallelism of your own: "
        "accel.replace(ctx, mesh=ctx.mesh).",
    )


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

    Labels are shifted before the sequence is cut, since the next token of a part's last position is on another rank:
    the model's output at a position is to be compared with the label there. Without an axis cp all positions stay, and
    labels are shifted all the same. No communication.

    Args:
        ctx: the context.
        batch: tensors by name, [batch, length, ...] with `dim=1`; alike on ranks that share samples.
        dim: dimension of the positions.
        shift: names of tensors with values to predict from the position before. "labels" may be missing; nothing is
            shifted with `()`.
        ignore: value for the last position, which has no next one, and for padding, in the tensors of `shift`.
        pad: values by name that fill up the other tensors at the end, to the next length that can be cut. Under a full
            mask, number padding as a separate document. None for no padding.
        multiple_of: number that divides the length of a rank's part: the size of tp under sequence parallelism.

    Returns:
        The parts by name, and "position_ids", int64 of shape [batch, own], unless the batch has some, such as
        the positions of packed documents.

    Raises:
        DataError: a length that cannot be cut, or tensors of different lengths.
        ConfigError: names that the batch does not have, or a tensor without a value of padding.

    Examples:
        >>> ids = torch.tensor([[5, 6, 7]])
        >>> part = accel.parallel.split_sequence(ctx, {"ids": ids, "labels": ids})
        >>> part["labels"], part["position_ids"]
        (tensor([[   6,    7, -100]]), tensor([[0, 1, 2]]))
    """
    check_count(multiple_of, "the divisor is not valid", where="split_sequence, multiple_of=")
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
        whole |= {name: _padded(each, dim, missing, values[name]) for name, each in whole.items() if name in batch}
    if size > 1:
        note_cut(ctx, (length + missing) // size)
        for each in batch.values():
            note_cut_dim(ctx, dim % each.dim())
        whole = {name: _own(each, dim, rank, size) for name, each in whole.items()}
        for each in whole.values():
            ctx.comm.marks.put(each, "cut")
    return whole


@context_first
def sequence_positions(ctx: DistContext, length: int) -> Tensor:
    """Return the places of this rank's positions in a sequence, in the order of `split_sequence`. No communication.

    For data that are cut before a batch is made, as where no rank can hold whole sequences, along the dimension 1, or 2
    of [batch, channels, length]. Images that are cut along their columns need `split_sequence`.

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
    note_cut(ctx, length // size)
    note_cut_dim(ctx, _CHANNELS_FIRST)
    return torch.cat([torch.arange(run.start, run.stop) for run in places(length, rank, size)])


def _check(batch: Mapping[str, Tensor], dim: int, shift: Sequence[str], pad: Mapping[str, float] | None) -> int:
    """Return the length of the sequences; raise for names and shapes that do not fit."""
    if not isinstance(batch, Mapping) or not batch:  # pyright: ignore[reportUnnecessaryIsInstance] - users pass tensors
        raise ConfigError(
            "the batch does not map names to tensors",
            expected="tensors by name",
            got=type(batch).__name__,
            where="split_sequence",
        )
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


def own_positions(x: Tensor, rank: int, size: int, dim: int = 1) -> Tensor:
    """Return the own positions of a whole sequence that is filled up with zeros. No communication."""
    missing = -x.shape[dim] % (2 * size)
    return _own(_padded(x, dim, missing, 0) if missing else x, dim, rank, size)


def _shifted(x: Tensor, dim: int, ignore: float) -> Tensor:
    if not x.shape[dim]:
        return x
    return _padded(x.narrow(dim, 1, x.shape[dim] - 1), dim, 1, ignore)


def _padded(x: Tensor, dim: int, count: int, value: float) -> Tensor:
    shape = list(x.shape)
    shape[dim] = count
    return torch.cat([x, x.new_full(shape, value)], dim)


def _own(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    runs = places(x.shape[dim], rank, size)
    return torch.cat([x.narrow(dim, run.start, len(run)) for run in runs], dim)
