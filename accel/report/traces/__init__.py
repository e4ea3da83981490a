# SPDX-License-Identifier: Apache-2.0
"""Traces of torch.profiler, read without torch: where the time of each rank went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.report.traces._breakdown import RankTimes as RankTimes, rank_times as rank_times, slowest as slowest
    from accel.report.traces._intervals import (
        Span as Span,
        intersect as intersect,
        length as length,
        subtract as subtract,
        union as union,
    )
    from accel.report.traces._text import describe_profile as describe_profile
    from accel.report.traces._trace import (
        Communication as Communication,
        Operator as Operator,
        Trace as Trace,
        parse_trace as parse_trace,
        read_traces as read_traces,
    )
    from accel.report.traces._waits import Waits as Waits, find_waits as find_waits

__getattr__ = exports(
    __name__,
    {
        "_breakdown": ("RankTimes", "rank_times", "slowest"),
        "_intervals": ("Span", "intersect", "length", "subtract", "union"),
        "_text": ("describe_profile",),
        "_trace": ("Communication", "Operator", "Trace", "parse_trace", "read_traces"),
        "_waits": ("Waits", "find_waits"),
    },
)
