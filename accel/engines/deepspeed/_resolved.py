# SPDX-License-Identifier: Apache-2.0
"""Facts of a run that a resolution takes, and settings with their sources that it gives. Free of torch."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from accel.engines.deepspeed._record import Key, nested
from accel.errors import ConfigError
from accel.formats import Precision
from accel.terminal import show_text

_COLUMNS = 80
_VALUE = 14


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Values that context, loader, model and optimizer have. None, or an empty text, where nothing says it.

    Attributes:
        ranks: data-parallel ranks.
        precision: number formats of the run.
        rows: samples of a rank's micro-batch.
        accumulation: micro-batches of an optimizer step.
        max_norm: norm to which `optimizer_step` clips.
        hidden_size: width of the model, as its configuration says.
        optimizer, optimizer_values: class of the optimizer and its options.
        places: the place where the user wrote a fact, by its name, for tables and errors.
    """

    ranks: int = 1
    precision: Precision = Precision()
    rows: int | None = None
    accumulation: int | None = None
    max_norm: float | None = None
    hidden_size: int | None = None
    optimizer: str = ""
    optimizer_values: Mapping[str, Any] = {}
    places: Mapping[str, str] = {}


class Setting(NamedTuple):
    """A value for DeepSpeed, and the place that says it."""

    value: Any
    source: str


class Resolved(msgspec.Struct, frozen=True):
    """Settings for DeepSpeed, without "auto" and without contradictions.

    Attributes:
        rows: value and source by key, in the order of DeepSpeed's JSON.
        clipping: norm that the configuration names for clipping; None if it names none.
        accumulation: micro-batches of an optimizer step that configuration or facts name; None if neither does.
    """

    rows: Mapping[Key, Setting]
    clipping: float | None = None
    accumulation: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """A new dict for DeepSpeed, as its JSON is nested."""
        return nested({key: row.value for key, row in self.rows.items()})

    def table(self) -> str:
        """Return keys, values and sources as a table of 80 columns."""
        lines: list[tuple[str, str, str]] = [("KEY", "VALUE", "SOURCE")]
        above: Key = ()
        for key, row in sorted(self.rows.items(), key=lambda item: (len(item[0]) > 1, item[0])):
            new = (depth for depth in range(len(key) - 1) if key[: depth + 1] != above[: depth + 1])
            lines += [("  " * depth + key[depth], "", "") for depth in new]
            lines.append(("  " * (len(key) - 1) + key[-1], _short(row.value), row.source))
            above = key[:-1]
        lines = [(show_text(key), show_text(value), show_text(source)) for key, value, source in lines]
        first = max(len(key) for key, _, _ in lines)
        second = max(len(value) for _, value, _ in lines)
        return "\n".join(_line(line, first, second) for line in lines)

    def check_step(self, *, max_norm: float | None, accumulation: int | None) -> None:
        """Compare an optimizer step with what the configuration says.

        Args:
            max_norm: norm to which the step clips; None if it does not.
            accumulation: micro-batches of a whole window; None where the caller keeps no record of it.

        Raises:
            ConfigError: the step clips otherwise, or has other micro-batches than the configuration says.
        """
        problems: list[str] = []
        if self.clipping is not None and max_norm != self.clipping:
            problems.append(
                f"gradient_clipping: {self.clipping:g} in DeepSpeed's configuration, but max_norm={max_norm} here. "
                f'Pass max_norm={self.clipping:g}, or write "auto".'
            )
        if None not in (self.accumulation, accumulation) and accumulation != self.accumulation:
            problems.append(
                f"gradient_accumulation_steps: {self.accumulation} in DeepSpeed's configuration, but the state has "
                f'{accumulation}. Pass accumulation={self.accumulation} to train_state, or write "auto".'
            )
        if problems:
            raise contradictions(problems, where="optimizer_step")


def contradictions(problems: list[str], where: str) -> ConfigError:
    """Make the error of all that does not fit."""
    listed = "".join(f"\n- {each}" for each in problems)
    return ConfigError("DeepSpeed's configuration contradicts the run", got=listed, where=where)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str) if not isinstance(value, str) else value
    return text if len(text) <= _VALUE else f"{text[: _VALUE - 3]}..."


def _line(cells: tuple[str, str, str], first: int, second: int) -> str:
    key, value, source = cells
    begin = f"{key:{first}}  {value:{second}}  "
    room = max(_COLUMNS - len(begin), 12)
    parts = textwrap.wrap(source, room, break_on_hyphens=False) or [""]
    return "\n".join([f"{begin}{parts[0]}".rstrip(), *(" " * len(begin) + part for part in parts[1:])])
