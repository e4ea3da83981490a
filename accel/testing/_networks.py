# SPDX-License-Identifier: Apache-2.0
"""Limits of the real backends, as tables: dtypes, reduce ops, layouts and kinds of messages.

Those of gloo were observed with torch 2.13; a test holds them against the local gloo. Those of nccl are in
`ProcessGroupNCCL.cpp`: its maps of dtypes and ops, `check_gpu_single_tensor` and `recvAnysource`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec
import torch
from torch import Tensor

from accel.testing._collectives import BITWISE, Reduction
from accel.testing._sites import SimulationError

Network = Literal["gloo", "nccl"]

_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_INTEGERS = frozenset({torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool})
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_SPARSE = (_FLOATS - {torch.float16}) | (_INTEGERS - {torch.bool})  # torch does not add the others
_LINEAR = frozenset({Reduction.SUM, Reduction.AVG})


class Limits(msgspec.Struct, frozen=True):
    """The limits of one backend.

    Attributes:
        moves: dtypes of collectives that move data; torch forwards most complex tensors as real ones.
        sends: dtypes of messages between two ranks; None for all.
        reduces: dtypes of sums.
        averages: dtypes of averages.
        bitwise: whether it has BAND, BOR and BXOR, of integers.
        complex_reductions: collectives that sum or average complex tensors, and do nothing else with them.
        dense: collectives that need contiguous tensors.
        strict_shapes: whether listed tensors need the shape of their source or target.
        any_source: whether a rank can receive from any rank.
        tags: whether messages carry tags.
    """

    moves: frozenset[torch.dtype]
    sends: frozenset[torch.dtype] | None
    reduces: frozenset[torch.dtype]
    averages: frozenset[torch.dtype]
    bitwise: bool
    complex_reductions: frozenset[str]
    dense: frozenset[str]
    strict_shapes: bool
    any_source: bool
    tags: bool


_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"})
_COLLECTIVES = _REDUCTIONS | {
    "broadcast", "all_gather", "all_gather_single", "all_gather_coalesced", "gather", "scatter", "all_to_all",
    "all_to_all_single",
}  # fmt: skip
_LIMITS: dict[Network, Limits] = {
    "gloo": Limits(
        moves=_FLOATS | _INTEGERS,
        sends=None,
        reduces=_FLOATS | _INTEGERS,
        averages=_FLOATS | {torch.complex64, torch.complex128},
        bitwise=True,
        complex_reductions=_REDUCTIONS,
        # The last three are refused by gloo. The others it reads and writes as if they were contiguous: wrong values.
        dense=frozenset(
            {"all_reduce", "reduce", "reduce_scatter", "broadcast", "scatter", "all_to_all_single", "send", "recv"}
        ),
        strict_shapes=True,
        any_source=True,
        tags=True,
    ),
    "nccl": Limits(
        moves=_FLOATS | _INTEGERS | _FLOAT8,
        sends=_FLOATS | _INTEGERS | _FLOAT8,
        reduces=_FLOATS | _INTEGERS,
        averages=(_FLOATS | _INTEGERS | _COMPLEX) - {torch.bool},
        bitwise=False,
        complex_reductions=frozenset({"all_reduce", "reduce"}),
        dense=_COLLECTIVES,
        strict_shapes=False,
        any_source=False,
        tags=False,
    ),
}


def check_reduction(network: Network | None, name: str, reduction: Reduction, dtype: torch.dtype) -> None:
    """Raise `SimulationError` for a reduction that the backend lacks; without one, for those that most backends lack.

    These are averages of integers, which gloo refuses and nccl rounds, and bitwise operations on floats.
    """
    whole = not (dtype.is_floating_point or dtype.is_complex)
    limits = _LIMITS[network] if network is not None else None
    if reduction in BITWISE:
        allowed = whole and (limits is None or (limits.bitwise and dtype in limits.reduces))
    elif limits is None:
        allowed = not (reduction is Reduction.AVG and whole)
    elif dtype.is_complex and not (name in limits.complex_reductions and reduction in _LINEAR):
        allowed = False
    elif reduction is Reduction.AVG:
        allowed = dtype in limits.averages
    else:
        allowed = dtype.is_complex or dtype in limits.reduces
    if not allowed:
        raise SimulationError(
            f"{reduction.value} of {dtype} is refused by {network or 'gloo and, or wrong with, nccl'}",
            where=name,
            fix="Cast the tensor, or choose another op.",
        )


def check_layouts(
    network: Network | None, name: str, reduction: Reduction | None, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    """Refuse sparse tensors, but for sums of one on all ranks, which gloo computes and nccl does not."""
    if not any(each.is_sparse for each in (*inputs, *outputs)):
        return
    is_sum = name == "all_reduce" and reduction is Reduction.SUM and len(inputs) == 1
    if network == "gloo" and is_sum and inputs[0].dtype not in _SPARSE:
        is_sum = inputs[0].coalesce().indices().shape[1] == 0  # without an entry there is nothing to add
    if network == "nccl" or not is_sum:
        raise SimulationError(
            f"{network or 'the simulated network'} does not carry sparse tensors here",
            expected="dense tensors, or for gloo all_reduce(SUM) of one sparse tensor of a dtype that torch adds",
            got=str(inputs[0].dtype),
            where=name,
            fix="Gather tensor.indices() and tensor.values(), or pass tensor.to_dense().",
        )


def check_tensors(network: Network | None, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Raise `SimulationError` for tensors that the backend does not take; without a backend, take all."""
    if network is None:
        return
    limits = _LIMITS[network]
    for tensor in (*inputs, *outputs):
        _check_dtype(limits, network, name, tensor.dtype)
        if name in limits.dense and not tensor.is_sparse and not tensor.is_contiguous():
            raise SimulationError(
                f"{network} needs contiguous tensors here",
                got=f"strides {tensor.stride()} for shape {tuple(tensor.shape)}",
                where=name,
                fix="Pass tensor.contiguous(), and copy the result back.",
            )
    if limits.strict_shapes:
        _check_shapes(network, name, inputs, outputs)


def check_message(network: Network | None, *, any_source: bool, tag: int) -> None:
    """Raise `SimulationError` for a message that the backend cannot address: from any rank, or with a tag."""
    if network is None:
        return
    limits = _LIMITS[network]
    if any_source and not limits.any_source:
        raise SimulationError(f"{network} does not receive from any rank", where="recv", fix="Name the source rank.")
    if tag and not limits.tags:
        raise SimulationError(
            f"{network} has no tags, and would take messages in order", got=f"tag {tag}", fix="Leave the tag out."
        )


def _check_dtype(limits: Limits, network: Network, name: str, dtype: torch.dtype) -> None:
    if name in ("send", "recv"):
        allowed: Collection[torch.dtype] | None = limits.sends
    elif dtype.is_complex and name in limits.complex_reductions:
        allowed = None
    else:
        allowed = limits.moves
    if allowed is not None and dtype not in allowed:
        known = ", ".join(sorted(str(each).removeprefix("torch.") for each in allowed))
        raise SimulationError(
            f"{network} does not carry {dtype}", expected=known, where=name, fix="Cast, or send a view as uint8."
        )


def _check_shapes(network: Network, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    wanted: Sequence[int] | None = None
    tensors = outputs
    match name:
        case "all_gather" | "gather":
            wanted = inputs[0].shape
        case "scatter" | "reduce_scatter":
            wanted, tensors = outputs[0].shape, inputs
        case "all_to_all":
            wanted, tensors = inputs[0].shape, (*inputs, *outputs)
        case _:
            return
    for number, tensor in enumerate(tensors):
        if tensor.shape != wanted:
            raise SimulationError(
                f"{network} needs tensors of one shape here",
                expected=str(list(wanted)),
                got=f"{list(tensor.shape)} at index {number}",
                where=name,
            )
