# SPDX-License-Identifier: Apache-2.0
"""A model cut into stages: its layout on the ranks, and the run of a batch through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from accel.comm import Comm, all_reduce_flat
from accel.context import DistContext
from accel.errors import StageError
from accel.mixins import Mixin
from accel.parallel._unwrap import STAGES, stage_modules
from accel.parallel.pipeline._boundaries import Boundary, boundary_of, find_boundaries, working
from accel.parallel.pipeline._placement import Layout
from accel.parallel.pipeline._split import MicroBatch
from accel.parallel.pipeline._stage_module import StageModule, Work, first_tensor, main_input
from accel.parallel.pipeline._ties import Tie
from accel.tree import tensors

if TYPE_CHECKING:
    from accel.parallel.pipeline._schedule import StageSchedule

_MOST_SCHEDULES = 4  # each keeps buffers for the micro-batches of one shape
_PIPELINE = "accel_pipeline"


class Pipeline:
    """The pipeline of one model on this rank.

    Attributes:
        comm: handle of the ranks along the pipeline.
        group: their process group.
        layout: schedule and numbers.
        names: of each tied parameter in the whole model.
        order: names of the whole model's parameters and persistent buffers.
        ties: parameters of which other ranks have a copy too.
        holding: whether gradients wait for the window's end.
    """

    def __init__(
        self,
        comm: Comm,
        group: dist.ProcessGroup,
        layout: Layout,
        names: Sequence[Sequence[str]],
        order: Sequence[str],
        ties: Sequence[Tie],
    ) -> None:
        self.comm = comm
        self.group = group
        self.layout = layout
        self.names = tuple(map(tuple, names))
        self.order = tuple(order)
        self.ties = tuple(ties)
        self.holding = False
        self._known: dict[object, tuple[Boundary, ...]] = {}
        self._schedules: dict[object, StageSchedule] = {}

    def __deepcopy__(self, memo: object) -> Pipeline:
        return self

    @property
    def last_rank(self) -> int:
        """Rank along the pipeline of the last stage."""
        return self.layout.owners[self.layout.stages - 1]

    def run(self, ctx: DistContext, model: nn.Module, work: Work, *, trains: bool) -> list[torch.Tensor]:
        """Run the micro-batches of a batch; return the last stage's results, on its rank alone.

        A collective along the pipeline, and of what the stages exchange along other axes.
        """
        stages = cast("Sequence[StageModule]", stage_modules(model))
        mains = [main_input(each) for each in work.micro_batches]
        facts = _facts(ctx, model, work, trains)
        passed = self._known.get(facts)
        if _missing_somewhere(ctx, self.comm, passed is None):
            with working(stages, work._replace(finish=_whole_output, micro_batches=work.probe or work.micro_batches)):
                passed = find_boundaries(self.comm, self.layout, stages, mains[0], ctx.device)
            self._known[facts] = passed
        assert passed is not None
        with working(stages, work):
            schedule = self._schedule(ctx, stages, facts, boundary_of(mains[0]), passed, trains=trains)
            return schedule.run(torch.cat(mains) if stages[0].index == 0 else mains[0])

    def _schedule(
        self,
        ctx: DistContext,
        stages: Sequence[StageModule],
        facts: object,
        main: Boundary,
        passed: Sequence[Boundary],
        *,
        trains: bool,
    ) -> StageSchedule:
        """The schedule for micro-batches of one shape; the ones used last are kept."""
        from accel.parallel.pipeline._schedule import StageSchedule  # torch's package takes long to import

        found = self._schedules.pop(facts, None)
        if found is None:
            holds = (lambda: self.holding) if trains else None
            found = StageSchedule(self.layout, stages, main, passed, group=self.group, device=ctx.device, holds=holds)
        self._schedules[facts] = found
        while len(self._schedules) > _MOST_SCHEDULES:
            _ = self._schedules.pop(next(iter(self._schedules)))
        return found


class Pipelined(Mixin):
    """Stands before the class of a model that is cut into stages."""

    def forward(self, *_inputs: Any, **_kwargs: Any) -> Any:
        """Refuse: one rank has some of the modules only."""
        raise StageError(
            "a pipelined model cannot be called, as this rank has some of its stages only",
            expected="loss, state = accel.forward_backward(ctx, model, state, inputs, loss_fn=...)",
            got="model(inputs)",
            fix="To evaluate, call accel.forward(ctx, model, inputs); to add tokens, accel.generate(ctx, model, ids).",
        )

    def train(self, mode: bool = True) -> Any:
        """Set the mode of the model and of its stages."""
        for each in stage_modules(cast(nn.Module, self)):
            _ = each.train(mode)
        return cast(Any, super()).train(mode)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, **_options: Any) -> None:
        """Set whether the next backward exchanges gradients along data parallelism."""
        pipeline = pipeline_of(cast(nn.Module, self))
        assert pipeline is not None
        pipeline.holding = not requires_gradient_sync

    def reshard(self) -> None:
        """Shard the parameters of the stages again, where `fully_shard` has them whole."""
        for stage in stage_modules(cast(nn.Module, self)):
            for each in stage.modules():
                if hasattr(type(each), "set_is_last_backward"):
                    cast(Any, each).reshard()


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Return the pipeline of a model; None of a model that is whole."""
    return cast("Pipeline | None", vars(model).get(_PIPELINE))


def attach(model: nn.Module, pipeline: Pipeline, stages: Sequence[StageModule]) -> None:
    """Let a model know its pipeline. Mutates it; the stages are no modules below it, so names stay as they are."""
    vars(model)[_PIPELINE] = pipeline
    vars(model)[STAGES] = tuple(stages)


def _facts(ctx: DistContext, model: nn.Module, work: Work, trains: bool) -> object:
    """Return the facts that shapes between stages depend on; micro-batches of one batch are alike."""
    first = work.micro_batches[0]
    listed = (first.args, dict(first.kwargs)) if work.shapes is None else work.shapes
    shapes = tuple((path, each.dtype, tuple(each.shape)) for path, each in tensors(listed, work.containers))
    device = ctx.device.type
    cast_to = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return shapes, model.training, trains, cast_to


def _whole_output(output: Any, _batch: MicroBatch) -> torch.Tensor:
    return first_tensor(output)


def _missing_somewhere(ctx: DistContext, along: Comm, missing: bool) -> bool:
    """Whether shapes are unknown on some rank: stages that exchange along other axes run the same forwards."""
    if ctx.world_size == along.size:
        return missing
    flag = torch.tensor([int(missing)], device=ctx.comm.control)
    return bool(all_reduce_flat(ctx.comm, flag, "max").item())
