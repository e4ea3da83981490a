# SPDX-License-Identifier: Apache-2.0
"""A model cut into stages: its layout on the ranks, the run of a batch, and gradients of tied parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from accel.comm import Comm, adopt, all_reduce_flat, group_of_rows
from accel.context import DistContext
from accel.errors import StageError
from accel.parallel._copies import NotPickled
from accel.parallel._leftovers import is_used, is_watched, note_used
from accel.parallel._modules import note_prepared, note_tensor, prepared_of, stage_modules, tensor_notes
from accel.parallel._same_batches import SameBatches
from accel.parallel._sharded import load_plain
from accel.parallel.axes.pipeline._held import (
    Copied,
    OwnParameters,
    check_children,
    check_tensors,
    copies_in,
    tables_in,
)
from accel.parallel.axes.pipeline._layout import Layout, Norms, batch_norms, check_norms
from accel.parallel.axes.pipeline._replayed import ReplayedModule, running
from accel.parallel.axes.pipeline._replays import Replays, StageTrials, agreed_replay, looked
from accel.parallel.axes.pipeline._work import Boundary, StageParts, Work
from accel.tensors import has_wide_gradient, local_part
from accel.topology import rank_rows

if TYPE_CHECKING:
    from accel.parallel.axes.pipeline._schedule import StageSchedule


class Tie(NamedTuple):
    """A parameter with copies on this rank and others."""

    name: str  # of this rank's copy
    comm: Comm  # handle of the ranks with a copy
    module: nn.Module  # that has it

    @property
    def parameter(self) -> nn.Parameter:
        """Return this rank's copy. The module's attribute may be a plain part of it, for modules that read it."""
        return dict(self.module.named_parameters(recurse=False))[self.name.rpartition(".")[2]]


def open_ties(
    ctx: DistContext,
    model: nn.Module,
    names: Sequence[Sequence[str]],
    stages_with: Callable[[Sequence[str]], Iterable[int]],
    layout: Layout,
) -> tuple[Tie, ...]:
    """Open a group for each set of ranks with copies of a parameter, a collective then, and mark the copies of higher
    ranks, which norms leave out. `stages_with`: stages that hold a parameter, by its names."""
    here = ctx.axis("pp").rank
    live = dict(model.named_parameters(remove_duplicate=False))
    found: list[Tie] = []
    for each in names:
        ranks = sorted({layout.owners[stage] for stage in stages_with(each)})
        if len(ranks) < 2:
            continue
        rows = [tuple(row[at] for at in ranks) for row in rank_rows(ctx.axes, "pp")]
        group = group_of_rows(ctx.comm, rows, "tied", ctx.timeout_s)
        if here not in ranks or group is None:
            continue
        own = next(name for name in each if live.get(name) is not None)
        found.append(Tie(own, adopt(group, ctx.device), model.get_submodule(own.rpartition(".")[0])))
        if here != ranks[0]:
            note_tensor(live[own], tied_copy=True)
    return tuple(found)


def is_tied_copy(parameter: torch.Tensor) -> bool:
    """Return whether a lower rank along the pipeline has the same parameter."""
    return "tied_copy" in tensor_notes(parameter)


def sum_tied_gradients(ties: Sequence[Tie], *, may_be_unused: bool) -> None:
    """Sum the gradients of tied parameters over the ranks that have a copy. A collective of these ranks.

    `may_be_unused`: ranks ask first if one has used it.
    """
    for tie in ties:
        parameter = tie.parameter
        if not parameter.requires_grad:
            continue
        if may_be_unused:
            used = torch.tensor([is_used(parameter)], dtype=torch.uint8, device=tie.comm.control)
            if all_reduce_flat(tie.comm, used, "max").item():
                note_used(parameter)
            elif not is_watched(parameter):  # else ranks with the same stage decide
                continue
        if parameter.grad is None:
            wide = torch.float32 if has_wide_gradient(parameter) else None  # as on the rank that has a gradient
            parameter.grad = torch.zeros_like(parameter, dtype=wide)
        part = local_part(parameter.grad)
        _ = part.copy_(all_reduce_flat(tie.comm, part.contiguous(), "sum").view_as(part))


def keep_one_sum(ties: Sequence[Tie]) -> None:
    """Leave gradients of tied parameters that are sums already to one rank each, so that the next sum counts them once.
    Mutates `.grad`."""
    for parameter in (tie.parameter for tie in ties):
        if is_tied_copy(parameter):
            parameter.grad = None


_MOST_SCHEDULES = 4  # each keeps buffers for the micro-batches of one shape


class Pipeline:
    """The pipeline of one model on this rank.

    Attributes:
        comm: handle of the ranks along the pipeline.
        layout: schedule and numbers.
        names: of each tied parameter in the whole model.
        order: names of the whole model's parameters and persistent buffers.
        ties: parameters with copies on other ranks.
        may_be_unused: whether parameters may stay out of a loss.
        holding: whether gradients wait for the window's end.
        replays: records of the model's forward, and their cuts.
        prove: compares what stages compute before a batch, and returns whether it is done with; None then, and for no
            comparison.
    """

    prove: Callable[[StageTrials], bool] | None = None

    def __init__(
        self,
        comm: Comm,
        layout: Layout,
        names: Sequence[Sequence[str]],
        order: Sequence[str],
        ties: Sequence[Tie],
        replays: Replays,
        *,
        may_be_unused: bool = False,
    ) -> None:
        self.comm = comm
        self.layout = layout
        self.names = tuple(map(tuple, names))
        self.order = tuple(order)
        self.ties = tuple(ties)
        self.may_be_unused = may_be_unused
        self.holding = False
        self.replays = replays
        self._schedules: dict[object, StageSchedule] = {}
        self._norms: Norms | None = None
        self._copies: Sequence[Copied] = ()
        self._tables: Sequence[OwnParameters] = ()

    def __deepcopy__(self, memo: object) -> Pipeline:
        return self

    @property
    def last_rank(self) -> int:
        """Rank along the pipeline of the last stage."""
        return self.layout.owners[self.layout.stages - 1]

    def pass_parts(self, stages: Sequence[nn.Module], parts: StageParts, prove: Callable[[StageTrials], bool]) -> None:
        """Let stages pass on parts of tensors, after a comparison before the first batch. Mutates the stages."""
        for each in stages:
            cast(ReplayedModule, each).parts = parts
        self.replays.parts = parts
        self.prove = prove

    def run(self, ctx: DistContext, model: nn.Module, work: Work, *, trains: bool) -> list[torch.Tensor]:
        """Run the micro-batches of a batch; return the last stage's results, only on its rank. A collective along the
        pipeline, and of the stages' axes."""
        watch: SameBatches | None = prepared_of(model).get("same_batches")
        if watch is not None and watch.awaited:
            watch.compare(work.batch(), trains=trains)
        if self._norms is None:
            self._norms = batch_norms(model)
            self._copies = copies_in(stage_modules(model))
            self._tables = tables_in(model)
        check_children(self._copies)
        check_tensors(self._tables)
        filled = sum(each.rows.size - each.rows.real for each in work.micro_batches)
        check_norms(self._norms, self.layout, StageError, f"rank {ctx.rank}", filled=filled)
        replays = self.replays
        stages = cast("Sequence[ReplayedModule]", stage_modules(model))
        if self.prove and self.prove(StageTrials(ctx, self.comm, self.layout, stages, replays, model, work)):
            self.prove = None
        key = replays.key(model, work, trains=trains)
        replay = next(iter(replays.known.get(key, ())), None)
        if _missing_somewhere(ctx, self.comm, replay is None):
            replay = agreed_replay(self.comm, lambda: replays.record(model, work))
            replay = looked(self.comm, self.layout, stages, work, replay, ctx.device)
            replays.keep(key, replay)
        assert replay is not None
        each = replays.of_micro_batches(self.comm, key, model, work)
        with running(stages, work, each, replays.streams_of(replay)):
            return self._schedule(ctx, stages, key, replay.boundaries(), trains=trains).run()

    def _schedule(
        self,
        ctx: DistContext,
        stages: Sequence[ReplayedModule],
        facts: object,
        passed: Sequence[Sequence[Boundary]],
        *,
        trains: bool,
    ) -> StageSchedule:
        """The schedule for micro-batches of one shape; the ones used last are kept."""
        from accel.parallel.axes.pipeline._schedule import StageSchedule  # torch's package takes long to import

        found = self._schedules.pop(facts, None)
        if found is None:
            holds = (lambda: self.holding) if trains else None
            found = StageSchedule(self.layout, stages, passed, group=self.comm.group, device=ctx.device, holds=holds)
        self._schedules[facts] = found
        while len(self._schedules) > _MOST_SCHEDULES:
            _ = self._schedules.pop(next(iter(self._schedules)))
        return found


class Pipelined(NotPickled):
    """Stands before the class of a model that is cut into stages."""

    def forward(self, *_inputs: Any, **_kwargs: Any) -> Any:
        """Refuse: one rank has some of the modules only."""
        raise StageError(
            "a pipelined model cannot be called, as this rank has some of its stages only",
            expected="loss, state = accel.forward_backward(ctx, model, state, inputs, loss_fn=...)",
            got="model(inputs)",
            fix="To evaluate, call accel.training.forward(ctx, model, inputs); "
            "to add tokens, accel.training.generate(ctx, model, ids).",
        )

    def train(self, mode: bool = True) -> Any:
        """Set the mode of the model and of its stages."""
        for each in stage_modules(cast(nn.Module, self)):
            _ = each.train(mode)
        return cast(Any, super()).train(mode)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load this rank's part of a state dict: ranks of other stages load theirs."""
        pipeline = pipeline_of(cast(nn.Module, self))
        assert pipeline is not None
        own = copy.copy(state_dict) if isinstance(state_dict, dict) else dict(state_dict)  # with torch's metadata
        for name in set(pipeline.order).difference(cast(nn.Module, self).state_dict(keep_vars=True)):
            _ = own.pop(name, None)
        return load_plain(cast(Any, super()).load_state_dict, own, *args, **kwargs)

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
    return prepared_of(model).get("pipeline")


def attach(model: nn.Module, pipeline: Pipeline, stages: Sequence[nn.Module]) -> None:
    """Let a model know its pipeline. Mutates it; the stages are no modules below it, so names stay as they are."""
    note_prepared(model, pipeline=pipeline, stages=tuple(stages))


def _missing_somewhere(ctx: DistContext, along: Comm, missing: bool) -> bool:
    """Whether shapes are unknown on some rank: stages that exchange along other axes run the same forwards."""
    if ctx.world_size == along.size:
        return missing
    flag = torch.tensor([int(missing)], device=ctx.comm.control)
    return bool(all_reduce_flat(ctx.comm, flag, "max").item())
