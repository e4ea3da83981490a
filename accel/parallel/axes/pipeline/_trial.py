# SPDX-License-Identifier: Apache-2.0
"""Trial cuts: whether tracing would cut a model that is no chain. On fake tensors, without communication."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from accel.errors import AccelError, ConfigError
from accel.parallel._modules import example_of, shallow_copy
from accel.parallel.axes.pipeline._stage_module import MicroBatch, example_batch, has_own
from accel.parallel.axes.tensor import Division
from accel.tree._walk import Containers

_ANY_MODEL = "The strategy fsdp along dp takes models of any kind."
E = TypeVar("E", bound=AccelError)


class Trial(NamedTuple):
    """A cut by tracing that may be tried.

    Attributes:
        model: the whole model; its values do not matter.
        device: of the stages.
        plans: cuts to try, one after another: paths of the stages, or their number, and the arguments of the plan.
        obstacle: why the mesh or the plan has no traced stages; "" for no reason.
        division: from the model to its division among ranks along tp; None without tp, or before it is known.
    """

    model: nn.Module
    device: torch.device
    plans: Sequence[tuple[Sequence[Sequence[str]] | int, str]]
    obstacle: str
    division: Callable[[nn.Module], Division] | None = None

    def with_outcome(
        self,
        error: E,
        batch: MicroBatch | None,
        around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> E:
        """Return a refusal of the chain rule with the outcome of a trial. `batch`: None for an unknown one."""
        fix = " ".join(filter(None, (error.fix, self._outcome(batch, around))))
        return type(error)(error.problem, expected=error.expected, got=error.got, where=error.where, fix=fix)

    def _outcome(self, batch: MicroBatch | None, around: Callable[[], AbstractContextManager[object]]) -> str:
        if self.obstacle:
            return f"A cut by tracing is refused, too: {self.obstacle}. {_ANY_MODEL}"
        if batch is None:
            return "With prepare(..., example=batch), a batch as the model takes it, this error tries a cut by tracing."
        if has_own(batch):
            return ""
        from accel.parallel.axes.pipeline._traced import Traces  # torch.export takes long to import

        met = ""
        for stages, plan in self.plans:
            try:
                division = None if self.division is None else self.division(self.model)
                with around():
                    _ = Traces.begin(self.model, self.device, batch, stages, division)
            except AccelError as error:
                got = f", got {error.got}" if error.got else ""
                fix = error.fix if isinstance(error, ConfigError) and error.fix else _ANY_MODEL
                met = f"{error.problem}{got}. {fix}"
            except Exception as error:  # whatever a copy of the model raises
                met = f"{type(error).__name__}: {error}. {_ANY_MODEL}"
            else:
                line = f"accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan({plan}), example=batch)"
                return f"Or cut it by tracing, which works in a trial: {line}."
        return f"A trial cut by tracing met this: {met}"


def trial_batch(model: nn.Module, example: Any, containers: Containers) -> MicroBatch | None:
    """Return an example as a micro-batch; without one, small inputs for a model of transformers, None for another."""
    if example is not None:
        return example_batch(example, containers)
    made = example_of(model)
    if made is None:
        return None
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
    return example_batch({name: _like(each, dtype) for name, each in made.items()})


def _like(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def skeleton_of(model: nn.Module) -> nn.Module:
    """Copy the modules of a model, with tensors on the meta device. Their other attributes are shared."""
    made: dict[int, nn.Module] = {}
    blank: dict[int, torch.Tensor | None] = {id(None): None}

    def tensor(each: torch.Tensor | None) -> torch.Tensor | None:
        if each is not None and id(each) not in blank:
            empty = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            blank[id(each)] = nn.Parameter(empty, each.requires_grad) if isinstance(each, nn.Parameter) else empty
        return blank[id(each)]

    def one(module: nn.Module) -> nn.Module:
        if id(module) not in made:
            copied: Any = shallow_copy(module)
            made[id(module)] = copied
            own = cast("dict[str, Any]", vars(copied))
            own |= {name: held.copy() for name, held in own.items() if "_hooks" in name and isinstance(held, dict)}
            children = cast("Mapping[str, nn.Module | None]", copied._modules)
            copied._parameters = {key: tensor(each) for key, each in copied._parameters.items()}
            copied._buffers = {key: tensor(each) for key, each in copied._buffers.items()}
            copied._modules = {key: None if child is None else one(child) for key, child in children.items()}
        return made[id(module)]

    return one(model)
