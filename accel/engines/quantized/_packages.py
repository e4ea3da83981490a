# SPDX-License-Identifier: Apache-2.0
"""The two packages, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from accel.errors import MissingExtraError


def package(name: str) -> Any:
    """Import a module of bitsandbytes or torchao.

    Raises:
        MissingExtraError: it is not installed, or does not import.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as error:  # a library for another system, or for another CUDA
        extra = name.partition(".")[0]
        raise MissingExtraError(
            f"quantization by {extra} needs a package that does not import",
            expected=name,
            got=f"{type(error).__name__}: {error}",
            where="load_quantized",
            fix=f"Run `pip install 'accel[{extra}]'`.",
        ) from error
