# SPDX-License-Identifier: Apache-2.0
"""A stage that replays the model's own forward: its calls run, calls of other stages are answered.

All ranks along the pipeline have the whole batch, so each stage runs the forward on its real inputs. A call of an
earlier stage returns what that stage sent, or a placeholder: one NaN, expanded to the shape. At the first call of a
later stage the forward ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn
from torch.autograd.graph import Node

from accel.errors import StageError
from accel.mixins import Mixin, add_mixin
from accel.parallel._calls import Plain, grow_cache, take_apart, tapped
from accel.parallel._containers import change_items, changeable_in, items_of, new_items
from accel.parallel._fakes import placeholder
from accel.parallel._micro_batches import MicroBatch, of_stage
from accel.parallel._private import hook_count, sequence_number, unchanged_version
from accel.parallel._record import ForwardRecord, Label, Leaf, UnitCall, place_of
from accel.parallel.axes.pipeline._cut import Cut, StageCut
from accel.parallel.axes.pipeline._work import (
    Boundary,
    StageParts,
    WholeParts,
    Work,
    boundary_of,
    call_hooks,
    check_shape,
    detachable,
    explained,
    write_into,
)
from accel.random import Key, rng_scope, torch_rng_scope
from accel.tree._walk import Containers

_LAST = Boundary("float32", ())  # of a loss
_AGAIN = "Pass accel.prepare(..., example=batch) a batch that makes the forward call the same modules in order."


class StageEnd(BaseException):
    """Ends a stage's forward at the first call of a later stage; no `except Exception` of the model catches it."""


class Replay(NamedTuple):
    """The run of batches of one kind through the stages."""

    record: ForwardRecord  # record of the forward
    cut: Cut  # cut of the record
    # Dtype and shape of each leaf that a call returns or a stage gives, as the stages compute them.
    facts: Mapping[Label, Boundary]
    # Seed of its streams where ranks along the pipeline have different global ones; None where they are alike.
    seed: int | None = None

    def boundaries(self) -> tuple[tuple[Boundary, ...], ...]:
        """Return dtypes and shapes of what each stage passes on, the last one a loss."""
        passed = [tuple(map(self.fact, stage.passes)) for stage in self.cut.stages[:-1]]
        return (*passed, (_LAST,))

    def fact(self, label: Label) -> Boundary:
        """Return dtype and shape of an output or argument, and whether a gradient is sent back."""
        leaf = self.record.leaf(label)
        recorded = Boundary(str(leaf.dtype).removeprefix("torch."), leaf.shape, leaf.differentiable)
        known = self.facts.get(label, recorded)
        return Boundary(known.dtype, known.shape, leaf.differentiable, known.part)


class Calls:
    """Answers to the calls of a model's units, by the run of a stage while there is one."""

    run: StageRun | None = None  # the run that answers now; None outside of the stages' forwards and backwards

    def of(self, path: str) -> Callable[[nn.Module, Plain, tuple[Any, ...], dict[str, Any]], Any]:
        """Return the answer to the calls of one unit."""

        def answer(module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            run = self.run
            return plain(*args, **kwargs) if run is None else run.call(path, module, plain, args, kwargs)

        return answer

    @contextlib.contextmanager
    def answered_by(self, run: StageRun | None) -> Generator[None]:
        """Let a run answer within a block."""
        before, self.run = self.run, run
        try:
            yield
        finally:
            self.run = before


class Stoppable(Mixin):
    """Stands before the class of a stage's model: ends its forward where a later stage begins. Inside of the hooks of
    `fully_shard`, which see a forward that returns."""

    accel_calls: Calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; return what later stages need where it is stopped."""
        try:
            return super().forward(*args, **kwargs)
        except StageEnd:
            run = cast(Calls, vars(self)["accel_calls"]).run
            assert run is not None
            return tuple(run.given.values())


class StageRun:
    """One micro-batch in one stage: its forward, and what a checkpoint computes again in its backward.

    Args:
        replay: of the batch.
        stage: the part of the cut.
        received: tensors that earlier stages sent, rows of parts among them.
        device: of the stage.
        key: of the random streams of this micro-batch; None for a forward without.
        containers: kinds of containers besides those that `accel.tree` knows.
        parts: of the model.

    Attributes:
        given: tensors that later stages need, filled by the forward.
        seen: dtypes and shapes of what the stage's own calls return, for a first run; None otherwise.
    """

    def __init__(
        self,
        replay: Replay,
        stage: StageCut,
        received: Mapping[Label, torch.Tensor],
        device: torch.device,
        key: Key | None,
        containers: Containers,
        *,
        parts: StageParts | None = None,
        looks: bool = False,
    ) -> None:
        self._replay = replay
        self._calls = replay.record.calls
        self._stage = stage
        self._parts = parts or WholeParts()
        self._received = received = {label: self._entered(label, rows) for label, rows in received.items()}
        self._device = device
        self._key = key
        self._containers = containers
        self._trains = torch.is_grad_enabled()
        self._is_reentrant = any(each.reentrant for each in replay.record.calls)
        self._at = 0
        self._inside = False
        self._ended = False
        self._nodes: list[tuple[int, int, str]] = []
        self.given: dict[Label, torch.Tensor] = {}
        self.seen: dict[Label, Boundary] | None = {} if looks else None
        self._gives = frozenset(stage.gives)
        self._crossing = [(each, value, hook_count(value)) for each, value in received.items() if each in stage.passes]
        self._written = {
            at: [(each, value) for each, value in received.items() if each.kind == "argument" and each.call == at]
            for at in {each.call for each in received if each.kind == "argument"}
        }

    def forward(self, model: Callable[..., Any], batch: MicroBatch) -> Any:
        """Run the model up to the stage's end; return its output on the last stage."""
        try:
            with self._stream(-1):
                output = model(*batch.args, **batch.kwargs)
        finally:
            self._ended = True
        if self._at < self._stage.end:
            self._refuse(f"it ends behind {self._at} calls", self._at)
        return output

    def call(self, path: str, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or answer a call of a unit."""
        if self._inside:
            return plain(*args, **kwargs)
        if self._ended:
            return self._call_again(path, module, plain, args, kwargs)
        at, self._at = self._at, self._at + 1
        if at >= len(self._calls) or self._calls[at].path != path:
            self._refuse(path, at)
        if at == self._stage.end:
            self._leave(args, kwargs)
        self._write_received(at, args, kwargs)
        if at >= self._stage.begin:
            return self._run(at, module, plain, args, kwargs)
        return self._answer(at, module, args, kwargs)

    def _write_received(self, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write what earlier stages sent into the arguments of a call."""
        for label, value in self._written.get(at, ()):
            argument = take_apart((args, kwargs), self._containers).leaves[label.leaf]
            with torch.set_grad_enabled(self._trains), unchanged_version(argument):
                write_into(argument, value)

    def unit_of(self, node: Node | None) -> str:
        """Return the path of the unit with the call that made a node of the graph. Another node or None: all paths."""
        number = -1 if node is None else sequence_number(node)
        every = " to ".join(dict.fromkeys(path for _, _, path in (*self._nodes[:1], *self._nodes[-1:])))
        return next((path for first, end, path in self._nodes if first <= number < end), every)

    def _refuse(self, got: str, at: int) -> NoReturn:
        known = self._calls[at].path if at < len(self._calls) else "the end of the forward"
        raise StageError(
            f"the forward calls its modules in another order than in its record: call {at}",
            expected=known,
            got=got,
            fix=_AGAIN,
        )

    def _leave(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """End the forward, with the arguments that the next stage needs."""
        wanted = [each for each in self._stage.gives if each.kind == "argument"]
        if wanted:
            leaves = take_apart((args, kwargs), self._containers).leaves
            for each in wanted:
                self._give(each, leaves[each.leaf])
        for each, value, hooks in self._crossing:
            if hook_count(value) != hooks:
                raise StageError(
                    "the forward registers a hook on a tensor that several stages have, each of which would run it",
                    expected="hooks that the module with the tensor as its result registers",
                    got=f"a hook on a result of {self._calls[each.call].path}",
                    fix="Call register_hook in the forward of that module.",
                )
        raise StageEnd

    def _give(self, label: Label, tensor: torch.Tensor) -> None:
        is_given = label in self._gives
        if self.seen is None and not is_given:
            return
        rows, part = self._parts.sent(tensor)
        if self.seen is not None:
            self.seen[label] = boundary_of(rows, part)
        if is_given:
            # code behind may change it in place, before it is sent
            is_changed = label.kind == "output" and self._replay.record.leaf(label).changed
            self.given[label] = rows.clone() if is_changed else rows
            if label.kind == "output":
                self._crossing.append((label, tensor, hook_count(tensor)))

    # --- own calls ----------------------------------------------------------------------------------------------------

    def _run(self, at: int, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self._calls[at]
        given = take_apart((args, kwargs), self._containers).leaves if known.writes else []
        held = changeable_in(args, kwargs) if known.changes else []
        inner = {
            each.path: module.get_submodule(each.path)
            for each in known.taps
            if any(number >= known.width for number in each.leaves)
        }
        first = sequence_number()
        self._inside = True
        try:
            with self._stream(at), tapped(inner) if inner else contextlib.nullcontext([]) as taps:
                result = plain(*args, **kwargs)
        finally:
            self._inside = False
        self._nodes.append((first, sequence_number(), known.path))
        is_answered = self._stage.end < len(self._calls) and known.has_numbers()
        if self.seen is None and not is_answered and not any(each.call == at for each in self._stage.gives):
            return result
        for number, value in self._leaves(known, module, result, given, held, taps):
            if isinstance(value, torch.Tensor):
                self._give(Label("output", at, number), value)
            elif is_answered:
                known.check_number(number, value)
        return result

    def _leaves(
        self,
        known: UnitCall,
        module: nn.Module,
        result: Any,
        given: Sequence[Any],
        held: Sequence[Any],
        taps: Sequence[tuple[str, Any]],
    ) -> Iterable[tuple[int, Any]]:
        """The leaves of a call, numbered as in its record."""
        yield from enumerate(take_apart(result, self._containers).leaves)
        for each in known.stashes:
            value = getattr(module.get_submodule(each.path), each.name)
            yield from zip(each.leaves, take_apart(value, self._containers).leaves, strict=True)
        for each in known.writes:
            yield each.leaf, given[each.argument]
        for each in known.changes:
            new = new_items(held[each.container], each.items)
            yield from zip(each.leaves, take_apart(new, self._containers).leaves, strict=True)
        tapped_paths = {path for path, _ in taps}
        for (_, output), each in zip(taps, [tap for tap in known.taps if tap.path in tapped_paths], strict=True):
            leaves = take_apart(output, self._containers).leaves
            yield from ((i, x) for i, x in zip(each.leaves, leaves, strict=True) if i >= known.width)

    # --- calls of other stages ----------------------------------------------------------------------------------------

    def _answer(self, at: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call of another stage; set the attributes, lists, caches and hooks' inputs that it
        leaves."""
        known = self._calls[at]
        handed = known.writes or known.cached or any(each.same is not None for each in known.leaves)
        given = take_apart((args, kwargs), self._containers).leaves if handed else []
        leaves = [
            given[each.same] if each.same is not None else self._leaf(Label("output", at, number), each)
            for number, each in enumerate(known.leaves)
        ]
        for write in known.writes:
            write_into(given[write.argument], leaves[write.leaf])
        for stash in known.stashes:
            setattr(module.get_submodule(stash.path), stash.name, stash.rebuild([leaves[i] for i in stash.leaves]))
        for each in known.cached:
            grow_cache(given[each.argument], each, self._device)
        held = changeable_in(args, kwargs) if known.changes else []
        before = list(map(items_of, held))
        for each in known.changes:
            new = each.rebuild([leaves[number] for number in each.leaves])
            change_items(held[each.container], before[each.container], each.items, new)
        for tap in known.taps:
            inner = module.get_submodule(tap.path)
            output = tap.rebuild([leaves[number] for number in tap.leaves])
            call_hooks(inner, () if tap.path else args, {} if tap.path else kwargs, output)
        return known.rebuild(leaves[: known.width])

    def _leaf(self, label: Label, leaf: Leaf) -> Any:
        if leaf.dtype is None:
            return leaf.value
        needs_memory = leaf.changed or label in self._replay.cut.dense
        # a checkpoint of the reentrant kind records nothing unless its inputs require gradients, and its forward is to
        # leave the received tensor as it is: its backward calls again
        carries = leaf.differentiable and self._trains and self._is_reentrant
        is_first = carries and not torch.is_grad_enabled()
        if label in self._received and not is_first:
            return self._received[label].clone() if needs_memory else self._received[label]
        fact = self._replay.fact(label)
        found = placeholder(fact.torch_dtype, fact.shape, self._device, dense=needs_memory or is_first)
        if label in self._received:
            return self._entered(label, found).copy_(self._received[label].detach())
        found = found.requires_grad_().clone() if carries and needs_memory else found.requires_grad_(carries)
        return self._entered(label, found)

    def _entered(self, label: Label, rows: torch.Tensor) -> torch.Tensor:
        """Return what another stage made, a part where that stage has one."""
        part = self._replay.fact(label).part
        return rows if part is None else self._parts.received(rows, part)

    def _call_again(
        self, path: str, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run or answer a call that a checkpoint makes again in backward, by the path of its module."""
        numbers = [number for number, each in enumerate(self._calls) if each.path == path]
        own = [number for number in numbers if self._stage.begin <= number < self._stage.end]
        if len(own) == len(numbers):
            if len(own) == 1:
                self._write_received(own[0], args, kwargs)
            with self._stream(own[0]) if len(own) == 1 else contextlib.nullcontext():
                return plain(*args, **kwargs)
        if len(numbers) > 1:
            raise StageError(
                f"a checkpoint around several modules runs {path} again, which is called in several stages",
                expected="checkpoints around one module",
                got=f"calls {', '.join(map(str, numbers))} of {path}",
                fix="Checkpoint blocks instead: accel.checkpoint_activations(model).",
            )
        return self._answer(numbers[0], module, args, kwargs)

    def _stream(self, number: int) -> contextlib.AbstractContextManager[None]:
        """The random streams of a call, the same in every cut; -1 for the code between calls."""
        if self._key is None:
            return contextlib.nullcontext()
        scope = rng_scope if self._replay.record.draws_on_host else torch_rng_scope
        return scope(self._key.fold_in(number), self._device)


class ReplayedModule(nn.Module):
    """One stage of a model, as torch's schedules call it.

    Attributes:
        module: the model with the parameters of this stage.
        index, count: place among all stages.
        rank: of the context, for errors.
        own: paths of the units that the stage calls.
        work: the current computation; None between calls.
        replays: replays of its micro-batches; none between calls.
        key: of the random streams of its batch; None for a batch without.
        before_batch: run once before the micro-batches of a batch; None for nothing.
        parts: of the model; None where stages pass on whole tensors.
        looks: whether the stage notes what its calls return.
        seen: dtypes and shapes of the results in its latest run.
        runs: runs that await their backward, by number of the micro-batch.
    """

    work: Work | None = None
    replays: Sequence[Replay] = ()
    key: Key | None = None
    before_batch: Callable[[], None] | None = None
    parts: StageParts | None = None
    looks = False

    def __init__(self, module: nn.Module, calls: Calls, index: int, rank: int, count: int, own: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.index = index
        self.count = count
        self.rank = rank
        self.own = tuple(own)
        self.seen: dict[Label, Boundary] = {}
        self._calls = calls
        vars(module)["accel_calls"] = calls
        add_mixin([module], Stoppable)
        self.runs: dict[int, StageRun] = {}

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.index == self.count - 1

    def forward(self, *received: torch.Tensor, micro: torch.Tensor) -> Any:
        """Run the stage on a micro-batch, by its number on the CPU; the first stage ignores `received`."""
        work, at = self.work, int(micro.item())
        assert work is not None
        replay = self.replays[at]
        batch = of_stage(work.micro_batches[at], self.index)
        run = self._begin(work, replay, at, received)
        stage = replay.cut.stages[self.index]
        with self._named("a pipeline stage", at), work.around():
            with self._calls.answered_by(run):
                output = run.forward(self.module, batch)
            if self.is_last:
                return work.finish(output, batch)
            known = run.given | dict(self._by_label(replay, received))
            for each in () if self.looks else stage.passes:
                check_shape(known[each], replay.fact(each), f"{each.kind} of {replay.record.paths[each.call]}")
            return tuple(detachable(known[each]) for each in stage.passes)
        raise AssertionError

    def _begin(self, work: Work, replay: Replay, at: int, received: Sequence[torch.Tensor]) -> StageRun:
        stage = replay.cut.stages[self.index]
        named = dict(self._by_label(replay, received))
        needed = {each: named[each] for each in stage.needs}
        tensors = received if self.index else self.module.parameters()
        device = next((each.device for each in tensors), torch.device("cpu"))
        key = None if self.key is None or not replay.record.is_random else self.key.fold_in(at)
        run = StageRun(replay, stage, needed, device, key, work.containers, parts=self.parts, looks=self.looks)
        if run.seen is not None:
            self.seen = run.seen  # filled while the stage runs
        if torch.is_grad_enabled():
            self.runs[at] = run
        return run

    def _by_label(self, replay: Replay, received: Sequence[torch.Tensor]) -> Iterable[tuple[Label, torch.Tensor]]:
        """The tensors that the stage before passed on; the first stage gets none."""
        return zip(replay.cut.stages[self.index - 1].passes, received, strict=True) if self.index else ()

    @contextlib.contextmanager
    def backward_of(self, micro: int, *, ends: bool) -> Generator[None]:
        """Let the run of a micro-batch answer the calls of its backward, in which checkpoints compute again."""
        run = self.runs.get(micro)  # none in a forward without gradients, where torch's schedules call it, too
        unit_of = run and run.unit_of
        with self._named("the backward of a pipeline stage", micro, unit_of), self._calls.answered_by(run):
            yield
        if ends:
            _ = self.runs.pop(micro, None)

    @contextlib.contextmanager
    def _named(self, what: str, micro: int, unit_of: Callable[[Node | None], str] | None = None) -> Generator[None]:
        """Name module, line, stage, micro-batch and rank in errors of the block. `unit_of`: of nodes of the graph."""
        assert self.work is not None
        number = f"micro-batch {micro + 1} of {len(self.work.micro_batches)}"
        where = f"stage {self.index} of {self.count}, {number}, rank {self.rank}"
        try:
            yield
        except Exception as error:
            found = explained(error, what, where, lambda own: place_of(own, self.module, unit_of))
            raise found from found.__cause__


@contextlib.contextmanager
def running(
    stages: Sequence[ReplayedModule], work: Work, replays: Sequence[Replay], key: Key | None, *, looks: bool = False
) -> Generator[None]:
    """Give stages their work, and the replays of its micro-batches, for the time of a block.

    `looks`: whether stages note what their calls return.
    """
    for each in stages:
        each.work, each.replays, each.key, each.looks = work, replays, key, looks
        if each.before_batch is not None:
            each.before_batch()
    try:
        yield
    finally:
        for each in stages:
            each.work, each.replays, each.key, each.looks = None, (), None, False
            each.runs.clear()
