# SPDX-License-Identifier: Apache-2.0
"""torch's schedules over this rank's stages: made once for each shape of a micro-batch, and run.

Huang et al. 2019, GPipe, arXiv:1811.06965; Narayanan et al. 2021, 1F1B and interleaved stages, arXiv:2104.04473;
Qi et al. 2023, zero bubble, arXiv:2401.10241; torch.distributed.pipelining.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from accel.parallel._leftovers import has_compiled
from accel.parallel._shared_memory import compiled_leaves, separate_gradients
from accel.parallel.axes.pipeline._layout import Layout
from accel.parallel.axes.pipeline._replayed import ReplayedModule
from accel.parallel.axes.pipeline._work import Boundary, boundary_of, explained

_RUNS_AGAIN = ("CheckpointFunctionBackward",)  # of a reentrant checkpoint, which runs another backward


class _Stage(PipelineStage):
    """A stage that reduces gradients only at the end of the window, and keeps gradients of earlier batches."""

    holds: Callable[[], bool]

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Exchange gradients along data parallelism, unless they are held back."""
        if not self.holds():
            cast(Any, super()).perform_reduce_grad(grad_scale_factor)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run the backward of a micro-batch; gradients that it leaves in shared memory get their own.

        Where the backward cannot be split, it runs in full as its first part, and the second part does nothing.
        """
        if backward_type == "input" and not can_split(bwd_kwargs["stage_output"], bwd_kwargs["input_values"]):
            if bwd_kwargs["output_grads"] is None:  # the last stage has a loss in a tuple
                bwd_kwargs = bwd_kwargs | {"stage_output": bwd_kwargs["stage_output"][0]}
            return self.backward_maybe_with_nosync("full", bwd_kwargs, last_backward)
        if backward_type == "weight" and bwd_kwargs["param_groups"] is None:
            return (), None
        fresh: Sequence[torch.Tensor] = ()
        if backward_type == "weight":  # its outputs have no graph any more
            fresh = [each for each in self.submod.parameters() if each.grad is None]
        elif has_compiled():
            outputs: Any = bwd_kwargs["stage_output"]
            fresh = compiled_leaves((outputs,) if isinstance(outputs, torch.Tensor) else outputs)
        result = cast(Any, super()).backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)
        separate_gradients(fresh)
        return result

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> None:
        """Run the backward of a micro-batch, or its first part; a replayed stage answers what checkpoints call."""
        with cast(ReplayedModule, self.submod).backward_of(bwd_chunk_id, ends=full_backward):
            cast(Any, super()).backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: Any = False) -> None:
        """Run the second part of the backward of a micro-batch."""
        with cast(ReplayedModule, self.submod).backward_of(bwd_chunk_id, ends=True):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradients for a stage on this rank; none in a run without backward, which V schedules ask too."""
        return cast(Any, super()).get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradients of a stage on this rank; nothing in a run without backward."""
        if self.has_backward:
            cast(Any, super()).set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def renew_buffers(self) -> None:
        """Receive the next batch in other memory: gradients, and what modules keep, may be views of this one's."""
        own = cast(Any, self)
        infos: Sequence[Any] = [*own.args_recv_info.values(), *own.grad_recv_info.values()]
        for each in itertools.chain.from_iterable(infos):
            if (old := getattr(each, "buffer", None)) is not None:
                each.buffer = torch.empty_like(old, requires_grad=old.requires_grad)

    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing: shapes are known, so nothing was run, and torch would drop gradients of earlier batches."""


def can_split(outputs: Sequence[torch.Tensor], inputs: Sequence[Any]) -> bool:
    """Return whether torch's split backward (inputs first, weights later) gives every parameter its gradient.

    The second part begins at the nodes of the graph that received gradients in the first one. It misses an output that
    depends on no input, such as a second tower's. It fails for an output that another output is computed from, for
    parameters that are used in several places, and for a reentrant checkpoint.

    Args:
        outputs: of a stage, or its loss.
        inputs: of a stage; tensors that other stages sent among them.

    Returns:
        False for a graph that may have one of these. No communication.
    """
    if not (tracked := [each for each in outputs if each.requires_grad]):
        return False  # torch 2.12 fails
    received = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    roots = [each.grad_fn for each in tracked]
    depends: dict[Node, bool] = {get_gradient_edge(each).node: True for each in received}
    parents: dict[Node, int] = {}
    children: dict[Node, list[Node]] = {}
    waiting: list[Node | None] = [*roots]
    while waiting:
        node = waiting[-1]
        if node is None or node.name() in _RUNS_AGAIN:
            return False
        if node in children:
            depends.setdefault(node, any(depends.get(each, False) for each in children[node]))
            _ = waiting.pop()
            continue
        found = [each for each, _ in node.next_functions if each is not None]
        children[node] = found
        for each in found:
            parents[each] = parents.get(each, 0) + 1
            if each not in children:
                waiting.append(each)
    if any(each in parents or not depends[each] for each in roots if each is not None):
        return False
    return all(count == 1 or depends[each] for each, count in parents.items())


class StageSchedule:
    """One of torch's schedules for micro-batches of one shape.

    Args:
        layout: of the pipeline.
        stages: of this rank.
        passed: dtypes and shapes of the outputs of each stage.
        group: ranks along the pipeline.
        device: of the stages.
        holds: whether gradients are held back now; None for a forward without backward.
    """

    def __init__(
        self,
        layout: Layout,
        stages: Sequence[ReplayedModule],
        passed: Sequence[Sequence[Boundary]],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        holds: Callable[[], bool] | None,
    ) -> None:
        self._trains = trains = holds is not None
        self._layout = layout
        self._rank = stages[0].rank
        ranks = dist.get_process_group_ranks(group)
        owners = layout.owners
        around = {at for each in stages for at in (each.index - 1, each.index + 1)}
        self._neighbours = sorted({ranks[owners[at]] for at in around if at in owners} - {self._rank})
        self._first = any(each.index == 0 for each in stages)
        self._last = any(each.is_last for each in stages)
        self._indices = torch.arange(layout.micro_batches)
        numbers = boundary_of(self._indices[:1])
        made: list[_Stage] = []
        for each in stages:
            given = (numbers,) if each.index == 0 else passed[each.index - 1]
            needs = trains and each.index > 0
            stage = _Stage(
                each,
                each.index,
                layout.stages,
                device,
                input_args=tuple(one.tensor(requires_grad=needs) for one in given),
                output_args=tuple(one.tensor(requires_grad=trains) for one in passed[each.index]),
                group=group,
            )
            stage.holds = holds or (lambda: True)
            made.append(stage)
        kind = get_schedule_class(layout.schedule)
        stage_or_stages = made[0] if issubclass(kind, PipelineScheduleSingle) else made
        loss: Callable[[Any, Any], Any] | None = (lambda output, _: output) if trains else None  # it is the loss
        self._stages = made
        self._schedule = cast(Any, kind)(
            stage_or_stages, n_microbatches=layout.micro_batches, loss_fn=loss, scale_grads=False
        )

    def run(self) -> list[torch.Tensor]:
        """Run all micro-batches; return their losses on the last stage. A collective.

        The first stage takes its inputs by the number of a micro-batch, as they are split already. A failed stage is a
        `StageError`, with its number, micro-batch and rank.
        """
        losses: list[torch.Tensor] = []
        inputs = (self._indices,) if self._first else ()
        target = {"target": self._indices, "losses": losses} if self._last and self._trains else {}
        for each in self._stages:
            each.renew_buffers()
        try:
            self._schedule.step(*inputs, return_outputs=False, micro=self._indices, **target)
        except Exception as error:
            neighbours = ", ".join(map(str, self._neighbours))
            where = f"{self._layout.schedule}, rank {self._rank}, which exchanges with rank {neighbours}"
            found = explained(error, "the pipeline's schedule", where)
            raise found from found.__cause__
        return losses
