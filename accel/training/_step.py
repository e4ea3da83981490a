# SPDX-License-Identifier: Apache-2.0
"""`optimizer_step`: one division, one norm, one multiplication, and one decision for all ranks."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast, get_args, overload

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from accel import xla
from accel.comm import refuse_replaced
from accel.context import DistContext, context_first
from accel.errors import ConfigError, StepError
from accel.errors._checks import check_choice
from accel.optim import Accumulation, KeptNorms, begun_here, clamp_, parameters_of, scale_, step_of, take_step
from accel.parallel._engines import Engine, EngineOutcome, StepRequest, engine_of
from accel.parallel._labels import decide_apart
from accel.precision._amp import LossScale
from accel.training._closure import Closure, step_by_closure
from accel.training._deferred import Deferred, check_deferrable, defer, give_found_inf, mark_deferred
from accel.training._refused import cannot_step, check_overflow, check_settings, warn_unstorable
from accel.training._train_state import TrainState, after_step, ended_window
from accel.training._window import (
    carried_batches,
    check_alone,
    check_batches,
    check_limits,
    check_real,
    checked_window,
    clear_here,
    division,
    in_format_of,
    joined,
    read_outcome,
    refuse_leftovers,
    seen_losses,
    shortening,
    times,
    total_weight,
    whole_norm,
    window_gradients,
)


def step_here(
    ctx: DistContext,
    optimizers: list[Optimizer],
    window: Accumulation,
    weight: float | torch.Tensor,
    request: StepRequest,
    deferring: Callable[..., Deferred] | None = None,
) -> tuple[EngineOutcome, Deferred | None]:
    """Divide, clip, step and clear the gradients. A collective if some are sharded.

    Gradients and parameters do not change if the window is empty, or if a checked gradient is not finite. `deferring`
    takes the norms, the weight, what norms carried and norms of single gradients, in place of the check.
    """
    # All refusals come before the first write: a rank that raises leaves parameters and gradients as they were.
    parts = _parts(ctx, optimizers, window, joint=request.joint)
    if request.max_value is not None:
        check_real(itertools.chain(*parts), "max_value=")
    clips = any(limit is not None for limit in request.max_norms)
    every = parameters_of(optimizers)
    norms: list[float | torch.Tensor] = []
    factor = request.factor
    looks = request.check_finite or deferring is not None
    carried = carried_batches(ctx, read=looks)
    kept = None if deferring is None else KeptNorms()
    if looks or clips:
        norms = [whole_norm(ctx, part, every, request.norm_type, carried, kept) for part in parts]
    if not looks:  # else the host reads the norms as they are
        norms = in_format_of(parts, norms, optimizers)
    if request.check_finite:
        # The step's wait for the device. Ranks decide alike: gradients or the norms of shards, and the weight, are
        # equal on all.
        found = read_outcome(norms, weight, carried)
        if carried is not None:
            check_batches(ctx, carried, found.sums, request.step)
        if found.empty or not found.finite:
            return EngineOutcome(stepped=False, finite=found.finite, grad_norm=None), None
        # known on the host now, so that the device has nothing left to divide
        factor = division(ctx, window, found.weight)
        norms = norms if factor == 1.0 and not clips else [*found.norms]
    deferred = None if deferring is None else deferring(norms, weight, carried, kept)
    # The norm of the divided gradients, without a pass over them: division and clipping share one multiply.
    norms = [times(norm, factor) for norm in norms]
    _apply(parts, factor, request, norms)
    grad_norm = joined(norms, parts, optimizers, joint=request.joint)
    for each in optimizers:
        step = partial(take_step, each, step_of(each, masters=ctx.precision.master_weights is not None))
        if deferred is None:
            _ = step()
        else:
            give_found_inf(each, deferred.found_inf, step)
    # Cleared at once: the memory is free before the next forward, and the next window begins with none.
    clear_here(optimizers)
    return EngineOutcome(stepped=True, finite=True, grad_norm=grad_norm), deferred


def step_by(
    engine: Engine,
    ctx: DistContext,
    optimizers: list[Optimizer],
    weight: float | torch.Tensor,
    request: StepRequest,
) -> EngineOutcome:
    """Let an engine step, unless the window is known to be empty."""
    # An engine has its own norm, so the weight alone is read.
    if request.check_finite and read_outcome([], weight).empty:
        return EngineOutcome(stepped=False, finite=True, grad_norm=None)
    return engine.step(ctx, optimizers, request)


def _parts(
    ctx: DistContext, optimizers: list[Optimizer], window: Accumulation, *, joint: bool
) -> list[list[torch.Tensor]]:
    """Group gradients by norm: all, or those of each optimizer; a parameter of two counts for the first."""
    # A parameter of two optimizers would be scaled twice, once with each group.
    groups = [parameters_of(optimizers)] if joint else _disjoint([parameters_of([each]) for each in optimizers])
    parts = window_gradients(ctx, window, *groups)
    if window.divided and max(window.divided, 0) != sum(map(len, parts)):
        raise StepError(
            "some of the gradients were divided by weight and loss scale, and others not",
            expected="unscale_gradients of all optimizers that take the step",
            got=f"{window.divided} gradients divided, {sum(map(len, parts))} in the step",
            fix="Pass both the same optimizers: state = accel.unscale_gradients(ctx, [first, second], state).",
        )
    return parts


def _disjoint(groups: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    seen: set[int] = set()
    left: list[list[torch.Tensor]] = []
    for group in groups:
        left.append([each for each in group if id(each) not in seen])
        seen.update(map(id, group))
    return left


def _apply(
    parts: list[list[torch.Tensor]],
    division_factor: float | torch.Tensor,
    request: StepRequest,
    norms: list[float | torch.Tensor],
) -> None:
    """Divide and clip, in one pass over the gradients that share a norm."""
    for at, part in enumerate(parts):
        if not part:
            continue  # an optimizer none of whose parameters took part
        factor, limit = division_factor, request.max_norms[at]
        if limit is not None:
            factor = times(shortening(norms[at], limit), factor)
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            scale_(part, factor)
        if request.max_value is not None:
            clamp_(part, request.max_value)


A = TypeVar("A")
T = TypeVar("T")
NonFinite = Literal["raise", "skip", "ignore", "defer"]
MaxNorm = float | Sequence[float | None] | None

_POLICIES = get_args(NonFinite)


class StepResult(NamedTuple, Generic[A]):
    """Outcome of `optimizer_step`, and the records to go on with.

    Attributes:
        stepped: whether parameters were changed; None under `nonfinite="defer"`, where the host does not know.
        accum: the accumulation, between two windows; None if none was passed.
        scaler: the loss scale for the next window.
        grad_norm: norm of the gradients of all ranks before clipping, shape [], or [optimizers] where `max_norm` was a
            list; None if no limit or check needed it.
    """

    stepped: bool | None
    accum: A
    scaler: LossScale
    grad_norm: torch.Tensor | None


@overload
def optimizer_step(
    ctx: DistContext,
    optimizer: Optimizer | Sequence[Optimizer],
    state: TrainState,
    /,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: MaxNorm = None,
    norm_type: float = 2.0,
    max_value: float | None = None,
    nonfinite: NonFinite = "raise",
    closure: Closure | None = None,
) -> TrainState: ...


@overload
def optimizer_step(
    ctx: DistContext,
    optimizer: Optimizer | Sequence[Optimizer],
    scaler: LossScale,
    accum: None = None,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: MaxNorm = None,
    norm_type: float = 2.0,
    max_value: float | None = None,
    nonfinite: NonFinite = "raise",
) -> StepResult[None]: ...


@overload
def optimizer_step(
    ctx: DistContext,
    optimizer: Optimizer | Sequence[Optimizer],
    scaler: LossScale,
    accum: Accumulation,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: MaxNorm = None,
    norm_type: float = 2.0,
    max_value: float | None = None,
    nonfinite: NonFinite = "raise",
) -> StepResult[Accumulation]: ...


@context_first
def optimizer_step(
    ctx: DistContext,
    optimizer: Optimizer | Sequence[Optimizer],
    scaler: TrainState | LossScale,
    accum: Accumulation | None = None,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: MaxNorm = None,
    norm_type: float = 2.0,
    max_value: float | None = None,
    nonfinite: NonFinite = "raise",
    closure: Closure | None = None,
) -> TrainState | StepResult[Accumulation] | StepResult[None]:
    """Divide, check, clip, step, and clear the gradients. Mutates parameters; a collective if gradients are sharded.

    `optimizer_step(ctx, optimizer, state)` takes and returns the `TrainState`; by its parts it takes the loss scale and
    the accumulation, and returns them in a `StepResult`.

    The gradients of the window are divided by its weight over ranks and micro-batches and by the loss scale, in one
    pass together with clipping. A skipped step changes no parameter, scheduler or optimizer state.

    Args:
        ctx: the context.
        optimizer: an optimizer, or several that take this step together, with one norm and one decision.
        scaler: a `TrainState` whose window has ended, or, with a closure, one from `state.next(batch)`; or the loss
            scale that `backward` used.
        accum: beside a loss scale, the window that has ended; None if `backward` had none.
        scheduler: scheduler or schedulers, stepped once after the optimizer, on any number of ranks.
        max_norm: largest norm of the gradients. A number is for all optimizers together, a list has one for each. None
            does not clip.
        norm_type: p of the p-norm, above 0; inf for the largest absolute value.
        max_value: largest absolute value of a gradient's element, instead of `max_norm`.
        nonfinite: policy for inf or NaN in a gradient: `raise`; `skip` the step; `defer`, where optimizers with
            fused=True leave the step out on the device, and a later call raises; or `ignore`. The last two do not wait
            for the device, and a window without weight is a step with zero gradients. Under a dynamic loss scale an
            overflow is always skipped.
        closure: function that computes the loss of the batch and calls no backward, for an optimizer that evaluates
            the loss in its step, such as LBFGS. It returns the mean loss, shape [], or the loss and its weight; the
            default weight is `batch.valid`. Each evaluation is a window: its gradient is divided, and the optimizer
            gets the mean loss over all ranks. It takes the place of `backward`.

    Returns:
        The next state, with `stepped` and `grad_norm`; for the parts, a `StepResult`.

    Raises:
        StepError: calls out of order, a parameter took no part in the loss, held a gradient before the window began, or
            has other values in a block, such as `Ema.applied_to`; nothing was changed.
        NonFiniteError: by the policy `nonfinite`, on every rank; parameters and gradients did not change. Or a deferred
            step before this one was left out.
        ConfigError: an option outside its range, a scheduler or optimizer that needs an argument to step, a scheduler
            without a further step, a setting of the launcher without effect, or a mesh with an unused axis cp; nothing
            was changed.
        ContextClosedError: the context is closed.

    Examples:
        >>> state = accel.backward(ctx, model(batch.data[0]).square().mean(), state.next(batch))
        >>> state = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0)
        >>> state.updates, state.stepped
        (1, True)
    """
    ctx.comm.settle()
    optimizers = listed(optimizer, Optimizer, "optimizer_step, optimizer", evaluates=closure is not None)
    state = None
    if isinstance(scaler, TrainState):
        check_alone(accum, "optimizer_step")
        state, scaler = scaler, scaler.scaler
        if closure is None:
            accum = ended_window(state.accum, "accel.optimizer_step")
    schedulers = [] if scheduler is None else listed(scheduler, LRScheduler, "optimizer_step, scheduler=")
    _check_not_exhausted(schedulers)
    check_choice(nonfinite, _POLICIES, "unknown policy", where="nonfinite=")
    if closure is not None:
        return _step_by_closure(ctx, optimizers, schedulers, state, closure, (max_norm, max_value, nonfinite))
    limits = check_limits(optimizers, max_norm, norm_type, max_value)
    window = checked_window(ctx, scaler, accum, accum if state is None else state)
    _check_begin(ctx, optimizers, accum)
    weight = total_weight(window)
    engine, checks = engine_of(ctx), nonfinite in ("raise", "skip") or scaler.dynamic
    request = StepRequest(
        factor=1.0 if checks and engine is None else division(ctx, window, weight),
        max_norms=limits,
        joint=not isinstance(max_norm, Sequence),
        norm_type=norm_type,
        max_value=max_value,
        check_finite=checks,
        accumulation=None if accum is None else accum.steps,
        step=None if accum is None else accum.updates,
    )
    deferring = None
    if nonfinite == "defer":
        check_deferrable(ctx, optimizers, scaler, engine=engine is not None)
        deferring = _deferring(ctx, optimizers, accum, scaler)
    if nonfinite == "defer" or ctx.comm.defers:
        mark_deferred(ctx, optimizers, defers=deferring is not None)
    if engine is None:
        outcome, deferred = step_here(ctx, optimizers, window, weight, request, deferring)
    else:
        outcome, deferred = step_by(engine, ctx, optimizers, weight, request), None
    if not outcome.finite and (nonfinite == "raise" or scaler.dynamic):
        check_overflow(ctx, scaler, accum, optimizers, apart=decide_apart(ctx.position.axes, optimizers))
    _end(ctx, engine, optimizers, schedulers, stepped=outcome.stepped)
    step = _result(ctx, optimizers, outcome, accum, scaler, deferred)
    if state is None:
        return step
    assert step.accum is not None
    stepped = outcome.stepped if deferred is None else deferred
    return after_step(ctx, state, step.accum, step.scaler, stepped=stepped, grad_norm=step.grad_norm)


def _step_by_closure(
    ctx: DistContext,
    optimizers: list[Optimizer],
    schedulers: list[LRScheduler],
    given: TrainState | None,
    closure: Closure,
    options: tuple[object, object, str],
) -> TrainState:
    """Take a step with a closure, which every rank takes; return the state after it."""
    state, norm = step_by_closure(ctx, optimizers, given, closure, options)
    _end(ctx, None, optimizers, schedulers, stepped=True)
    outcome = EngineOutcome(stepped=True, finite=True, grad_norm=norm)
    step = _result(ctx, optimizers, outcome, state.accum, state.scaler, None)
    assert step.accum is not None
    return after_step(ctx, state, step.accum, step.scaler, stepped=True, grad_norm=norm)


def _deferring(
    ctx: DistContext, optimizers: list[Optimizer], accum: Accumulation | None, scaler: LossScale
) -> Callable[..., Deferred]:
    """Return `defer` with the facts of a step."""
    apart, updates = decide_apart(ctx.position.axes, optimizers), None if accum is None else accum.updates
    note = partial(_note, ctx, updates, scaler, apart=apart)
    losses = seen_losses(ctx, accum)
    return partial(defer, ctx, optimizers=optimizers, step=updates, losses=losses, apart=apart, note=note)


def _note(
    ctx: DistContext,
    updates: int | None,
    scaler: LossScale,
    *,
    apart: bool,
    stepped: bool = True,
    finite: bool = True,
) -> None:
    """Note a decision for ranks to compare, unless they may decide apart."""
    if ctx.world_size > 1 and not apart:
        ctx.comm.steps.add(updates=updates, stepped=stepped, finite=finite, scale=scaler.scale)


def _end(
    ctx: DistContext,
    engine: Engine | None,
    optimizers: list[Optimizer],
    schedulers: list[LRScheduler],
    *,
    stepped: bool,
) -> None:
    """Advance schedulers after a step; clear the gradients of one that is left out."""
    if not stepped:
        # A skipped step advances no scheduler, so that the learning rate counts the same steps as the optimizer.
        if engine is None:
            clear_here(optimizers)
        else:
            engine.clear(ctx, optimizers)
        return
    for each in schedulers:
        each.step()
    for each in begun_here(ctx, optimizers) if engine is None else ():
        warn_unstorable(each)
    if ctx.device.type == "xla":
        # XLA only records up to here: the step's graph is cut and run now, once a step.
        xla.end_step()


def _check_not_exhausted(schedulers: Iterable[LRScheduler]) -> None:
    """Raise `ConfigError` if a scheduler has no further step."""
    for each in schedulers:
        for inner in _stepped(each):
            if isinstance(inner, OneCycleLR) and inner.last_epoch >= inner.total_steps:
                raise ConfigError(
                    "the learning rate's cycle is over",
                    expected=f"at most {inner.total_steps} steps",
                    got=f"step {inner.last_epoch + 1}",
                    where="optimizer_step, scheduler=",
                    fix="OneCycleLR(total_steps=) counts optimizer steps, not batches: pass accel.total_steps(...).",
                )


def _stepped(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Return the schedulers inside one that its next step advances; torch has no public names for them."""
    held = cast(Any, scheduler)
    if isinstance(scheduler, ChainedScheduler):
        for each in held._schedulers:
            yield from _stepped(each)
    elif isinstance(scheduler, SequentialLR):
        at = bisect_right(held._milestones, held.last_epoch + 1)
        if at == 0 or held._milestones[at - 1] != held.last_epoch + 1:  # where one begins, it starts anew
            yield from _stepped(held._schedulers[at])
    else:
        yield scheduler


def _check_begin(ctx: DistContext, optimizers: list[Optimizer], accum: Accumulation | None) -> None:
    """Raise if settings have no effect, a block has replaced the weights, or the window began with gradients."""
    if ctx.launched or ctx.position.opened:
        check_settings(ctx, accum, optimizers)
    refuse_replaced(parameters_of(optimizers), "accel.optimizer_step")
    if accum is not None:
        refuse_leftovers(ctx, optimizers)


def _result(
    ctx: DistContext,
    optimizers: list[Optimizer],
    outcome: EngineOutcome,
    accum: Accumulation | None,
    scaler: LossScale,
    deferred: Deferred | None,
) -> StepResult[Accumulation] | StepResult[None]:
    """Return the records after a step, and note its decision, or that it is yet to be read."""
    stepped, finite = outcome.stepped, outcome.finite
    norm = outcome.grad_norm if stepped else None
    after = scaler.update(finite=finite) if stepped or not finite else scaler
    if deferred is not None:
        ctx.comm.deferred = deferred.read
    elif ctx.world_size > 1:
        updates = None if accum is None else accum.updates
        _note(ctx, updates, after, apart=decide_apart(ctx.position.axes, optimizers), stepped=stepped, finite=finite)
    known = stepped if deferred is None else None
    if accum is None:
        ctx.comm.seen_loss = None
        return StepResult(known, None, after, norm)
    closed = accum.close(stepped=stepped, finite=finite)
    if after is not scaler:
        ctx.comm.marks.put(closed, "spent", scaler)  # refused if the next window begins with it
    return StepResult(known, closed, after, norm)


def listed(objects: T | Sequence[T], kind: type[T], where: str, *, evaluates: bool = False) -> list[T]:
    """List the optimizers or schedulers of a step: each once, and of a kind that steps without arguments.

    `evaluates`: the step has a closure, for an optimizer that evaluates the loss.
    """
    alone = isinstance(objects, kind) or not isinstance(objects, Sequence)
    found = [cast(T, objects)] if alone else list(cast("Sequence[T]", objects))
    for each in found:
        lacks = isinstance(each, ReduceLROnPlateau) or (isinstance(each, torch.optim.LBFGS) and not evaluates)
        if not isinstance(each, kind) or lacks:
            raise cannot_step(each, kind, where)
    if len(set(map(id, found))) < len(found):
        raise ConfigError("would be stepped twice", expected=f"each {kind.__name__} once", got="one again", where=where)
    return found
