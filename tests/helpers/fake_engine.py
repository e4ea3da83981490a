# SPDX-License-Identifier: Apache-2.0
"""An engine as those that users bring: it keeps weights, gradients and optimizer state in flat tensors of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import accel
from accel.parallel._engines import Engine, EngineOutcome, StepRequest


class FlatModel(nn.Module):
    """A model whose parameters are views of one tensor; gradients are gathered in another."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.weights = torch.cat([each.detach().flatten() for each in module.parameters()])
        self.gradients = torch.zeros_like(self.weights)
        start = 0
        for each in module.parameters():
            each.data = self.weights[start : start + each.numel()].view_as(each)
            each.flat_gradients = self.gradients  # so that calls which see parameters alone find them
            start += each.numel()

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def collect(self) -> None:
        """Add the gradients of a backward to the flat ones."""
        found = [torch.zeros_like(each) if each.grad is None else each.grad for each in self.module.parameters()]
        self.gradients += torch.cat([each.flatten() for each in found])
        self.module.zero_grad()


class FlatMomentum(Optimizer):
    """SGD with momentum on the flat weights."""

    def __init__(self, model: FlatModel, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.model = model
        self.passed = optimizer
        self.velocity = torch.zeros_like(model.weights)

    def step(self, closure: None = None) -> None:
        group = self.param_groups[0]
        self.velocity.mul_(group["momentum"]).add_(self.model.gradients)
        self.model.weights.sub_(self.velocity, alpha=group["lr"])
        self.passed._opt_called = True  # which torch's schedulers look for


class _Flat:
    """State of an object of the engine, as a checkpoint takes it: a tensor, and the learning rates of groups."""

    def __init__(self, tensor: torch.Tensor, groups: Sequence[dict[str, Any]] = ()) -> None:
        self.tensor = tensor
        self.groups = groups

    def state_dict(self) -> dict[str, Any]:
        return {"flat": self.tensor, "rates": [group["lr"] for group in self.groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tensor.copy_(state_dict["flat"])
        for group, rate in zip(self.groups, state_dict["rates"], strict=True):
            group["lr"] = rate


def make(ctx: accel.DistContext) -> Engine:
    """Return the engine; all its state is in the objects that it prepares."""
    return Engine(
        prepare=_prepare,
        hold=_hold,
        backward=_backward,
        step=_step,
        clear=_clear,
        clip_norm=_clip_norm,
        clip_value=_clip_value,
        items=_items,
        loaded=_loaded,
    )


def _prepare(ctx: accel.DistContext, objects: Sequence[Any]) -> Sequence[Any]:
    models = {id(each): FlatModel(each) for each in objects if isinstance(each, nn.Module)}
    prepared = [models.get(id(each), each) for each in objects]
    for at, each in enumerate(objects):
        if isinstance(each, Optimizer):
            [model] = models.values()
            prepared[at] = FlatMomentum(model, each)
    return prepared


@contextlib.contextmanager
def _hold(ctx: accel.DistContext, models: Sequence[nn.Module], exchanges: bool) -> Generator[None]:
    yield
    for each in models:
        assert isinstance(each, FlatModel)
        each.collect()
        if exchanges:
            each.gradients.copy_(accel.reduce(ctx, each.gradients, "mean"))  # as data parallelism leaves them


def _backward(ctx: accel.DistContext, loss: torch.Tensor, retain_graph: bool) -> None:
    torch.autograd.backward(loss, retain_graph=retain_graph)


def _step(ctx: accel.DistContext, optimizers: Sequence[Optimizer], request: StepRequest) -> EngineOutcome:
    [optimizer] = optimizers
    assert isinstance(optimizer, FlatMomentum)
    [limit] = request.max_norms
    grads = optimizer.model.gradients
    norm = (grads * request.factor).norm(request.norm_type)
    if request.check_finite and not norm.isfinite():
        return EngineOutcome(stepped=False, finite=False, grad_norm=None)
    shortened = 1.0 if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)
    grads.mul_(request.factor * shortened)
    if request.max_value is not None:
        grads.clamp_(-request.max_value, request.max_value)
    optimizer.step()
    grads.zero_()
    return EngineOutcome(stepped=True, finite=True, grad_norm=norm)


def _clear(ctx: accel.DistContext, optimizers: Sequence[Optimizer]) -> None:
    for each in optimizers:
        assert isinstance(each, FlatMomentum)
        each.model.gradients.zero_()


def _clip_norm(
    ctx: accel.DistContext, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, factor: Any
) -> torch.Tensor:
    grads = _gradients_of(parameters)
    norm = (grads * factor).norm(norm_type)
    grads.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _clip_value(ctx: accel.DistContext, parameters: Sequence[torch.Tensor], clip_value: float, factor: Any) -> None:
    bound = clip_value / float(factor)
    _gradients_of(parameters).clamp_(-bound, bound)


def _gradients_of(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The flat gradients of the model whose weights these are views of."""
    return parameters[0].flat_gradients


def _items(ctx: accel.DistContext, items: Mapping[str, object]) -> Mapping[str, object]:
    flat = dict(items)
    for name, each in items.items():
        if isinstance(each, FlatModel):
            flat[name] = _Flat(each.weights)
        elif isinstance(each, FlatMomentum):
            flat[name] = _Flat(each.velocity, each.param_groups)
    return flat


def _loaded(ctx: accel.DistContext, items: Mapping[str, object], made: Mapping[str, object]) -> None:
    """Nothing is left to hand on: state was loaded in place."""
