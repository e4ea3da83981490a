# SPDX-License-Identifier: Apache-2.0
"""Figures that a record carries as one field, and that equality, encoding and checkpoints leave out."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, init=False)
class Uncompared:
    """Values that are no fields, so that nothing compares, encodes or saves them.

    A subclass declares each as a `ClassVar` with its default. They go along where a record is copied, pickled or
    changed by `msgspec.structs.replace`; what is decoded has the defaults.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)
