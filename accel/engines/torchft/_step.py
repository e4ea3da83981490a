# SPDX-License-Identifier: Apache-2.0
"""One step of all replica groups that are alive, and the state that heals one that joins."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel.checkpoint._encoding import decode, encode
from accel.data import SampleCount
from accel.data._batches import Batch, batches
from accel.data._loader import Loader
from accel.data._progress import skip_first_batches
from accel.engines.torchft._group import ReplicaGroup
from accel.errors import AccelError, ConfigError, PeerError, StepError
from accel.items._kinds import refuse_replaced_items
from accel.items._values import Stateful
from accel.loop_state import Accumulation, Cursor, LossScale, check_latest
from accel.tensors import is_dtensor, parameters_of
from accel.training._step import optimizer_step as step_of_group
from accel.training._train_state import TrainState

_STATE = "state"


def check_items(items: Mapping[str, object]) -> None:
    """Raise `ConfigError` unless a group that joins can adopt all of these."""
    wrong = [f"{name}: {type(item).__name__}" for name, item in items.items() if not isinstance(item, Stateful)]
    if wrong or _STATE in items:
        raise ConfigError(
            "items that a joining group cannot adopt",
            expected=f"objects with state_dict and load_state_dict, by other names than {_STATE!r}",
            got=", ".join(wrong) or f"{_STATE!r} among the items, the name of the TrainState itself",
            where="begin_step, items",
        )


def capture(items: Mapping[str, object], state: TrainState) -> dict[str, Any]:
    """Return all items and the state as tensors and values; a sharded model is refused. No communication."""
    tensors: dict[str, torch.Tensor] = {}
    values = {
        name: encode(item.state_dict(), name, tensors) for name, item in items.items() if isinstance(item, Stateful)
    }
    parts = {"cursor": state.cursor, "accum": state.accum, "scaler": state.scaler}
    values[_STATE] = {name: msgspec.to_builtins(part) for name, part in parts.items()}
    if sharded := [name for name, tensor in tensors.items() if is_dtensor(tensor)]:
        raise ConfigError(
            "replica groups that shard their model",
            expected="ranks of a group that replicate it: strategy ddp, or one rank",
            got=f"{len(sharded)} sharded tensors, the first {sharded[0]}",
            where="begin_step, items",
        )
    return {"tensors": tensors, "values": values}


def restore(items: Mapping[str, object], taken: Mapping[str, Any]) -> TrainState:
    """Put another group's state into live objects with the same names; return its `TrainState`. No communication."""
    values, tensors = dict(taken["values"]), taken["tensors"]
    state = values.pop(_STATE)
    if values.keys() != items.keys():
        raise ConfigError(
            "replica groups differ in their items",
            expected=", ".join(sorted(values)),
            got=", ".join(sorted(items)),
            where="begin_step, items",
        )
    for name, item in items.items():
        assert isinstance(item, Stateful)
        live: dict[str, torch.Tensor] = {}
        _ = encode(item.state_dict(), name, live)
        mine = {key: part for key, part in tensors.items() if _belongs(key, name)}
        if isinstance(item, nn.Module):
            _copy(live, mine)
        else:
            _ = item.load_state_dict(decode(values[name], name, mine, name))
    return TrainState(
        cursor=msgspec.convert(state["cursor"], Cursor),
        accum=msgspec.convert(state["accum"], Accumulation),
        scaler=msgspec.convert(state["scaler"], LossScale),
    )


def _copy(live: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor]) -> None:
    if live.keys() != mine.keys():
        raise ConfigError(
            "replica groups differ in their models",
            expected=", ".join(sorted(mine.keys() - live.keys())) or "no other tensors",
            got=", ".join(sorted(live.keys() - mine.keys())),
            where="begin_step, items",
        )
    if odd := [key for key, tensor in live.items() if _facts(tensor) != _facts(mine[key])]:
        raise ConfigError(
            "replica groups differ in their models",
            expected=", ".join(f"{key} {_facts(mine[key])}" for key in odd),
            got=", ".join(f"{key} {_facts(live[key])}" for key in odd),
            where="begin_step, items",
        )
    with torch.no_grad():
        for key, tensor in live.items():
            _ = tensor.copy_(mine[key])


def _facts(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _belongs(key: str, name: str) -> bool:
    return key.startswith((f"{name}.", f"{name}[")) or key == name


_AGAIN_S = 0.25


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One step as this group begins it.

    Attributes:
        step: steps that the job has committed before.
        groups: number of groups that take part.
        index: place of this group among them, from 0.
        healed: whether this group has just adopted the state of another.
        state: the state that every group begins with.
        begun_s: time of the begin, of `time.perf_counter`.
    """

    step: int
    groups: int
    index: int
    healed: bool
    state: TrainState
    begun_s: float


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a step.

    Attributes:
        step: steps that the job had committed before.
        committed: whether it counts; if not, its samples are dealt again.
        groups: number of groups that took part.
        index: place of this group among them.
        healed: whether this group adopted the state of another at its begin.
        start, stop: positions in the data, before and after the samples of all groups.
        weight: weight of the losses of all groups together; 0 for a step that does not count.
        seconds: time since its begin.
        reason: the error for which this rank gave it up; empty if there was none here.
    """

    step: int
    committed: bool
    groups: int
    index: int
    healed: bool
    start: Cursor
    stop: Cursor
    weight: float
    seconds: float
    reason: str = ""


def begin_step(group: ReplicaGroup, state: TrainState, items: Mapping[str, object]) -> Turn:
    """Agree with all live groups on the next step. A collective of all ranks of all groups; may mutate the items.

    A group that is behind first adopts the state of another, into the items. At the first step all groups adopt the
    state of one.

    Args:
        group: from `replica`.
        state: between two windows.
        items: live objects with state_dict and load_state_dict, the same in every group: models, optimizers,
            schedulers.

    Returns:
        The turn of this group; continue with `turn.state`.

    Raises:
        PeerError: there were too few groups until the time-out, or the lighthouse is gone.
        ConfigError: items that another group cannot adopt, or a state within a window.
        StepError: a block, such as `Ema.applied_to`, has replaced an item's weights.
    """
    began = time.perf_counter()
    check_items(items)
    refuse_replaced_items(items, "torchft.begin_step")
    state.check_saveable()
    manager = group.manager
    if not group.begun:
        _ = capture(items, state)  # torchft would log what this raises, and give up every step
        # a run that resumes is ahead of groups that begin
        manager.load_state_dict({"step": state.updates + state.accum.skipped, "batches_committed": 0})
        group.begun = True
    group.offer = lambda: capture(items, state)
    healed = False
    while True:
        _meet(group)
        taken, group.taken = group.taken, None
        if taken is not None:
            state, healed = restore(items, taken), True
        if manager.num_participants() >= group.min_replicas:
            break
        if time.perf_counter() - began > group.quorum_timeout_s:  # the lighthouse itself lets fewer pass
            raise _group_changed(group, f"min_replicas={group.min_replicas} groups", f"{manager.num_participants()}")
        time.sleep(_AGAIN_S)
    return Turn(
        step=manager.current_step(),
        groups=manager.num_participants(),
        index=manager.participating_rank() or 0,
        healed=healed,
        state=state,
        begun_s=began,
    )


def _meet(group: ReplicaGroup) -> None:
    """Agree with the groups that are alive."""
    try:
        group.manager.start_quorum()
    except AccelError:
        raise
    except (RuntimeError, TimeoutError) as error:
        expected = "a lighthouse that answers, and enough groups before quorum_timeout_s"
        raise _group_changed(group, expected, str(error)) from error


def _group_changed(group: ReplicaGroup, expected: str, got: str) -> PeerError:
    return PeerError(
        "too few replica groups joined the step",
        expected=expected,
        got=got,
        where=f"begin_step, step {group.manager.current_step()}",
    )


def next_batch(group: ReplicaGroup, loader: Loader, turn: Turn, state: TrainState) -> Batch:
    """Return this rank's next batch of a turn. A collective of the group's own ranks.

    The loader's steps from `state.cursor` on are dealt to the groups in order. So a batch is a function of position,
    index and number of the groups alone, and `batch.next` is the position after the batches of all groups. Where the
    epoch ends before this group's batch, it gets a placeholder with `valid == 0`.

    Args:
        group: from `replica`.
        loader: from `prepare_loader`; its `global_batch` is for one group.
        turn: from `begin_step`.
        state: `turn.state`, or the state after the batch before.

    Raises:
        DataError: as `accel.batches`.
        StepError: a state of another step.
    """
    _check_turn(turn, state, "torchft.next_batch")
    cursor = state.cursor
    left = loader.steps(cursor)
    at = skip_first_batches(cursor, min(turn.index, left - 1), loader)
    reading = batches(group.ctx, loader, at)
    batch = next(reading)
    reading.close()
    after = skip_first_batches(cursor, min(turn.groups, left), loader)
    valid = batch.valid if turn.index < left else SampleCount(0, 0, batch.valid.copies)
    return msgspec.structs.replace(batch, start=cursor, next=after, is_last=turn.groups >= left, valid=valid)


def _check_turn(turn: Turn, state: TrainState, where: str) -> None:
    """Raise `StepError` unless a state follows a turn's: a group that heals has adopted another."""
    own, agreed = (each.updates + each.accum.skipped for each in (state, turn.state))
    if own != agreed or state.cursor.epoch < turn.state.cursor.epoch:
        raise StepError(
            "the state does not belong to this turn",
            expected=f"a state after {agreed} steps, at epoch {turn.state.cursor.epoch}",
            got=f"{own} steps, at epoch {state.cursor.epoch}",
            where=where,
            fix="Continue from the turn's state: turn = begin_step(group, state, items), then state = turn.state.",
        )


def optimizer_step(
    group: ReplicaGroup,
    turn: Turn,
    optimizer: Optimizer | Sequence[Optimizer],
    state: TrainState,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: float | None = None,
    max_value: float | None = None,
    nonfinite: Literal["raise", "skip", "ignore"] = "raise",
) -> tuple[TrainState, StepReport]:
    """Sum gradients and weights over all live groups, and step, or give the step up. Mutates parameters.

    A collective of all ranks of all groups. Loss sums and weights are summed and divided once, so that batches of
    unequal size count by their samples. If a group is lost meanwhile, the gradients are dropped, nothing else changes,
    and the state from the begin is returned.

    Args:
        group: from `replica`.
        turn: from `begin_step`.
        optimizer: as for `accel.optimizer_step`.
        state: a state at the end of its window.
        scheduler, max_norm, max_value, nonfinite: as for `accel.optimizer_step`.

    Returns:
        The next state, and the report of the step.

    Raises:
        StepError: the window has not ended, or a state of another step; or as `accel.optimizer_step`.
        NonFiniteError: by the policy, on every rank of every group.
    """
    _check_turn(turn, state, "torchft.optimizer_step")
    check_latest(state, "torchft.optimizer_step")
    if not state.sync:
        raise StepError(
            "the window has not ended",
            expected="optimizer_step when state.sync",
            got=f"micro-batch {state.accum.micro} of {state.accum.steps}",
            where="torchft.optimizer_step",
        )
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    manager = group.manager
    total = _exchange(group, optimizers, state)
    error = manager.errored()
    committed = bool(manager.should_commit())
    error = manager.errored() or error
    if committed:
        accum = msgspec.structs.replace(state.accum, world_weight=total, unit=1.0)
        summed = msgspec.structs.replace(state, accum=accum)
        after = step_of_group(
            group.ctx,
            optimizers,
            summed,
            scheduler=scheduler,
            max_norm=max_norm,
            max_value=max_value,
            nonfinite=nonfinite,
        )
    else:
        for each in optimizers:
            each.zero_grad(set_to_none=True)
        after = turn.state
    return after, StepReport(
        step=turn.step,
        committed=committed,
        groups=turn.groups,
        index=turn.index,
        healed=turn.healed,
        start=turn.state.cursor,
        stop=state.cursor,
        weight=total if committed else 0.0,
        seconds=time.perf_counter() - turn.begun_s,
        reason="" if error is None else str(error.original_exception),
    )


def _exchange(group: ReplicaGroup, optimizers: Sequence[Optimizer], state: TrainState) -> float:
    """Sum gradients over groups, bit for bit the same in each; return the weight of all groups together."""
    parameters = parameters_of(optimizers)
    unit = state.accum.unit or 1.0
    device = group.ctx.device
    head = torch.zeros(1 + len(parameters), dtype=torch.float64, device=device)
    head[0] = state.accum.world_weight
    head[1:] = torch.tensor([each.grad is not None for each in parameters], dtype=torch.float64)
    works = [group.manager.allreduce(head, reduce_op=ReduceOp.SUM)]
    kinds = sorted({each.dtype for each in parameters}, key=str)
    flats: dict[torch.dtype, torch.Tensor] = {}
    for dtype in kinds:
        parts = [each for each in parameters if each.dtype == dtype]
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in parts]
        # units of windows differ between groups, so the sums are in none
        flats[dtype] = torch.cat([grad.detach().reshape(-1) for grad in grads]).mul_(unit)
        works.append(group.manager.allreduce(flats[dtype], reduce_op=ReduceOp.SUM))
    for work in works:
        _ = work.wait()
    if group.manager.errored():  # another group was lost: the sums are worthless
        return 0.0
    total, *held = cast("list[float]", cast(Any, head).tolist())
    held_by = dict(zip(map(id, parameters), held, strict=True))
    for dtype, flat in flats.items():
        parts = [each for each in parameters if each.dtype == dtype]
        pieces: Sequence[torch.Tensor] = cast(Any, flat).split([each.numel() for each in parts])
        for each, piece in zip(parts, pieces, strict=True):
            if held_by[id(each)]:
                each.grad = piece.view_as(each) if each.grad is None else each.grad.copy_(piece.view_as(each))
    return total
