# SPDX-License-Identifier: Apache-2.0
"""A stage as torch's schedules call it: one tensor in, one tensor out, its errors named."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel.comm import peer_error
from accel.errors import AccelError, StageError
from accel.parallel._private import is_view
from accel.parallel.pipeline._split import MicroBatch
from accel.tree import Containers

_EMBEDDINGS = "inputs_embeds"  # where models of Hugging Face take what an embedding would return


class ByStage:
    """An argument of a model that each stage has one of, such as a cache of its layers.

    Attributes:
        made: the arguments of this rank's stages, by stage.
    """

    __slots__ = ("_make", "made")

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.made: dict[int, Any] = {}

    def of(self, stage: int) -> Any:
        """Return the argument of a stage; made when it is asked for first."""
        if stage not in self.made:
            self.made[stage] = self._make()
        return self.made[stage]


class Work(NamedTuple):
    """The computation of a rank's stages in one call.

    Attributes:
        micro_batches: inputs and targets, the same on all ranks along the pipeline.
        finish: maps the last stage's output and the micro-batch to the tensor to run backward from, or to return.
        around: context of each forward, such as autocast.
        containers: kinds of containers besides those that `accel.tree` knows.
        probe: micro-batches for the forward that finds shapes, where another run of one would have an effect; None for
            `micro_batches`.
        shapes: tree of the tensors on which shapes between stages depend; None for all inputs.
    """

    micro_batches: Sequence[MicroBatch]
    finish: Callable[[Any, MicroBatch], torch.Tensor]
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    containers: Containers = ()
    probe: Sequence[MicroBatch] | None = None
    shapes: Any = None


class StageModule(nn.Module):
    """One stage of a model.

    Attributes:
        module: the model with the modules of this stage.
        index, count: place among all stages.
        rank: of the context, for errors.
        stages: paths of the modules of all stages.
        own: those of this one.
        work: the current computation; None between calls.
        before_batch: run once before the micro-batches of a batch; None for nothing.
    """

    work: Work | None = None
    before_batch: Callable[[], None] | None = None

    def __init__(self, module: nn.Module, index: int, rank: int, stages: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.module = module
        self.index = index
        self.count = len(stages)
        self.rank = rank
        self.stages = stages
        self.own = tuple(stages[index])
        self._names = tuple(inspect.signature(module.forward).parameters)

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.index == self.count - 1

    def forward(self, hidden: torch.Tensor, *, micro: torch.Tensor) -> torch.Tensor:
        """Run the stage on a micro-batch.

        Args:
            hidden: output of the stage before; not looked at in the first stage.
            micro: number of the micro-batch, on the CPU.
        """
        work = self.work
        assert work is not None
        at = int(micro.item())
        with self._named(f"micro-batch {at + 1} of {len(work.micro_batches)}"):
            batch = self._own(work.micro_batches[at])
            with work.around():
                output = self.call(hidden, batch)
                if self.is_last:
                    return work.finish(output, batch)
            found = first_tensor(output)
            return found.clone() if is_view(found) else found  # schedules detach outputs in place
        raise AssertionError

    def _own(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with this stage's arguments."""
        if not has_own(batch):
            return batch
        kwargs = {key: each.of(self.index) if isinstance(each, ByStage) else each for key, each in batch.kwargs.items()}
        return batch._replace(kwargs=kwargs)

    def call(self, hidden: torch.Tensor, batch: MicroBatch) -> Any:
        """Run the stage's modules, with `hidden` in the place of the model's first input behind the first stage."""
        if self.index == 0:
            return self.module(*batch.args, **batch.kwargs)
        args = list(batch.args)
        kwargs = dict(batch.kwargs)
        if _EMBEDDINGS not in self._names:
            if args:
                args[0] = hidden
            else:
                kwargs[next(iter(kwargs))] = hidden
            return self.module(*args, **kwargs)
        if args:
            kwargs |= zip(self._names[1:], args[1:], strict=False)
        else:
            _ = kwargs.pop(next(iter(kwargs)))
        return self.module(**{**kwargs, _EMBEDDINGS: hidden})

    @contextlib.contextmanager
    def _named(self, micro: str) -> Any:
        """Name stage, micro-batch and rank in errors of the block."""
        try:
            yield
        except (AccelError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            lost = peer_error(error, f"the forward of stage {self.index}")
            raise lost or StageError(
                f"a pipeline stage failed: {type(error).__name__}: {str(error).strip()}",
                where=f"stage {self.index} of {self.count}, {micro}, rank {self.rank}",
            ) from error


def has_own(batch: MicroBatch) -> bool:
    """Return whether a micro-batch has arguments of which each stage has its own."""
    return any(isinstance(each, ByStage) for each in batch.kwargs.values())


def main_input(batch: MicroBatch) -> torch.Tensor:
    """Return the input whose place hidden states take behind the first stage.

    Raises:
        StageError: it is no tensor.
    """
    values = (*batch.args, *batch.kwargs.values())
    if not values or not isinstance(values[0], torch.Tensor):
        raise StageError(
            "the first input of a pipelined model is no tensor",
            expected="the tensor that hidden states replace behind the first stage",
            got=type(values[0]).__name__ if values else "no input",
            where="inputs=",
        )
    return values[0]


def first_tensor(output: Any) -> torch.Tensor:
    """Return the first tensor of a model's output, which is what the next stage goes on with.

    Raises:
        StageError: there is none.
    """
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        items = list(cast("Mapping[Any, Any]", output).values())
    else:
        items = list(cast("Sequence[Any]", output)) if isinstance(output, tuple | list) else []
    for each in items:
        if isinstance(each, torch.Tensor):
            return each
    raise StageError(
        "a stage returned no tensor", expected="a tensor, or some with one", got=type(cast(object, output)).__name__
    )
