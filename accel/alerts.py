# SPDX-License-Identifier: Apache-2.0
"""Alerts of a run: rules, the file that keeps them, and the command or webhook that they reach. Free of torch.

`Alerts` is the setting; `RuleWatch` evaluates its rules. An `AlertLog` belongs to one process, a rank's trackers or a
launcher: a repeat of an alert only counts, and a background thread writes and delivers.
"""

from __future__ import annotations

import collections
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, replace

from accel.endpoints import post_json
from accel.errors import ConfigError
from accel.errors._checks import check_choice, check_count, nearest_metrics
from accel.run_folder import append_rest, bounded, hide_in_text, read_files
from accel.system import Helpers, run_helper
from accel.terminal import show_limit, show_names, show_seconds

FOLDER = "alerts"  # of a run's folder, with a file for each process that has alerts
AlertLevel = Literal["info", "warning", "error"]
LEVELS = get_args(AlertLevel)

_SLOW = ("time/slowest_own_s", "time/own_s")  # of step statistics
_STATISTICS = "Log the values of `accel.metrics.step_statistics`, with its `time` under `time`."
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
        check_choice(self.level, LEVELS, "the level of the alert is unknown", where=where)
        given = [name for name in _CONDITIONS if getattr(self, name) is not None]
        if len(given) != 1:
            fix = 'Write a rule for each, such as {metric = "loss", above = 10.0}.'
            facts = {"expected": f"one of {', '.join(_CONDITIONS)}", "got": ", ".join(given) or "none"}
            raise ConfigError("a rule has one condition", where=where, fix=fix, **facts)
        if bool(self.metric) == (self.slow_rank is not None):
            fix = "A slow rank has no metric; every other rule has one."
            raise ConfigError("a condition that does not fit the metric", got=given[0], where=where, fix=fix)
        if self.slow_rank is not None and not 1 < self.slow_rank < math.inf:
            raise ConfigError("the factor is not valid", expected="above 1", got=repr(self.slow_rank), where=where)
        if self.unchanged_steps is not None:
            check_count(self.unchanged_steps, "the number of steps is not valid", where=where)
        if any(each is not None and not math.isfinite(each) for each in (self.above, self.below)):
            raise ConfigError("the limit is not valid", expected="a finite number", where=where)

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
            raise ConfigError("the command is not valid", expected="a list of words, a program first", where="command")
        if self.webhook and (got := _refused(self.webhook)):
            raise ConfigError("the URL for alerts is not valid", expected="https://HOST/...", got=got, where="webhook")

    def __repr__(self) -> str:
        shown = {**asdict(self), "webhook": self.webhook and "***"}
        return f"Alerts({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def _refused(url: str) -> str:
    """Return why a URL is no webhook, without showing it; nothing for one that is."""
    scheme, found, rest = url.partition("://")
    if scheme != "https":
        return scheme[:10] if found else "no scheme"
    if not re.fullmatch(r"[!-~]+", rest):
        return "spaces, or characters beyond ASCII"
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    return "a user's name" if "@" in re.split("[/?#]", rest)[0] else "" if is_whole else "no host, or no port"


def check_metrics(rules: Sequence[AlertRule], names: Collection[str]) -> None:
    """Raise `ConfigError` for a rule on a number that a run's first `log` lacks."""
    for rule in rules:
        missing = [name for name in rule.needed if name not in names]
        if missing and not rule.later:
            near = nearest_metrics(missing[0], names)
            asked = f"Did you mean {' or '.join(f'`{each}`' for each in near)}?" if near else ""
            shown = list(dict.fromkeys([*near, *sorted(names)]))
            raise ConfigError(
                f"an alert's rule is on {'step statistics' if rule.slow_rank else 'a metric'} that the run lacks",
                expected=f"one of {show_names(shown, 20)}",
                got=repr(missing[0]),
                where=f"alerts, rule {rule.title!r}",
                fix=f"{_STATISTICS if rule.slow_rank else asked} Where it is first logged later, "
                "add `later = true` to the rule.".strip(),
            )


class Breach(NamedTuple):
    """A broken rule, and the values that break it."""

    rule: AlertRule
    text: str


class RuleWatch:
    """The evaluation of rules along the steps of a run."""

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
    return f"{who} takes {show_seconds(slowest)} a step of its own, the median is {show_seconds(median)}"


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """An alert, as a file, a command and a webhook get it, without credentials."""

    time_s: float  # its time, in seconds since the epoch
    level: str  # its level
    title: str  # its first line
    text: str = ""  # its further text
    source: str = ""  # the process that raised it: "rank 3" or "launch"
    host: str = ""  # name of its host
    run: str = ""  # name of the run; empty if unknown
    count: int = 1  # number of equal ones until `last_s`
    last_s: float = 0.0  # time of the last one

    @property
    def line(self) -> str:
        """The alert in one line."""
        return f"{self.title}: {' '.join(self.text.split())}" if self.text else self.title


def read_alerts(folder: Path, problems: list[str] | None = None) -> list[Alert]:
    """Return the last 10,000 alerts in a run's folder in order of time; lines that cannot be read are left out.

    Args:
        folder: the run's folder.
        problems: gets a line for each file that cannot be read.
    """
    found: dict[tuple[str, float, str, str], Alert] = {}
    for path, lines in read_files(folder, FOLDER, [] if problems is None else problems):
        for line in lines:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                alert = msgspec.json.decode(line, type=Alert)
                found[(path.name, alert.time_s, alert.title, alert.text)] = alert  # a later line has the newer count
            if len(found) > _MOST_READ:
                del found[next(iter(found))]
    return sorted(found.values(), key=lambda each: each.time_s)


_MOST_TITLE, _MOST_TEXT = 200, 2_000  # characters
_MOST_READ, _MOST_OPEN = 10_000, 1_000  # alerts of a run, and alerts with counted repeats
_MOST_WAITING = 100  # alerts that wait for their delivery
_PATIENCE_S = 10.0  # for one try of the webhook, and for the command
_RETRIES, _PAUSE_S = 2, 1.0  # the pause is before the first of them, and twice as long before the second

Post = Callable[[str, bytes, float], None]  # URL, body, seconds of patience; raises OSError or ValueError
Key = tuple[str, ...]


class AlertLog:
    """The alerts of this process. Its thread starts with the first one, and is a daemon.

    Args:
        settings: command and webhook.
        source: "rank 3" or "launch".
        report: takes the level and the text of a line for the log.
        run: returns the run's name.
        folders: folders of runs to write to.
        post: sends a body to a URL.
        clock: returns the time, in seconds since the epoch.
        helpers: takes note of a running command.
    """

    def __init__(
        self,
        settings: Alerts,
        *,
        source: str,
        report: Callable[[str, str], object],
        run: Callable[[], str] = str,
        folders: Sequence[str] = (),
        post: Post | None = None,
        clock: Callable[[], float] = time.time,
        helpers: Helpers | None = None,
    ) -> None:
        self._settings = settings
        self._source = source
        self._helpers = helpers
        self._report = report
        self._run = run
        self._folders = list(folders)
        self._post = post or post_json
        self._clock = clock
        began = datetime.fromtimestamp(clock(), UTC).strftime("%Y%m%dT%H%M%S.%f")
        host = re.sub(r"[^0-9A-Za-z.-]", "_", socket.gethostname())
        self._file = f"{began}-{host}-{os.getpid()}-{source.replace(' ', '-')}.jsonl"
        self._changed = threading.Condition()
        self._open: dict[Key, Alert] = {}
        self._written: dict[Key, int] = {}  # the count on file
        self._content = bytearray()
        self._waiting: collections.deque[Alert] = collections.deque()
        self._started = self._ended = self._done = self._is_dirty = False
        self._left_out = 0
        self._reported: set[str] = set()

    def add_folder(self, folder: str) -> None:
        """Write to another folder of a run too, all alerts so far included."""
        with self._changed:
            if folder in self._folders:
                return
            self._folders.append(folder)
            if self._content:
                self._is_dirty = True
                self._start()

    def add(
        self, title: str, text: str = "", *, level: str, every_s: float, key: Key = (), is_known: bool = False
    ) -> None:
        """Raise an alert; one with the key of another in the last `every_s` seconds only counts. Waits for nothing.

        Args:
            title, text: the alert.
            level: its level.
            every_s: seconds in which equal ones are one.
            key: identity of equal ones; title, text and level by default.
            is_known: whether the log has it already.
        """
        key = key or (level, title, text)
        now_s = self._clock()
        with self._changed:
            if self._ended:
                return
            known = self._open.get(key)
            if known is not None and now_s < known.time_s + every_s:
                self._open[key] = known = replace(known, count=known.count + 1, last_s=now_s)
                if known.count >= 2 * self._written[key]:  # a file of many repeats stays short
                    self._write(key, known)
                return
            self._forget(key)
            alert = Alert(
                time_s=now_s,
                level=level,
                title=_plain(title, _MOST_TITLE),
                text=_plain(text, _MOST_TEXT),
                source=self._source,
                host=socket.gethostname(),
                run=self._run(),
                last_s=now_s,
            )
            self._open[key] = alert
            self._write(key, alert)
            self._deliver_later(alert)
        if not is_known:
            _ = self._report(level, f"alert: {alert.line}")

    def end(self, patience_s: float) -> None:
        """Write and deliver what waits, for some seconds at most; later alerts are dropped."""
        with self._changed:
            if self._ended:
                return
            for key in list(self._open):
                self._forget(key)
            self._ended = True
            self._changed.notify_all()
            if not self._started:
                return
            _ = self._changed.wait_for(lambda: self._done, patience_s)
            late = 0 if self._done else 1 + len(self._waiting)
        if late + self._left_out:
            _ = self._report("warning", f"{late + self._left_out} alerts were not delivered in time")

    def has_work(self) -> bool:
        """Return whether an alert waits to be written or delivered."""
        with self._changed:
            return bool(self._waiting) or self._is_dirty

    def _forget(self, key: Key) -> None:
        """Close an alert, and write its last count; and the oldest ones of too many."""
        if (known := self._open.pop(key, None)) is not None and self._written.pop(key, 0) != known.count:
            self._write(key, known)
            _ = self._written.pop(key)
        while len(self._open) >= _MOST_OPEN:
            self._forget(next(iter(self._open)))

    def _write(self, key: Key, alert: Alert) -> None:
        self._written[key] = alert.count
        self._content += msgspec.json.encode(alert) + b"\n"
        self._is_dirty = True
        self._start()

    def _deliver_later(self, alert: Alert) -> None:
        if self._settings.command or self._settings.webhook:
            self._waiting.append(alert)
            while len(self._waiting) > _MOST_WAITING:
                _ = self._waiting.popleft()
                self._left_out += 1

    def _start(self) -> None:
        if not self._started:
            self._started = True
            threading.Thread(target=self._work, name="accel-alerts", daemon=True).start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                _ = self._changed.wait_for(lambda: self._waiting or self._is_dirty or self._ended)
                content = bytes(self._content) if self._is_dirty else b""
                folders = list(self._folders)
                self._is_dirty = False
                alert = self._waiting.popleft() if self._waiting else None
                if not content and alert is None:
                    self._done = True
                    self._changed.notify_all()
                    return
            for folder in folders if content else ():
                self._append(folder, content)
            if alert is not None:
                self._deliver(alert)

    def _append(self, folder: str, content: bytes) -> None:
        try:
            (Path(folder) / FOLDER).mkdir(exist_ok=True)
            append_rest(Path(folder) / FOLDER / self._file, content)
        except OSError as error:  # the next alert tries again
            if folder not in self._reported:
                self._reported.add(folder)
                _ = self._report("warning", f"{folder} gets no record of alerts: {error.strerror}")

    def _deliver(self, alert: Alert) -> None:
        body = msgspec.json.encode({**msgspec.to_builtins(alert), "line": alert.line})
        for name, used, send in (
            ("command", self._settings.command, lambda: self._run_command(alert, body)),
            ("webhook", self._settings.webhook, lambda: self._send(body)),
        ):
            if used and (problem := send()):
                _ = self._report("warning", f"the {name} did not get the alert {alert.title!r}: {problem}")

    def _run_command(self, alert: Alert, body: bytes) -> str:
        return run_command(self._settings.command, alert, body, self._helpers)

    def _send(self, body: bytes) -> str:
        """Send to the webhook, with two more tries; return the last problem, without the URL."""
        problem = ""
        for number in range(1 + _RETRIES):
            if number:
                time.sleep(_PAUSE_S * number)
            try:
                self._post(self._settings.webhook, body, _PATIENCE_S)
            except (OSError, ValueError, RuntimeError) as error:  # the last: no thread starts at the end of Python
                code: object = getattr(error, "code", None)
                reason: object = getattr(error, "reason", None) or error
                text = f"HTTP status {code}" if code is not None else f"{type(error).__name__}: {reason}"
                parts = urlsplit(self._settings.webhook)
                for secret in (self._settings.webhook, parts.path, parts.query):
                    text = text.replace(secret, "***") if len(secret) > 3 else text  # "/" says nothing
                problem = _plain(text, _MOST_TITLE)
            else:
                return ""
        return f"{1 + _RETRIES} tries, {problem}"


def run_command(words: Sequence[str], alert: Alert, body: bytes, helpers: Helpers | None = None) -> str:
    """Run a command with an alert on its standard input; return the problem, or nothing."""
    fields = {"{title}": alert.title, "{text}": alert.text, "{level}": alert.level}
    filled = [re.sub(r"\{(title|text|level)\}", lambda found: fields[found[0]], word) for word in words]
    try:
        ended = run_helper(filled, limit_s=_PATIENCE_S, stdin=body, helpers=helpers)
    except (OSError, ValueError) as error:
        return _plain(str(error), _MOST_TITLE)
    if ended.status is None:
        return f"no end in {show_limit(_PATIENCE_S)}"
    return _plain(f"exit status {ended.status} {ended.last_line()}".strip(), _MOST_TITLE) if ended.status else ""


def _plain(text: str, most: int) -> str:
    """Return a text without credentials and without what terminals act on, bounded."""
    shown = "".join(char if char.isprintable() or char == "\n" else " " for char in text)
    return bounded(hide_in_text(shown), most)
