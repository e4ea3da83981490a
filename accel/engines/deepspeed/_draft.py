# SPDX-License-Identifier: Apache-2.0
"""A configuration on its way to being settled: its values with their sources, and what does not fit."""

from __future__ import annotations

import json
from typing import Any, Self

from accel.engines.deepspeed._record import DeepSpeed, Key, field_of
from accel.engines.deepspeed._resolved import Setting


class Draft:
    """Values by key, and problems. Only `resolve` holds one, while it runs."""

    def __init__(self, rows: dict[Key, Setting], source: str) -> None:
        self.rows = rows
        self.problems: list[str] = []
        self._source = source

    @classmethod
    def of(cls, config: DeepSpeed) -> Self:
        """Return what a configuration says, each value with its source."""
        by_field = {key for _, key, _ in config.said()}
        defaults = dict(zip(config.__struct_fields__, config.__struct_defaults__, strict=True))
        rows: dict[Key, Setting] = {}
        for key, value in config.values().items():
            field = field_of(key) if key in by_field else "settings"
            is_default = field != "settings" and getattr(config, field) == defaults[field] and not config.source
            source = config.source or ("default" if is_default else f"DeepSpeed({field}=)")
            rows[key] = Setting(value, source)
        return cls(rows, config.source)

    def said(self, key: Key) -> Any:
        """Return the value at a key; None if nothing or "auto" stands there."""
        row = self.rows.get(key)
        return None if row is None or row.value == "auto" else row.value

    def fill(self, key: Key, value: Any, source: str) -> None:
        """Set the value at a key."""
        self.rows[key] = Setting(value, source)

    def agree(self, key: Key, fact: Any, place: str) -> Any:
        """Return the value at a key, from the fact if it is open; a fact that says otherwise is a problem."""
        said = self.said(key)
        if fact is None:
            return said
        if said is None:
            self.fill(key, fact, place)
        elif said != fact:
            self.problem(f'{self.shown(key)}, but {place} says {fact}. Write "auto", or leave it out.')
        return fact

    def impose(self, key: Key, value: Any) -> None:
        """Set a value that the training loop needs; a configuration that says otherwise is a problem."""
        said = self.said(key)
        if said is not None and said != value:
            self.problem(f"{self.shown(key)}, but the training loop needs {json.dumps(value)}. Leave it out.")
        self.fill(key, value, "the training loop")

    def problem(self, text: str) -> None:
        """Note what does not fit, and the way out."""
        self.problems.append(text)

    def shown(self, key: Key) -> str:
        """Return a key with its value and its source, as errors begin with them."""
        row = self.rows[key]
        where = "" if row.source == self._source else f" of {row.source}"
        return f"{dotted(key)}: {json.dumps(row.value, default=str)}{where}"


def dotted(key: Key) -> str:
    """Return a key as one text."""
    return ".".join(key)
