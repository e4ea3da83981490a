# SPDX-License-Identifier: Apache-2.0
"""Blocks that make many objects to keep, such as trees of sources, which collections need not walk."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def no_collections() -> Generator[None]:
    """Disable collections in a block that makes many long-lived objects, and exempt the survivors from later ones."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
