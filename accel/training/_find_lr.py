# SPDX-License-Identifier: Apache-2.0
"""`find_lr`: a range test of learning rates by real steps; and `rewound`, the block that takes them back.

After the block a model, its optimizers and the random streams are as before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from accel.comm import replaced
from accel.context import DistContext, context_first
from accel.data import StreamLoader
from accel.data._batches import Batch, batches
from accel.data._loader import Loader
from accel.errors import ConfigError
from accel.errors._checks import check_count, check_kind
from accel.loop_state import LastPass
from accel.metrics import running_metrics
from accel.optim import settle_state
from accel.parallel._engines import engine_of
from accel.parallel._leftovers import clear_gradients, clear_parameters
from accel.parallel._modules import reshard
from accel.random import isolated_rng
from accel.tensors import parameters_of
from accel.training._forward_backward import forward_backward
from accel.training._loss_sums import LossFn
from accel.training._lr_range import LrRange, has_diverged, lr_range, spaced
from accel.training._step import MaxNorm, optimizer_step
from accel.training._train_state import TrainState
from accel.training._train_step import pair_of

_FEWEST = 10

Unpack = Callable[[Batch], tuple[Any, Any, float | torch.Tensor | None]]


@context_first
def find_lr(
    ctx: DistContext,
    state: TrainState,
    loader: Loader | StreamLoader,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss_fn: LossFn,
    *,
    low: float = 1e-7,
    high: float = 1.0,
    steps: int = 100,
    max_norm: MaxNorm = None,
    unpack: Unpack | None = None,
) -> LrRange:
    """Take optimizer steps at rising learning rates, and suggest the rate at which the loss falls fastest.

    It calls the functions of `train_step`, with the state's accumulation, over as many epochs as needed. The test ends
    early where the loss, a mean over all ranks, rises far or is not finite. At its end, and after an error,
    parameters, buffers, modes, optimizers and random streams are as before, to the bit; so are the state and the
    position in the data. Plain attributes that a forward writes are not restored. A collective; takes the memory of a
    copy of parameters, buffers and optimizer state.

    Args:
        ctx: the context, on a mesh without `pp`.
        state: the state that the training would begin with, between two windows.
        loader: from `prepare_loader`. A stream that cannot be read twice loses the samples of the test.
        model: from `prepare` or `prepare_model`, in the mode for training.
        optimizer: an optimizer, or several that step together. The group with the largest learning rate gets the
            tested one, and the others keep their ratio to it.
        loss_fn: maps the model's output and the targets to the sum of the losses, as for `train_step`.
        low, high: first and last learning rate; each step multiplies the rate by the same factor.
        steps: number of optimizer steps, 10 or above.
        max_norm: largest norm of the gradients, as for `optimizer_step`; as in the training, for it moves the result.
        unpack: returns a batch's inputs, targets and weight, as `train_step` takes them; None for the weight means
            `batch.valid`. By default `batch.data` is a pair of inputs and targets.

    Returns:
        The record of the test, the same on every rank: `learning_rates`, `losses`, `suggestion`, `figure()`.

    Raises:
        ConfigError: a mesh with `pp`, a strategy of an engine, or an argument outside its range; nothing was changed.
        DataError: `batch.data` is no pair, and there is no `unpack`.
        StepError: the state waits for `backward` or `optimizer_step`.
        PeerError: another rank was lost.

    Examples:
        >>> whole = accel.prepare_loader(ctx, DataLoader(dataset, batch_size=10))
        >>> loss_sum = nn.MSELoss(reduction="sum")
        >>> found = accel.schedules.find_lr(ctx, state, whole, model, optimizer, loss_sum, high=10.0)
        >>> 0.001 < found.suggestion < 1.0, found.diverged
        (True, True)

    Reference: Smith 2017, "Cyclical Learning Rates for Training Neural Networks", arXiv:1506.01186.
    """
    ctx.comm.check_open()
    _check_arguments(ctx, state, low, high, steps)
    state.check_pass()
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    ratios = _ratios(optimizers)
    # The guards against dropped states go by identity: the caller's state, cursor and loader must not be marked.
    start = _twin(ctx, state)
    loader = dataclasses.replace(loader, passes=LastPass())
    rates: list[float] = []
    losses: list[float] = []
    diverged = False
    with rewound(ctx, model, optimizers), contextlib.closing(batches(ctx, loader, start, repeat=True)) as data:
        step = _Step(ctx, model, optimizers, loss_fn, max_norm, unpack)
        trained = start
        for rate in spaced(low, high, steps):
            _set_rate(optimizers, ratios, rate)
            trained, loss = step.take(trained, data)
            if loss is None:
                continue
            diverged = not math.isfinite(loss)
            if not diverged:
                rates.append(rate)
                losses.append(loss)
                # A dynamic loss scale explains a gradient that is not finite; nothing else does.
                lost = trained.accum.skipped > start.accum.skipped and not trained.scaler.dynamic
                diverged = lost or has_diverged(losses)
            if diverged:
                break
    return lr_range(rates, losses, diverged=diverged)


class _Step(NamedTuple):
    """The arguments of every step of a test."""

    ctx: DistContext
    model: nn.Module
    optimizers: list[Optimizer]
    loss_fn: LossFn
    max_norm: MaxNorm
    unpack: Unpack | None

    def take(self, state: TrainState, data: Iterator[Batch]) -> tuple[TrainState, float | None]:
        """Train on one window; return the next state and the mean loss over all ranks, None without a real unit."""
        metrics = running_metrics(loss="mean")
        while not state.sync:
            batch = next(data)
            inputs, targets, weight = self._parts(batch)
            state = state.next(batch)
            loss, state = forward_backward(
                self.ctx, self.model, state, inputs, loss_fn=self.loss_fn, targets=targets, weight=weight
            )
            metrics = metrics.add(batch.valid if weight is None else weight, loss=loss)
        state = optimizer_step(self.ctx, self.optimizers, state, max_norm=self.max_norm, nonfinite="skip")
        return state, metrics.read(self.ctx)[0].get("loss")

    def _parts(self, batch: Batch) -> tuple[Any, Any, float | torch.Tensor | None]:
        if self.unpack is not None:
            return self.unpack(batch)
        inputs, targets = pair_of(
            batch,
            where="find_lr",
            fix='Pass unpack=, such as unpack=lambda batch: (batch.data["x"], batch.data["y"], None).',
        )
        return inputs, targets, None


def _check_arguments(ctx: DistContext, state: object, low: float, high: float, steps: int) -> None:
    if ctx.axis("pp").size > 1:
        raise ConfigError(
            "a range test has no pipeline",
            expected="a mesh without pp",
            got=f"pp={ctx.axis('pp').size}",
            where="find_lr",
            fix="Run the test on another mesh: the rate depends on the model and on the global batch.",
        )
    if engine_of(ctx) is not None:
        raise ConfigError(
            "an engine keeps its own parameters and state, which cannot be restored",
            expected="the strategy ddp or fsdp",
            got=f"strategy {ctx.strategy}",
            where="find_lr",
        )
    check_kind(
        state,
        TrainState,
        "the state is not valid",
        expected="a TrainState, from accel.train_state(ctx)",
        where="find_lr",
    )
    check_count(steps, "too few steps for a range", least=_FEWEST, where="find_lr(steps=)")
    if not 0 < low < high < math.inf:
        raise ConfigError(
            "the range of learning rates is not valid",
            expected="0 < low < high",
            got=f"low={low!r}, high={high!r}",
            where="find_lr",
        )


def _twin(ctx: DistContext, state: TrainState) -> TrainState:
    """Return an equal state of other records."""
    parts = {name: msgspec.structs.replace(getattr(state, name)) for name in ("cursor", "accum", "scaler")}
    twin = msgspec.structs.replace(state, **parts)
    ctx.comm.marks.watch(twin.scaler)
    return twin


def _ratios(optimizers: Sequence[Optimizer]) -> list[float]:
    """Return the learning rate of each group as a part of the largest; all 1 where there is none."""
    rates = [float(group.get("lr", 0.0)) for each in optimizers for group in each.param_groups]
    largest = max(rates, default=0.0)
    return [rate / largest if largest else 1.0 for rate in rates]


def _set_rate(optimizers: Sequence[Optimizer], ratios: Sequence[float], rate: float) -> None:
    groups = [group for each in optimizers for group in each.param_groups]
    for group, ratio in zip(groups, ratios, strict=True):
        if isinstance(group.get("lr"), torch.Tensor):  # one that a compiled or captured step reads
            group["lr"].fill_(rate * ratio)
        else:
            group["lr"] = rate * ratio


Restore = Callable[[], object]  # puts the former content back into an object


@contextlib.contextmanager
def rewound(ctx: DistContext, model: nn.Module, optimizers: Sequence[Optimizer]) -> Generator[None]:
    """Restore parameters, gradients, buffers, modes, optimizers and random streams after a block, or an error in it.

    Everything keeps its identity and gets its bits back. Takes the memory of a copy. No communication.
    """
    reshard(model)
    every = list(_all_optimizers(optimizers))
    stepped = list(_stepped(model, every))
    with torch.no_grad():
        restores = [*map(_module, model.modules()), *map(_optimizer, every)]
        restores += map(_kept, stepped)
        # Gradients that no optimizer clears; DDP's are views on memory that each backward writes.
        grads = [(each, _kept(each.grad)) for each in model.parameters() if each.grad is not None]
    clear_gradients(model)
    try:
        with isolated_rng(ctx.device), replaced(stepped, "find_lr", "accel.schedules.find_lr", steps=True):
            yield
    finally:
        # An error may have left shards gathered, and gradients of half a window.
        reshard(model)
        clear_gradients(model)
        clear_parameters(parameters_of(every))
        with torch.no_grad():
            for restore in restores:
                _ = restore()
            for parameter, restore in grads:
                parameter.grad = restore()
        torch.clear_autocast_cache()  # an enclosing autocast keeps copies of the former tensors


def _all_optimizers(optimizers: Sequence[Optimizer]) -> Iterator[Optimizer]:
    """Yield optimizers and those inside, as wrappers and ZeroRedundancyOptimizer have them."""
    known: set[int] = set()
    waiting = list(optimizers)
    while waiting:
        each = waiting.pop(0)
        if id(each) not in known:
            known.add(id(each))
            yield each
            waiting += [value for value in vars(each).values() if isinstance(value, Optimizer)]


def _stepped(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[torch.Tensor]:
    """Yield the tensors that steps change, each once: trained and optimized parameters, and buffers."""
    trained = (each for each in model.parameters() if each.requires_grad)
    found = {id(each): each for each in (*trained, *parameters_of(optimizers), *model.buffers())}
    yield from found.values()


def _module(module: Any) -> Restore:
    """Keep a module's mode, and which tensors are its parameters and buffers: a forward may replace some."""
    tables = [cast("dict[str, Any]", table) for table in (module._parameters, module._buffers)]
    before = [dict(table) for table in tables]
    training = module.training

    def restore() -> None:
        module.training = training
        for table, entries in zip(tables, before, strict=True):
            if list(table) != list(entries) or any(table[name] is not each for name, each in entries.items()):
                table.clear()
                table.update(entries)

    return restore


def _optimizer(optimizer: Optimizer) -> Restore:
    """Keep an optimizer's attributes, its groups and its state."""
    attributes = dict(vars(optimizer))
    settle_state(optimizer)
    inner = [_kept(optimizer.state), _kept(optimizer.param_groups)]

    def restore() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for each in inner:
            _ = each()

    return restore


def _kept(value: Any) -> Callable[[], Any]:
    """Copy the content of a tensor, or of a container and all in it, but for the parameters of a group.

    Returns:
        A function that puts the content back into the same object, and returns the object.
    """
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        return lambda: value.copy_(copy)
    if isinstance(value, dict):
        table = cast("dict[Any, Any]", value)
        entries = {key: (lambda each=each: each) if key == "params" else _kept(each) for key, each in table.items()}
        return lambda: _refilled(table, {key: entry() for key, entry in entries.items()})
    if not isinstance(value, list | tuple):
        return lambda: value
    items = [_kept(each) for each in cast("Sequence[Any]", value)]
    return lambda: _refilled(value, [item() for item in items])


def _refilled(container: Any, content: Any) -> Any:
    """Put content back into a dict or a list, and return it; a tuple has kept its objects."""
    if hasattr(container, "clear"):
        container.clear()
        put = container.update if hasattr(container, "update") else container.extend
        put(content)
    return container
