# SPDX-License-Identifier: Apache-2.0
"""A line of `metrics.jsonl`: step, values, and last the readings of clocks.

Two runs of the same training have the same lines apart from `time`. JSON knows no numbers that are not finite: they
are the texts "nan", "inf" and "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from accel.errors import ConfigError

_STEP, _TIME = "step", "time"
_TEXTS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one step.

    Attributes:
        step: optimizer step.
        values: numbers by name.
        time: readings of clocks by name, in seconds, or rates such as samples per second.
    """

    step: int
    values: dict[str, float]
    time: dict[str, float] = {}


def encode_line(step: int, values: Mapping[str, float], time: Mapping[str, float] | None = None) -> bytes:
    """Return a line with its newline.

    Args:
        step: optimizer step, 0 or above.
        values: numbers by name, in the order of the line.
        time: readings of clocks by name.

    Raises:
        ConfigError: a value is no number, or its name is "step" or "time".
    """
    for taken in values.keys() & {_STEP, _TIME}:
        raise ConfigError("a metric has a name that the line uses itself", got=repr(taken), fix="Rename the metric.")
    line = {
        _STEP: step,
        **{name: _encodable(name, value) for name, value in values.items()},
        _TIME: {name: _encodable(name, value) for name, value in (time or {}).items()},
    }
    return msgspec.json.encode(line) + b"\n"


def decode_line(line: bytes) -> MetricsLine | None:
    """Return the values of a line; None if it is damaged. Values of other kinds than numbers are left out."""
    try:
        found: Any = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not isinstance(found, dict):
        return None
    values = cast("dict[str, Any]", found)
    step = values.pop(_STEP, None)
    time = values.pop(_TIME, None)
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    return MetricsLine(step=step, values=_numbers(values), time=_numbers(time))


def _encodable(name: str, value: Any) -> float | str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            "not a number", expected="an int or a float", got=type(value).__name__, where=f"the metric {name!r}"
        )
    if isinstance(value, int) or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _numbers(found: Any) -> dict[str, float]:
    values = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, str):
            value = _TEXTS.get(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = value
    return numbers
