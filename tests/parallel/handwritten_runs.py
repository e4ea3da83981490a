# SPDX-License-Identifier: Apache-2.0
"""One step of a hand-written model: through a pipeline, and by a plain loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from handwritten import Handwritten, tensors_of
from steps import begin_batch

import accel
from accel.parallel import Plan
from accel.tree import map_tensors

LR = 0.25


class Step(NamedTuple):
    """What one step leaves on a rank.

    Attributes:
        loss: the batch's mean.
        norm: of all gradients.
        parameters: after the step, by name.
        buffers: after the step, by name.
        trained: names of the parameters that got a gradient.
        outputs: tensors of `forward` after the step; none without.
    """

    loss: float
    norm: float
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    trained: frozenset[str]
    outputs: torch.Tensor | None = None


def called(model: torch.nn.Module, inputs: Any) -> Any:
    """The output of a model for the inputs of a `Batch`."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def piped(
    ctx: accel.DistContext, each: Handwritten, mesh: str, plan: Plan, *, rows: int = 7, evaluates: bool = True
) -> Step:
    """A step of SGD with a batch of `rows` samples, the same on all ranks; then the outputs, if it `evaluates`."""
    ctx = accel.replace(ctx, mesh=mesh)
    batch = each.batch(5, rows)
    model: Any = each.make()
    if "random" in each.tags:
        model.eval()
    optimizer: Any = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=LR)
    example = each.batch(6, rows).inputs
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=example)
    state = begin_batch(ctx)
    loss, state = accel.forward_backward(
        ctx, model, state, batch.inputs, targets=batch.targets, loss_fn=each.loss, weight=rows
    )
    inner = accel.unwrap_model(model)
    trained = frozenset(name for name, one in inner.named_parameters() if one.grad is not None and one.grad.any())
    norm = accel.optimizer_step(ctx, optimizer, state, max_norm=1e9).grad_norm
    assert norm is not None
    buffers = {name: one.detach().clone() for name, one in inner.named_buffers()}
    outputs = None
    if evaluates:
        with accel.evaluating(model):
            outputs = accel.training.forward(ctx, model, batch.inputs, select=_first)
    named = inner.named_parameters(remove_duplicate=False)
    parameters = {name: one.detach().clone() for name, one in named}
    return Step(float(loss), float(norm), parameters, buffers, trained, outputs)


def _first(output: Any) -> torch.Tensor:
    found = tensors_of(output)
    return next((one for one in found if one.ndim), found[0])


def plain(each: Handwritten, micro_batches: int, *, rows: int = 7) -> Step:
    """The same step by a loop of torch alone: micro-batches of one size, filled up with copies of the last sample."""
    model = each.make()
    if "random" in each.tags:
        model.eval()
    batch = each.batch(5, rows)
    size = -(-rows // micro_batches)
    total = 0.0
    for begin in range(0, rows, size):
        real = min(size, rows - begin)

        def part(tensor: torch.Tensor, begin: int = begin) -> torch.Tensor:
            return tensor[[min(at, rows - 1) for at in range(begin, begin + size)]]

        def real_rows(tensor: torch.Tensor, real: int = real) -> torch.Tensor:
            return tensor[:real] if tensor.ndim and len(tensor) == size else tensor

        output = map_tensors(real_rows, called(model, map_tensors(part, batch.inputs)))
        loss = each.loss(output, batch.targets[begin : begin + real]) / rows
        loss.backward()
        total += loss.item()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    norm = torch.stack([one.norm() for one in gradients.values()]).norm()
    with torch.no_grad():
        for name, gradient in gradients.items():
            model.get_parameter(name).sub_(LR * gradient)
    buffers = {name: one.detach().clone() for name, one in model.named_buffers()}
    parameters = {name: one.detach() for name, one in model.named_parameters(remove_duplicate=False)}
    trained = frozenset(name for name, one in gradients.items() if one.any())
    return Step(total, float(norm), parameters, buffers, trained, _first(called(model.eval(), batch.inputs)).detach())


def compare(found: list[Step], expected: Step, *, tolerance: float = 1e-10, outputs: bool = True) -> list[str]:
    """What differs; every parameter must be on some rank, and every buffer right on one."""
    wrong: list[str] = []

    def differs(one: torch.Tensor, other: torch.Tensor) -> bool:
        return one.shape != other.shape or not torch.allclose(one, other, rtol=tolerance, atol=tolerance)

    for rank, step in enumerate(found):
        if abs(step.loss - expected.loss) > tolerance * max(1.0, abs(expected.loss)):
            wrong.append(f"rank {rank}: loss {step.loss} instead of {expected.loss}")
        if abs(step.norm - expected.norm) > tolerance * max(1.0, expected.norm):
            wrong.append(f"rank {rank}: norm {step.norm} instead of {expected.norm}")
        wrong += [
            f"rank {rank}: {name}" for name, one in step.parameters.items() if differs(one, expected.parameters[name])
        ]
        if outputs and step.outputs is not None and differs(step.outputs, expected.outputs):
            wrong.append(f"rank {rank}: outputs")
    trained = frozenset[str]().union(*(step.trained for step in found))
    for name in expected.parameters:
        if not any(name in step.parameters for step in found):
            wrong.append(f"{name} is nowhere")
    for name in sorted(expected.trained - trained):
        tied = [n for n in trained if torch.equal(expected.parameters[n], expected.parameters[name])]
        if not tied:
            wrong.append(f"{name} has no gradient")
    for name, value in expected.buffers.items():
        holders = [step.buffers[name] for step in found if name in step.buffers]
        if not holders or all(differs(one, value) for one in holders):
            wrong.append(f"buffer {name}")
    return wrong
