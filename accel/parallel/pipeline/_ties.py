# SPDX-License-Identifier: Apache-2.0
"""Tied parameters of several stages: their gradients are summed, so that every copy takes the same step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from accel.comm import Comm, adopt, all_reduce_flat, group_of_rows
from accel.context import DistContext
from accel.parallel.pipeline._placement import Layout
from accel.tensors import local_part
from accel.topology import rank_rows

_COPY = "accel_tied_copy"


class Tie(NamedTuple):
    """A parameter of which this rank and others have a copy.

    Attributes:
        name: of this rank's copy.
        comm: handle of the ranks with a copy.
    """

    name: str
    comm: Comm


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(each) for each in names.values() if len(each) > 1)


def holders(names: Sequence[str], stages: Sequence[Sequence[str]], owners: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks along the pipeline that have a tied parameter. Pure.

    Args:
        names: of the parameter.
        stages: paths of the modules of each stage.
        owners: rank of each stage.
    """
    return tuple(sorted({owners[stage_of(name, stages)] for name in names}))


def stage_of(name: str, stages: Sequence[Sequence[str]]) -> int:
    """Return the stage that has a parameter. Pure."""
    return next(at for at, paths in enumerate(stages) if name.startswith(tuple(f"{path}." for path in paths)))


def open_ties(
    ctx: DistContext,
    model: nn.Module,
    names: Sequence[Sequence[str]],
    stages: Sequence[Sequence[str]],
    layout: Layout,
) -> tuple[Tie, ...]:
    """Open a group for each set of ranks with copies of a parameter. A collective where there are such.

    Marks the copies of higher ranks, which norms leave out.

    Args:
        ctx: the context.
        model: with the modules of this rank.
        names: of each tied parameter.
        stages: paths of the modules of each stage.
        layout: of the pipeline.
    """
    here = ctx.axis("pp").rank
    live = dict(model.named_parameters(remove_duplicate=False))
    found: list[Tie] = []
    for each in names:
        ranks = holders(each, stages, layout.owners)
        if len(ranks) < 2:
            continue
        rows = [tuple(row[at] for at in ranks) for row in rank_rows(ctx.axes, "pp")]
        group = group_of_rows(ctx.comm, rows, "tied", ctx.timeout_s)
        if here not in ranks or group is None:
            continue
        own = next(name for name in each if name in live)
        found.append(Tie(own, adopt(group, ctx.device)))
        if here != ranks[0]:
            setattr(live[own], _COPY, True)
    return tuple(found)


def is_tied_copy(parameter: torch.Tensor) -> bool:
    """Return whether a lower rank along the pipeline has the same parameter."""
    return getattr(parameter, _COPY, False)


def sum_tied_gradients(model: nn.Module, ties: Sequence[Tie], before: Mapping[str, torch.Tensor]) -> None:
    """Sum the gradients of tied parameters over the ranks that have a copy. A collective of these ranks.

    Args:
        model: pipelined.
        ties: of this rank.
        before: gradients of ties that an earlier call of this window has summed, by name; added afterwards.
    """
    for tie in ties:
        parameter = model.get_parameter(tie.name)
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        part = local_part(parameter.grad)
        _ = part.copy_(all_reduce_flat(tie.comm, part.contiguous(), "sum").view_as(part))
        if tie.name in before:
            _ = part.add_(local_part(before[tie.name]))


def take_summed(model: nn.Module, ties: Sequence[Tie]) -> dict[str, torch.Tensor]:
    """Take away gradients of tied parameters that are sums already, and return them by name. Mutates `.grad`."""
    found: dict[str, torch.Tensor] = {}
    for tie in ties:
        parameter = model.get_parameter(tie.name)
        if parameter.grad is not None:
            found[tie.name] = parameter.grad
            parameter.grad = None
    return found
