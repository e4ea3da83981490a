# SPDX-License-Identifier: Apache-2.0
"""Alerts of a run: rules, the file that keeps them, and the command or webhook that they reach. Free of torch.

Begin with `_rules.py`: the setting `Alerts`, and the evaluation of its rules. `_log.py` has the `AlertLog` of one
process, a rank's trackers or a launcher: a repeat of an alert only counts, and a background thread writes and delivers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.alerts._log import Alert as Alert, AlertLog as AlertLog, read_alerts as read_alerts
    from accel.alerts._rules import (
        LEVELS as LEVELS,
        AlertLevel as AlertLevel,
        AlertRule as AlertRule,
        Alerts as Alerts,
        RuleWatch as RuleWatch,
        check_metrics as check_metrics,
    )

__getattr__ = exports(
    __name__,
    {
        "_log": ("Alert", "AlertLog", "read_alerts"),
        "_rules": ("LEVELS", "AlertLevel", "AlertRule", "Alerts", "RuleWatch", "check_metrics"),
    },
)
