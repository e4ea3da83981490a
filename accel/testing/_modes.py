# SPDX-License-Identifier: Apache-2.0
"""Modes of a thread that a simulated collective ignores: it runs in one rank's thread and works for all of them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch


@contextmanager
def outside_of_modes() -> Generator[None]:
    """Run a block without autograd, autocast and the dispatch modes of this thread, as a backend's own threads do."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), cast(Any, torch)._C._DisableTorchDispatch():
        yield
