# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints stay: a record of wishes, and a pure function of steps and metrics."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Literal, cast, get_args

import msgspec

from accel.errors import ConfigError, check_choice

Mode = Literal["min", "max"]


class Keep(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Which checkpoints of a folder stay after a save: all that any of the fields asks for; the others are deleted.

    Attributes:
        newest: how many of the newest, the one just saved included; 1 or above.
        every: steps that are multiples of it stay for ever; None for none.
        best: how many with the best metric; 0 for none. Of equal ones the newer stay.
        by: the metric's name, one that `save_state` was given by `metrics=`.
        mode: whether "min" or "max" is best.
    """

    newest: int = 1
    every: int | None = None
    best: int = 0
    by: str = ""
    mode: Mode = "min"


def check_keep(keep: int | Keep | None) -> Keep | None:
    """Return what a caller asked for as a record; None to keep all.

    Raises:
        ConfigError: a number is out of range, or `best` and `by` do not go together.
    """
    if keep is None:
        return None
    asked = keep if isinstance(keep, Keep) else Keep(newest=keep)
    where = "save_state, keep="
    if type(asked.newest) is not int or asked.newest < 1:
        expected = f"{'newest' if asked is keep else 'keep'} of 1 or above, or keep=None to keep all"
        raise ConfigError("no checkpoint would stay", expected=expected, got=repr(asked.newest), where=where)
    if asked.every is not None and (type(asked.every) is not int or asked.every < 1):
        raise ConfigError("not a distance of steps", expected="every of 1 or above", got=repr(asked.every), where=where)
    if type(asked.best) is not int or asked.best < 0:
        raise ConfigError("not a number of checkpoints", expected="best from 0", got=repr(asked.best), where=where)
    if (asked.best > 0) != (asked.by != ""):
        fix = "Write Keep(best=1, by='loss'), and save_state(..., metrics={'loss': loss})."
        raise ConfigError("best= and by= need each other", got=repr(asked), where=where, fix=fix)
    check_choice(asked.mode, get_args(Mode), "unknown mode", where=where)
    return asked


def check_metrics(metrics: Mapping[str, float] | None, keep: Keep | None) -> dict[str, float]:
    """Return metrics as they are stored.

    Raises:
        ConfigError: one is no finite number, or the one that `keep` goes by is not among them.
    """
    where = "save_state, metrics="
    for name, value in (metrics or {}).items():
        if not _is_comparable(value):
            raise ConfigError(
                f"the metric {name!r} cannot be compared",
                expected="a finite number",
                got=repr(value),
                where=where,
                fix="Leave it out: a checkpoint without it is never among the best. Of a tensor, pass `.item()`.",
            )
    if metrics is not None and keep is not None and keep.best and keep.by not in metrics:
        raise ConfigError("the metric to keep by is missing", expected=keep.by, got=", ".join(metrics), where=where)
    return {name: float(value) for name, value in (metrics or {}).items()}


def plan_keep(saved: Mapping[int, Mapping[str, float]], current: int, keep: Keep) -> frozenset[int]:
    """Return the steps that stay.

    Args:
        saved: metrics by step of all checkpoints that there are.
        current: the step just saved, one of them; it stays whatever its number.
        keep: what else to keep.
    """
    others = sorted(saved.keys() - {current}, reverse=True)
    stay = {current, *others[: keep.newest - 1]}
    if keep.every is not None:
        stay |= {step for step in saved if step % keep.every == 0}
    sign = 1 if keep.mode == "min" else -1
    rated = sorted((sign * metrics[keep.by], -step) for step, metrics in saved.items() if keep.by in metrics)
    stay |= {-step for _, step in rated[: keep.best]}
    return frozenset(stay)


def _is_comparable(value: object) -> bool:
    return type(value) in (int, float) and abs(cast(float, value)) <= sys.float_info.max
