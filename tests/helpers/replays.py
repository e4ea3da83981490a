# SPDX-License-Identifier: Apache-2.0
"""Stages that replay a model's forward, one after another in one process, beside the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from handwritten import Handwritten
from planned_parts import Calls, Cut, ForwardRecord, ModelView, cut_record, planned, record_forward, without_memory
from torch import Tensor, nn
from torch.nn import functional

from accel.parallel._calls import let_answer
from accel.parallel._micro_batches import MicroBatch, example_batch
from accel.parallel.axes.pipeline import ReplayedModule, Work
from accel.parallel.axes.pipeline._cut import call_costs
from accel.parallel.axes.pipeline._held import drop_others
from accel.parallel.axes.pipeline._replayed import Replay, running
from accel.random import Key
from accel.topology import begins_of

CPU = torch.device("cpu")


class Example(NamedTuple):
    """A hand-written model with one micro-batch.

    Attributes:
        entry: of the collection.
        batch: inputs and targets.
        record: of the forward, in the units of a plan.
        trains: the mode of the model.
    """

    entry: Handwritten
    batch: MicroBatch
    record: ForwardRecord
    trains: bool = True


def example(entry: Handwritten, stages: int, rows: int = 4, *, trains: bool = True) -> Example:
    """ForwardRecord a model in units for a number of stages."""
    drawn = entry.batch(0, rows)
    batch = example_batch(drawn.inputs)._replace(targets=drawn.targets)
    units = planned(without_memory(entry.make().train(trains), CPU), batch, stages).units
    ghost = without_memory(entry.make().train(trains), CPU)
    return Example(entry, batch, record_forward(ghost, units, batch.args, batch.kwargs), trains)


class Dropping(nn.Module):
    """Stands before the class of a module: drops some of its output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        drops = isinstance(output, Tensor) and output.is_floating_point()
        return functional.dropout(output, 0.1, self.training) if drops else output


def dropping(entry: Handwritten) -> Handwritten:
    """Return an entry whose modules with parameters drop some of their outputs in training."""

    def build() -> nn.Module:
        model = entry.build()
        for each in model.modules():
            if any(True for _ in each.parameters(recurse=False)):
                each.__class__ = type(f"Dropping{type(each).__name__}", (Dropping, type(each)), {})
        return model

    return entry._replace(build=build, tags=entry.tags | {"random"})


def cut(given: Example, stages: int) -> Cut:
    """Cut the record where the planner would."""
    return cut_record(given.record, begins(given.record, stages))


def begins(record: ForwardRecord, stages: int) -> tuple[int, ...]:
    """The first call of each stage, by time."""
    calls = call_costs(record)
    return begins_of([each.time for each in calls], stages, [each.price for each in calls])


def run_plain(given: Example) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the loss of the model itself and its gradients by name."""
    model = given.entry.make()
    loss = given.entry.loss(model(*given.batch.args, **given.batch.kwargs), given.batch.targets)
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters()}


def run_stages(given: Example, plan: Cut, key: Key | None = None) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the loss of the last stage, and gradients by name, summed over the stages that hold a parameter. What a
    stage does not hold is NaN there. `key`: of random streams; none by default."""
    replay = Replay(given.record, plan, {})
    stages = [stage_at(given, plan, at) for at in range(len(plan.stages))]
    work = Work([given.batch], lambda output, batch: given.entry.loss(output, batch.targets))
    with running(stages, work, [replay], key):
        return _run(stages)


def stage_at(given: Example, plan: Cut, at: int) -> ReplayedModule:
    """Return one stage of a cut, on a model of its own."""
    model = given.entry.make().train(given.trains)
    calls = Calls()
    for path in given.record.units:
        let_answer(model.get_submodule(path), calls.of(path))
    _ = drop_others(ModelView(model), plan.stages[at].holds, given.record.units, CPU)
    return ReplayedModule(model, calls, at, 0, len(plan.stages), ())


def _run(stages: Sequence[ReplayedModule]) -> tuple[Tensor, dict[str, Tensor | None]]:
    given: list[list[Tensor]] = []
    made: list[list[Tensor]] = []
    received: list[Tensor] = [torch.zeros(())]
    for stage in stages:
        given.append(received)
        output: Any = stage(*received, micro=torch.zeros(1, dtype=torch.int64))
        made.append(list(output) if isinstance(output, tuple) else [output])
        received = [each.detach().requires_grad_(each.requires_grad) for each in made[-1]]
    loss = made[-1][0]
    back: list[Tensor | None] = [torch.ones_like(loss)]
    for stage, taken, outputs in zip(reversed(stages), reversed(given), reversed(made), strict=True):
        pairs = [(each, grad) for each, grad in zip(outputs, back, strict=True) if each.requires_grad]
        live = [(each, grad) for each, grad in pairs if grad is not None]
        with stage.backward_of(0, ends=True):
            torch.autograd.backward([each for each, _ in live], [grad for _, grad in live])
        back = [each.grad for each in taken]
    return loss.detach(), _summed(stages)


def _summed(stages: Sequence[ReplayedModule]) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for stage in stages:
        live: nn.Module = stage.module
        for name, each in live.named_parameters():
            grads = [grad for grad in (found.get(name), each.grad) if grad is not None]
            found[name] = sum(grads[1:], grads[0]) if grads else None
    return found


def difference(one: tuple[Tensor, dict[str, Tensor | None]], other: tuple[Tensor, dict[str, Tensor | None]]) -> float:
    """Return the largest difference of losses and gradients; infinity for one that is missing or not a number."""
    pairs = [(one[0], other[0])]
    for name, each in one[1].items():
        twin = other[1].get(name)
        if (each is None or not each.any()) != (twin is None or not twin.any()):
            return float("inf")
        if each is not None and twin is not None:
            pairs.append((each, twin))
    worst = max(float((a - b).abs().max()) for a, b in pairs)
    return worst if worst == worst else float("inf")
