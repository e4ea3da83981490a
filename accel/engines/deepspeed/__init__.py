# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed as a strategy. Its configuration needs neither DeepSpeed nor torch; names resolve on first use.

Begin with `_engine.py`. A `DeepSpeed` record (`_record.py`) and the facts of a run (`_facts.py`) become settings
(`_resolve.py`, checked in `_draft.py` against the keys of `_keys.py`); `_package.py` calls DeepSpeed with them.
`_whole.py` turns its state into whole tensors for checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.engines.deepspeed._engine import build_sharded as build_sharded, gathered as gathered, make as make
    from accel.engines.deepspeed._facts import config_of as config_of, read_facts as read_facts
    from accel.engines.deepspeed._record import (
        DeepSpeed as DeepSpeed,
        DeepSpeedSetting as DeepSpeedSetting,
        Offload as Offload,
        ResolvedDeepSpeed as ResolvedDeepSpeed,
        RunFacts as RunFacts,
        from_json as from_json,
        from_section as from_section,
        from_setting as from_setting,
        read_deepspeed as read_deepspeed,
    )
    from accel.engines.deepspeed._resolve import resolve as resolve

__getattr__ = exports(
    __name__,
    {
        "_engine": (
            "make",
            "build_sharded",
            "gathered",
        ),
        "_facts": (
            "config_of",
            "read_facts",
        ),
        "_record": (
            "from_json",
            "from_section",
            "from_setting",
            "read_deepspeed",
            "DeepSpeed",
            "Offload",
            "RunFacts",
            "ResolvedDeepSpeed",
            "DeepSpeedSetting",
        ),
        "_resolve": ("resolve",),
    },
)
