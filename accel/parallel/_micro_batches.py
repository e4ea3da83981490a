# SPDX-License-Identifier: Apache-2.0
"""A batch split into micro-batches, with or without a pipeline, their arguments and the tensors of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from accel.comm._marks import carry_mark
from accel.errors import DataError, StageError
from accel.tree import map_tensors
from accel.tree._walk import Containers, leaves, tensors


class Rows(NamedTuple):
    """Rows of one micro-batch."""

    begin: int  # first row
    real: int  # number of rows of the batch
    size: int  # number of rows, with copies of the batch's last row behind the real ones


class MicroBatch(NamedTuple):
    """Inputs and targets of one micro-batch."""

    args: tuple[Any, ...]  # positional arguments of the model
    kwargs: Mapping[str, Any]  # its keyword arguments
    targets: Any  # of the loss function; None without
    rows: Rows  # its rows in the batch


def plan_rows(rows: int, count: int, *, equal: bool) -> list[Rows]:
    """Return the rows of each micro-batch of a batch: all of one size, the last ones filled up, if `equal`; else
    differing by at most one."""
    if equal:
        size = -(-rows // count)
        return [Rows(at * size, max(0, min(size, rows - at * size)), size) for at in range(count)]
    found: list[Rows] = []
    begin = 0
    for at in range(count):
        real = rows // count + (at < rows % count)
        found.append(Rows(begin, real, max(real, 1)))
        begin += real
    return found


def split_batch(
    inputs: Any, targets: Any, count: int, *, equal: bool, containers: Containers = (), has_loss: bool = True
) -> list[MicroBatch]:
    """Split a batch, tensors or arguments of the model with targets, into micro-batches along dimension 0.

    Tensors of one row, or without a dimension, and other values go to every micro-batch as they are. A rank that
    computes no loss checks the targets, and has none.
    """
    args, kwargs = arguments(inputs)
    listed = [*tensors((args, dict(kwargs)), containers), *tensors(targets, containers)]
    rows = _count(listed)
    found: list[MicroBatch] = []
    for each in plan_rows(rows, count, equal=equal):

        def take(tensor: torch.Tensor, own: Rows = each) -> torch.Tensor:
            return _slice(tensor, rows, own)

        found.append(
            MicroBatch(
                args=map_tensors(take, args, containers),
                kwargs={key: map_tensors(take, value, containers) for key, value in kwargs.items()},
                targets=map_tensors(take, targets, containers) if has_loss else None,
                rows=each,
            )
        )
    return found


def example_batch(example: Any, containers: Containers = ()) -> MicroBatch:
    """Return an example of a batch, as `split_batch` takes it, as one micro-batch."""
    return split_batch(example, None, 1, equal=True, containers=containers)[0]


def first_device(batch: MicroBatch) -> torch.device:
    """Return the device of the first tensor with values in a micro-batch; the CPU without one."""
    found = [each.device for _, each in tensors((batch.args, dict(batch.kwargs))) if not each.is_meta]
    return found[0] if found else torch.device("cpu")


def arguments(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return inputs as positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), cast("Mapping[str, Any]", inputs)
    if isinstance(inputs, tuple | list):
        return tuple(cast("Sequence[Any]", inputs)), {}
    return (inputs,), {}


def first_rows(tree: Any, own: Rows, containers: Containers = ()) -> Any:
    """Return an output or target of a micro-batch without the rows that fill it up."""
    if own.real == own.size:
        return tree

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[: own.real] if tensor.ndim and tensor.shape[0] == own.size else tensor

    return map_tensors(take, tree, containers)


def _slice(tensor: torch.Tensor, rows: int, own: Rows) -> torch.Tensor:
    if tensor.ndim == 0 or tensor.shape[0] != rows or (rows == 1 and own.size == 1):
        return tensor
    part = tensor[own.begin : own.begin + own.real]
    if not part.requires_grad:
        part = part.detach()  # no view: torch.compile makes a graph for views and another one for filled rows
    missing = own.size - own.real
    if missing:
        part = torch.cat([part, tensor[rows - 1 :].expand(missing, *tensor.shape[1:])])
    carry_mark(tensor, part, "cut")
    return part


def _count(listed: Sequence[tuple[str, torch.Tensor]]) -> int:
    """Number of rows of the tensors that are split."""
    sizes = {path: tensor.shape[0] for path, tensor in listed if tensor.ndim}
    several = {path: size for path, size in sizes.items() if size != 1}
    if not sizes or 0 in sizes.values():
        raise DataError(
            "a batch without rows cannot be split",
            expected="tensors with the batch in dimension 0",
            got=", ".join(f"{path}: {list(tensor.shape)}" for path, tensor in listed) or "no tensor",
            where="inputs=",
        )
    if len(set(several.values())) > 1:
        raise DataError(
            "tensors of a batch have different numbers of rows",
            expected="one number in dimension 0, or one row for all",
            got=", ".join(f"{path}: {size}" for path, size in several.items()),
            where="inputs=, targets=",
            fix="Pass a value that is no part of the batch by a closure, or with one row.",
        )
    return next(iter(several.values()), 1)


def first_tensor(output: Any, containers: Containers = ()) -> torch.Tensor:
    """Return the first tensor of a model's output, the next stage's input, outermost first; `StageError` if there is
    none."""
    if isinstance(output, torch.Tensor):
        return output
    items = _items(output, containers)
    for each in items:
        if isinstance(each, torch.Tensor):
            return each
    for each in items:
        if found := tensors(each, containers):
            return found[0][1]
    raise StageError(
        "a stage returned no tensor", expected="a tensor, or some with one", got=type(cast(object, output)).__name__
    )


def _items(output: object, containers: Containers) -> list[Any]:
    """The values right below an output of any kind; itself where it is no container."""
    if isinstance(output, Mapping):
        return list(cast("Mapping[Any, Any]", output).values())
    if isinstance(output, tuple | list):
        return list(cast("Sequence[Any]", output))
    return [each for _, each in leaves(output, containers, is_leaf=lambda node: node is not output)]


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


def of_stage(batch: MicroBatch, stage: int) -> MicroBatch:
    """Return a micro-batch with the arguments of one stage."""
    if not any(isinstance(each, ByStage) for each in batch.kwargs.values()):
        return batch
    kwargs = {key: each.of(stage) if isinstance(each, ByStage) else each for key, each in batch.kwargs.items()}
    return batch._replace(kwargs=kwargs)
