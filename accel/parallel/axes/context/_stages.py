# SPDX-License-Identifier: Apache-2.0
"""Parts of positions in the stages of a pipeline: messages between stages, and the proof before the first batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from accel.comm import Call, exchange_values
from accel.context import DistContext
from accel.devices import wide_dtype
from accel.errors import PrepareError, StageError
from accel.parallel._calls import unchanged
from accel.parallel._micro_batches import MicroBatch
from accel.parallel._modules import prepared_of, stage_modules
from accel.parallel._private import called_eagerly
from accel.parallel.axes.context._attention import whole_positions
from accel.parallel.axes.context._forward import Inputs, Positions, Traits
from accel.parallel.axes.context._inner import full_outputs, listed, may_be_full
from accel.parallel.axes.context._positions import PositionRanks
from accel.parallel.axes.context._proof import DIFFERENT, attempted, differ, evaluated, outputs_of, whole_outputs
from accel.parallel.axes.context._split import ALL_POSITIONS
from accel.parallel.parts import PartTensor, leave, make, plain_of
from accel.parallel.parts._nested import rows_in
from accel.parallel.parts._part import outside, own_rows
from accel.tree import map_tensors

if TYPE_CHECKING:
    from accel.parallel.axes.pipeline._replayed import Replay
    from accel.parallel.axes.pipeline._replays import StageTrial, StageTrials
    from accel.parallel.axes.pipeline._work import PassedPart

_PROOF = Call("positions", "proof of stages", ordered=False)


class StagePositions(Positions):
    """Calls of the stages of one model on this rank.

    Attributes:
        kinds: the ranks that hold parts, in one order on all ranks.
        is_proving: whether stages run for the proof.
        output: of the last call for the proof, with its parts.
        got: outputs of the last stage in the proof, on its rank.
        unrecorded: first error of a forward that is recorded for the proof; None for none.
    """

    def __init__(self, ctx: DistContext, roots: Sequence[nn.Module], traits: Traits) -> None:
        super().__init__(ctx, roots, traits)
        self.is_proved = True  # by the pipeline, before it calls a stage
        self.is_proving = False
        self.output: Any = None
        self.got: list[Tensor] = []
        self.unrecorded: StageError | None = None
        self.kinds = (self.ranks, self.within)
        for each in self.kinds:
            each.in_stages = True

    def left(self, output: Any) -> Any:
        """Return own positions for the parts of an output."""
        if self.is_proving:
            self.output = output
        return super().left(output)

    # --- what stages pass on

    def sent(self, tensor: Tensor) -> tuple[Tensor, PassedPart | None]:
        """Return what a stage sends of a tensor: of a part this rank's positions, with the facts of the part."""
        from accel.parallel.axes.pipeline._work import PassedPart

        tensor = rows_in(tensor if self._is_of_positions(tensor) else leave(tensor))  # of a part along tp
        if not isinstance(tensor, PartTensor):
            return tensor, None
        if tensor.division is None:
            return self.ranks.left(tensor), None
        return outside(plain_of(tensor)), PassedPart(
            self.kinds.index(cast(PositionRanks, tensor.ranks)), tensor.division
        )

    def _is_of_positions(self, tensor: Tensor) -> bool:
        return isinstance(tensor, PartTensor) and tensor.ranks in self.kinds

    def received(self, rows: Tensor, part: PassedPart) -> Tensor:
        """Return received positions as a part."""
        return make(rows.view_as(rows), part.layout, self.kinds[part.ranks])

    def whole(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with all positions, for a record. A collective."""
        if ALL_POSITIONS.holds(self.ctx):
            return batch
        self.note_uncut(Inputs(batch.args, batch.kwargs))

        def gathered(each: Tensor) -> Tensor:
            at = self.cut_dim(each, self.dim)
            return each if at is None else whole_positions(self.ctx, each, at)

        return _batch_of(batch, map_tensors(gathered, Inputs(batch.args, batch.kwargs)))

    def cuts(self, batch: MicroBatch) -> Sequence[int | None]:
        """Return the dimension of the positions of each input; None for an input without."""
        self.note_uncut(Inputs(batch.args, batch.kwargs))
        return [self.cut_dim(each, self.dim) for each in listed((batch.args, batch.kwargs))]

    # --- the proof

    def prove_stages(self, trials: StageTrials) -> bool:
        """Raise `PrepareError` on every rank where stages with parts of positions give something else than stages with
        all of them. A collective. Return whether the first micro-batch has positions that are cut."""
        batch = trials.batch
        given = Inputs(batch.args, batch.kwargs)
        if self.traits.is_cut and not self.has_own(given):
            return False
        self.unrecorded = None
        try:
            self.prove(trials.model, given, partial(self._problem_of, trials, batch, given))
        except PrepareError:
            if self.unrecorded is not None:
                raise self.unrecorded from None
            raise
        return True

    def _problem_of(
        self, trials: StageTrials, batch: MicroBatch, given: Inputs, dim: int | None, most: int | None
    ) -> str:
        """Return the difference of stages with parts from stages with all positions; "" for none. A collective."""
        proof = self.proof_inputs(given, dim, most)
        with contextlib.ExitStack() as stack:
            for each in (trials.model, *trials.stages):
                stack.enter_context(evaluated(each, self.ctx.device))
                stack.enter_context(called_eagerly(each))
            stack.enter_context(self._proving())
            self.dim = dim
            self.got = []
            problem = self._compared(
                trials, [_batch_of(batch, each) for each in (proof.whole, proof.own)], self._compare_stage
            )
            self.full = {}
            is_open = not problem and may_be_full(self.got, proof.lengths)
            if any(exchange_values(self.ctx.comm, _PROOF, is_open, bool)):

                def run_whole(trial: StageTrial) -> None:
                    found = whole_outputs(self.ranks, partial(self._run_whole, trial), may_fail=False)
                    if trial.module.is_last:
                        self.full = full_outputs(self.got, found, proof.lengths)

                failed = self._compared(trials, [_batch_of(batch, proof.half)] * 2, run_whole)
                problem = failed and f"an output that may have all positions, and for half of them {failed}"
        names = exchange_values(self.ctx.comm, _PROOF, list(self.ranks.whole), list[str])
        self.ranks.whole |= dict.fromkeys(name for each in names for name in each)
        return problem

    @contextlib.contextmanager
    def _proving(self) -> Generator[None]:
        self.is_proving = self.is_running = True
        try:
            yield
        finally:
            self.is_proving = self.is_running = False
            self.output = None
            self.got = []

    def _compared(
        self, trials: StageTrials, batches: Sequence[MicroBatch], attempt: Callable[[StageTrial], None]
    ) -> str:
        """Run stage after stage; return the problem of one, "" for none. A collective."""

        def problem_of(trial: StageTrial) -> str:
            with unchanged(trial.module, is_seen=False), self.agreeing():
                return attempted(self.ranks, partial(attempt, trial))

        problem = ""
        replays: list[Replay] = []
        try:
            with ALL_POSITIONS.begun(self.ctx):
                replays.append(trials.replay(batches[0]))
        except StageError as error:
            self.unrecorded = self.unrecorded or error
            problem = str(error)
        found = [each for each in exchange_values(self.ctx.comm, _PROOF, problem, str) if each]
        found = found or trials.compare(replays[0], batches, problem_of)
        return next((each for each in found if each != DIFFERENT), "".join(found[:1]))

    def _compare_stage(self, trial: StageTrial) -> None:
        """Raise `PrepareError` where a stage with parts differs from one with all positions. A collective along cp."""

        def run_own() -> list[Tensor]:
            pairs = zip(trial.received, trial.parts, strict=True)
            passed = trial.run(1, [each if part is None else self._own(each, part) for each, part in pairs])
            if trial.module.is_last:
                return outputs_of(self.output)
            found = [each if part is None else self.received(each, part) for each, part in passed]
            return list(map(self._number, found))

        found = differ(self.ranks, trial.module, partial(self._run_whole, trial), run_own, [trial.module])
        if trial.module.is_last:
            self.got = found

    def _run_whole(self, trial: StageTrial) -> list[Tensor]:
        """Run a stage with all positions; return the tensors that it passes on, or the floating-point outputs."""
        passed = trial.run(0, trial.received)
        if trial.module.is_last:
            return outputs_of(trial.output)
        return [self._number(each) for each, _ in passed]

    def _number(self, passed: Tensor) -> Tensor:
        """Return a passed tensor in a dtype with differences: integers and masks decide what later stages compute."""
        is_exact = not passed.is_floating_point() and not passed.is_complex()
        return passed.to(wide_dtype(self.ctx.device)) if is_exact else passed

    def _own(self, whole: Tensor, part: PassedPart) -> Tensor:
        """Return this rank's positions of a tensor of all, for a stage that gets them as a part."""
        ranks = self.kinds[part.ranks]
        return plain_of(own_rows(whole, part.layout.dim, part.layout.cut, ranks))


def use_stage_positions(ctx: DistContext, model: nn.Module, traits: Traits, within: Sequence[nn.Module] = ()) -> None:
    """Let the stages of a model compute with parts of positions, as `use_positions` lets a model. Mutates them."""
    stages = stage_modules(model)
    runs = [cast(Any, each).module for each in stages]
    positions = StagePositions(ctx, [model, *stages, *runs], traits)
    positions.begin(model, runs, within)
    positions.guard_all(model)
    cast(Any, prepared_of(model)).get("pipeline").pass_parts(stages, positions, positions.prove_stages)


def ghost_of(model: nn.Module) -> nn.Module | None:
    """Return the model without memory that the stages of a model record; None without stages."""
    pipeline = prepared_of(model).get("pipeline")
    return None if pipeline is None else pipeline.replays.ghost


def _batch_of(batch: MicroBatch, given: Inputs) -> MicroBatch:
    return batch._replace(args=given.inputs, kwargs=given.keywords)
