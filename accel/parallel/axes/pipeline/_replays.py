# SPDX-License-Identifier: Apache-2.0
"""The replays of a pipelined model: a record for each kind of batch, its cut, and the shapes that stages compute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from accel.comm import Call, Comm, agreed_values
from accel.errors import AccelError, PrepareError, StageError
from accel.parallel._calls import let_answer, take_apart, tensors_in, units_of
from accel.parallel._modules import aliases_of, named_modules
from accel.parallel._private import called_eagerly
from accel.parallel._record import ForwardRecord, Label
from accel.parallel._recorder import record_forward
from accel.parallel.axes.pipeline._boundaries import Boundary, noise, working
from accel.parallel.axes.pipeline._cut import MOST_TWICE, Cut, StageCut, begins_of, cut_record, share_twice
from accel.parallel.axes.pipeline._replayed import Calls, Replay, ReplayedModule, StageRun, replaying
from accel.parallel.axes.pipeline._stage_module import MicroBatch, Work, first_tensor, of_stage
from accel.parallel.axes.pipeline._stage_plan import Layout, Stages
from accel.random import Key
from accel.tensors import emptied_caches
from accel.tree._walk import Containers

_MOST_REPLAYS = 16
_SEEDS = 2**62  # number of different seeds
_TORCH = str(Path(torch.__file__).parent)
_FIX = "Pass accel.prepare(..., example=batch), a batch like this one, so that the stages hold what it needs."


class Planned(NamedTuple):
    """Stages of a model before its first batch.

    Attributes:
        units: paths of the modules whose calls are recorded.
        starts: path of the module at which each stage begins, and the number of its earlier calls; None without a
            record.
        holds: names of the parameters and buffers of each stage.
        own: paths of the units that each stage calls.
    """

    units: tuple[str, ...]
    starts: tuple[tuple[str, int], ...] | None
    holds: tuple[frozenset[str], ...]
    own: tuple[tuple[str, ...], ...]


def _form(leaf: Any) -> object:
    """The facts of an argument that a record depends on."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape)
    return leaf if isinstance(leaf, int | float | str | None) else cast("object", type(leaf))


def recorded(model: nn.Module, units: Sequence[str], batch: MicroBatch, containers: Containers = ()) -> ForwardRecord:
    """Record the forward of a micro-batch. No communication; an error of the model's own is a `StageError`."""
    try:
        return record_forward(model, units, batch.args, batch.kwargs, containers=containers)
    except (AccelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise StageError(
            f"the forward fails where it is recorded: {type(error).__name__}: {str(error).strip()}",
            expected="a forward that runs on parameters without values",
            where=_line_of(error),
        ) from error


def _line_of(error: Exception) -> str:
    """The line of the innermost forward of a module that an error was raised in."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == "forward" and not code.co_filename.startswith(_TORCH):
            found = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


class Replays:
    """The replays of one model on this rank.

    Args:
        ghost: the whole model without memory.
        planned: its stages. Without their starts, each begins where the forward first calls a module of its own.
        device: of the stages.
    """

    def __init__(self, ghost: nn.Module, planned: Planned, device: torch.device) -> None:
        self._ghost = ghost
        self._units = planned.units
        self._starts = planned.starts
        self._holds = planned.holds
        self._device = device
        self._known: dict[object, list[Replay]] = {}
        self._batches = 0
        self._calls = Calls()
        for path in planned.units:
            let_answer(ghost.get_submodule(path), self._calls.of(path))

    def key(self, model: nn.Module, work: Work, *, trains: bool) -> object:
        """Return what a record depends on: shapes and other arguments, the mode, gradients and autocast."""
        first = work.micro_batches[0]
        tree = (first.args, dict(first.kwargs)) if work.shapes is None else work.shapes
        spec = pytree.tree_structure(tree)
        facts = tuple(map(_form, take_apart(tree, work.containers).leaves))
        kinds = dict.fromkeys(("cpu", self._device.type))
        with work.around():
            cast_to = tuple(torch.get_autocast_dtype(each) for each in kinds if torch.is_autocast_enabled(each))
        return spec, facts, model.training, trains, cast_to

    def find(self, key: object) -> Replay | None:
        """Return the replay of a kind of batch; None if it is to be made."""
        return self._known[key][0] if key in self._known else None

    def of_micro_batches(self, comm: Comm, key: object, model: nn.Module, work: Work) -> list[Replay]:
        """Return the replay of each micro-batch. Where the forward reads values of its inputs, they may differ, and an
        order of calls that is new is recorded: a collective along the pipeline then, whose ranks see the same inputs.
        """
        known = self._known[key]
        if not known[0].record.branches or known[0].record.decisions or work.probe is not None:
            return [known[0]] * len(work.micro_batches)
        found: list[Replay] = []
        for each in work.micro_batches:
            fits = (old for old in known if is_followed(old, self._ghost, self._calls, each, work))
            replay = next(fits, None)
            if replay is None:
                own = work._replace(micro_batches=[each])
                replay = with_facts(agreed_replay(comm, lambda own=own: self.record(model, own)), known[0])
                known.append(replay)
                del known[1 : max(1, len(known) - _MOST_REPLAYS)]
            found.append(replay)
        return found

    def streams_of(self, replay: Replay) -> Key | None:
        """Return the key of a batch's random streams; None for a forward that draws nothing. Mutates this rank's global
        stream, from which the key is drawn where ranks along the pipeline have the same stream."""
        if not replay.draws:
            return None
        if replay.seed is None:
            return Key(int(torch.randint(_SEEDS, ())))
        self._batches += 1
        return Key(replay.seed).fold_in(self._batches)

    def keep(self, key: object, replay: Replay) -> None:
        """Keep a replay; the ones made last are kept."""
        self._known[key] = [replay]
        while len(self._known) > _MOST_REPLAYS:
            _ = self._known.pop(next(iter(self._known)))

    def record(self, model: nn.Module, work: Work) -> Replay:
        """Record and cut the forward of a micro-batch; `StageError` where the stages lack what it needs."""
        batch = of_stage((work.probe or work.micro_batches)[0], -1)
        modes = {path: each.training for path, each in named_modules(model, every_path=True)}
        for path, each in named_modules(self._ghost):
            each.training = modes.get(path, model.training)
        with work.around():
            record = recorded(self._ghost, self._units, batch, work.containers)
        begins = self._begins(record)
        cut = cut_record(record, begins)
        missing = self._missing(record, cut)
        by_holdings = begins_by_holdings(record, self._holds) if missing else begins
        if by_holdings != begins:  # modules that the example has not called
            cut = cut_record(record, by_holdings)
            missing = self._missing(record, cut)
        if missing:
            raise StageError(
                "a stage reads tensors for this batch that it does not hold",
                expected="the parameters and buffers that the model was prepared with",
                got=", ".join(missing[:3]),
                fix=_FIX,
            )
        return Replay(record, cut, {}, draws=record.draws)

    def _missing(self, record: ForwardRecord, cut: Cut) -> list[str]:
        """Names of the tensors that stages of a cut read and do not hold."""
        labels = record.end.union(*(each.needs for each in record.calls), *(each.sources for each in record.decisions))
        arguments = [each.sources for call in record.calls for each in call.arguments.values()]
        read = {label.name for label in labels.union(*arguments)}
        is_read = {name for each in record.held if not read.isdisjoint(each.names) for name in each.names}
        pairs = zip(cut.stages, self._holds, strict=True)
        return sorted(name for stage, held in pairs for name in (stage.holds - held) & is_read)

    def _begins(self, record: ForwardRecord) -> tuple[int, ...]:
        """The first call of each stage in a record: that of the example, or by holdings where it is not called."""
        starts = starts_of(record, range(len(record.calls)))
        found = [starts.index(each) for each in self._starts or () if each in starts]
        if len(found) == len(self._holds) and found == sorted(found) and found[0] == 0:
            return tuple(found)
        return begins_by_holdings(record, self._holds)


_SHARES = (0.6, 0.35, 0.2, 0.1, 0.05, 0.02, 0.0)  # of all parameters, from which a module is opened


def planned(
    ghost: nn.Module, batch: MicroBatch, stages: Sequence[Sequence[str]] | int, containers: Containers = ()
) -> Planned:
    """Cut a model by a record of an example, in the coarsest units that give enough calls. No communication.

    `stages`: paths of the modules at which stages begin, or the number of stages. `containers`: kinds of containers
    besides those that `accel.tree` knows.

    Raises:
        PrepareError: the forward calls too few modules, or calls them in another order than that of `stages`.
        StageError: a stage cannot play back what a module does, or would compute too much again.
    """
    count = stages if isinstance(stages, int) else len(stages)
    opened = frozenset[str]() if isinstance(stages, int) else frozenset(path for each in stages for path in each)
    tried: list[tuple[str, ...]] = []

    def record(units: Sequence[str]) -> ForwardRecord:
        return recorded(ghost, units, batch, containers)

    for share in _SHARES:
        units = units_of(ghost, opened, share)
        if units not in tried:
            tried.append(units)
            if found := _planned(ghost, record, stages, share, opened, frozenset()):
                return found
    raise PrepareError(
        "fewer calls of modules than stages",
        expected=f"at least {count}",
        got=", ".join(tried[-1]) or "none",
        where="prepare_model, plan=, stages",
        fix="Take fewer ranks along pp or fewer stages_per_rank.",
    )


def _planned(
    ghost: nn.Module,
    record_in: Callable[[Sequence[str]], ForwardRecord],
    stages: Sequence[Sequence[str]] | int,
    share: float,
    opened: frozenset[str],
    whole: frozenset[str],
) -> Planned | None:
    """Cut a model in units of a size, with some opened and some whole; None for too few calls."""
    units = units_of(ghost, opened, share, whole)
    record = record_in(units)
    if more := _updated(record) - whole:
        return _planned(ghost, record_in, stages, share, opened, whole | more)
    count = stages if isinstance(stages, int) else len(stages)
    if len(record.calls) < count:
        return None
    begins = begins_of(record, count) if isinstance(stages, int) else begins_at(record, stages)
    if share_twice(record, begins) > MOST_TWICE:
        return _planned(ghost, record_in, stages, share, opened | _read_outside(record, begins, opened), whole)
    cut = cut_record(record, begins)
    own = tuple(tuple(dict.fromkeys(record.paths[each.begin : each.end])) for each in cut.stages)
    return Planned(units, starts_of(record, begins), tuple(each.holds for each in cut.stages), own)


def _updated(record: ForwardRecord) -> set[str]:
    """The modules whose buffers code between calls changes, such as a norm without parameters; `StageError` for those
    of the model itself."""
    found = {name.rpartition(".")[0] for name in record.updates}
    around = [path for path in found if not path or any(f"{unit}.".startswith(f"{path}.") for unit in record.units)]
    if around:
        raise StageError(
            "the forward changes a buffer by values that one stage has",
            expected="a change within a module that no other module's call is in",
            got=", ".join(name for name in record.updates if name.rpartition(".")[0] in around),
            where="prepare_model",
            fix="Put the change into a separate module, which one stage has.",
        )
    return found


def _read_outside(record: ForwardRecord, begins: Sequence[int], opened: Collection[str]) -> set[str]:
    """The units to open, as code outside reads their parameters; `StageError` without any to open."""
    found = {f"{unit}." for unit in record.units if any(name.startswith(f"{unit}.") for name in record.outside)} - set(
        opened
    )
    if found:
        return found
    most = max(range(len(record.between)), key=record.between.__getitem__)
    place = f"before the call of {record.paths[most]}" if most < len(record.paths) else "behind the last call"
    direct = sorted({name.rpartition(".")[0] or name for name in record.outside})
    raise StageError(
        "stages would compute too much again, as the forward does it outside of modules",
        expected=f"at most {MOST_TWICE:.0%} of its FLOPs outside of the modules {', '.join(record.units[:3])}...",
        got=f"{share_twice(record, begins):.0%}, {f'with {direct[0]}, ' if direct else ''}{place}",
        where="prepare_model",
        fix="Put that computation into a module with the parameters that it reads.",
    )


def planned_by_paths(ghost: nn.Module, stages: Stages) -> Planned:
    """Cut a model by the paths of its stages' modules, which have all parameters. Pure."""
    units = units_of(ghost, [path for paths in stages for path in paths])
    holds: list[set[str]] = [set() for _ in stages]
    for _, aliases in aliases_of(ghost):
        inside = [at for at, paths in enumerate(stages) if _are_below(aliases, paths)]
        for at in inside or range(len(stages)):  # a buffer around the modules
            holds[at].update(aliases)
    own = tuple(tuple(each for each in units if _are_below([f"{each}."], paths)) for paths in stages)
    return Planned(units, None, tuple(map(frozenset, holds)), own)


def _are_below(names: Sequence[str], paths: Sequence[str]) -> bool:
    return any(name.startswith(tuple(f"{path}." for path in paths)) for name in names)


def begins_at(record: ForwardRecord, stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return the first call of each stage by the modules at which it begins; they are called in the order of the
    stages, or a `PrepareError`. Pure."""
    found: list[int] = [0]
    for at, paths in enumerate(stages[1:], 1):
        places = [number for number, path in enumerate(record.paths) if _are_below([f"{path}."], paths)]
        if not places or places[0] <= found[-1]:
            raise PrepareError(
                "the forward does not call the modules of the stages in their order",
                expected=f"{', '.join(paths)} of stage {at} behind {record.paths[found[-1]]}",
                got=", ".join(record.paths[:20]),
                where="prepare_model, plan=, stages",
                fix="Name the modules at which each stage begins, in the order of their calls: "
                "Plan(stages=[[...], [...]]).",
            )
        found.append(places[0])
    return tuple(found)


def begins_by_holdings(record: ForwardRecord, holds: Sequence[frozenset[str]]) -> tuple[int, ...]:
    """Return the first call of each stage, by what the stages hold. Pure.

    Modules called behind those of a later stage are a `StageError`.
    """
    begins = [0]
    for number, path in enumerate(record.paths):
        needed = {name for each in record.held for name in each.names if name.startswith(f"{path}.")}
        holders = [at for at, held in enumerate(holds) if needed <= held]
        later = [at for at in holders if at >= len(begins) - 1]
        if not later:
            raise StageError(
                "the forward calls modules in another order than that of the stages",
                expected="no module of a stage behind one of a later stage",
                got=f"{path} of stage {holders[0] if holders else 'none'} behind stage {len(begins) - 1}",
                fix=_FIX,
            )
        begins += [number] * (later[0] - len(begins) + 1)
    if len(begins) < len(holds):
        raise StageError("the last stage calls none of its modules", got=", ".join(record.paths[:20]), fix=_FIX)
    return tuple(begins)


def starts_of(record: ForwardRecord, begins: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """Return the path of the module at which each stage begins, and the number of its earlier calls. Pure."""
    return tuple((record.paths[at], record.paths[:at].count(record.paths[at])) for at in begins)


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
        raise StageError(
            "ranks along the pipeline record different forwards",
            expected="the same calls of modules on all of them, by the same inputs",
            got=", ".join(made[0].record.paths[:20]),
            fix="Pass the same batch on all ranks along pp.",
        )
    draws = [drawn for _, drawn in found]
    return made[0] if len(set(draws)) == 1 else made[0]._replace(seed=draws[0])


def _digest(replay: Replay) -> str:
    """Return the calls of a replay and what travels as text. The order of sets differs between processes."""
    stages = [(each.begin, each.end, each.needs, each.gives, each.passes) for each in replay.cut.stages]
    return repr((replay.record.paths, stages, sorted(replay.cut.dense)))


def is_followed(replay: Replay, model: Callable[..., Any], calls: Calls, batch: MicroBatch, work: Work) -> bool:
    """Return whether a micro-batch calls the modules of a record in its order, by a forward whose calls are all
    answered by placeholders. No communication."""
    end = len(replay.record.calls)
    nothing = StageCut(begin=end, end=end, needs=(), gives=(), passes=(), holds=frozenset())
    run = StageRun(replay, nothing, {}, first_device(batch), None, work.containers)
    try:
        with torch.no_grad(), emptied_caches(), work.around(), calls.answered_by(run):
            _ = run.forward(model, batch)
    except StageError:
        return False
    return True


def first_device(batch: MicroBatch) -> torch.device:
    """Return the device of the first tensor of a micro-batch; the CPU without one."""
    found = tensors_in((batch.args, dict(batch.kwargs)))
    return found[0].device if found else torch.device("cpu")


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
            fix="Pass accel.prepare(..., example=batch) a batch of the longer path, or begin the stages elsewhere: "
            "Plan(stages=[[...], [...]]).",
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
    facts: dict[Label, Boundary] = {}
    with working(stages, probe):
        for at in range(layout.stages):
            known = replay._replace(facts=dict(facts))

            def look(at: int = at, known: Replay = known) -> list[tuple[Label, Boundary]]:
                return _look(own[at], known, device) if at in own else []

            found = agreed_values(comm, Call("forward_backward: shapes"), look, list[tuple[Label, Boundary]])
            facts |= dict(found[layout.owners[at]])
    return replay._replace(facts=facts)


def _look(stage: ReplayedModule, replay: Replay, device: torch.device) -> list[tuple[Label, Boundary]]:
    """Run a stage without gradients; buffers, attributes and random streams stay as they are."""
    passed = replay.cut.stages[stage.index - 1].passes if stage.index else ()
    received = [noise(replay.fact(each), device) for each in passed] or [torch.zeros(())]
    devices = [] if device.type == "cpu" else [device]
    streams = cast(Any, torch.random).fork_rng(devices=devices, device_type=device.type)
    replayed = replaying([stage], [replay], None)
    with torch.no_grad(), streams, called_eagerly(stage), replayed, stage.looking(), _unchanged(stage.module):
        _ = stage(*received, micro=torch.zeros(1, dtype=torch.int64))
    return list(stage.seen.items())


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Generator[None]:
    """Put buffers and attributes of modules back, as a forward that only looks is none of the user's."""
    values = {each: each.detach().clone() for each in model.buffers()}
    modules = [(each, dict(vars(each)), dict(each.named_buffers(recurse=False))) for each in model.modules()]
    try:
        yield
    finally:
        for each, attributes, buffers in modules:
            vars(each).update(attributes)  # new ones stay, as they note hooks and gathered parameters
            for name, buffer in buffers.items():
                if each.get_buffer(name) is not buffer:
                    setattr(each, name, buffer)
        for buffer, before in values.items():
            _ = buffer.copy_(before)
