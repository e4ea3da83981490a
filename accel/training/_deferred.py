# SPDX-License-Identifier: Apache-2.0
"""Deferred steps: optimizers read on the device whether gradients are finite, and a later call on the host.

The outcome is their `found_inf`, as torch.amp.GradScaler's, and is copied to the host during the work that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.optim import SGD, Adagrad, Optimizer

from accel.context import DistContext
from accel.errors import ConfigError, NonFiniteError
from accel.loop_state import Accumulation, LossScale
from accel.optim import KeptNorms
from accel.tensors import is_dtensor, parameters_of
from accel.training._refused import first_of_ranks
from accel.training._window import Figures, blame, judged, stacked


class Deferred:
    """A step with an outcome that the host has not read. The context's handle holds `read` until then.

    Attributes:
        found_inf: shape [], fp32: 1 where the optimizers leave the step out, else 0.
        stepped: whether the optimizers took the step; None before `read`.
    """

    __slots__ = ("_judge", "found_inf", "stepped")

    def __init__(self, found_inf: torch.Tensor, judge: Callable[[], None]) -> None:
        self.found_inf = found_inf
        self.stepped: bool | None = None
        self._judge: Callable[[], None] | None = judge

    def __deepcopy__(self, memo: object) -> Deferred:
        return self  # copies of a state share the outcome, which is yet to be read

    def __reduce__(self) -> tuple[Any, ...]:
        return _outcome, (self.stepped,)

    def read(self) -> None:
        """Wait for the outcome, and raise its error."""
        judge, self._judge = self._judge, None  # it holds tensors
        if judge is not None:
            self.stepped = False
            judge()
            self.stepped = True


def _outcome(stepped: bool | None) -> bool | None:
    return stepped


def defer(
    ctx: DistContext,
    norms: Figures,
    weight: float | torch.Tensor,
    kept: KeptNorms,
    *,
    optimizers: Sequence[Optimizer],
    accum: Accumulation,
    independent: bool,
    note: Callable[[], object],
) -> Deferred:
    """Begin to copy the outcome of a step to the host. No wait for the device, no communication.

    Args:
        ctx: the context.
        norms: norms of the gradients.
        weight: the window's weight.
        kept: norms of single gradients, which stay on the device unless the outcome is an error.
        optimizers: optimizers of the step; their parameters still have gradients.
        accum: the window of the step.
        independent: whether ranks may decide differently.
        note: called once it is known that the step was taken.
    """
    if not isinstance(weight, torch.Tensor):
        _ = judged([weight])  # refused before the step
    device = next((each.device for each in (*norms, weight) if isinstance(each, torch.Tensor)), ctx.device)
    figures = stacked([*norms, weight], device)
    # a weight below 0 takes no step either
    stays = (figures.isfinite().all() & (figures[-1] >= 0)).logical_not()
    read = _begin_copy(ctx, figures)
    places = [id(each.grad) for each in parameters_of(optimizers)]

    def judge() -> None:
        if not judged(read()).finite:
            bad = kept.nonfinite()
            at = next((at for at, place in enumerate(places) if place in bad), None)
            named = first_of_ranks(ctx, optimizers, at, independent=independent)
            raise _nonfinite(accum.updates, blame(ctx, accum.losses.seen, independent=independent), named)
        _ = note()

    return Deferred(stays.to(torch.float32), judge)


def _begin_copy(ctx: DistContext, figures: torch.Tensor) -> Callable[[], list[float]]:
    """Copy figures to the host in the background, where its memory can be pinned; return a function that waits."""
    streams = ctx.streams
    if not (streams.is_pinnable and streams.holds(figures)):
        return lambda: list(map(float, figures.cpu()))
    host = streams.pinned(figures.shape, figures.dtype)
    streams.copy(host, figures)
    # not the stream: by the time of the wait, it has work of the next step
    copied = streams.record(streams.current())

    def wait() -> list[float]:
        streams.synchronize(copied)
        return list(map(float, host))

    return wait


def _nonfinite(step: int, blamed: str, named: str) -> NonFiniteError:
    return NonFiniteError(
        f"a gradient of step {step} is not finite",
        expected="finite gradients",
        got="inf or NaN" + blamed,
        where=named or "the norm of all gradients, optimizer_step, nonfinite='defer'",
        fix="Parameters and optimizer state are as before that step; load the last checkpoint, as schedulers and"
        " counts have advanced.",
    )


def check_deferrable(ctx: DistContext, optimizers: Sequence[Optimizer], scaler: LossScale, *, engine: bool) -> None:
    """Raise `ConfigError` where a step cannot be left out after the host has continued."""
    if engine:
        raise _refused("an engine decides over its steps itself", "a strategy without an engine", ctx.strategy)
    if scaler.dynamic:
        raise _refused(
            "the loss scale of the next backward depends on the outcome of this step",
            "a fixed loss scale",
            "a dynamic one, as with fp16",
            "Compute in bf16, or pass scaler=accel.LossScale(scale=...) to train_state.",
        )
    for each in optimizers:
        if not _takes_found_inf(each):
            raise _refused(
                "an optimizer that cannot leave out a step on the device",
                "one that takes found_inf, as Adam, AdamW, SGD and Adagrad of torch.optim with fused=True do",
                type(each).__name__,
                f"Build it with fused=True: torch.optim.{type(each).__name__}(..., fused=True)."
                if "fused" in each.defaults
                else "Use one of those, with fused=True.",
            )
        if isinstance(each, SGD | Adagrad) and any(map(is_dtensor, parameters_of([each]))):
            raise _refused(
                "torch has no fused kernel of this optimizer for DTensors",
                "Adam or AdamW of torch.optim for sharded parameters",
                type(each).__name__,
                "Build torch.optim.AdamW(..., fused=True).",
            )
        if any(group.get("momentum") and group.get("dampening") for group in each.param_groups):
            raise _refused(
                "a first step differs from later ones under dampening, and may be left out",
                "dampening=0",
                f"{type(each).__name__} with momentum and dampening",
            )


def _refused(problem: str, expected: str, got: str, fix: str = "") -> ConfigError:
    otherwise = "Or pass nonfinite='skip'." if fix else "Pass nonfinite='skip'."
    where = "optimizer_step, nonfinite='defer'"
    return ConfigError(problem, expected=expected, got=got, where=where, fix=f"{fix} {otherwise}".strip())


def _takes_found_inf(optimizer: Optimizer) -> bool:
    # the mark by which torch.amp.GradScaler finds them; a group may have been built otherwise
    takes = getattr(optimizer, "_step_supports_amp_scaling", False)
    return takes and all(group.get("fused", True) for group in optimizer.param_groups)


def mark_deferred(ctx: DistContext, optimizers: Sequence[Optimizer], *, defers: bool) -> None:
    """Mark the parameters of deferred steps, which no average follows; a step of another kind removes the marks."""
    if not defers:
        if ctx.comm.defers:
            ctx.comm.marks.clear("deferred")
            ctx.comm.defers = False
        return
    for each in optimizers:
        parameters = parameters_of([each])
        if parameters and ctx.comm.marks.find(parameters[0], "deferred") is None:  # marked in the first step
            for parameter in parameters:
                ctx.comm.marks.put(parameter, "deferred")
    ctx.comm.defers = True


def give_found_inf(optimizer: Optimizer, found_inf: torch.Tensor, step: Callable[[], object]) -> None:
    """Let an optimizer take a step unless `found_inf` is 1."""
    if isinstance(optimizer, SGD):
        _begin_momentum(optimizer)
    holder = cast(Any, optimizer)
    holder.found_inf = found_inf
    try:
        _ = step()
    finally:
        del holder.found_inf


def _begin_momentum(optimizer: SGD) -> None:
    """Begin momentum with zeros: torch begins without memory to keep, which a first step that is left out would."""
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for each in group["params"]:
            if each.grad is not None and optimizer.state[each].get("momentum_buffer") is None:
                optimizer.state[each]["momentum_buffer"] = torch.zeros_like(each.grad)
