# SPDX-License-Identifier: Apache-2.0
"""Settings of a run and of a launch: typed records, their files, and the order of their sources. Free of torch.

Begin with `_settings.py`, where each setting is declared once. `_schema.py` derives flags, variables and file keys from
it, `_files.py` reads and writes files, `_resolve.py` decides between sources. `_accelerate.py` imports others' files.
Names resolve on first use: a launch without a file loads no parser of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import declared, exports

if TYPE_CHECKING:
    from accel.config._files import decode, encode, read_config
    from accel.config._resolve import ConfigFile, resolve
    from accel.config._settings import LaunchConfig

__all__ = [
    "ConfigFile",
    "LaunchConfig",
    "decode",
    "encode",
    "read_config",
    "resolve",
]

__getattr__ = exports(__name__, declared())
__dir__ = __all__.copy
