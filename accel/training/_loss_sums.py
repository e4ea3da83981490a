# SPDX-License-Identifier: Apache-2.0
"""Sums of losses of micro-batches from the user's function, and a check that it returns no mean."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from accel.context import DistContext
from accel.errors import StepError
from accel.parallel._micro_batches import MicroBatch, first_rows, first_tensor
from accel.parallel._modules import is_pipelined, note_prepared, prepared_of, tensor_notes, unwrap_model
from accel.parallel._private import flat_tensors, mixes_dtensors
from accel.random import isolated_rng
from accel.tensors import is_view
from accel.training._backward import check_loss, rooted
from accel.tree import map_tensors
from accel.tree._walk import Containers, tensors

LossFn = Callable[..., torch.Tensor]

_EXPECTED = "the sum of the losses of a micro-batch's real units"
_WHERE = "forward_backward, loss_fn="
_PENALTY = (
    "Leave a penalty of parameters out of the loss. Use the optimizer's weight decay, or add the penalty's gradient to"
    " the gradients between accel.unscale_gradients and accel.optimizer_step."
)
_MOST_KNOWN = 64
_DEEPEST = 3  # functions in the closures of functions
_TWICE = 1.5  # between the 1 of a sum and the 2 of a mean
_ROUNDING = 0.01  # of sums of 16-bit numbers
_SAME = 0.1  # of a mean with some noise


class LossProbe:
    """Looks at a loss function in one call of `forward_backward`, unless the model has seen it before.

    Args:
        ctx: the context.
        model: notes the functions that were looked at.
        loss_fn: the user's.
        weight: number of units in the batch.
        micro_batches: number of micro-batches of the batch.
    """

    def __init__(
        self, ctx: DistContext, model: nn.Module, loss_fn: LossFn, weight: float | torch.Tensor, micro_batches: int
    ) -> None:
        self._ctx = ctx
        self._loss_fn = loss_fn
        self._weight = weight
        self._micro_batches = micro_batches
        self._model = unwrap_model(model)
        self._key = _key(loss_fn)
        known = _known(self._model)
        self._done = self._key in known or len(known) >= _MOST_KNOWN

    def halves(self, given: tuple[Any, ...], rows: int) -> tuple[float, ...]:
        """Return the losses of a micro-batch's halves; none if the function is known, or raises on halves.

        To be called before the loss itself, which may change its arguments. Raises `StepError` for a function that
        reads what a module of another stage keeps.
        """
        if self._done:
            return ()
        if rows < 2:
            self._look(given, rows)
            return ()
        first = rows // 2
        found = self._values(given, rows, lambda tensor: tensor[:first].clone(), lambda tensor: tensor[first:].clone())
        self._done = not found  # one that raises is left alone, for good
        if self._done:
            _note(self._model, self._key)
        return found

    def _look(self, given: tuple[Any, ...], rows: int) -> None:
        """Look once at what a loss of one row reads, on a pipeline: such rows do not show a mean."""
        key = f"{self._key}, one row"
        if is_pipelined(self._model) and key not in _known(self._model):
            _ = self._values(given, rows, torch.clone)
            _note(self._model, key)

    def check(self, loss: torch.Tensor, halves: tuple[float, ...], given: tuple[Any, ...], rows: int) -> None:
        """Raise `StepError` if a loss is a mean over rows, by its `halves`. Waits for the device, once a function."""
        if not halves:
            return
        whole = float(loss.detach())
        if not all(map(math.isfinite, (whole, *halves))) or whole == 0:
            return  # the next batch may show it
        if not self._is_mean(whole, halves, given, rows):
            self._done = True
            _note(self._model, self._key)
            return
        shown = " and ".join(f"{each:.4g}" for each in halves)
        got = f"{whole:.4g} for {rows} rows, {shown} for their halves"
        if is_models_own(loss, given[0], rows, self._ctx.containers):
            self._check_own(loss, given[0], got)
            return
        raise StepError(
            "loss_fn returns a mean, which would be divided by the number of units again",
            expected=_EXPECTED,
            got=got,
            where=_WHERE,
            fix='Return the sum: cross_entropy(logits, targets, reduction="sum"), or losses.sum(). weight= is the'
            " number of units in the full batch.",
        )

    def _check_own(self, loss: torch.Tensor, output: Any, got: str) -> None:
        """Raise `StepError` for a loss of the model's own, which may be a mean, unless `loss_fn` sums it."""
        if loss.grad_fn is not None and loss.grad_fn.name().startswith("SumBackward"):
            self._done = True
            _note(self._model, self._key)
            return
        value = "output" if isinstance(output, torch.Tensor) else "output.loss"
        raise StepError(
            "loss_fn returns a value that the model has computed, which may be a mean",
            expected=_EXPECTED,
            got=got,
            where=_WHERE,
            fix="For a mean over its units pass targets=labels and "
            f"loss_fn=lambda output, labels: {value} * labels.numel(); for a sum loss_fn=lambda output: {value}.sum().",
        )

    def _is_mean(self, whole: float, halves: tuple[float, ...], given: tuple[Any, ...], rows: int) -> bool:
        both = sum(halves)
        if abs(both) <= _TWICE * abs(whole) or abs(both - whole) <= _ROUNDING * sum(map(abs, halves)):
            return False
        # Rows that come twice do not change a mean, but change a sum of pairs, such as one row with several targets.
        twice = self._values(given, rows, lambda tensor: torch.cat([tensor, tensor]))
        if not twice or abs(twice[0] - whole) > _SAME * abs(whole):
            return False
        return not float(self._weight) <= self._micro_batches  # else it counts micro-batches, and this is their mean

    def _values(
        self, given: tuple[Any, ...], rows: int, *takes: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[float, ...]:
        """Return losses of rows without gradient, and restore the random streams; nothing if one raises."""
        found: list[float] = []
        reads = _Reads()
        with torch.no_grad(), isolated_rng(self._ctx.device), reads:
            for take in takes:

                def taken(tensor: torch.Tensor, take: Callable[[torch.Tensor], torch.Tensor] = take) -> torch.Tensor:
                    return take(tensor.detach()) if tensor.ndim and tensor.shape[0] == rows else tensor

                try:
                    found.append(float(self._loss_fn(*map_tensors(taken, given, self._ctx.containers))))
                except Exception:  # whatever a user's function makes of fewer rows
                    found = []
                    break
        if reads.shape is not None:
            raise StepError(
                "loss_fn reads a tensor of a module in another stage, which has no values on the last one",
                expected="a loss_fn that reads the output and the targets alone",
                got=f"a tensor of shape {list(reads.shape)}",
                where=_WHERE,
                fix="Return what modules keep from the forward, too:"
                " return logits, torch.stack([block.loss for block in self.blocks]).sum()."
                f" {_PENALTY}",
            )
        if is_pipelined(self._model):
            self._check_penalty(reads)
        return tuple(found)

    def _check_penalty(self, reads: _Reads) -> None:
        """Raise `StepError` for a loss of all matrices of a stage, as a penalty of the model's parameters is."""
        named = [(name, each) for name, each in self._model.named_parameters() if each.ndim > 1]
        owners = {name.rpartition(".")[0] for name, _ in named}
        read = {name.rpartition(".")[0] for name, each in named if id(each) in reads.parameters}
        if len(owners) > 1 and read == owners:
            raise StepError(
                "loss_fn reads parameters of all modules of the last stage, which holds no others of the model",
                expected="a loss_fn that reads the output and the targets, at most the parameters of a head",
                got=f"parameters of {', '.join(sorted(owners))}",
                where=_WHERE,
                fix=_PENALTY,
            )


class _Reads(TorchFunctionMode):
    """Notes the parameters that functions get, and the shape of a tensor in place of what another stage has."""

    shape: torch.Size | None = None

    def __init__(self) -> None:
        super().__init__()
        self.parameters: set[int] = set()  # ids of the parameters that a function computes a tensor from

    def __torch_function__(  # pyright: ignore[reportIncompatibleMethodOverride] - torch leaves its types open
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the function."""
        read = _with_values(str(getattr(func, "__name__", "")), args, kwargs or {})
        given = flat_tensors(read)
        result = func(*args, **(kwargs or {}))
        if flat_tensors(result):
            # a device or a number of elements reads no values
            self.parameters |= {id(each) for each in given if isinstance(each, nn.Parameter)}
            self.shape = next((each.shape for each in given if "placeholder" in tensor_notes(each)), self.shape)
        return result


def _with_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a function without those that it takes a shape, dtype or device from."""
    if name.startswith("new_") or name.endswith("_like"):
        return args[1:]
    return args[:1] if name == "to" or name.endswith("_as") else (args, kwargs)


def is_models_own(loss: torch.Tensor, output: Any, rows: int, containers: Containers) -> bool:
    """Return whether a loss is made of values without rows that a model has computed, by its graph down to there."""
    made = [each for _, each in tensors(output, containers) if each.grad_fn is not None]
    with_rows = {each.grad_fn: each.ndim > 0 and each.shape[0] == rows for each in made}
    found: set[Node] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in found:
            continue
        found.add(node)
        if node not in with_rows:
            todo += [each for each, _ in node.next_functions]
        elif with_rows[node]:
            return False
    return not found.isdisjoint(with_rows)


def _known(model: nn.Module) -> tuple[str, ...]:
    return prepared_of(model).get("losses", ())


def _note(model: nn.Module, key: str) -> None:
    note_prepared(model, losses=(*_known(model), key))


def _key(function: object, deep: int = 0) -> str:
    """Return a text for a loss function, the same for one that a loop makes anew in each batch."""
    if isinstance(function, functools.partial):
        inner = cast("functools.partial[Any]", function)
        settings = [*inner.args, *inner.keywords.values()]
        return f"{_key(inner.func, deep)}, {[_setting(each, deep) for each in settings]}"
    code = getattr(function, "__code__", None)
    if code is None:
        kept = vars(function) if hasattr(function, "__dict__") else {}
        settings = [f"{name}={each!r}" for name, each in kept.items() if isinstance(each, str | bool)]
        return (
            f"{type(function).__module__}.{getattr(function, '__qualname__', type(function).__qualname__)} {settings}"
        )
    cells = [each.cell_contents for each in getattr(function, "__closure__", None) or () if _is_filled(each)]
    settings = [*cells, *(getattr(function, "__defaults__", None) or ())]
    return f"{code.co_filename}:{code.co_firstlineno} {hash(code)} {[_setting(each, deep) for each in settings]}"


def _setting(value: object, deep: int) -> str:
    if value is None or isinstance(value, str | bool):
        return repr(value)
    return _key(value, deep + 1) if callable(value) and deep < _DEEPEST else type(value).__name__


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


@dataclasses.dataclass(eq=False)
class LossSums:
    """Sums of losses, one for each micro-batch."""

    ctx: DistContext
    loss_fn: LossFn  # the user's
    factor: float | torch.Tensor  # factor of their gradients
    probe: LossProbe  # looks at the function
    found: list[torch.Tensor] = dataclasses.field(default_factory=list[torch.Tensor])  # the sums so far, detached

    def of(self, output: Any, batch: MicroBatch) -> torch.Tensor:
        """Return the sum of a micro-batch's losses; rows that fill it up are left out."""
        containers = self.ctx.containers
        if not batch.rows.real:
            first = first_tensor(output, containers)
            found = (first if first.ndim else first[None])[:0].sum()
        else:
            trees = (output,) if batch.targets is None else (output, batch.targets)
            given = tuple(first_rows(each, batch.rows, containers) for each in trees)
            halves = self.probe.halves(given, batch.rows.real)
            found = self._called(given)
            check_loss(found, "forward_backward", "Return the sum over the real units: loss.sum().")
            if batch.rows.real < batch.rows.size and is_models_own(found, given[0], batch.rows.real, containers):
                raise StepError(
                    "the model has computed its loss with rows that fill up a micro-batch",
                    expected="a batch with rows that the micro-batches divide, or a loss of outputs with rows",
                    got=f"{batch.rows.real} rows of the batch in a micro-batch of {batch.rows.size}",
                    where=_WHERE,
                    fix="Pass DataLoader(drop_last=True) and a batch_size that micro_batches divides.",
                )
            self.probe.check(found, halves, given, batch.rows.real)
        if found.dtype in (torch.float16, torch.bfloat16):
            found = found.float()  # weight times scale does not fit into 16 bits
        self.found.append(found.detach())
        return found

    def _called(self, given: tuple[Any, ...]) -> Any:
        """The loss that the user's function returns."""
        try:
            return self.loss_fn(*given)
        except RuntimeError as error:
            if not mixes_dtensors(error):
                raise
            raise StepError(
                "loss_fn computes with a parameter as ranks keep it, a DTensor",
                expected="outputs of the model or of its modules",
                got=str(error),
                where=_WHERE,
                fix="Call the module that has the parameter, or return its result from the forward. A head's weight may"
                " go to linear_cross_entropy.",
            ) from error

    def scaled(self, output: Any, batch: MicroBatch) -> torch.Tensor:
        """Return what backward runs from; no view, as schedules detach it in place."""
        loss, grad = rooted(self.of(output, batch), self.factor)
        if grad is None:
            return loss.clone() if is_view(loss) else loss
        self.factor = grad  # made once for all micro-batches
        return cast(Any, _Rooted).apply(loss, grad)


class _Rooted(torch.autograd.Function):
    """A loss that backward runs from, with a factor for its gradient: no kernel, whereas a multiplication takes two."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.factor = factor
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *_ones: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.factor, None
