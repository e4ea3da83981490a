# SPDX-License-Identifier: Apache-2.0
"""Traces of torch.profiler, read without torch: where the time of each rank went.

Begin with `_trace.py`, which reads a file; `_breakdown.py` divides its time among computation, messages and waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import declared, exports

if TYPE_CHECKING:
    from accel.report.traces._breakdown import (
        RankBreakdown as RankBreakdown,
        Waits as Waits,
        describe_profile as describe_profile,
        find_waits as find_waits,
        rank_times as rank_times,
        slowest as slowest,
    )
    from accel.report.traces._trace import (
        Communication as Communication,
        Operator as Operator,
        Span as Span,
        Trace as Trace,
        intersect as intersect,
        length as length,
        parse_trace as parse_trace,
        read_traces as read_traces,
        subtract as subtract,
        union as union,
    )

__getattr__ = exports(__name__, declared())
