# SPDX-License-Identifier: Apache-2.0
"""Tests beside services of others, whose start on a busy machine is not ours to mend."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any


def tried_again(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test a second time, in a folder of its own, if the first run fails; two failures are one."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        try:
            test(*args, **fixtures)
        except Exception as error:
            warnings.warn(f"tried again after {error!r:.500}", RuntimeWarning, stacklevel=2)
            if "tmp_path" in fixtures:
                fixtures["tmp_path"] = fixtures["tmp_path"] / "again"
                fixtures["tmp_path"].mkdir()
            test(*args, **fixtures)

    return run
