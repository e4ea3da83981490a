# SPDX-License-Identifier: Apache-2.0
"""Settings of alerts, rules on what a run logs, and their evaluation. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from accel.errors import ConfigError
from accel.errors._checks import check_choice, did_you_mean

AlertLevel = Literal["info", "warning", "error"]
LEVELS = get_args(AlertLevel)

_SLOW = ("time/slowest_own_s", "time/own_s")  # of step statistics
_SLOW_SHARE = 0.05  # of the step, below which the delay of a rank does not matter
_CONDITIONS = ("above", "below", "unchanged_steps", "slow_rank")


class AlertRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rule on what a run logs.

    Attributes:
        metric: name of a logged number, such as "train/loss"; readings of clocks are "time/step_s" and so on.
        above, below: limits of the metric; a value that is not finite breaks either.
        unchanged_steps: steps for which the metric may stay the same.
        slow_rank: times the median rank's own time in a step, above which the slowest rank is reported; from the
            readings of step statistics, and without a metric.
        level: level of the alert.
        later: whether the metric may be missing in the first `log`, as one of an evaluation.

    Raises:
        ConfigError: not exactly one condition, or one that does not fit the metric.
    """

    metric: str = ""
    above: float | None = None
    below: float | None = None
    unchanged_steps: int | None = None
    slow_rank: float | None = None
    level: str = "warning"
    later: bool = False

    def __post_init__(self) -> None:
        where = f"the rule on {self.metric or 'a slow rank'}"
        check_choice(self.level, LEVELS, "not a level of alerts", where=where)
        given = [name for name in _CONDITIONS if getattr(self, name) is not None]
        if len(given) != 1:
            fix = 'Write a rule for each, such as {metric = "loss", above = 10.0}.'
            facts = {"expected": f"one of {', '.join(_CONDITIONS)}", "got": ", ".join(given) or "none"}
            raise ConfigError("a rule has one condition", where=where, fix=fix, **facts)
        if bool(self.metric) == (self.slow_rank is not None):
            fix = "A slow rank has no metric; every other rule has one."
            raise ConfigError("a condition that does not fit the metric", got=given[0], where=where, fix=fix)
        if self.slow_rank is not None and not 1 < self.slow_rank < math.inf:
            raise ConfigError("not a factor", expected="above 1", got=repr(self.slow_rank), where=where)
        if self.unchanged_steps is not None and self.unchanged_steps < 1:
            raise ConfigError(
                "not a number of steps", expected="1 or more", got=repr(self.unchanged_steps), where=where
            )
        if any(each is not None and not math.isfinite(each) for each in (self.above, self.below)):
            raise ConfigError("not a limit", expected="a finite number", where=where)

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the numbers that it reads."""
        return (self.metric,) if self.metric else _SLOW

    @property
    def title(self) -> str:
        """The title of its alerts."""
        if self.slow_rank is not None:
            return f"a rank is {self.slow_rank:g} times slower than the median"
        if self.unchanged_steps is not None:
            return f"{self.metric} unchanged for {self.unchanged_steps} steps"
        limit = f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"
        return f"{self.metric} {limit}"


class Alerts(msgspec.Struct, frozen=True, kw_only=True):
    """The alerts of a run, the section `alerts` of `accel.toml`.

    Attributes:
        command: words of a command that each alert starts, without a shell; `{title}`, `{text}` and `{level}` inside a
            word are replaced, and its standard input is the alert as JSON.
        webhook: URL with https that gets each alert as JSON; a credential, shown nowhere.
        every_s: seconds in which a broken rule, or the launcher, alerts once.
        disk_full: part of a disk in use from which `accel launch` alerts; 1 for never.
        rules: rules that rank 0 evaluates at each `log`.

    Raises:
        ConfigError: a value outside its range.
    """

    command: tuple[str, ...] = ()
    webhook: str = ""
    every_s: Annotated[float, Meta(gt=0, le=1e9)] = 600.0
    disk_full: Annotated[float, Meta(gt=0, le=1)] = 0.95
    rules: tuple[AlertRule, ...] = ()

    def __post_init__(self) -> None:
        if self.command and not self.command[0]:
            raise ConfigError("not a command", expected="a list of words, a program first", where="command")
        if self.webhook and not re.fullmatch(r"https://[^\s/@]+(/\S*)?", self.webhook):
            scheme = self.webhook.partition(":")[0] if "://" in self.webhook else "no scheme"
            raise ConfigError("not a URL for alerts", expected="https://HOST/...", got=f"{scheme:.10}", where="webhook")


def check_metrics(rules: Sequence[AlertRule], names: Collection[str]) -> None:
    """Raise `ConfigError` for a rule on a number that is not among those of a run's first `log`."""
    for rule in rules:
        missing = [name for name in rule.needed if name not in names]
        if missing and not rule.later:
            what = "step statistics" if rule.slow_rank is not None else "a metric"
            near = "" if rule.slow_rank is not None else did_you_mean(missing[0], names, otherwise=" ")
            raise ConfigError(
                f"an alert's rule is on {what} that the run does not log",
                expected=f"one of {', '.join(sorted(names)[:20])}",
                got=repr(missing[0]),
                where=f"alerts, rule {rule.title!r}",
                fix=f"{near} Where it is first logged later, add `later = true` to the rule.".strip(),
            )


class Breach(msgspec.Struct, frozen=True):
    """A broken rule.

    Attributes:
        rule: the rule.
        text: the values that break it.
    """

    rule: AlertRule
    text: str


class RuleWatch:
    """The evaluation of rules along the steps of a run.

    Args:
        rules: the rules.
    """

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self._rules = rules
        self._since: dict[int, tuple[str, int]] = {}  # the last value of a rule's metric, and its first step
        self._seen: set[int] = set()

    def see(self, values: Mapping[str, float], step: int) -> list[Breach]:
        """Return the rules that the numbers of a step break."""
        broken: list[Breach] = []
        for at, rule in enumerate(self._rules):
            if all(name in values for name in rule.needed):
                self._seen.add(at)
                if text := self._broken(at, rule, values, step):
                    broken.append(Breach(rule, f"{text} at step {step}"))
        return broken

    def unseen(self) -> list[AlertRule]:
        """Return the rules on numbers that were never logged."""
        return [rule for at, rule in enumerate(self._rules) if at not in self._seen]

    def _broken(self, at: int, rule: AlertRule, values: Mapping[str, float], step: int) -> str:
        if rule.slow_rank is not None:
            return _slow_text(values, rule.slow_rank)
        value = values[rule.metric]
        shown = f"{rule.metric} is {value:.6g}"
        if rule.unchanged_steps is not None:
            before, since = self._since.get(at, ("", step))
            since = since if before == repr(value) else step
            self._since[at] = (repr(value), since)
            return f"{shown} since step {since}" if step - since >= rule.unchanged_steps else ""
        is_over = rule.above is not None and value > rule.above
        is_under = rule.below is not None and value < rule.below
        return shown if is_over or is_under or not math.isfinite(value) else ""


def _slow_text(values: Mapping[str, float], factor: float) -> str:
    slowest, median = (values[name] for name in _SLOW)
    if not slowest > factor * median or slowest - median < _SLOW_SHARE * values.get("time/step_s", 0.0):
        return ""
    who = f"rank {int(values['time/slowest_rank'])}" if "time/slowest_rank" in values else "the slowest rank"
    return f"{who} takes {slowest * 1e3:.1f} ms a step of its own, the median is {median * 1e3:.1f} ms"
