# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed as a strategy. Its configuration needs neither DeepSpeed nor torch; names resolve on first use.

Begin with `_engine.py`. A `DeepSpeed` record (`_options.py`) and the facts of a run become settings (`_resolve.py`,
checked in `_draft.py` against the keys of `_keys.py`); `_package.py` calls DeepSpeed with them. `_whole.py` turns its
state into whole tensors for checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import declared, exports

if TYPE_CHECKING:
    from accel.engines.deepspeed._engine import build_sharded, config_of, gathered
    from accel.engines.deepspeed._options import DeepSpeed, Offload, RunFacts, read_deepspeed
    from accel.engines.deepspeed._resolve import resolve

__all__ = [
    "DeepSpeed",
    "Offload",
    "RunFacts",
    "build_sharded",
    "config_of",
    "gathered",
    "read_deepspeed",
    "resolve",
]

__getattr__ = exports(__name__, declared())
__dir__ = __all__.copy
