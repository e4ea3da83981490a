# SPDX-License-Identifier: Apache-2.0
"""The work of a rank's stages in one call, and dtypes and shapes of the tensors that they pass on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

import msgspec
import torch
from torch import nn

from accel.comm import peer_error
from accel.errors import AccelError, PeerError, StageError
from accel.parallel._micro_batches import MicroBatch
from accel.parallel._private import forward_hooks, hooks_with_keywords
from accel.parallel.parts import RowLayout, leave
from accel.tensors import is_view, same_memory
from accel.tree._walk import Containers

_FORWARD_LINE = "Call torch.autograd.set_detect_anomaly(True) first: torch then prints the line of the forward."


class PassedPart(NamedTuple):
    """Facts of a part that a stage sends. The receiver makes a part of the rows again."""

    ranks: int  # number of the ranks that hold it, among all ranks of the model's parts
    layout: RowLayout  # of the rows


class Boundary(msgspec.Struct, frozen=True):
    """Dtype and shape of a tensor that a stage passes on, and whether a gradient is sent back; of the rows of a part,
    with its facts."""

    dtype: str
    shape: tuple[int, ...]
    differentiable: bool = True
    part: PassedPart | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return torch's dtype."""
        return getattr(torch, self.dtype)

    def tensor(self, *, requires_grad: bool) -> torch.Tensor:
        """Return a tensor like it on the meta device."""
        dtype = self.torch_dtype
        floats = dtype.is_floating_point or dtype.is_complex
        return torch.empty(
            self.shape, dtype=dtype, device="meta", requires_grad=requires_grad and floats and self.differentiable
        )


def boundary_of(tensor: torch.Tensor, part: PassedPart | None = None) -> Boundary:
    """Return a tensor's dtype and shape."""
    return Boundary(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), part=part)


class StageParts(Protocol):
    """Parts of tensors that ranks along another axis share and that stages pass on."""

    def sent(self, tensor: torch.Tensor) -> tuple[torch.Tensor, PassedPart | None]:
        """Return what a stage sends of a tensor: of a part this rank's rows, with the facts of the part."""
        ...

    def received(self, rows: torch.Tensor, part: PassedPart) -> torch.Tensor:
        """Return received rows as a part."""
        ...

    def whole(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with the inputs of all ranks that share them, for a record. A collective of these."""
        ...

    def cuts(self, batch: MicroBatch) -> Sequence[int | None]:
        """Return the dimension along which ranks share each input; None for an input that all of them have."""
        ...


class WholeParts:
    """The parts of a model with stages that pass on whole tensors."""

    def sent(self, tensor: torch.Tensor) -> tuple[torch.Tensor, PassedPart | None]:
        """Return a tensor; all of a part."""
        return leave(tensor), None

    def received(self, rows: torch.Tensor, part: PassedPart) -> torch.Tensor:
        """Return received rows as they are."""
        _ = part
        return rows

    def whole(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch as it is."""
        return batch

    def cuts(self, batch: MicroBatch) -> Sequence[int | None]:
        """Return nothing: ranks share no input."""
        _ = batch
        return ()


def check_shape(found: torch.Tensor, expected: Boundary, what: str) -> None:
    """Raise `StageError` for a tensor that does not have the shape of the first micro-batch's."""
    if found.shape != expected.shape:
        raise StageError(
            "the shape of a tensor that is sent to the next stage depends on values",
            expected=f"{list(expected.shape)}, as in the first micro-batch",
            got=f"{list(found.shape)}, {what}",
            fix="Compute all rows, and choose by torch.where(mask, new, old); or choose within a module's forward.",
        )


def explained(
    error: Exception, what: str, where: str, place_in: Callable[[Exception], str] = lambda _: ""
) -> Exception:
    """Return the error to raise for one in the run of a stage, with its cause: a typed one in it, or a new one.

    Args:
        error: torch puts its errors around a stage's.
        what: the run.
        where: its place.
        place_in: maps an error of the model's own to its place in the model.
    """
    causes = [error]
    while isinstance(cause := causes[-1].__cause__, Exception):
        causes.append(cause)
    known = next((each for each in causes if isinstance(each, AccelError | torch.OutOfMemoryError)), None)
    lost = next(filter(None, (peer_error(each, what) for each in causes)), None)
    if isinstance(known, StageError) and not known.where:
        made = StageError(known.problem, expected=known.expected, got=known.got, where=where, fix=known.fix)
    elif known is not None:
        return known
    elif lost is not None:
        made = PeerError(lost.problem, expected=lost.expected, where=where, fix=lost.fix)
    else:
        text = f"{what} failed: {type(causes[-1]).__name__}: {str(causes[-1]).strip()}"
        place = ", ".join(filter(None, (place_in(causes[-1]), where)))
        made = StageError(text, where=place, fix=_FORWARD_LINE if "backward" in what else "")
    made.__cause__ = error
    return made


def detachable(output: torch.Tensor) -> torch.Tensor:
    """Return an output that schedules may detach in place, while operators of the stage need it for gradients of
    weights."""
    if is_view(output):
        return output.clone()
    return same_memory(output) if output.requires_grad else output


def call_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
    """Call the forward hooks of a module for their effects; what they return is ignored, as what was sent has passed
    them."""
    with_keywords = hooks_with_keywords(module)
    for number, hook in list(forward_hooks(module).items()):
        inputs = (args, kwargs) if number in with_keywords else (args,)
        cast(Any, hook)(module, *inputs, output)


def write_into(argument: Any, value: torch.Tensor) -> None:
    """Write a received argument into the tensor with which the forward continues, with its gradient."""
    if argument.requires_grad and not is_view(argument):
        _ = argument.detach_()
    _ = argument.copy_(value)


def noise(like: Boundary, device: torch.device, seed: int) -> torch.Tensor:
    """Return random numbers in the place of a tensor that a stage passes on; zeros for integers."""
    dtype = like.torch_dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(like.shape, dtype=dtype, device=device)
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


class Work(NamedTuple):
    """The computation of a rank's stages in one call."""

    micro_batches: Sequence[MicroBatch]  # inputs and targets, the same on all ranks along the pipeline
    # Maps the last stage's output and the micro-batch to the tensor to run backward from, or to return.
    finish: Callable[[Any, MicroBatch], torch.Tensor]
    # Context of each forward, such as autocast.
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    containers: Containers = ()  # kinds of containers besides those that `accel.tree` knows
    # Micro-batches for the forward that finds shapes, where another run of one would have an effect; None for
    # `micro_batches`.
    probe: Sequence[MicroBatch] | None = None
    shapes: Any = None  # tree of the tensors on which shapes between stages depend; None for all inputs
    # Inputs, and targets if there are some, before the split; None for `micro_batches`.
    whole: Mapping[str, Any] | None = None

    def batch(self) -> dict[str, Any]:
        """Return the tensors that all ranks along the pipeline have alike, by the names of errors."""
        if self.whole is not None:
            return dict(self.whole)
        listed = [(each.args, dict(each.kwargs), each.targets) for each in self.micro_batches]
        return {f"micro-batch {at + 1}": each for at, each in enumerate(listed)}
