# SPDX-License-Identifier: Apache-2.0
"""Stages of a model before its first batch: its calls, recorded or in order, and where each stage begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from accel.errors import AccelError, PrepareError, StageError
from accel.errors._checks import did_you_mean
from accel.parallel._blocks import block_groups, blocks_of, outermost_groups
from accel.parallel._calls import units_of
from accel.parallel._micro_batches import MicroBatch
from accel.parallel._modules import named_modules
from accel.parallel._record import ForwardRecord, check_replaced, place_of, record_in_order
from accel.parallel._recorder import record_forward
from accel.parallel.axes.pipeline._cut import MOST_TWICE, call_costs, costs_of, cut_record, share_twice
from accel.topology import Balance, CallCosts, begins_of
from accel.tree._walk import Containers

Stages = Sequence[Sequence[str]]
FIX = "Pass accel.prepare(..., example=batch), a batch like this one, so that the stages hold what it needs."
_ORDERS = (
    "Pass accel.prepare(..., example=batch), a batch like this one, so that the stages hold what it needs. For a loop"
    " over the samples of a batch, compute on all of them at once, or make micro-batches of one sample, without"
    " example=: Plan(micro_batches=len(batch))."
)


class Planned(NamedTuple):
    """Stages of a model before its first batch."""

    units: tuple[str, ...]  # paths of the recorded modules
    # Path of the module at which each stage begins, and the number of its earlier calls; None without a record.
    starts: tuple[tuple[str, int], ...] | None
    holds: tuple[frozenset[str], ...]  # names of the parameters and buffers of each stage
    own: tuple[tuple[str, ...], ...]  # paths of the units that each stage calls


def recorded(model: nn.Module, units: Sequence[str], batch: MicroBatch, containers: Containers = ()) -> ForwardRecord:
    """Record the forward of a micro-batch. No communication; an error of the model's own is a `StageError`."""
    before = dict(model.named_parameters(remove_duplicate=False))
    try:
        record = record_forward(model, units, batch.args, batch.kwargs, containers=containers)
    except (AccelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise StageError(
            f"the forward fails where it is recorded: {type(error).__name__}: {str(error).strip()}",
            expected="a forward that runs on parameters without values",
            where=place_of(error, model),
            fix="Call torch.func.vmap within the forward of a block, which calls no other block."
            if isinstance(error, NotImplementedError)  # tensors of vmap have no memory
            else "Read values of hidden states by .item(), bool() or float(), or within the module that returns them.",
        ) from error
    check_replaced(model, before)
    return record


_SHARES = (0.6, 0.35, 0.2, 0.1, 0.05, 0.02, 0.0)  # of all parameters, from which a module is opened


def planned(
    ghost: nn.Module,
    batch: MicroBatch | None,
    stages: Stages | int,
    containers: Containers = (),
    balance: Balance | None = None,
    costs: Mapping[str, float] | None = None,
) -> Planned:
    """Cut a model by a record of an example, in the coarsest units that give enough calls. No communication.

    Args:
        ghost: the whole model, without memory.
        batch: the example; None for calls in the order of registration, where stages begin behind blocks.
        stages: paths of the modules at which stages begin, or the number of stages.
        containers: kinds of containers besides those that `accel.tree` knows.
        balance: cost of a call; "time" by default, and "blocks" without an example.
        costs: cost of modules by path, in the place of the balance's.

    Raises:
        PrepareError: the forward calls too few modules, or calls them in another order than `stages`, or `stages` names
            modules that the model does not have.
        StageError: a stage cannot play back what a module does, or would compute too much again.
        ConfigError: an unknown balance, or costs that are no numbers from 0, or of other modules.
    """
    count = stages if isinstance(stages, int) else len(stages)
    opened = frozenset(costs or ())
    if not isinstance(stages, int):
        _check_paths(ghost, stages)
        opened |= {path for each in stages for path in each}
    blocks = _block_paths(ghost)
    tried: list[tuple[str, ...]] = []

    def record(units: Sequence[str]) -> ForwardRecord:
        return record_in_order(ghost, units) if batch is None else recorded(ghost, units, batch, containers)

    def begins(record: ForwardRecord) -> tuple[int, ...]:
        if not isinstance(stages, int):
            return begins_at(record, stages)
        calls = call_costs(record, blocks)
        prices = [each.price for each in calls]
        whole = [at for at, each in enumerate(calls) if batch is None and each.path in blocks]
        if len(whole) >= stages:  # they begin behind blocks
            prices = [0.0 if not at or at - 1 in whole[:-1] else math.inf for at in range(len(calls))]
        of_calls = costs_of(calls, balance or ("blocks" if batch is None else "time"), costs)
        return begins_of(of_calls, stages, prices)

    for share in _SHARES:
        units = units_of(ghost, opened, share)
        if units not in tried:
            tried.append(units)
            if found := _planned(ghost, record, begins, count, share, opened, frozenset()):
                return found if batch is not None else found._replace(starts=None)
    raise PrepareError(
        "fewer calls of modules than stages",
        expected=f"at least {count}",
        got=", ".join(tried[-1]) or "none",
        where="prepare_model, plan=, stages",
        fix="Use fewer ranks along pp or fewer stages_per_rank, or put what the forward computes into more modules.",
    )


def recorded_costs(ghost: nn.Module, batch: MicroBatch) -> tuple[CallCosts, ...]:
    """Return the costs of the calls that `planned` divides at first."""
    return call_costs(recorded(ghost, units_of(ghost, (), _SHARES[0]), batch), _block_paths(ghost))


def _block_paths(ghost: nn.Module) -> set[str]:
    """The paths of a model's blocks, or else of the entries of its lists."""
    blocks = {each.path for each in blocks_of(ghost)}
    return blocks or {path for group in outermost_groups(block_groups(ghost)) for path, _ in group.entries}


def _check_paths(model: nn.Module, stages: Stages) -> None:
    """Raise `PrepareError` with all problems, unless each stage has modules, which the model has."""
    known = [name for name, _ in named_modules(model, every_path=True) if name]
    problems = [f"stage {at} has no module" for at, paths in enumerate(stages) if not paths]
    unknown = [path for paths in stages for path in paths if path not in known]
    problems += [f"{path!r} is no module of the model. {did_you_mean(path, known)}".rstrip() for path in unknown]
    if problems:
        listed = "\n  ".join(problems)
        raise PrepareError(
            f"the stages are not made of the model's modules:\n  {listed}\n",
            where="prepare_model, plan=, stages",
            fix="Name the modules at which each stage begins: Plan(stages=[[...], [...]]).",
        )


def _planned(
    ghost: nn.Module,
    record_in: Callable[[Sequence[str]], ForwardRecord],
    begins_in: Callable[[ForwardRecord], tuple[int, ...]],
    count: int,
    share: float,
    opened: frozenset[str],
    whole: frozenset[str],
) -> Planned | None:
    """Cut a model in units of a size, with some opened and some whole; None for too few calls."""
    units = units_of(ghost, opened, share, whole)
    record = record_in(units)
    if more := _updated(record) - whole:
        return _planned(ghost, record_in, begins_in, count, share, opened, whole | more)
    if len(record.calls) < count:
        return None
    begins = begins_in(record)
    if share_twice(record, begins) > MOST_TWICE:
        more = _read_outside(record, begins, opened)
        return _planned(ghost, record_in, begins_in, count, share, opened | more, whole)
    cut = cut_record(record, begins)
    own = tuple(tuple(dict.fromkeys(record.paths[each.begin : each.end])) for each in cut.stages)
    return Planned(units, starts_of(record, begins), tuple(each.holds for each in cut.stages), own)


def _updated(record: ForwardRecord) -> set[str]:
    """The modules with buffers that code between calls changes, such as a norm without parameters; `StageError` for
    buffers of the model itself."""
    found = {name.rpartition(".")[0] for name in record.updates}
    around = [path for path in found if not path or any(f"{unit}.".startswith(f"{path}.") for unit in record.units)]
    if around:
        raise StageError(
            "the forward changes a buffer by values that one stage has",
            expected="a change within a module that no other module's call is in",
            got=", ".join(name for name in record.updates if name.rpartition(".")[0] in around),
            where="prepare_model",
            fix="Put the change into a separate module, which one stage has.",
        )
    return found


def _read_outside(record: ForwardRecord, begins: Sequence[int], opened: Collection[str]) -> set[str]:
    """The units to open, as code outside reads their parameters; `StageError` without any to open."""
    found = {f"{unit}." for unit in record.units if any(name.startswith(f"{unit}.") for name in record.outside)} - set(
        opened
    )
    if found:
        return found
    most = max(range(len(record.between)), key=record.between.__getitem__)
    place = f"before the call of {record.paths[most]}" if most < len(record.paths) else "behind the last call"
    direct = sorted({name.rpartition(".")[0] or name for name in record.outside})
    raise StageError(
        "stages would compute too much again, as the forward does it outside of modules",
        expected=f"at most {MOST_TWICE:.0%} of its FLOPs outside of the modules {', '.join(record.units[:3])}...",
        got=f"{share_twice(record, begins):.0%}, {f'with {direct[0]}, ' if direct else ''}{place}",
        where="prepare_model",
        fix="Put that computation into a module with the parameters that it reads.",
    )


def begins_at(record: ForwardRecord, stages: Stages) -> tuple[int, ...]:
    """Return the first call of each stage by the modules at which it begins. Pure.

    A module that is first called in another stage than the one that names it is a `PrepareError`.
    """
    below = [tuple(f"{path}." for path in paths) for paths in stages]
    places = [[at for at, path in enumerate(record.paths) if f"{path}.".startswith(each)] for each in below]
    begins = (0, *(min(each, default=0) for each in places[1:]))
    first = {path: at for at, path in reversed(list(enumerate(record.paths)))}
    for at, (begin, end, found) in enumerate(zip(begins, [*begins[1:], len(record.calls)], places, strict=True)):
        if begin >= end or any(not begin <= first[record.paths[place]] < end for place in found):
            raise PrepareError(
                "the forward does not call the modules of the stages in their order",
                expected=f"{', '.join(stages[at])} of stage {at} behind earlier stages, before later ones",
                got=", ".join(record.paths[:20]),
                where="prepare_model, plan=, stages",
                fix="Name the modules at which each stage begins, in the order of their calls: "
                "Plan(stages=[[...], [...]]).",
            )
    return begins


def begins_by_holdings(record: ForwardRecord, holds: Sequence[frozenset[str]]) -> tuple[int, ...]:
    """Return the first call of each stage, by what the stages hold. Pure.

    Modules called behind modules of a later stage are a `StageError`.
    """
    begins = [0]
    for number, path in enumerate(record.paths):
        needed = {name for each in record.held for name in each.names if name.startswith(f"{path}.")}
        holders = [at for at, held in enumerate(holds) if needed <= held]
        later = [at for at in holders if at >= len(begins) - 1]
        if not later:
            raise StageError(
                "the forward calls modules in another order than the stages",
                expected="no module of a stage behind one of a later stage",
                got=f"{path} of stage {holders[0] if holders else 'none'} behind stage {len(begins) - 1}",
                fix=_ORDERS,
            )
        begins += [number] * (later[0] - len(begins) + 1)
    if len(begins) < len(holds):
        raise StageError("the last stage calls none of its modules", got=", ".join(record.paths[:20]), fix=_ORDERS)
    return tuple(begins)


def starts_of(record: ForwardRecord, begins: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """Return the path of the module at which each stage begins, and the number of its earlier calls. Pure."""
    return tuple((record.paths[at], record.paths[:at].count(record.paths[at])) for at in begins)
