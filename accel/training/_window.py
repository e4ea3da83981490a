# SPDX-License-Identifier: Apache-2.0
"""A window that has ended: its gradients, its weight over all ranks, their norm, the division of both, its losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast, overload

import msgspec
import torch
from torch.optim import Optimizer

from accel.comm import Call, adopt, agreed, notes_of_ranks
from accel.context import DistContext, group_of
from accel.devices import wide_dtype
from accel.errors import ConfigError, StepError
from accel.errors._checks import check_choice
from accel.loop_state import Accumulation, LossScale, WindowLosses, check_latest
from accel.optim import (
    KeptNorms,
    elements_of,
    gradients,
    norm_over,
    precision_of,
    step_of,
    take_step,
    total_norm,
    wide_norm,
)
from accel.parallel._labels import check_exchanged, decide_independently, has_state_on_host, name_of
from accel.parallel._leftovers import drop_unused, found_gradient
from accel.parallel._modules import refuse_assigned_gradients
from accel.parallel._spread import average_
from accel.parallel.axes.pipeline import is_tied_copy
from accel.tensors import is_dtensor, parameters_of
from accel.terminal import show_names

_MOST_BITS = 1024  # of what a float holds


class StepWindow(NamedTuple):
    """A window, as the functions of the step take it."""

    accum: Accumulation  # its micro-batches and their weights
    scaler: LossScale  # its loss scale
    record: object  # the record that the caller passed, which holds `accum` or is it


class Policy(NamedTuple):
    """A policy for gradients with inf or NaN, as what a step needs for it."""

    reads: bool  # whether the host waits for norm and weight before the step
    raises: bool  # whether such gradients are an error; else the step is left out, where that is known in time
    defers: bool = False  # whether the optimizers leave the step out on the device, and a later call raises


POLICIES = {
    "raise": Policy(reads=True, raises=True),
    "skip": Policy(reads=True, raises=False),
    "ignore": Policy(reads=False, raises=False),
    "defer": Policy(reads=False, raises=True, defers=True),
}


def policy_of(nonfinite: str, scaler: LossScale) -> Policy:
    """Return the policy of a step; `ConfigError` for an unknown name."""
    check_choice(nonfinite, tuple(POLICIES), "unknown policy", where="nonfinite=")
    policy = POLICIES[nonfinite]
    # a dynamic loss scale is decided over in each step, and too many overflows are an error
    return policy._replace(reads=not policy.defers, raises=True) if scaler.dynamic else policy


def check_window(ctx: DistContext, window: StepWindow) -> None:
    """Raise `StepError` unless a window that has ended may be stepped with."""
    ctx.comm.check_open()
    check_latest(window.record, "optimizer_step")
    if window.accum.scale != window.scaler.scale:
        raise StepError(
            "the loss scale is not the one of the gradients",
            expected=str(window.accum.scale),
            got=str(window.scaler.scale),
            fix="Step all optimizers of a window in one call: optimizer_step(ctx, [first, second], ...), or give each"
            " its own accumulation and loss scale.",
        )


def mark_followed(ctx: DistContext, window: StepWindow, call: str) -> None:
    """Mark a window and its record: later calls with them report that `call` was dropped."""
    ctx.comm.marks.put(window.accum, "followed", call)
    if window.record is not window.accum:
        ctx.comm.marks.put(window.record, "followed", call)


def window_gradients(
    ctx: DistContext, window: Accumulation, *groups: Iterable[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Return the gradients of groups of parameters as ranks have exchanged them; for sparse ones only the rows.

    A collective if a graph was kept. Sparse gradients are coalesced. Runs in a block of `refused_alike`.
    """
    listed = [list(group) for group in groups]
    found = [_gradients(ctx, window, group) for group in listed]
    # a stage of a pipeline may only hold frozen parameters
    if not any(found) and (ctx.axis("pp").size == 1 or any(each.requires_grad for group in listed for each in group)):
        raise StepError(
            "there are no gradients",
            expected="a backward before the step",
            got="every .grad is None",
            fix="Call accel.backward first, on a loss of these parameters.",
        )
    return found


@contextmanager
def refused_alike(
    ctx: DistContext, parameters: Iterable[torch.Tensor], name: str, optimizers: Sequence[Optimizer] = ()
) -> Generator[bool]:
    """Run the checks of a call on the gradients of parameters; yield whether all ranks raise what one refuses.

    Each stage of a pipeline checks other parameters, and the others would wait for a stage that raises alone. So the
    first call of a name is a collective at the block's end, with optimizers the first call of each. Later ones are not,
    as a step has no more messages than one by hand: there the others learn of it when the rank ends. Ranks of a stage
    hold the same parameters, so they refuse alike. A collective, too, where unused parameters have been announced.
    """
    if ctx.world_size > 1:
        # Before gradients are listed: where no rank used a parameter, the exchange has left zeros, which would be
        # stepped.
        drop_unused(ctx, parameters)
    callers = optimizers or [ctx.comm]
    agrees = ctx.axis("pp").size > 1 and any(name not in _agreed_names(ctx, each) for each in callers)
    with agreed(ctx.comm, Call(name, ordered=False)) if agrees else nullcontext():
        yield agrees
    if agrees:
        for each in callers:
            ctx.comm.marks.put(each, "agreed", _agreed_names(ctx, each) | {name})


def _agreed_names(ctx: DistContext, caller: object) -> frozenset[str]:
    """The names of calls about which stages have agreed, of an optimizer, or of a context's calls without."""
    mark = ctx.comm.marks.find(caller, "agreed")
    return frozenset() if mark is None else cast("frozenset[str]", mark.note)


def total_weight(window: Accumulation) -> float | torch.Tensor:
    """Return the weight over all ranks, in the window's unit: a number where reading it does not wait for a device."""
    return window.world_weight if window.unit == 1.0 else window.world_weight / window.unit


@overload
def times(value: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor: ...


@overload
def times(value: float | torch.Tensor, factor: float | torch.Tensor) -> float | torch.Tensor: ...


def times(value: float | torch.Tensor, factor: float | torch.Tensor) -> float | torch.Tensor:
    """Multiply; by the number 1 without work of the device."""
    return value if not isinstance(factor, torch.Tensor) and factor == 1.0 else value * factor


def division(ctx: DistContext, window: Accumulation, weight: float | torch.Tensor) -> float | torch.Tensor:
    """Return the factor that makes a window's gradients the gradients of the mean loss over all units."""
    if window.divided:
        return 1.0
    if isinstance(weight, torch.Tensor):  # without weight all gradients are zero, and stay it
        return torch.where(weight > 0, ctx.world_size / times(weight, window.scale), 0.0)
    if weight == 0.0:
        return 0.0
    return ctx.world_size / (weight * window.scale)  # data parallel has divided by the world size


def check_limit(limit: float, where: str) -> None:
    """Raise `ConfigError` unless a number is above 0."""
    if not _is_above_zero(limit):
        raise ConfigError("the limit to clip to is not valid", expected="above 0", got=_shown(limit), where=where)


def check_limits(
    optimizers: list[Optimizer],
    max_norm: float | Sequence[float | None] | None,
    norm_type: float,
    max_value: float | None,
) -> list[float | None]:
    """Return one largest norm for all optimizers, or one for each."""
    check_norm_type(norm_type)
    if max_norm is None and max_value is None:
        return [None]
    limits: list[float | None] = list(max_norm) if isinstance(max_norm, Sequence) else [max_norm]
    for limit in limits:
        if limit is not None:
            check_limit(limit, "max_norm=")
    if isinstance(max_norm, Sequence) and len(limits) != len(optimizers):
        raise ConfigError(
            "norms and optimizers differ in number",
            expected=f"{len(optimizers)}, or one number for all together",
            got=f"{len(limits)}",
            where="max_norm=",
        )
    if max_value is not None:
        check_limit(max_value, "max_value=")
        if any(limit is not None for limit in limits):
            raise ConfigError("two kinds of clipping exclude each other", expected="max_norm or max_value", got="both")
    return limits


def check_real(grads: Iterable[torch.Tensor], where: str) -> None:
    """Raise `ConfigError` if a gradient is complex: its elements have no order to cut them in."""
    if found := sum(grad.is_complex() for grad in grads):
        raise ConfigError(
            "complex gradients cannot be cut to a value",
            expected="real gradients",
            got=f"{found} complex ones",
            where=where,
            fix="Clip by norm instead: max_norm=, or accel.clip_grad_norm_.",
        )


def check_norm_type(norm_type: float) -> None:
    """Raise `ConfigError` unless there is such a p-norm."""
    if not _is_above_zero(norm_type):
        raise ConfigError(
            "the norm is not valid", expected="p above 0, or inf", got=_shown(norm_type), where="norm_type="
        )


def as_tensor(norm: float | torch.Tensor, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Return a norm as a tensor of shape []; where it is, or on a device."""
    if isinstance(norm, torch.Tensor):
        return norm.to(device, dtype)
    return torch.scalar_tensor(norm, dtype=dtype, device=device)


def in_format_of(
    parts: Sequence[Sequence[torch.Tensor]], norms: Sequence[float | torch.Tensor], optimizers: Sequence[Optimizer]
) -> list[float | torch.Tensor]:
    """Return norms of some gradients in their precision, where they are tensors."""
    return [
        as_tensor(norm, precision_of(part, optimizers)) if isinstance(norm, torch.Tensor) else norm
        for norm, part in zip(norms, parts, strict=False)
    ]


def joined(
    norms: list[float | torch.Tensor], parts: list[list[torch.Tensor]], optimizers: list[Optimizer], *, joint: bool
) -> torch.Tensor | None:
    """Return the norms as one tensor: of shape [] for all together, else of one norm for each optimizer."""
    if not norms:
        return None
    if joint:
        return as_tensor(norms[0], precision_of(parts[0], optimizers), parts[0][0].device if parts[0] else None)
    device = next((part[0].device for part in parts if part), None)
    dtypes = [precision_of(part, [each]) for part, each in zip(parts, optimizers, strict=True)]
    return torch.stack([as_tensor(norm, dtype, device) for norm, dtype in zip(norms, dtypes, strict=True)])


def shortening(norm: float | torch.Tensor, max_norm: float) -> float | torch.Tensor:
    """Return the factor that shortens gradients of a norm to `max_norm`, at most 1.

    The 1e-6 comes from torch.nn.utils.clip_grad_norm_.
    """
    if isinstance(norm, torch.Tensor):
        return (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return min(max_norm / (norm + 1e-6), 1.0)


def _is_above_zero(number: object) -> bool:
    try:
        return not isinstance(number, str) and float(cast(Any, number)) > 0
    except (OverflowError, TypeError, ValueError):
        return False


def _shown(number: object) -> str:
    """Show a number in an error; Python prints no integer of thousands of digits."""
    return "a number too large" if isinstance(number, int) and number.bit_length() > _MOST_BITS else repr(number)


def _gradients(ctx: DistContext, window: Accumulation, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    grads = gradients(parameters)
    if ctx.world_size > 1:
        check_exchanged(ctx.rank, parameters)
        if window.divided:  # the user may have changed them since
            refuse_assigned_gradients(parameters, f"rank {ctx.rank}, optimizer_step")
    if torch.sparse_coo in {grad.layout for grad in grads}:
        if window.retained and ctx.world_size > 1:
            raise StepError(
                "sparse gradients of two backward passes through one graph cannot be averaged",
                expected="one backward in the micro-batch that ends a window",
                got="retain_graph=True",
                where=f"rank {ctx.rank}",
                fix="Add the losses and call backward once, or build the embedding with sparse=False.",
            )
        return elements_of(parameters)
    if window.retained and ctx.world_size > 1:  # what was exchanged already is the same everywhere, and stays
        average_(ctx, [grad for grad in grads if not is_dtensor(grad)])
    return grads


def clear_here(optimizers: list[Optimizer]) -> None:
    """Clear gradients as `zero_grad` does, without its records for the profiler, which take most of its time."""
    for optimizer in optimizers:
        if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:  # overridden, or wrapped
            optimizer.zero_grad()
            continue
        for each in parameters_of([optimizer]):
            each.grad = None


_MOST_NAMED = 3


class Leftovers(NamedTuple):
    """Gradients that `accumulate` found at the start of a window, on parameters of its step."""

    parameters: list[torch.Tensor]  # with a gradient that is still there, as no optimizer steps another
    used: list[torch.Tensor]  # with a gradient of more than zeros, which are no gradient

    def check(self, ctx: DistContext) -> None:
        """Raise `StepError` if there are some. A collective if some are sharded, as a rank's shard may be zeros."""
        # Whole gradients are equal on all ranks, unless one ran another backward, which then raises alone.
        is_sharded = any(map(is_dtensor, self.parameters))
        with agreed(ctx.comm, Call("optimizer_step", ordered=False)) if is_sharded else nullcontext():
            self.refuse()

    def refuse(self) -> None:
        """Raise `StepError` if this rank has found some."""
        if self.used:
            raise _leftover_error(self.used)


def leftovers_of(optimizers: Sequence[Optimizer]) -> Leftovers:
    """Return the gradients of optimizers from before their window."""
    parameters = parameters_of(optimizers)
    found = [each for each in parameters if found_gradient(each) is not None and each.grad is not None]
    return Leftovers(found, [each for each in found if found_gradient(each)])


def _leftover_error(parameters: Sequence[torch.Tensor]) -> StepError:
    names = [name_of(each) or f"one of shape {list(each.shape)}" for each in parameters]
    return StepError(
        "the step would use gradients from before its window",
        expected="parameters without gradients when a window begins",
        got=f"gradients of {show_names(names, _MOST_NAMED)}",
        where="optimizer_step",
        fix="Call accel.training.clear_gradients(model) where a window is abandoned, "
        "or where a loss of another model has left gradients in this one; "
        "optimizer.zero_grad() after each window in which an optimizer takes no step.",
    )


def whole_norm(
    ctx: DistContext,
    grads: Sequence[torch.Tensor],
    parameters: Iterable[torch.Tensor],
    norm_type: float,
    kept: KeptNorms | None = None,
) -> float | torch.Tensor:
    """Return the total norm of gradients over all stages, equal on all ranks; see `accel.optim.total_norm`.

    A collective along the pipeline, and of DTensors' meshes. `parameters` include the parameters of `grads`.
    """
    if ctx.axis("pp").size == 1:
        return total_norm(grads, norm_type, kept)
    group = group_of(ctx, "pp")
    assert group is not None
    # A tied parameter is on two stages, and its gradient is summed on both: it counts once.
    copies = {id(each.grad) for each in parameters if is_tied_copy(each)}
    own = [grad for grad in grads if id(grad) not in copies]
    # In float64: the square of a large norm overflows float32.
    plain = bool(own) and not any(is_dtensor(grad) or grad.device != ctx.device for grad in own)
    if plain and norm_type != math.inf:
        norm = wide_norm(own, norm_type, kept)
    else:
        norm = torch.as_tensor(total_norm(own, norm_type, kept), dtype=torch.float64, device=ctx.device)
    return norm_over([adopt(group, ctx.device)], norm, norm_type)


Figures = Sequence[float | torch.Tensor]


class StepReading(NamedTuple):
    """Figures of a step on the host."""

    finite: bool  # whether the gradients are
    empty: bool  # whether the window has no weight
    norms: list[float]  # norms of the gradients
    weight: float  # weight of the window


def read_outcome(norms: Figures, weight: float | torch.Tensor) -> StepReading:
    """Return the outcome in one wait for the device; raise `ConfigError` if the weight is none."""
    figures = [*norms, weight]
    tensors = [figure for figure in figures if isinstance(figure, torch.Tensor)]
    if len(tensors) == 1:
        figures = [figure.cpu() if isinstance(figure, torch.Tensor) else figure for figure in figures]
    elif tensors:
        read = iter(stacked(tensors, tensors[0].device).cpu())
        figures = [next(read) if isinstance(figure, torch.Tensor) else figure for figure in figures]
    return judged(list(map(float, figures)))


def stacked(figures: Figures, device: torch.device) -> torch.Tensor:
    """Put figures on one device, so that several are read in one wait."""
    wide = wide_dtype(device)
    # a number is filled in: a copy of it would wait
    return torch.stack(
        [
            figure.to(device, wide)
            if isinstance(figure, torch.Tensor)
            else torch.full((), figure, dtype=wide, device=device)
            for figure in figures
        ]
    )


def judged(figures: list[float]) -> StepReading:
    """Return the outcome by the norms and, at the end, the weight; raise `ConfigError` if that is no weight."""
    *norms, total = figures
    if not 0 <= total < math.inf:
        raise ConfigError(
            "a weight is not a finite number from 0",
            expected="finite numbers, 0 or above",
            got=f"a sum of {total}",
            where="backward, weight=",
            fix="The window's gradients are invalid: drop them by discard or clear_gradients of accel.training.",
        )
    return StepReading(all(map(math.isfinite, norms)), total == 0, norms, total)


_FINITE, _BAD, _UNKNOWN = "finite", "bad", "unknown"


def with_loss(accum: Accumulation, loss: torch.Tensor) -> Accumulation:
    """Return a window with a loss noted, by which an error names the ranks that had a bad one. Waits for no device."""
    seen = accum.losses.seen
    found = _figure(loss) if seen is None else _both(seen, _figure(loss))
    return msgspec.structs.replace(accum, losses=WindowLosses(seen=found))


def _figure(loss: torch.Tensor) -> float | torch.Tensor:
    # On the CPU a number costs less than a kernel; whatever stands in for a tensor there has none to read.
    if loss.is_cpu and type(loss) is torch.Tensor:
        return loss.item()
    return loss.detach() if loss.requires_grad else loss


def _both(first: float | torch.Tensor, second: float | torch.Tensor) -> float | torch.Tensor:
    """Return a figure that is finite if two are: 0 times inf or NaN is NaN, which stays."""
    if isinstance(first, torch.Tensor):
        other = second.to(first.device) if isinstance(second, torch.Tensor) else second
        return torch.add(first, other, alpha=0)  # one kernel
    return torch.add(second, first, alpha=0) if isinstance(second, torch.Tensor) else first + 0.0 * second


def blame(ctx: DistContext, seen: float | torch.Tensor | None, *, independent: bool) -> str:
    """Return a clause that names the ranks with a bad loss, by the window's losses. Waits for the device.

    Every rank that refuses the step calls this; one that refuses alone waits a second for the others.
    """
    own = _UNKNOWN if seen is None else _FINITE if math.isfinite(seen) else _BAD
    known = {ctx.rank: own} if independent else notes_of_ranks(ctx.comm, "losses", own)
    if bad := sorted(rank for rank, each in known.items() if each == _BAD):
        if ctx.world_size == 1:
            return "; the loss was not finite either"
        return f"; the loss of rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))} was not finite"
    if _UNKNOWN in known.values():
        return ""
    if len(known) == ctx.world_size:
        return "; the loss was finite" + " on every rank" * (ctx.world_size > 1)
    return f"; the loss was finite on rank {', '.join(map(str, sorted(known)))}"


def steps_of(ctx: DistContext, optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, Callable[[], object]]]:
    """Return optimizers with the functions that step them. Those that send messages learn their ranks, a collective."""
    masters = ctx.precision.master_weights is not None
    steps: list[tuple[Optimizer, Callable[[], object]]] = []
    for each in optimizers:
        if (share := getattr(each, "share_ranks", None)) is not None:
            share(ctx, independent=decide_independently(ctx.position.axes, [each]))
        step = step_of(each, masters=masters, streams=ctx.streams if has_state_on_host(each) else None)
        steps.append((each, partial(take_step, each, step)))
    return steps
