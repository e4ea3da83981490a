# SPDX-License-Identifier: Apache-2.0
"""A placeholder of logits: the inputs of a loss, the notes between head and loss, and the real logits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from accel.comm import adopt, copied
from accel.comm._units import users_line
from accel.errors import PrepareError
from accel.parallel._modules import RANKS, note_module, notes_of
from accel.parallel._private import is_library_hook, tensors_of, without_subclasses, wrapper_of
from accel.parallel.logits._head_calls import WHERE, HeadCall, parameters_of
from accel.parallel.logits._head_chunks import Words, loss_of_rows
from accel.parallel.parts import PartTensor, RowLayout, make, plain_of
from accel.parallel.parts._part import outside

if TYPE_CHECKING:
    from accel.parallel.axes.tensor._layers import Layer

T = TypeVar("T")

_LOG = logging.getLogger("accel.parallel")


class LogitParts(NamedTuple):
    """Parts of logits. With `raw = hidden @ weight.T + bias` these are `cap * tanh(scale * raw / cap)`; without a cap
    `scale * raw`.
    """

    hidden: Tensor  # shape [..., features]; its backward sums gradients over the ranks along tp that split the classes
    weight: Tensor  # of the classes of this rank, shape [classes, features]
    bias: Tensor | None  # shape [classes]; None without
    scale: float  # factor of the raw logits
    cap: float | None  # soft cap; None without
    words: Words  # the classes of this rank


class DeferredLogits(Tensor):
    """Logits of shape [..., classes] without memory, as far as nothing but a cross entropy asks for them.

    Attributes:
        call: of the head.
        hidden: rows of its input, shape [..., features].
        scale, cap: see `LogitParts`.
        added: bias that the model adds, with one element a class; None without.
        is_moved: whether the classes are in dimension 1 of three.
        is_part: whether the logits are a part, in the forward of a divided model, so that it reports the classes of
            all ranks.
    """

    call: HeadCall
    hidden: Tensor
    scale: float
    cap: float | None
    added: Tensor | None
    is_moved: bool
    is_part: bool
    _step: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None
    _made: Tensor | None

    @staticmethod
    def __new__(
        cls: type[DeferredLogits],
        call: HeadCall,
        *,
        hidden: Tensor | None = None,
        classes: int | None = None,
        scale: float = 1.0,
        cap: float | None = None,
        added: Tensor | None = None,
        dtype: torch.dtype | None = None,
        is_moved: bool = False,
        is_part: bool = False,
        step: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None = None,
    ) -> DeferredLogits:
        """Make a placeholder of a call, or of a `step` from another placeholder; the rest are attributes."""
        hidden = call.hidden if hidden is None else hidden
        classes = _classes(call.head, is_part=is_part) if classes is None else classes
        rows = hidden.shape[:-1]
        shape = (*rows[:-1], classes, rows[-1]) if is_moved else (*rows, classes)
        weight = cast(Tensor, call.head.weight)
        needs = call.grad and (hidden.requires_grad or weight.requires_grad)
        made: Any = wrapper_of(
            cast(Any, cls), shape, dtype or call.autocast or hidden.dtype, hidden.device, requires_grad=needs
        )
        made.call = call
        made.hidden = hidden
        made.scale = scale
        made.cap = cap
        made.added = added
        made.is_moved = is_moved
        made.is_part = is_part
        made._step = step
        made._made = None
        if needs:
            with without_subclasses():
                _ = made.register_hook(_refuse_gradient)
        return made

    # what is asked

    @property
    def classes(self) -> int:
        """Number of classes that it reports."""
        return self.shape[-2 if self.is_moved else -1]

    @property
    def is_made(self) -> bool:
        """Whether the real logits are there."""
        return self._made is not None or (self._step is not None and self._step[0].is_made)

    def made(self) -> Tensor:
        """Return the logits themselves, made once. A collective where the head gathers its outputs along tp."""
        if self._made is None:
            with torch.set_grad_enabled(self.call.grad):
                if self.numel() == 0:  # as in a micro-batch without rows; its gradients are zeros
                    self._made = self._outputs(lambda _: self.call.forward(self.hidden))
                elif self._step is None:
                    _report(self.call.head)
                    self._made = self._outputs()
                else:
                    parent, step = self._step
                    self._made = step(parent.made())
        return self._made

    def _outputs(self, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The outputs of the head, or of a function in place of its forward: a part in the forward of a divided
        model."""
        found = self.call.run(function)
        rows = self.call.hooked(found if isinstance(self.call.hidden, PartTensor) else plain_of(found))
        if not self.is_part:
            return rows
        cut = self.call.head.accel_layer.rule.layouts["weight"].cut
        return make(rows, RowLayout(rows.dim() - (2 if self.is_moved else 1), cut), getattr(self.call.head, RANKS))

    def own_words(self) -> DeferredLogits:
        """Return the placeholder of this rank's classes, for a part that leaves the model."""
        return self._changed(lambda part: outside(plain_of(part)), classes=_classes(self.call.head), is_part=False)

    def left(self, leave: Callable[[Tensor], Tensor]) -> DeferredLogits:
        """Return the placeholder of the rows that leave a model for a part of positions. `leave`: returns them."""
        return self._changed(leave, hidden=leave(self.hidden))

    def compute(self, function: Callable[[LogitParts], T]) -> T:
        """Call a function of what the logits are made of, where the head's parameters are gathered."""
        head = self.call.head

        def of_parts(_input: Tensor) -> T:
            return function(self._parts(parameters_of(head)))

        with torch.set_grad_enabled(self.call.grad and torch.is_grad_enabled()):
            return self.call.run(of_parts)

    def _parts(self, here: Mapping[str, Any]) -> LogitParts:
        head: Any = self.call.head
        weight: Tensor = here["weight"]
        bias: Tensor | None = here.get("bias")
        layer: Layer | None = getattr(head, "accel_layer", None)
        hidden = self.hidden
        words = Words(0, weight.shape[0], None)
        if layer is not None and layer.rule.style != "replicated":
            comm = adopt(layer.group, hidden.device)
            total: int = head.out_features
            words = Words(min(-(-total // comm.size) * comm.rank, total), total, comm)
            hidden = copied(hidden, layer.group)
        if self.added is not None:
            added = self.added.flatten()
            if layer is not None and words.comm is not None and added.shape[0] != weight.shape[0]:
                first = cast(int, words.first)
                added = copied(added, layer.group)[first : first + weight.shape[0]]
            bias = added if bias is None else bias + added
        return LogitParts(hidden, weight, bias, self.scale, self.cap, words)

    def loss(self, targets: Tensor, *, is_split: bool = False, **options: Any) -> Tensor | None:
        """Return the cross entropy of rows, or None where only real logits give it. A collective along tp.

        `is_split`: whether logits of this rank's classes are meant. `options` are passed to `loss_of_rows`.
        """
        if self.is_made or is_split != self.is_split or isinstance(self.hidden, PartTensor):
            return None
        if targets.is_floating_point() or targets.shape != self.hidden.shape[:-1]:
            return None

        def of_rows(parts: LogitParts) -> Tensor:
            hidden, weight, bias, scale, cap, words = parts
            made: dict[str, Any] = {"bias": bias, "scale": scale, "softcap": cap, **options}
            made["recompute"] = notes_of(self.call.head).get("recompute")
            return loss_of_rows(hidden, weight, targets, words, **made)

        return self.call.hooked(self.compute(of_rows))

    @property
    def is_split(self) -> bool:
        """Whether ranks along tp have logits of different classes."""
        layer: Layer | None = getattr(self.call.head, "accel_layer", None)
        return layer is not None and layer.rule.style == "colwise"

    # what torch asks

    @classmethod
    def __torch_function__(  # pyright: ignore[reportIncompatibleMethodOverride] - torch leaves its types open
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what needs no values, note what can be noted, and compute all else from the real logits."""
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _ASKED:
            with without_subclasses():
                return func(*args, **kwargs)
        first = args[0] if args else None
        noted = None
        if isinstance(first, DeferredLogits) and not first.is_made:
            noted = first._noted(func, name, args[1:], kwargs)
        if noted is not None:
            return noted
        args, kwargs = pytree.tree_map(_real, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse operators that reach a placeholder behind autograd."""
        raise _escaped(str(func))

    def _noted(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the placeholder of an operation's result, or a loss; None where real logits are needed."""
        if name == "register_hook" and is_library_hook(args[0]):
            handle = RemovableHandle(self.call.hooks)
            self.call.hooks[handle.id] = args[0]
            return handle
        if func is functional.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        is_recorded = torch.is_grad_enabled() or not self.call.grad
        note = _NOTES.get(name) if is_recorded or name == "detach" else None
        changes = None if note is None else note(self, *args, **kwargs)
        if changes is None:
            return None

        def step(real: Tensor) -> Tensor:
            return func(real, *args, **kwargs)

        return self._changed(step, **changes)

    def _changed(self, step: Callable[[Tensor], Tensor], **changes: Any) -> DeferredLogits:
        """Return the placeholder of what a step makes of these logits."""
        own: dict[str, Any] = {
            "call": self.call,
            "hidden": self.hidden,
            "classes": self.classes,
            "scale": self.scale,
            "cap": self.cap,
            "added": self.added,
            "dtype": self.dtype,
            "is_moved": self.is_moved,
            "is_part": self.is_part,
        }
        return cast(Any, DeferredLogits)(**{**own, **changes}, step=(self, step))

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: Any = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        if size_average is not None or reduce is not None or (weight is not None and weight.requires_grad):
            return None
        if self.dim() > 2 and not self.is_moved:  # torch's classes are in dimension 1
            return None
        return self.loss(
            target, weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )


def sources_of(output: object) -> Iterator[Tensor]:
    """Yield the tensors of an output, and what logits in it are computed from if those are deferred."""
    for each in tensors_of(output):
        yield each.hidden if isinstance(each, DeferredLogits) else each


def _real(each: Any) -> Any:
    return each.made() if isinstance(each, DeferredLogits) else each


def _classes(head: Any, *, is_part: bool = False) -> int:
    """Number of logits that a head gives each row on this rank, or that a part of them reports."""
    layer: Layer | None = getattr(head, "accel_layer", None)
    total: int = head.out_features
    if layer is None or layer.rule.style != "colwise" or is_part:
        return total
    each = -(-total // layer.size)
    return max(min(each, total - each * layer.rank), 0)


# Attributes and methods that answer from the placeholder's shape, dtype and device.
_ASKED = frozenset(
    {
        *("shape", "dtype", "device", "ndim", "requires_grad", "layout", "itemsize", "nbytes", "names"),
        *("size", "dim", "numel", "nelement", "ndimension", "element_size", "get_device", "__len__"),
        *("is_cuda", "is_cpu", "is_meta", "is_xla", "is_sparse", "is_quantized", "is_nested", "is_inference"),
        *("is_floating_point", "is_complex", "_base"),
    }
)

_Changes = dict[str, Any] | None


def _converted(logits: DeferredLogits, *args: Any, **kwargs: Any) -> _Changes:
    """A conversion to float32, or to the dtype that the logits have, on their device."""
    dtype = logits.dtype
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, str | torch.device):
            device = torch.device(each)
            if device.type != logits.device.type or device.index not in (None, logits.device.index):
                return None
        elif not isinstance(each, bool | None | torch.memory_format):
            return None
    if dtype not in (torch.float32, logits.dtype):
        return None
    return {"dtype": dtype}


def _as_float(logits: DeferredLogits, **_: Any) -> _Changes:
    return {"dtype": torch.float32}


def _as_double(logits: DeferredLogits, **_: Any) -> _Changes:
    return {"dtype": torch.float64} if logits.hidden.dtype == torch.float64 else None


def _unchanged(logits: DeferredLogits, **_: Any) -> _Changes:
    return {}


def _detached(logits: DeferredLogits) -> _Changes:
    return {"call": logits.call.detached(), "hidden": logits.hidden.detach()}


def _viewed(logits: DeferredLogits, *shape: Any, **kwargs: Any) -> _Changes:
    sizes: list[Any] = [*shape[0]] if len(shape) == 1 and isinstance(shape[0], tuple | list) else [*shape]
    if kwargs or logits.is_moved or not sizes or not all(isinstance(each, int) for each in sizes):
        return None
    count = math.prod(logits.hidden.shape[:-1])
    known = math.prod(each for each in sizes[:-1] if each != -1)
    unknown = sizes.count(-1)
    fits = known == count if unknown == 0 or sizes[-1] == -1 else known > 0 and count % known == 0
    if unknown > 1 or not fits or sizes[-1] not in (logits.classes, -1):
        return None
    return {"hidden": logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1])}


def _flattened(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> _Changes:
    if logits.is_moved or end_dim % logits.dim() >= logits.dim() - 1:
        return None
    return {"hidden": logits.hidden.flatten(start_dim, end_dim)}


def _indexed(logits: DeferredLogits, index: Any) -> _Changes:
    """Some of the rows, by slices, numbers, masks or tensors of positions."""
    items = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
    if logits.is_moved or not all(_is_index(each) for each in items):
        return None
    last = items[-1] if items else Ellipsis
    keeps_last = last is Ellipsis or (isinstance(last, slice) and last == slice(None))
    taken = sum(_dims_of(each) for each in items)
    if any(each is Ellipsis for each in items):
        fits = keeps_last
    else:
        fits = taken < logits.dim() or (taken == logits.dim() and keeps_last)
    return {"hidden": logits.hidden[index]} if fits else None


def _is_index(item: object) -> bool:
    if isinstance(item, Tensor):
        return not isinstance(item, DeferredLogits) and not item.is_floating_point()
    return item is None or item is Ellipsis or (isinstance(item, int | slice) and not isinstance(item, bool))


def _dims_of(item: object) -> int:
    """Number of dimensions that an index takes."""
    if isinstance(item, Tensor) and item.dtype == torch.bool:
        return item.ndim
    return 0 if item is None or item is Ellipsis else 1


def _multiplied(logits: DeferredLogits, by: Any) -> _Changes:
    if not isinstance(by, int | float) or isinstance(by, bool):
        return None
    if logits.cap is None:
        return {"scale": logits.scale * by}
    return {"scale": logits.scale * by, "cap": logits.cap * by} if by > 0 else None


def _divided(logits: DeferredLogits, by: Any, **kwargs: Any) -> _Changes:
    if kwargs or not isinstance(by, int | float) or isinstance(by, bool) or by == 0:
        return None
    return _multiplied(logits, 1 / by)


def _capped(logits: DeferredLogits) -> _Changes:
    return {"cap": 1.0} if logits.cap is None else None


def _with_bias(logits: DeferredLogits, other: Any, **kwargs: Any) -> _Changes:
    """A bias of the classes, before factors and caps."""
    if kwargs or type(other) not in (Tensor, nn.Parameter) or logits.is_moved or logits.added is not None:
        return None
    is_row = other.shape[-1:] == (logits.classes,) and other.numel() == logits.classes and other.ndim <= logits.dim()
    return {"added": other} if is_row and logits.cap is None and logits.scale == 1.0 else None


def _moved(logits: DeferredLogits, *dims: Any, **kwargs: Any) -> _Changes:
    """Classes in dimension 1 of three, as cross entropies of sequences want them."""
    if kwargs or logits.is_moved or logits.dim() != 3 or {each % 3 for each in dims} != {1, 2}:
        return None
    return {"is_moved": True}


_NOTES: Mapping[str, Callable[..., _Changes]] = {
    "float": _as_float,
    "double": _as_double,
    **dict.fromkeys(("contiguous", "atleast_1d"), _unchanged),
    "clone": _unchanged,
    "detach": _detached,
    "to": _converted,
    "type": _converted,
    "view": _viewed,
    "reshape": _viewed,
    "flatten": _flattened,
    "__getitem__": _indexed,
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply"), _multiplied),
    **dict.fromkeys(("div", "__truediv__", "__div__", "true_divide", "divide"), _divided),
    "tanh": _capped,
    **dict.fromkeys(("add", "__add__", "__radd__"), _with_bias),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _moved),
}


def _report(head: Any) -> None:
    """Log once that a head's logits are made, and where."""
    if "reported" not in notes_of(head):
        note_module(head, reported=True)
        line = "deferred logits are made%s: only cross entropies and token_logprobs are computed without them"
        _LOG.warning(line, users_line())


def _refuse_gradient(_grad: Tensor) -> None:
    raise _escaped("a gradient")


def _escaped(what: str) -> PrepareError:
    return PrepareError(
        "deferred logits were used in a place that torch does not report, such as an autograd.Function",
        expected="a cross entropy, or another function of torch",
        got=what,
        where=WHERE,
        fix="Pass logits + 0, which makes them.",
    )
