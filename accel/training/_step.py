# SPDX-License-Identifier: Apache-2.0
"""`optimizer_step`: one division, one norm, one multiplication, and one decision for all ranks."""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from accel import xla
from accel.comm import FirstValue, refuse_replaced
from accel.context import DistContext, context_first
from accel.errors import ConfigError, StepError
from accel.loop_state import Accumulation, LossScale
from accel.optim import KeptNorms, begun_here, clamp_, scale_
from accel.parallel._engines import Engine, EngineOutcome, StepRequest, engine_of
from accel.parallel._labels import decide_independently, new_replicas
from accel.tensors import checksums, parameters_of
from accel.training._closure import Closure, step_by_closure
from accel.training._deferred import Deferred, check_deferrable, defer, give_found_inf, mark_deferred
from accel.training._refused import cannot_step, check_overflow, check_settings, warn_unstorable
from accel.training._train_state import TrainState, after_step, carries_state, ended_window, window_of
from accel.training._window import (
    Policy,
    StepWindow,
    check_limits,
    check_real,
    check_window,
    clear_here,
    division,
    in_format_of,
    joined,
    leftovers_of,
    policy_of,
    read_outcome,
    refused_alike,
    shortening,
    steps_of,
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
    policy: Policy,
    deferring: Callable[..., Deferred],
) -> tuple[EngineOutcome, Deferred | None]:
    """Divide, clip, step and clear the gradients. A collective if some are sharded.

    Gradients and parameters do not change if the window is empty, or if a checked gradient is not finite. `deferring`
    begins to read the norms, the weight and norms of single gradients, where the policy defers that.
    """
    # All refusals come before the first write: a rank that raises leaves parameters and gradients as they were.
    every = parameters_of(optimizers)
    left = leftovers_of(optimizers)
    with refused_alike(ctx, every, "optimizer_step", optimizers) as agrees:
        if agrees:
            left.refuse()
        else:
            left.check(ctx)
        parts = _parts(ctx, optimizers, window, joint=request.joint)
        if request.max_value is not None:
            check_real(itertools.chain(*parts), "max_value=")
    clips = any(limit is not None for limit in request.max_norms)
    norms: list[float | torch.Tensor] = []
    factor = request.factor
    looks = policy.reads or policy.defers
    kept = KeptNorms() if policy.defers else None
    if looks or clips:
        norms = [whole_norm(ctx, part, every, request.norm_type, kept) for part in parts]
    if not looks:  # else the host reads the norms as they are
        norms = in_format_of(parts, norms, optimizers)
    if policy.reads:
        # The step's wait for the device. Ranks decide alike: gradients or the norms of shards, and the weight, are
        # equal on all.
        found = read_outcome(norms, weight)
        if found.empty or not found.finite:
            return EngineOutcome(stepped=False, finite=found.finite, grad_norm=None), None
        # known on the host now, so that the device has nothing left to divide
        factor = division(ctx, window, found.weight)
        norms = norms if factor == 1.0 and not clips else [*found.norms]
    deferred = deferring(norms, weight, kept) if policy.defers else None
    # The norm of the divided gradients, without a pass over them: division and clipping share one multiply.
    norms = [times(norm, factor) for norm in norms]
    _apply(parts, factor, request, norms)
    grad_norm = joined(norms, parts, optimizers, joint=request.joint)
    for each, step in steps_of(ctx, optimizers):
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
    leftovers_of(optimizers).check(ctx)
    # An engine computes its norm itself, so only the weight is read.
    if request.check_finite and read_outcome([], weight).empty:
        return EngineOutcome(stepped=False, finite=True, grad_norm=None)
    return engine.step(ctx, optimizers, request)


def _parts(
    ctx: DistContext, optimizers: list[Optimizer], window: Accumulation, *, joint: bool
) -> list[list[torch.Tensor]]:
    """Group gradients by norm: all, or each optimizer's; a parameter of two optimizers counts for the first."""
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
            continue  # no parameter of this optimizer took part
        factor, limit = division_factor, request.max_norms[at]
        if limit is not None:
            factor = times(shortening(norms[at], limit), factor)
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            scale_(part, factor)
        if request.max_value is not None:
            clamp_(part, request.max_value)


T = TypeVar("T")
NonFinite = Literal["raise", "skip", "ignore", "defer"]
MaxNorm = float | Sequence[float | None] | None


class StepOptions(NamedTuple):
    """Options of `optimizer_step`, by its names."""

    scheduler: LRScheduler | Sequence[LRScheduler] | None
    max_norm: MaxNorm
    norm_type: float
    max_value: float | None
    nonfinite: NonFinite


class StepResult(NamedTuple):
    """Outcome of `optimizer_step`, and the next records.

    Attributes:
        stepped: whether parameters were changed; None under `nonfinite="defer"`, where the host does not know.
        accum: the accumulation, between two windows.
        scaler: the loss scale for the next window.
        grad_norm: norm of the gradients of all ranks before clipping, shape [], or [optimizers] where `max_norm` was a
            list; None if no limit or check needed it.
    """

    stepped: bool | None
    accum: Accumulation
    scaler: LossScale
    grad_norm: torch.Tensor | None


@carries_state(2, "step = {}")
@context_first
def optimizer_step(
    ctx: DistContext,
    optimizer: Optimizer | Sequence[Optimizer],
    state: TrainState,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: MaxNorm = None,
    norm_type: float = 2.0,
    max_value: float | None = None,
    nonfinite: NonFinite = "raise",
    closure: Closure | None = None,
) -> TrainState:
    """Divide, check, clip, step, and clear the gradients. Mutates parameters; a collective if gradients are sharded.

    The gradients of the window are divided by its weight over ranks and micro-batches and by the loss scale, in one
    pass together with clipping. A skipped step changes no parameter, scheduler or optimizer state.

    Args:
        ctx: the context.
        optimizer: an optimizer, or several that take this step together, with one norm and one decision.
        state: a state at the end of a window; with a closure, one from `state.next(batch)`.
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
        The next state, with `stepped` and `grad_norm`.

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
    options = StepOptions(scheduler, max_norm, norm_type, max_value, nonfinite)
    optimizers, schedulers = step_objects(ctx, optimizer, options, evaluates=closure is not None)
    if closure is None:
        window = ended_window(state, "accel.optimizer_step")
        taken, deferred = step_window(ctx, optimizers, schedulers, window, options)
    else:  # every rank takes such a step
        clips = max_norm is not None or max_value is not None
        policy = policy_of(nonfinite, state.scaler)
        state, norm = step_by_closure(ctx, optimizers, state, closure, clips=clips, policy=policy)
        _end(ctx, None, optimizers, schedulers, stepped=True)
        outcome = EngineOutcome(stepped=True, finite=True, grad_norm=norm)
        taken, deferred = _result(ctx, optimizers, outcome, window_of(state), None), None
    stepped = bool(taken.stepped) if deferred is None else deferred
    return after_step(ctx, state, taken.accum, taken.scaler, stepped=stepped, grad_norm=taken.grad_norm)


def step_window(
    ctx: DistContext,
    optimizers: list[Optimizer],
    schedulers: list[LRScheduler],
    window: StepWindow,
    options: StepOptions,
) -> tuple[StepResult, Deferred | None]:
    """Take the optimizer step of a window, as `optimizer_step`; return its result, and a deferred step."""
    max_norm, policy = options.max_norm, policy_of(options.nonfinite, window.scaler)
    limits = check_limits(optimizers, max_norm, options.norm_type, options.max_value)
    check_window(ctx, window)
    _check_begin(ctx, optimizers, window.accum)
    accum, scaler, weight = window.accum, window.scaler, total_weight(window.accum)
    engine = engine_of(ctx)
    request = StepRequest(
        factor=1.0 if policy.reads and engine is None else division(ctx, accum, weight),
        max_norms=limits,
        joint=not isinstance(max_norm, Sequence),
        norm_type=options.norm_type,
        max_value=options.max_value,
        check_finite=policy.reads,
        accumulation=accum.steps,
    )
    if policy.defers:
        check_deferrable(ctx, optimizers, scaler, engine=engine is not None)
    if policy.defers or ctx.comm.defers:
        mark_deferred(ctx, optimizers, defers=policy.defers)
    if engine is None:
        deferring = partial(_deferred, ctx, optimizers, window)
        outcome, deferred = step_here(ctx, optimizers, accum, weight, request, policy, deferring)
    else:
        outcome, deferred = step_by(engine, ctx, optimizers, weight, request), None
    if policy.raises and not outcome.finite:
        check_overflow(ctx, window, optimizers, independent=decide_independently(ctx.position.axes, optimizers))
    _end(ctx, engine, optimizers, schedulers, stepped=outcome.stepped)
    return _result(ctx, optimizers, outcome, window, deferred), deferred


def step_objects(
    ctx: DistContext, optimizer: Optimizer | Sequence[Optimizer], options: StepOptions, *, evaluates: bool = False
) -> tuple[list[Optimizer], list[LRScheduler]]:
    """Return the optimizers and schedulers of a step; refuse those that cannot take one, and an unknown policy."""
    ctx.comm.settle()
    optimizers = listed(optimizer, Optimizer, "optimizer_step, optimizer", evaluates=evaluates)
    given = options.scheduler
    schedulers = [] if given is None else listed(given, LRScheduler, "optimizer_step, scheduler=")
    _check_not_exhausted(schedulers)
    if ctx.world_size > 1 and ctx.device.type != "xla":
        _note_first_values(ctx, optimizers)
    return optimizers, schedulers


def _note_first_values(ctx: DistContext, optimizers: list[Optimizer]) -> None:
    """Note the values of replicas before their first step, for ranks to compare. Waits for the device then."""
    new = [each for each in optimizers if ctx.comm.marks.find(each, "noted") is None]
    if not new or decide_independently(ctx.position.axes, new):
        return
    for each in new:
        ctx.comm.marks.put(each, "noted")
    replicas = new_replicas(parameters_of(new))
    if replicas or ctx.axis("pp").size > 1:  # a stage may hold nothing that other ranks hold
        sums = checksums({str(at): each.part for at, each in enumerate(replicas)}, by_position=True)
        ctx.comm.steps.add_values(
            [FirstValue(each.holders, each.name, bits) for each, bits in zip(replicas, sums.values(), strict=True)]
        )


def _deferred(
    ctx: DistContext,
    optimizers: list[Optimizer],
    window: StepWindow,
    norms: Sequence[float | torch.Tensor],
    weight: float | torch.Tensor,
    kept: KeptNorms,
) -> Deferred:
    """Begin to read the outcome of a step."""
    independent = decide_independently(ctx.position.axes, optimizers)
    note = partial(_note, ctx, window.accum.updates, window.scaler, independent=independent)
    return defer(
        ctx, norms, weight, kept, optimizers=optimizers, accum=window.accum, independent=independent, note=note
    )


def _note(
    ctx: DistContext,
    updates: int,
    scaler: LossScale,
    *,
    independent: bool,
    stepped: bool = True,
    finite: bool = True,
) -> None:
    """Note a decision for ranks to compare, unless they may decide independently."""
    if ctx.world_size > 1 and not independent:
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
        _advance(ctx, each)
    for each in begun_here(ctx, optimizers) if engine is None else ():
        warn_unstorable(each)
    if ctx.device.type == "xla":
        # XLA only records up to here: the step's graph is cut and run now, once a step.
        xla.end_step()


def _advance(ctx: DistContext, scheduler: LRScheduler) -> None:
    """Step a scheduler; warn once if the loop has stepped it too since the latest step."""
    mark = ctx.comm.marks.find(scheduler, "advanced")
    is_twice = mark is not None and mark.note is not None and _steps_of(scheduler) == cast(int, mark.note) + 1
    if is_twice and ctx.is_main_process:
        logging.getLogger("accel.training").warning(_TWICE, type(scheduler).__name__)
    scheduler.step()
    is_known = is_twice or (mark is not None and mark.note is None)
    ctx.comm.marks.put(scheduler, "advanced", None if is_known else _steps_of(scheduler))


def _steps_of(scheduler: LRScheduler) -> int | None:
    """Return the steps that a scheduler has taken; None for one that does not count them."""
    held = cast(Any, scheduler)
    return (
        _steps_of(held._schedulers[0]) if isinstance(scheduler, ChainedScheduler) else held.__dict__.get("last_epoch")
    )


_TWICE = (
    "%s took a step between two optimizer steps that step it too, so its learning rate runs ahead: leave out "
    "scheduler.step(), or scheduler= of optimizer_step"
)


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


def _check_begin(ctx: DistContext, optimizers: list[Optimizer], accum: Accumulation) -> None:
    """Raise if settings have no effect, or a block has replaced the weights."""
    if ctx.launched or ctx.position.opened:
        check_settings(ctx, accum, optimizers)
    refuse_replaced(parameters_of(optimizers), "accel.optimizer_step")


def _result(
    ctx: DistContext,
    optimizers: list[Optimizer],
    outcome: EngineOutcome,
    window: StepWindow,
    deferred: Deferred | None,
) -> StepResult:
    """Return the records after a step, and note its decision, or that it is yet to be read."""
    accum, scaler = window.accum, window.scaler
    stepped, finite = outcome.stepped, outcome.finite
    norm = outcome.grad_norm if stepped else None
    after = scaler.update(finite=finite) if stepped or not finite else scaler
    if deferred is not None:
        ctx.comm.deferred = deferred.read
    elif ctx.world_size > 1:
        independent = decide_independently(ctx.position.axes, optimizers)
        _note(ctx, accum.updates, after, independent=independent, stepped=stepped, finite=finite)
    closed = accum.close(stepped=stepped, finite=finite)
    if after is not scaler:
        ctx.comm.marks.put(closed, "spent", scaler)  # refused if the next window begins with it
    return StepResult(stepped if deferred is None else None, closed, after, norm)


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
