# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in pinned host memory: one bucket is stepped while the next one comes and the last one leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from accel.comm._streams import DeviceStreams
from accel.errors import ConfigError, StepError
from accel.errors._checks import with_article
from accel.tensors import dtensor_around, is_dtensor, local_part
from accel.topology import STATE_BUCKET

_STREAMED = "accel_streamed_state"  # attribute of an optimizer: its `StreamedState`
_WHERE = 'Plan(offload="optimizer")'

_States = Mapping[Tensor, Mapping[str, Tensor]]


class StreamedState:
    """Copies between an optimizer's state on the host and the device. `optimizer.state` has the host's tensors between
    steps.

    Memory of the device is freed after the computing stream waits for the copy out. So two buckets suffice, however far
    the host is ahead.
    """

    def __init__(self, optimizer: Optimizer, streams: DeviceStreams) -> None:
        deals_state = any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
        if isinstance(optimizer, LBFGS) or deals_state:
            raise _refused(optimizer, "state that belongs to no single parameter")
        self.streams = streams
        self._optimizer = optimizer
        self._into = streams.side()
        self._out = streams.side()
        self._homes: dict[Tensor, dict[str, Tensor]] = {}
        self._leaving: list[Tensor] = []  # read by copies to the host
        self._left: Any = None  # event after these copies
        _ = optimizer.register_state_dict_pre_hook(lambda _: self.settle())

    def settle(self) -> None:
        """Let the host wait for the copies of the latest step, before it reads the state."""
        if self._left is not None:
            self.streams.synchronize(self._left)

    def on_host(self, value: Tensor) -> Tensor:
        """Return a copy of a value on the host, as for a state that is loaded."""
        home = self._new_home(value)
        self.streams.copy(local_part(home), local_part(value))
        self._left = self.streams.record(self.streams.current())
        return home

    def step(self, step: Callable[[], object]) -> None:
        """Step one bucket of parameters after the other. Mutates parameters and state.

        Args:
            step: steps the parameters in the optimizer's groups.
        """
        groups = [(group, cast("list[Tensor]", group["params"])) for group in self._optimizer.param_groups]
        counted = {id(each) for group, params in groups if _counts_on_device(group) for each in params}
        buckets = list(_buckets([each for _, params in groups for each in params if each.grad is not None]))
        coming, arrived = self._bring(buckets[0] if buckets else (), counted)
        try:
            for at, bucket in enumerate(buckets):
                self._free()
                here, event = coming, arrived
                coming, arrived = self._bring(buckets[at + 1] if at + 1 < len(buckets) else (), counted)
                if event is not None:
                    self.streams.wait(self.streams.current(), event)
                for parameter, state in here.items():
                    self._optimizer.state[parameter].update(state)
                del here
                before = [_options(group) for group, _ in groups]
                _narrow(groups, bucket)
                _ = step()
                if len(buckets) > 1:
                    _check_options(self._optimizer, before, [group for group, _ in groups])
                self._send(bucket)
            self._free()
        finally:
            for group, params in groups:
                group["params"] = params

    def _bring(self, bucket: Sequence[Tensor], counted: set[int]) -> tuple[_States, Any]:
        """Begin to copy the state of some parameters to the device; return it, and an event after the copies."""
        copies = list[tuple[Tensor, Tensor]]()
        found = dict[Tensor, dict[str, Tensor]]()
        for parameter in bucket:
            homes = self._homes.get(parameter, {})
            for name, value in cast("dict[str, Any]", self._optimizer.state.get(parameter, {})).items():
                is_home = value is homes.get(name)
                if not is_home and not self._was_loaded(name, value, is_counted=id(parameter) in counted):
                    continue
                home = local_part(value)
                there = _dense(self.streams.empty, home)
                copies.append((there, home))
                found.setdefault(parameter, {})[name] = dtensor_around(there, value) if is_dtensor(value) else there
        if not copies:
            return found, None
        # the memory may have been the computing stream's
        self.streams.wait(self._into, self.streams.record(self.streams.current()))
        with self.streams.on(self._into):
            for there, home in copies:
                self.streams.copy(there, home)
        return found, self.streams.record(self._into)

    def _was_loaded(self, name: str, value: object, *, is_counted: bool) -> bool:
        """Return whether a value is on the host since a load, and belongs on the device."""
        if not isinstance(value, Tensor) or self.streams.holds(local_part(value)):
            return False
        return value.ndim > 0 or (name == "step" and is_counted)

    def _send(self, bucket: Sequence[Tensor]) -> None:
        """Begin to copy the state of some parameters to the host, where `optimizer.state` then has it."""
        copies = list[tuple[Tensor, Tensor]]()
        for parameter in bucket:
            state = cast("dict[str, Any]", self._optimizer.state.get(parameter, {}))
            homes = self._homes.setdefault(parameter, {})
            for name, value in list(state.items()):
                if not isinstance(value, Tensor) or not self.streams.holds(part := local_part(value)):
                    continue
                if type(part) is not Tensor:
                    raise _refused(self._optimizer, f"state of the class {type(part).__name__}")
                if not _fits(homes.get(name), value):
                    homes[name] = self._new_home(value)
                copies.append((local_part(homes[name]), part))
                state[name] = homes[name]
        if not copies:
            return
        self.streams.wait(self._out, self.streams.record(self.streams.current()))
        with self.streams.on(self._out):
            for home, part in copies:
                self.streams.copy(home, part)
        self._left = self.streams.record(self._out)
        self._leaving = [part for _, part in copies]

    def _new_home(self, value: Tensor) -> Tensor:
        home = _dense(self.streams.pinned, local_part(value))
        return dtensor_around(home, value) if is_dtensor(value) else home

    def _free(self) -> None:
        """Free the memory of the bucket that leaves, after its copies."""
        if self._leaving:
            self.streams.wait(self.streams.current(), self._left)
            self._leaving = []


def streamed_state(optimizer: Optimizer, streams: DeviceStreams) -> StreamedState:
    """Return what streams an optimizer's state, made at its first step. Mutates the optimizer's attributes.

    Raises:
        ConfigError: the optimizer's state cannot be streamed.
    """
    found: StreamedState | None = getattr(optimizer, _STREAMED, None)
    if found is None or found.streams is not streams:
        found = StreamedState(optimizer, streams)
        setattr(optimizer, _STREAMED, found)
    return found


def settle_state(optimizer: Optimizer) -> None:
    """Let the host wait for copies of an optimizer's state to the host, before it reads the state."""
    found: StreamedState | None = getattr(optimizer, _STREAMED, None)
    if found is not None:
        found.settle()


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divide parameters, alike on all ranks that hold parts of them."""
    bucket = list[Tensor]()
    held = 0
    for each in parameters:
        nbytes = each.numel() * each.itemsize
        if bucket and held + nbytes > STATE_BUCKET:
            yield bucket
            bucket, held = list[Tensor](), 0
        bucket.append(each)
        held += nbytes
    if bucket:
        yield bucket


def _dense(make: Callable[[Sequence[int], torch.dtype], Tensor], like: Tensor) -> Tensor:
    """Make a tensor of a kind of memory, with the strides of another one if that has no gaps."""
    if like.is_contiguous():
        return make(like.shape, like.dtype)
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    permuted = make([like.shape[dim] for dim in order], like.dtype)
    made = permuted.permute([order.index(dim) for dim in range(like.ndim)])
    return made if made.stride() == like.stride() else make(like.shape, like.dtype)


def _fits(home: Tensor | None, value: Tensor) -> bool:
    return home is not None and home.dtype == value.dtype and home.shape == value.shape


def _narrow(groups: Sequence[tuple[dict[str, Any], list[Tensor]]], bucket: Sequence[Tensor]) -> None:
    """Leave some parameters in the groups. Mutates them, as wrappers of an optimizer share them."""
    held = set(map(id, bucket))
    for group, params in groups:
        group["params"] = [each for each in params if id(each) in held]


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("fused"))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, and how often those that are tensors were changed."""
    options = {key: value for key, value in group.items() if key != "params"}
    return options | {f"{key} in place": value._version for key, value in options.items() if isinstance(value, Tensor)}


def _check_options(
    optimizer: Optimizer, before: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Raise for an optimizer that counts in its groups: each bucket would count again."""
    for old, group in zip(before, groups, strict=True):
        new = _options(group)
        if changed := [key for key in new if key not in old or (new[key] is not old[key] and new[key] != old[key])]:
            raise StepError(
                "this optimizer counts its steps per group, so it cannot step one bucket of parameters after the other",
                expected="an optimizer that steps like torch.optim's",
                got=f"{type(optimizer).__name__}, which changed {', '.join(changed)}",
                where=_WHERE,
                fix="Leave offload out of the plan, and begin again: some parameters have moved.",
            )


def _refused(optimizer: Optimizer, got: str) -> ConfigError:
    return ConfigError(
        f"the state of {with_article(type(optimizer).__name__)} cannot be streamed",
        expected="plain tensors for each parameter, as torch.optim.AdamW has",
        got=got,
        where=_WHERE,
        fix="Use torch.optim.AdamW, or leave offload out of the plan.",
    )
