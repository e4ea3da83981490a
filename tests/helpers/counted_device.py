# SPDX-License-Identifier: Apache-2.0
"""A device type of its own, which computes on the CPU and counts what makes the host wait for it.

Run in a process of its own: the type stays registered, and `torch.accelerator` finds it from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils, backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from accel.comm._streams import TorchStreams
from accel.parallel.parts import PartTensor
from accel.testing._device_operators import host_reads

NAME = "counted"


class Count(NamedTuple):
    """What `counting` collects for a thread: ranks are threads."""

    waits: list[str]
    operators: list[str] | None


_COUNTS: dict[int, Count] = {}
_NOBODY = Count([], None)
_aten = torch.ops.aten


def register() -> torch.device:
    """Register the type, once a process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    module: Any = torch.get_device_module(NAME)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.Stream = module.Event = _Stream
    module.current_stream = _Stream
    module.stream = lambda stream: stream
    module.current_device = lambda: 0
    module.synchronize = lambda *_: None
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    # torch takes lists of tensors at once where it knows their types, as those of CUDA
    optimizer._foreach_supported_types.append(CountedTensor)
    _foreach_utils._foreach_supported_types.append(CountedTensor)
    return torch.device(NAME, 0)


class _Stream:
    """A stream, or an event, of a device that does everything at once."""

    def __init__(self, *_: object, **_named: object) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def record_event(self, *_: object) -> _Stream:
        return self

    def record(self, *_: object) -> None: ...

    def synchronize(self, *_: object) -> None:
        _COUNTS[threading.get_ident()].waits.append("an event")

    wait = wait_event = wait_stream = record


class PinnableStreams(TorchStreams):
    """Streams as those of CUDA: copies to pinned memory do not wait, but their events do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.is_pinnable = True

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory."""
        return torch.empty(shape, dtype=dtype)

    def current(self) -> _Stream:
        """Return a stream: torch has none of this type."""
        return _Stream()

    def record(self, stream: _Stream) -> _Stream:
        """Return an event."""
        return stream.record_event()


class CountedTensor(torch.Tensor):
    """A tensor of the device, around one of the CPU."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def tolist(self) -> Any:
        """Return the values; the host waits for them."""
        return self.to("cpu").tolist()

    def as_subclass(self, kind: Any) -> Any:
        """Return the tensor as a part, or a part as a tensor: torch changes the class of plain tensors alone."""
        same = self.view_as(self)
        if kind is PartTensor:
            same.__class__ = CountedPart
        return same

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _counted(func, args, kwargs or {})  # those of a DTensor come here at once


class CountedPart(PartTensor, CountedTensor):
    """A part of a tensor of the device."""


class _Counting(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own operators come here next
        return _counted(func, args, kwargs or {})


def _counted(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator, and note it for the thread."""
    count = _COUNTS.get(threading.get_ident(), _NOBODY)
    result = _run(func, args, kwargs, count.waits)
    if count.operators is not None and any(isinstance(each, CountedTensor) for each in tree_leaves((args, result))):
        count.operators.append(str(func))
    return result


@contextmanager
def counting(operators: list[str] | None = None) -> Generator[list[str]]:
    """Collect the operators by which the host waits for the device, and all that it dispatches if asked for them."""
    waits: list[str] = []
    made = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        there = device is not None and torch.device(device).type == NAME
        return made(data, **options).to(device) if there else made(data, device=device, **options)

    synchronize = torch.accelerator.synchronize

    def synchronized(device: Any = None, /) -> None:
        if device is not None and torch.device(device).type == NAME:
            _COUNTS.get(threading.get_ident(), _NOBODY).waits.append("synchronize")
        else:
            synchronize(device)

    torch.tensor = tensor  # which makes no tensor on a device that Python defines
    torch.accelerator.synchronize = synchronized
    _COUNTS[threading.get_ident()] = Count(waits, operators)
    try:
        with _Counting():
            yield waits
    finally:
        torch.tensor, torch.accelerator.synchronize = made, synchronize
        del _COUNTS[threading.get_ident()]


def _run(func: Any, args: Sequence[Any], given: Mapping[str, Any], waits: list[str]) -> Any:
    kwargs = dict(given)
    flat = tree_flatten((args, kwargs))[0]
    here = [each for each in flat if isinstance(each, CountedTensor)]
    to = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if here and host_reads(func, args, kwargs):
        waits.append(str(func))
    if func is _aten.record_stream.default:
        return None
    if func is _aten._to_copy.default and to is not None and to.type == "cpu" and here:
        waits.append("copy to the host")
    goes_on = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    if func is _aten.copy_.default and here and not isinstance(args[0], CountedTensor) and not goes_on:
        waits.append("copy to the host")
    # from memory that is not pinned CUDA copies while the host waits, unless told not to
    comes = func is _aten._to_copy.default and to is not None and to.type == NAME and not here
    if comes and not kwargs.get("non_blocking", False):
        waits.append("copy from the host")
    others = [
        each for each in flat if isinstance(each, torch.Tensor) and not isinstance(each, CountedTensor) and each.dim()
    ]
    if here and others and func is not _aten.copy_.default:
        raise RuntimeError(f"expected all tensors to be on the same device: {func}")
    stays = (bool(here) and to is None) or (to is not None and to.type == NAME)
    if to is not None:
        kwargs["device"] = torch.device("cpu")
    known = {id(each.inner): each for each in here}
    plain, named = tree_map(lambda each: each.inner if isinstance(each, CountedTensor) else each, (tuple(args), kwargs))
    result = func(*plain, **named)
    if func is _aten.copy_.default:
        return args[0]
    if not stays or func in (_aten._local_scalar_dense.default, _aten.equal.default):
        return result

    def back(each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        return known[id(each)] if id(each) in known else CountedTensor(each)

    return tree_map(back, result)
