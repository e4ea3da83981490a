# SPDX-License-Identifier: Apache-2.0
"""`TrainState`: the one record that a training loop carries. Its values determine the next call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar, cast

import msgspec
import torch
from torch import nn

from accel.comm import refuse_replaced
from accel.comm._marks import Uncompared, find_mark
from accel.context import DistContext, context_first
from accel.data import SampleCount
from accel.data._batches import Batch
from accel.errors import ConfigError, StepError
from accel.loop_state import Accumulation, Cursor, LossScale, check_latest, next_micro_batch
from accel.optim import CLOSURE_LINE
from accel.parallel._leftovers import clear_gradients
from accel.precision._amp import loss_scale
from accel.training._deferred import Deferred
from accel.training._window import StepWindow


def is_begun(window: Accumulation) -> bool:
    """Return whether the current batch waits for its first backward pass."""
    return window.latest < window.micro


def begun_window(window: Accumulation, call: str) -> Accumulation:
    """Return a window within a micro-batch; one without a begun batch is a `StepError`."""
    if not window.micro:
        raise _not_begun(call)
    return window


def ended_window(state: TrainState, call: str) -> StepWindow:
    """Return the window of a state that waits for its optimizer step; `StepError` for another state."""
    window = state.accum
    if not window.micro:
        raise _not_begun(
            call, fix="Optimizers that end one window step in one call: optimizer_step(ctx, [first, second], state)."
        )
    if is_begun(window):
        raise dropped(window, call)
    if not window.sync:
        raise StepError(
            "the window has not ended",
            expected="the call where state.sync",
            got=f"micro-batch {window.micro} of {window.steps}",
            where=call,
            fix="Guard it: `if state.sync:`.",
        )
    return window_of(state)


def window_of(state: TrainState) -> StepWindow:
    """Return the window of a state."""
    return StepWindow(state.accum, state.scaler, state)


def check_between(window: Accumulation, call: str) -> None:
    """Raise `StepError` within a window; the error names the missing call."""
    if not window.micro:
        return
    if window.sync or is_begun(window):
        raise dropped(window, call)
    raise StepError(
        "the window is not full",
        expected="a state between two windows",
        got=f"micro-batch {window.micro} of {window.steps}",
        where=call,
        fix="Drop its gradients before: state = accel.training.discard(state, model). Or end it with its last batch:"
        " state = state.next(batch, last=True).",
    )


def dropped(window: Accumulation, call: str) -> StepError:
    """Make the error for a call before the one that the window waits for, or after its result was dropped."""
    check_latest(window, call)
    if is_begun(window):
        missing, line = "the backward of this batch", "state = accel.backward(ctx, loss, state)"
        closures = f" If the optimizer evaluates the loss, as LBFGS does: {CLOSURE_LINE}."
    else:
        missing, line = "the optimizer step of this window", "state = accel.optimizer_step(ctx, optimizer, state)"
        closures = ""
    return StepError(
        f"the state has no record of {missing}",
        expected=line,
        got=f"micro-batch {window.micro} of {window.steps}",
        where=call,
        fix=f"Keep the result: {line}. To abandon the window: state = accel.training.discard(state, model).{closures}",
    )


def _not_begun(call: str, fix: str = "") -> StepError:
    return StepError(
        "no batch has begun",
        expected="state = state.next(batch) before it",
        got="a state between two windows",
        where=call,
        fix=fix,
    )


def _misplaced(cursor: Cursor, batch: Batch) -> StepError:
    """Make the error for a batch that does not begin where the state is."""
    if batch.next == cursor:
        return StepError(
            "the batch was taken already",
            expected="state.next(batch) once for each batch",
            got="a second time for the latest one",
            where="state.next",
            fix="For another step on the same batch, such as another model's: state = state.next(), and"
            " weight=batch.valid in its backward.",
        )
    return StepError(
        "the batch does not begin at the state's position",
        expected=_position(cursor),
        got=_position(batch.start),
        where="state.next",
        fix="Keep the result in every batch: state = state.next(batch). To leave one out: state ="
        " accel.training.discard(state.next(batch), model). A second loader needs a separate cursor.",
    )


F = TypeVar("F", bound=Callable[..., Any])


class StepFigures(Uncompared):
    """Figures of the latest step and of the batch, which a state carries on.

    Attributes:
        stepped: whether the step changed parameters, or the deferred step that will know it.
        grad_norm: norm of its gradients.
        backward_at: time at which the batch's first `backward` began.
    """

    stepped: ClassVar[bool | Deferred | None] = False
    grad_norm: ClassVar[torch.Tensor | None] = None
    backward_at: ClassVar[float | None] = None


class TrainState(msgspec.Struct, frozen=True, weakref=True):
    """Position in the data, accumulation window and loss scale of a run.

    Each call of the loop takes the state and returns the next one. A dropped result is an error at the next call; where
    a batch has several backward passes, at the next batch or step.

    Attributes:
        cursor: position in the data: after the current batch.
        accum: accumulation window.
        scaler: loss scale.
        valid: real samples of the current batch; None between windows.
        figures: figures of the latest step; neither compared nor saved.
    """

    cursor: Cursor
    accum: Accumulation
    scaler: LossScale
    valid: SampleCount | None = None
    figures: StepFigures = StepFigures()

    @property
    def epoch(self) -> int:
        """Epochs finished."""
        return self.cursor.epoch

    @property
    def sync(self) -> bool:
        """Whether the current batch ends the window, so that `optimizer_step` follows."""
        return self.accum.sync

    @property
    def updates(self) -> int:
        """Optimizer steps taken since the run began."""
        return self.accum.updates

    @property
    def stepped(self) -> bool | None:
        """Whether the latest `optimizer_step` changed parameters. False before any step.

        None after one with `nonfinite="defer"`, until a later call has read its outcome.
        """
        found = self.figures.stepped
        return found.stepped if isinstance(found, Deferred) else found

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of the latest step's gradients, shape [], or [optimizers] if `max_norm` was a list; None if unknown."""
        return self.figures.grad_norm

    @property
    def backward_at(self) -> float | None:
        """Time at which the batch's first `backward` began, of `time.perf_counter`."""
        return self.figures.backward_at

    def next(self, batch: Batch | None = None, *, last: bool = False) -> Self:
        """Return the state within a batch. No communication.

        Args:
            batch: the one that follows, from `batches(ctx, loader, state)`. None for samples that no loader gave, such
                as rollouts: the position in the data stays, and `backward` takes their `weight=`.
            last: whether the window ends with this batch, full or not; the epoch's last batch always ends it.

        Raises:
            StepError: the result of an earlier call was dropped, the batch begins at another position, or it was taken
                before.
        """
        if self.sync or is_begun(self.accum):
            raise dropped(self.accum, "state.next")
        check_latest(self, "state.next")
        figures = StepFigures(stepped=self.figures.stepped, grad_norm=self.figures.grad_norm)
        if batch is None:
            accum = next_micro_batch(self.accum, last=last)
            return msgspec.structs.replace(self, accum=accum, valid=None, figures=figures)
        if batch.start is not self.cursor and batch.start != self.cursor:
            raise _misplaced(self.cursor, batch)
        accum = next_micro_batch(self.accum, last=last or batch.is_last)
        return msgspec.structs.replace(self, cursor=batch.next, accum=accum, valid=batch.valid, figures=figures)

    def next_epoch(self) -> Self:
        """Return the state at the beginning of the next epoch, for loops that leave an epoch early.

        Raises:
            StepError: within a window.
        """
        check_between(self.accum, "state.next_epoch")
        after = msgspec.structs.replace(self, cursor=Cursor(self.cursor.seed, self.cursor.epoch + 1))
        # The method has no context: the run's has marked the loss scale, or the window before a new scale.
        if (known := find_mark(self.scaler, "watched") or find_mark(self.accum, "spent")) is not None:
            known.owner.put(self, "left")
        return after

    def check_pass(self) -> None:
        """Raise `StepError` within a window, as another pass would use its gradients, or after `next_epoch`."""
        check_between(self.accum, "accel.batches")
        if find_mark(self, "left") is not None:
            raise StepError(
                "the result of state.next_epoch() was dropped",
                expected="state = state.next_epoch()",
                got="the state before it",
                where="accel.batches",
                fix="Keep the result: without it the pass continues in the same epoch.",
            )

    def at(self, cursor: Cursor) -> Self:
        """Return the state at another position in the data. No communication.

        Raises:
            StepError: within a window.
        """
        check_between(self.accum, "state.at")
        return msgspec.structs.replace(self, cursor=cursor)

    def check_saveable(self) -> None:
        """Raise `ConfigError` within a window: a checkpoint would lose its gradients."""
        self.accum.check_saveable()

    def rank_part(self) -> object:
        """Return the part that differs between ranks, None if there is none."""
        return self.cursor.rank_part()

    def with_rank_part(self, part: object) -> Self:
        """Return the state with this rank's part, in records or in plain values.

        Raises:
            msgspec.ValidationError: the part does not fit.
        """
        return msgspec.structs.replace(self, cursor=self.cursor.with_rank_part(part))


@context_first
def train_state(
    ctx: DistContext,
    *,
    seed: int = 0,
    accumulation: int | None = None,
    sync_each_batch: bool = False,
    scaler: LossScale | None = None,
) -> TrainState:
    """Return the state that a run starts with. No communication.

    Args:
        ctx: the context; its precision and accumulation are used.
        seed: seed of the data order.
        accumulation: micro-batches in a window; by default `ctx.accumulation`, the setting of flag, variable or file.
        sync_each_batch: whether ranks exchange gradients in every micro-batch and not only in the last. This takes more
            communication, but sharded models need no memory for full gradients. The result is the same.
        scaler: the first loss scale; by default `loss_scale(ctx)`: dynamic for fp16, else fixed at 1.

    Raises:
        ConfigError: an argument outside its range.
        DeviceError: the device does not compute in the context's precision.

    Examples:
        >>> ctx = accel.single()
        >>> state = accel.train_state(ctx, seed=0, accumulation=4)
        >>> state.epoch, state.updates, state.sync
        (0, 0, False)
    """
    steps = ctx.accumulation if accumulation is None else accumulation
    usual = loss_scale(ctx)  # in any case, as it checks the device
    scaler = usual if scaler is None else scaler
    ctx.comm.marks.watch(scaler)
    return TrainState(Cursor(seed=seed), Accumulation(steps, sync_each_batch), scaler)


def discard(state: TrainState, *models: nn.Module) -> TrainState:
    """Drop the gradients of the current window, and return the state between two windows. Mutates `.grad`.

    The position stays: the samples of the window are not seen again in this epoch. No communication; call it on all
    ranks, which else disagree about the next window.

    Args:
        state: in a window or between two.
        models: every model that the window trains, as `prepare` returned them.

    Returns:
        The state between two windows.

    Raises:
        ConfigError: no model.
        StepError: a block, such as `Ema.applied_to`, has replaced a model's weights.

    Examples:
        >>> ctx, model = accel.single(), torch.nn.Linear(2, 1)
        >>> state = accel.training.discard(accel.train_state(ctx), model)
        >>> state.sync
        False
    """
    if not models:
        raise ConfigError(
            "no model to discard the gradients of",
            expected="every model that the window trains",
            got="only a state",
            where="discard",
            fix="state = accel.training.discard(state, model)",
        )
    for at, model in enumerate(models):
        refuse_replaced(model.parameters(), "accel.training.discard", f"discard, model {at + 1}")
    clear_gradients(*models)
    return msgspec.structs.replace(state, accum=state.accum.reset(), valid=None)


def weight_of(
    state: TrainState, weight: float | torch.Tensor | None, *, same_units: bool
) -> float | torch.Tensor | None:
    """Return the weight of a backward pass: the batch's real samples, unless the caller gives another.

    A second pass without `same_units` or a weight is a `StepError`: it may count samples twice.
    """
    begun_window(state.accum, "accel.backward")
    if weight is not None:
        return weight
    if not is_begun(state.accum) and not same_units:
        raise StepError(
            "the samples of this batch are counted already",
            expected="state = state.next(batch) before the backward of another batch",
            got="a second backward of one batch",
            where="accel.backward",
            fix="If it is one, pass same_units=True for the same samples again, or weight= for others.",
        )
    if state.valid is None and not same_units:
        raise StepError(
            "the number of samples of this batch is not known",
            expected="a batch of a loader, or a weight",
            got="state.next() without a batch",
            where="accel.backward",
            fix="Pass the number of samples behind the mean: state = accel.backward(ctx, loss, state, weight=count).",
        )
    return state.valid


def after_backward(state: TrainState, accum: Accumulation, began: float | None = None) -> TrainState:
    """Return the state after a backward pass that `began` at a `perf_counter`; a batch keeps its first pass's time."""
    figures = state.figures
    if began is not None and figures.backward_at is None:
        figures = StepFigures(stepped=figures.stepped, grad_norm=figures.grad_norm, backward_at=began)
    return msgspec.structs.replace(state, accum=accum, figures=figures)


def after_step(
    ctx: DistContext,
    state: TrainState,
    accum: Accumulation,
    scaler: LossScale,
    *,
    stepped: bool | Deferred,
    grad_norm: torch.Tensor | None,
) -> TrainState:
    """Return the state between two windows."""
    figures = StepFigures(stepped=stepped, grad_norm=grad_norm, backward_at=state.backward_at)
    if scaler is state.scaler:  # else its window is marked
        ctx.comm.marks.watch(scaler)
    return TrainState(state.cursor, accum, scaler, figures=figures)


def _position(cursor: Cursor) -> str:
    order = f" of {cursor.of}" if cursor.of else ""
    return f"seed {cursor.seed}, epoch {cursor.epoch}, {cursor.consumed} samples consumed{order}"


def carries_state(at: int, keeps: str = "{}") -> Callable[[F], F]:
    """Decorate a verb with a `TrainState` as positional argument `at`; another record there is a `ConfigError`.

    The fix is the call by the parts; `keeps` is the line around that.
    """

    def decorate(function: F) -> F:
        def checked(*args: Any, **kwargs: Any) -> Any:
            state = args[at] if len(args) > at else kwargs.get("state", kwargs.get("scaler", args))
            behind = args[at + 1] if len(args) > at + 1 else kwargs.get("accum")
            if isinstance(state, TrainState) and not isinstance(behind, Accumulation):
                return function(*args, **kwargs)
            if state is args or not (args and isinstance(args[0], DistContext)):
                return function(*args, **kwargs)  # which names what is missing
            raise _other_record(function, at, keeps, [state, behind])

        # reports name the outermost frame of this package as the public call
        checked.__code__ = checked.__code__.replace(co_name=function.__name__)
        functools.update_wrapper(checked, function)
        return cast(F, checked)

    return decorate


def _other_record(function: Callable[..., Any], at: int, keeps: str, given: list[object]) -> ConfigError:
    """Make the error for records of a window in the place of a `TrainState`."""
    parts = [each for each in given if isinstance(each, LossScale | Accumulation)]
    names = list(inspect.signature(function).parameters.values())
    before = [each.name for each in names[:at]]
    behind = [each.name for each in names[at + 1 :] if each.kind is each.POSITIONAL_ONLY]
    name, state = function.__name__, "accel.train_state(ctx)"
    fix = f"Pass the state that the call before returned; the first is {state}."
    if parts:
        records = (
            ["accum"]
            if name == "accumulate"
            else ["scaler", "accum"][: 1 + any(isinstance(each, Accumulation) for each in parts)]
        )
        models = ["model"] if name == "accumulate" else []
        call = f"accel.training.parts.{name}({', '.join([*before, *records, *behind, *models])})"
        fix = f"A loss scale and an accumulation without a state: {keeps.format(call)}"
    return ConfigError(
        "a step needs the full state",
        expected=f"a TrainState, from {state}",
        got=", ".join(type(each).__name__ for each in parts or given[:1]),
        where=f"{name}, state",
        fix=fix,
    )
