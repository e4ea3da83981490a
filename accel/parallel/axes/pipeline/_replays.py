# SPDX-License-Identifier: Apache-2.0
"""The replays of a pipelined model: a record for each kind of batch, its cut, and the shapes that stages compute; runs
of the stages in two ways that are compared before the first batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from accel.comm import Call, Comm, agreed_values, broadcast_flat, exchange_values, shared_failure
from accel.context import DistContext
from accel.devices import autocast_dtype
from accel.errors import StageError
from accel.fakes import emptied_caches
from accel.parallel._calls import let_answer, take_apart, unchanged
from accel.parallel._fakes import ValuesRead, refuse_to_world
from accel.parallel._micro_batches import MicroBatch, first_device, first_tensor, of_stage
from accel.parallel._modules import named_modules
from accel.parallel._private import called_eagerly
from accel.parallel._record import ForwardRecord, Label, check_hidden, check_states
from accel.parallel.axes.pipeline._cut import Cut, StageCut, cut_record
from accel.parallel.axes.pipeline._layout import Layout
from accel.parallel.axes.pipeline._planned import FIX, Planned, begins_by_holdings, recorded, starts_of
from accel.parallel.axes.pipeline._replayed import Calls, Replay, ReplayedModule, StageRun, running
from accel.parallel.axes.pipeline._work import Boundary, PassedPart, StageParts, WholeParts, Work, noise
from accel.random import Key, isolated_rng
from accel.terminal import show_names

_MOST_REPLAYS = 16
_SEEDS = 2**62  # number of different seeds
_TRIAL = Call("forward_backward", "comparison of stages", ordered=False)
_WAYS = (0, 1)
_Seen = list[tuple[Label, Boundary]]


def _form(leaf: Any) -> object:
    """The facts of an argument that a record depends on."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape)
    return leaf if isinstance(leaf, int | float | str | None) else cast("object", type(leaf))


class Replays:
    """The replays of one model on this rank.

    Args:
        planned: its stages. Without their starts, each begins where the forward first calls one of its modules.
        device: of the stages.
        several: whether ranks have several stages.

    Attributes:
        ghost: the whole model without memory.
        parts: of the model. Records are of all positions.
        known: replays by the kind of batch, the first one of each with the order of its example.
    """

    def __init__(self, ghost: nn.Module, planned: Planned, device: torch.device, *, several: bool = False) -> None:
        self.ghost = ghost
        self.parts: StageParts = WholeParts()
        self._units = planned.units
        self._starts = planned.starts
        self._holds = planned.holds
        self._device = device
        self._several = several
        self.known: dict[object, list[Replay]] = {}
        self._batches = 0
        self._calls = Calls()
        for path in planned.units:
            let_answer(ghost.get_submodule(path), self._calls.of(path))

    def key(self, model: nn.Module, work: Work, *, trains: bool) -> object:
        """Return what a record depends on: shapes, cuts and other arguments, the mode, gradients and autocast."""
        first = work.micro_batches[0]
        tree = (first.args, dict(first.kwargs)) if work.shapes is None else work.shapes
        spec = pytree.tree_structure(tree)
        facts = tuple(map(_form, take_apart(tree, work.containers).leaves))
        with work.around():
            cast_to = tuple(map(autocast_dtype, dict.fromkeys(("cpu", self._device.type))))
        return spec, facts, tuple(self.parts.cuts(first)), model.training, trains, cast_to

    def of_micro_batches(self, comm: Comm, key: object, model: nn.Module, work: Work) -> list[Replay]:
        """Return the replay of each micro-batch. Where the forward reads values of its inputs, they may differ, and an
        order of calls that is new is recorded: a collective along the pipeline then, and a `StageError` on all its
        ranks where they follow different orders."""
        known = list(self.known[key])
        if not known[0].record.branches or known[0].record.decisions or work.probe is not None:
            return [known[0]] * len(work.micro_batches)

        def fitting(batch: MicroBatch) -> int:
            whole = self.parts.whole(batch)
            fits = (at for at, old in enumerate(known) if is_followed(old, self.ghost, self._calls, whole, work))
            return next(fits, -1)

        orders = agreed_values(
            comm, Call("forward_backward: orders of calls"), lambda: list(map(fitting, work.micro_batches)), list[int]
        )
        if any(each != orders[0] for each in orders):
            raise _differing(known[0])
        found: list[Replay] = []
        for each, first in zip(work.micro_batches, orders[0], strict=True):
            at = first if first >= 0 else fitting(each)
            if at < 0:
                own = work._replace(micro_batches=[each])
                known.append(with_facts(agreed_replay(comm, lambda own=own: self.record(model, own)), known[0]))
            found.append(known[at])
        self.known[key] = [known[0], *known[1:][-_MOST_REPLAYS:]]
        return found

    def streams_of(self, replay: Replay) -> Key | None:
        """Return the key of a batch's random streams; None for a forward that draws nothing. Mutates this rank's global
        stream, from which the key is drawn where ranks along the pipeline have the same stream."""
        if not replay.record.is_random:
            return None
        if replay.seed is None:
            return Key(int(torch.randint(_SEEDS, ())))
        self._batches += 1
        return Key(replay.seed).fold_in(self._batches)

    def keep(self, key: object, replay: Replay) -> None:
        """Keep a replay; the ones made last are kept."""
        self.known[key] = [replay]
        while len(self.known) > _MOST_REPLAYS:
            _ = self.known.pop(next(iter(self.known)))

    def record(self, model: nn.Module, work: Work) -> Replay:
        """Record and cut the forward of a micro-batch; `StageError` where the stages lack what it needs."""
        batch = self.parts.whole(of_stage((work.probe or work.micro_batches)[0], -1))
        modes = {path: each.training for path, each in named_modules(model, every_path=True)}
        for path, each in named_modules(self.ghost):
            each.training = modes.get(path, model.training)
        with work.around():
            record = recorded(self.ghost, self._units, batch, work.containers)
        begins = self._begins(record)
        cut = cut_record(record, begins, self._holds)
        missing = self._missing(record, cut)
        by_holdings = begins_by_holdings(record, self._holds) if missing else begins
        if by_holdings != begins:  # modules that the example has not called
            cut = cut_record(record, by_holdings, self._holds)
            missing = self._missing(record, cut)
        if missing:
            raise StageError(
                "a stage reads tensors for this batch that it does not hold",
                expected="the parameters and buffers that the model was prepared with",
                got=show_names(missing),
                fix=FIX,
            )
        if torch.is_grad_enabled():
            check_hidden(record, [label for each in cut.stages for label in each.passes])
        check_states(record, [each.end for each in cut.stages[:-1]], several=self._several)
        return Replay(record, cut, {})

    def _missing(self, record: ForwardRecord, cut: Cut) -> list[str]:
        """Names of the tensors that stages of a cut read and do not hold."""
        labels = record.end.union(*(each.needs for each in record.calls), *(each.sources for each in record.decisions))
        arguments = [each.sources for call in record.calls for each in call.arguments.values()]
        read = {label.name for label in labels.union(*arguments)}
        is_read = {name for each in record.held if not read.isdisjoint(each.names) for name in each.names}
        pairs = zip(cut.stages, self._holds, strict=True)
        return sorted(name for stage, held in pairs for name in (stage.holds - held) & is_read)

    def _begins(self, record: ForwardRecord) -> tuple[int, ...]:
        """The first call of each stage in a record: the call of the example, or by holdings if it is not called."""
        starts = starts_of(record, range(len(record.calls)))
        found = [starts.index(each) for each in self._starts or () if each in starts]
        if len(found) == len(self._holds) and found == sorted(found) and found[0] == 0:
            return tuple(found)
        return begins_by_holdings(record, self._holds)


def agreed_replay(comm: Comm, make: Callable[[], Replay]) -> Replay:
    """Record on each rank along the pipeline. A collective; an error of one is raised on all, and records that differ
    are a `StageError` on all."""
    made: list[Replay] = []

    def work() -> tuple[str, int]:
        made.append(make())
        with cast(Any, torch.random).fork_rng(devices=[]):  # as a batch will draw
            drawn = int(torch.randint(_SEEDS, ()))
        return _digest(made[0]), drawn

    found = agreed_values(comm, Call("forward_backward: record"), work, tuple[str, int])
    if len({digest for digest, _ in found}) > 1:
        raise _differing(made[0])
    are_alike = len({drawn for _, drawn in found}) == 1
    return made[0] if are_alike else made[0]._replace(seed=found[0][1])


def _differing(replay: Replay) -> StageError:
    return StageError(
        "ranks along the pipeline run different forwards",
        expected="the same calls of modules on all of them, by the same inputs",
        got=", ".join(replay.record.paths[:20]),
        fix="Pass the same batch on all ranks along pp.",
    )


def _digest(replay: Replay) -> str:
    """Return the calls of a replay and the sent tensors as text. The order of sets differs between processes."""
    stages = [(each.begin, each.end, each.needs, each.gives, each.passes) for each in replay.cut.stages]
    return repr((replay.record.paths, stages, sorted(replay.cut.dense)))


def is_followed(replay: Replay, model: nn.Module, calls: Calls, batch: MicroBatch, work: Work) -> bool:
    """Return whether a micro-batch follows a record, by a forward in which placeholders answer all calls: Python
    reads the same values, and calls the same modules in the same order. No communication."""
    end = len(replay.record.calls)
    if any(each.part is not None for each in replay.facts.values()):
        replay = replay._replace(facts={})  # of rows, and the batch is of all positions
    nothing = StageCut(begin=end, end=end, needs=(), gives=(), passes=(), holds=frozenset())
    run = StageRun(replay, nothing, {}, first_device(batch), None, work.containers)
    try:
        with (
            torch.no_grad(),
            emptied_caches(),
            unchanged(model),
            work.around(),
            calls.answered_by(run),
            isolated_rng(),
            ValuesRead() as values,
        ):
            _ = run.forward(model, batch)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # of another order, or of shapes that follow from values of the inputs
        return False
    return tuple(values.found) == replay.record.branches  # else the same calls may have other arguments


def with_facts(replay: Replay, known: Replay) -> Replay:
    """Return a replay of another order of calls with the dtypes and shapes of a known one; tensors of other forms
    between its stages are a `StageError`. Pure."""
    places = {start: at for at, start in enumerate(starts_of(known.record, range(len(known.record.calls))))}
    facts: dict[Label, Boundary] = {}
    for at, start in enumerate(starts_of(replay.record, range(len(replay.record.calls)))):
        found = {label: fact for label, fact in known.facts.items() if label.call == places.get(start)}
        facts |= {label._replace(call=at): fact for label, fact in found.items()}
    made = replay._replace(facts=facts)
    if made.boundaries() != known.boundaries():
        raise StageError(
            "two micro-batches of a batch pass different tensors between stages",
            expected=f"{known.boundaries()}",
            got=f"{made.boundaries()}, as the forward calls {', '.join(replay.record.paths[:20])}",
            fix="Begin the stages where both pass the same tensors: Plan(stages=[[...], [...]]).",
        )
    return made


def looked(
    comm: Comm, layout: Layout, stages: Sequence[ReplayedModule], work: Work, replay: Replay, device: torch.device
) -> Replay:
    """Return a replay with the dtypes and shapes that the stages compute, by a forward of the first micro-batch without
    gradients, stage after stage. A collective along the pipeline; an error of one stage is raised on all."""
    own = {stage.index: stage for stage in stages}

    def whole(output: Any, _batch: MicroBatch) -> torch.Tensor:
        return first_tensor(output, work.containers)

    probe = work._replace(finish=whole, micro_batches=work.probe or work.micro_batches)
    for at in range(layout.stages):

        def look(at: int = at, known: Replay = replay) -> list[tuple[Label, Boundary]]:
            return _look(own[at], probe, known, device) if at in own else []

        found = agreed_values(comm, Call("forward_backward: shapes"), look, list[tuple[Label, Boundary]])
        replay = replay._replace(facts={**replay.facts, **dict(found[layout.owners[at]])})
    return replay


def _look(stage: ReplayedModule, work: Work, replay: Replay, device: torch.device) -> list[tuple[Label, Boundary]]:
    """Run a stage without gradients; buffers, attributes and random streams stay as they are. Where a path depends on
    hidden values, random ones may take another: what is not seen then is as recorded."""
    passed = replay.cut.stages[stage.index - 1].passes if stage.index else ()
    received = [noise(replay.fact(each), device, at) for at, each in enumerate(passed)] or [torch.zeros(())]
    runs = running([stage], work, [replay], None, looks=True)
    differs = contextlib.suppress(StageError) if replay.record.decisions else contextlib.nullcontext()
    with torch.no_grad(), isolated_rng(device), called_eagerly(stage), runs, unchanged(stage.module), differs, _Alone():
        _ = stage(*received, micro=torch.zeros(1, dtype=torch.int64))
    return list(stage.seen.items())


class _Alone(TorchFunctionMode):
    """Refuses messages to all ranks, as only some of them run a stage: the others would not answer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = kwargs or {}
        refuse_to_world(func, args, given)
        return func(*args, **given)


class StageTrial:
    """One stage in two ways: with all positions, as one process has them, and with the positions of this rank.

    Attributes:
        module: the stage.
        received: tensors that the stage before passes on, with all positions.
        parts: for each of these, the facts of the part that this rank has of it; None for a tensor without positions.
        seen: dtypes and shapes of what the stage has computed, for each way.
        values: tensors that it passes on, with all positions.
        output: of the model, for the last run of the last stage.
    """

    def __init__(
        self, stage: ReplayedModule, work: Work, replays: Sequence[Replay], received: Sequence[Tensor]
    ) -> None:
        passed = replays[0].cut.stages[stage.index - 1].passes if stage.index else ()
        self.module = stage
        self.received = list(received)
        self.parts = [replays[1].fact(each).part for each in passed]
        self.seen: list[Mapping[Label, Boundary]] = [{}, {}]
        self.values: list[Tensor] = []
        self.output: Any = None
        self.work = work._replace(finish=self._keep)
        self._replays = replays
        self._dtypes = [replays[0].record.leaf(each).dtype for each in passed]

    def run(self, way: int, received: Sequence[Tensor]) -> list[tuple[Tensor, PassedPart | None]]:
        """Run the stage in one of the ways; return what it passes on, and the facts of parts. The last stage passes on
        nothing."""
        given = [each.to(dtype) for each, dtype in zip(received, self._dtypes, strict=True)]
        passed = self.module(*(given or [torch.zeros(())]), micro=torch.tensor([way]))
        self.seen[way] = dict(self.module.seen)
        if self.module.is_last:
            return []
        replay = self._replays[way]
        known = replay._replace(facts={**replay.facts, **self.seen[way]})
        if way == 0:
            self.values = [each.detach() for each in passed]
        labels = replay.cut.stages[self.module.index].passes
        return [(each, known.fact(label).part) for each, label in zip(passed, labels, strict=True)]

    def _keep(self, output: Any, _batch: MicroBatch) -> Any:
        self.output = output
        return output


class StageTrials:
    """Runs of the stages of a model for its first batch. All ranks take part in each."""

    def __init__(
        self,
        ctx: DistContext,
        comm: Comm,
        layout: Layout,
        stages: Sequence[ReplayedModule],
        replays: Replays,
        model: nn.Module,
        work: Work,
    ) -> None:
        self.model = model
        self.stages = stages
        self._ctx = ctx
        self._comm = comm
        self._layout = layout
        self._replays = replays
        self._work = work

    @property
    def batch(self) -> MicroBatch:
        """The first micro-batch."""
        return of_stage((self._work.probe or self._work.micro_batches)[0], -1)

    def replay(self, batch: MicroBatch) -> Replay:
        """Record and cut the forward of a micro-batch. A collective along the pipeline."""
        work = self._work._replace(micro_batches=[batch], probe=None)
        return agreed_replay(self._comm, lambda: self._replays.record(self.model, work))

    def compare(
        self, replay: Replay, batches: Sequence[MicroBatch], problem_of: Callable[[StageTrial], str]
    ) -> list[str]:
        """Run each stage in two ways, up to one with a problem; return the problems that ranks find. A collective.

        Args:
            replay: of the micro-batch with all positions.
            batches: a micro-batch for each way.
            problem_of: runs one stage, on its ranks; returns the difference of its ways, "" for none.
        """
        own = {stage.index: stage for stage in self.stages}
        known = [replay, replay]
        values: list[Tensor] = []
        for at in range(self._layout.stages):
            trial: StageTrial | None = None
            problem = ""
            if at in own:
                trial = StageTrial(own[at], self._work._replace(micro_batches=batches, probe=None), known, values)
                with shared_failure(self._ctx.comm, _TRIAL), running([own[at]], trial.work, known, None, looks=True):
                    problem = problem_of(trial)
            found = [each for each in exchange_values(self._ctx.comm, _TRIAL, problem, str) if each]
            if found:
                return found
            seen = [self._of_owner(at, trial and trial.seen[way]) for way in _WAYS]
            known = [each._replace(facts={**each.facts, **new}) for each, new in zip(known, seen, strict=True)]
            if at + 1 < self._layout.stages:
                values = self._passed_on(at, known[0], trial, values)
        return []

    def _of_owner(self, at: int, seen: Mapping[Label, Boundary] | None) -> dict[Label, Boundary]:
        """The facts that the rank with a stage has seen. A collective along the pipeline."""
        listed = agreed_values(self._comm, _TRIAL, lambda: list((seen or {}).items()), _Seen)
        return dict(listed[self._layout.owners[at]])

    def _passed_on(self, at: int, replay: Replay, trial: StageTrial | None, before: Sequence[Tensor]) -> list[Tensor]:
        """Return what a stage passes on, on all ranks. A collective along the pipeline."""
        labels = replay.cut.stages[at].passes
        passed = dict(zip(replay.cut.stages[at - 1].passes if at else (), before, strict=True))
        sent: list[Tensor] = []
        for number, label in enumerate(labels):
            if label not in passed:
                fact = replay.fact(label)
                made = torch.empty(fact.shape, dtype=fact.torch_dtype, device=self._ctx.device)
                if trial is not None:
                    _ = made.copy_(trial.values[number])
                broadcast_flat(self._comm, made, source=self._layout.owners[at])
                passed[label] = made
            sent.append(passed[label])
        return sent
