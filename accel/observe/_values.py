# SPDX-License-Identifier: Apache-2.0
"""Values of a step: numbers by flat names; those on an accelerator are read later, in the background."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from accel.devices import wide_dtype
from accel.errors import ConfigError

TIME = "time/"  # names of readings of clocks begin with it
_RESERVED = ("step", "time")


class StepValues:
    """Numbers of a step by name, some of which may still be on a device.

    Args:
        numbers: numbers by name, all names in their order; 0 in place of those on devices.
        waiting: names and a stacked copy of the tensors on devices.
    """

    def __init__(self, numbers: dict[str, float], waiting: list[tuple[list[str], torch.Tensor]]) -> None:
        self._numbers = numbers
        self._waiting = waiting
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        return 200 + 150 * len(self._numbers)

    def read(self) -> dict[str, float]:
        """Return the numbers; waits for the devices. Several threads may call it."""
        with self._lock:
            while self._waiting:
                names, stacked = self._waiting[-1]
                self._numbers.update(zip(names, cast("Any", stacked).tolist(), strict=True))
                _ = self._waiting.pop()
        return self._numbers


def make_values(values: Mapping[str, object]) -> StepValues:
    """Copy values. Does not wait for a device.

    Args:
        values: numbers, tensors of one element and scalars of numpy, by name; nested mappings join names by "/".
            Readings of clocks are under "time".

    Raises:
        ConfigError: a value of another kind, or a name that cannot be one.
    """
    numbers: dict[str, float] = {}
    waiting: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, value in _flat(values, ""):
        if name in numbers:
            raise ConfigError("two values have one name", got=repr(name), where="log")
        if type(value) is float or type(value) is int:
            numbers[name] = value
        elif isinstance(value, torch.Tensor):
            _check_tensor(name, value)
            numbers[name] = _unboxed(value.item()) if value.is_cpu else 0.0
            if not value.is_cpu:
                waiting.setdefault(value.device, {})[name] = value
        else:
            numbers[name] = _number(name, value)
    stacks = [(list(tensors), _stacked(tensors)) for tensors in waiting.values()]
    return StepValues(numbers, stacks)


def split_times(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return numbers without the readings of clocks, and these under their own names."""
    numbers = {name: value for name, value in values.items() if not name.startswith(TIME)}
    return numbers, {name.removeprefix(TIME): value for name, value in values.items() if name.startswith(TIME)}


def _flat(values: Mapping[str, object], before: str) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if not isinstance(key, str) or not key or not key.isprintable():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError("not a name of a value", expected="printable text", got=repr(key), where="log")
        name = before + key
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, object]", value), f"{name}/")
        elif name in _RESERVED:
            raise ConfigError(
                "a value has a name that each line has itself",
                got=repr(name),
                where="log",
                fix='Rename it; readings of clocks are {"time": {"step_s": ...}}.',
            )
        else:
            yield name, value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float):
        return value
    item: Any = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", None) == 1:  # scalars and arrays of numpy
        found = item()
        if isinstance(found, int | float):
            return _unboxed(found)
    fixes = {"str": "Texts go into a table: accel.log_table(...).", "NoneType": "Leave the name out."}
    raise ConfigError(
        "not a number",
        expected="a number or a tensor of one element",
        got=f"{type(value).__name__} {value!r:.40}",
        where=f"log, {name!r}",
        fix=fixes.get(type(value).__name__, ""),
    )


def _unboxed(value: Any) -> float:
    return int(value) if isinstance(value, bool) else value


def _check_tensor(name: str, value: torch.Tensor) -> None:
    if value.numel() != 1 or value.is_complex():
        raise ConfigError(
            "not a number",
            expected="a tensor of one real element",
            got=f"{value.dtype} of shape {list(value.shape)}",
            where=f"log, {name!r}",
            fix="Log its mean() or another number of it.",
        )


def _stacked(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Copy tensors on one device: a replayed graph overwrites its results."""
    wide = wide_dtype(next(iter(tensors.values())).device)
    return torch.stack([tensor.detach().reshape(()).to(wide) for tensor in tensors.values()])
