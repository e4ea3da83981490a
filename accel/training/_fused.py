# SPDX-License-Identifier: Apache-2.0
"""The optimizer in the backward: each parameter is stepped with its gradient, which is freed at once."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch.optim import Optimizer

from accel.comm import Call, agreed, refuse_replaced
from accel.comm._streams import DeviceStreams
from accel.context import DistContext, context_first
from accel.errors import ConfigError, NonFiniteError, StepError
from accel.errors._checks import check_choice
from accel.optim import first_nonfinite, gradients, step_of, take_step
from accel.parallel._engines import engine_of
from accel.parallel._labels import has_state_on_host, name_of
from accel.parallel._leftovers import drop_unused
from accel.tensors import is_dtensor, parameters_of
from accel.training._backward import check_loss, run_backward
from accel.training._refused import cannot_step
from accel.training._window import POLICIES

_NonFinite = Literal["raise", "ignore"]


@context_first
def fused_step(ctx: DistContext, loss: torch.Tensor, optimizer: Optimizer, *, nonfinite: _NonFinite = "raise") -> None:
    """Run backward and step in one, with one gradient in memory at a time. Mutates parameters.

    It takes the place of `backward` and `optimizer_step` in a loop with a step after every backward, on one rank or for
    a model of `fully_shard`, where the gradients of one group are alive together. It cannot do what needs all gradients
    before any parameter moves: clipping by norm, accumulation, the loss scale of fp16, skipping a step. The optimizer
    stays an ordinary one, for schedulers (step them after this) and checkpoints. With torch.optim.SGD this is LOMO.

    Args:
        ctx: the context. For local SGD pass `accel.single(ctx.device)`.
        loss: shape [], the mean over the batch, to be minimised. Ranks count the same.
        optimizer: optimizer that steps each parameter by itself, as torch.optim's do.
        nonfinite: policy for inf or NaN: `raise`, which costs several ranks two small messages, or `ignore`, which
            never waits for the device.

    Raises:
        ConfigError: a parameter that is not sharded on more ranks than one, fp16, or an optimizer that cannot step a
            single parameter.
        StepError: gradients of an earlier backward are left, a parameter got two in this one, or a block, such as
            `Ema.applied_to`, has replaced the weights.
        NonFiniteError: on all ranks. A loss is not finite, and nothing was changed; or a gradient is not finite, its
            parameter was not changed, and the error has the number of parameters stepped before.

    Reference: Lv et al. 2023, "Full parameter fine-tuning for large language models with limited resources",
        arXiv:2306.09782; torch.Tensor.register_post_accumulate_grad_hook.
    """
    groups = _checked(ctx, optimizer)
    refuse_replaced(parameters_of([optimizer]), "accel.training.fused_step")
    check_choice(nonfinite, get_args(_NonFinite), "unknown policy", where="nonfinite=")
    looks = POLICIES[nonfinite].reads
    call = Call("fused_step", ordered=False)
    if looks:
        with agreed(ctx.comm, call):
            # Before backward, since parameters move within it and nothing can be taken back.
            if not bool(torch.isfinite(loss.detach()).all()):
                got = str(loss.item())
                raise NonFiniteError("the loss is not finite", expected="a finite loss", got=got, where="fused_step")
    streams = ctx.streams if has_state_on_host(optimizer) else None
    done: set[int] = set()
    spoilt: list[NonFiniteError] = []

    def step_one(parameter: torch.Tensor) -> None:
        _check_once(parameter, done)
        if ctx.world_size > 1:
            drop_unused(ctx, [parameter])  # a message for each, as none waits for the others
            if parameter.grad is None:
                return
        _ = gradients([parameter])  # sums what tensor parallelism leaves in parts
        bad = _nonfinite(parameter, len(done)) if looks else None
        done.add(id(parameter))
        if bad is None:
            _step_one(optimizer, groups[id(parameter)], parameter, streams)
        elif ctx.world_size == 1:
            raise bad
        else:
            spoilt.append(bad)  # raised after the backward, in which the other ranks wait for this one
            parameter.grad = None

    # Each parameter is stepped as soon as its gradient is complete, and the gradient is freed: that is the memory
    # saved.
    handles = [
        parameter.register_post_accumulate_grad_hook(step_one)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    try:
        check_loss(loss, "fused_step", "Use the mean over the batch: loss.mean().")
        run_backward(ctx, loss, 1.0)
    finally:
        for handle in handles:
            handle.remove()
    if not done:
        raise StepError("no parameter of the optimizer took part in the loss", where="fused_step")
    # The second message: all ranks raise, though only one has seen the gradient.
    if looks:
        with agreed(ctx.comm, call):
            if spoilt:
                raise spoilt[0]


def _step_one(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor, streams: DeviceStreams | None
) -> None:
    """Show the optimizer one parameter only: it would search all of them for the one with a gradient."""
    narrow, all_groups = {**group, "params": [parameter]}, optimizer.param_groups
    optimizer.param_groups = [narrow]
    try:
        take_step(optimizer, step_of(optimizer, streams=streams))
    finally:
        optimizer.param_groups = all_groups
    parameter.grad = None
    if counted := [key for key in narrow if key != "params" and narrow[key] is not group.get(key)]:
        raise ConfigError(
            "this optimizer counts its steps per group, so it cannot step single parameters",
            expected="an optimizer that steps like torch.optim's",
            got=f"{type(optimizer).__name__}, which changed {', '.join(counted)}",
            where="fused_step",
            fix="Use accel.backward and accel.optimizer_step, and load the last checkpoint: one parameter has moved.",
        )


def _check_once(parameter: torch.Tensor, done: set[int]) -> None:
    if id(parameter) in done:
        raise StepError(
            "a parameter got gradients twice in one backward, and was stepped after the first",
            expected="one backward through the graph",
            got="a nested one, as reentrant checkpointing runs",
            where=_name(parameter),
            fix="Use accel.checkpoint_activations, and load the last checkpoint.",
        )


def _nonfinite(parameter: torch.Tensor, stepped: int) -> NonFiniteError | None:
    """Make the error for a gradient that is not finite in this rank's part."""
    if first_nonfinite([parameter]):
        return None
    return NonFiniteError(
        "a gradient is not finite",
        expected="finite gradients",
        got=f"inf or NaN, after {stepped} parameters had been stepped",
        where=_name(parameter),
        fix="Load the last checkpoint, and lower the learning rate.",
    )


def _name(parameter: torch.Tensor) -> str:
    return name_of(parameter) or f"a parameter of shape {list(parameter.shape)}"


def _checked(ctx: DistContext, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """Return the group of each parameter, by `id`, after checks of model, context and optimizer."""
    ctx.comm.check_open()
    ctx.comm.settle()
    refused = {
        "an engine steps all of its parameters at once": engine_of(ctx) is not None,
        "ranks exchange the gradients of unsharded parameters after the backward, so nothing would be saved": (
            ctx.world_size > 1
            and any(not is_dtensor(each) and each.requires_grad for each in parameters_of([optimizer]))
        ),
        "an overflow of fp16 must be seen before any parameter moves": ctx.precision.compute == "fp16",
        "master weights need all gradients of a step": ctx.precision.master_weights is not None,
        "a step sends messages for all parameters at once": ctx.world_size > 1 and hasattr(optimizer, "share_ranks"),
    }
    for problem, holds in refused.items():
        if holds:
            raise ConfigError(problem, where="fused_step", fix="Use accel.backward and accel.optimizer_step.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise cannot_step(optimizer, Optimizer, "fused_step, optimizer")
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    left = sum(each.grad is not None for each in parameters_of([optimizer]))
    if left:
        raise StepError(
            "gradients of an earlier backward would be added to these",
            expected="no gradients before the call: it accumulates none",
            got=f"{left} of them",
            where="fused_step",
            fix="Call optimizer.zero_grad(), or accel.backward and accel.optimizer_step to accumulate.",
        )
    return groups
