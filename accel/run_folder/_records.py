# SPDX-License-Identifier: Apache-2.0
"""The records of a run and of a launch on one host: settings, code, attempts, events, and the error that ended it."""

from __future__ import annotations

import platform
import re
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

import accel
from accel.run_folder._files import LAUNCHES, RUN, problem_of_json, read_files, read_json
from accel.run_folder._secrets import hide_in_diff
from accel.system import HelperEnd, Helpers, run_helper
from accel.terminal import show_limit, show_size

_DISTRIBUTION = "accel-torch"  # of this package; `accel` on the index is a stranger's
_PACKAGES = ("torch", "numpy", "safetensors", "transformers", "datasets", "torchao", "torchdata")
_CONFLICTING = re.compile(r"accel-[^-]+\.(dist|egg)-info", re.IGNORECASE)
_PATIENCE_S = 5.0  # a status of a large tree on a slow disk
_MOST_STATUS = 64_000_000  # bytes of its output
_MOST_NAMES = 1_000_000
# Variables, because a repository's settings override less specific settings of a command line. Nothing is fetched, by a
# program of the repository, for a partial clone.
_GIT_ENVIRON = ("GIT_OPTIONAL_LOCKS=0", "GIT_NO_LAZY_FETCH=1", "GIT_ALLOW_PROTOCOL=none", "GIT_TERMINAL_PROMPT=0")
# A repository can name programs in its settings, and whoever wrote the folder may not be this user.
_GIT_SETTINGS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "core.pager=cat", "diff.autoRefreshIndex=false")
_FILTER = re.compile(r"filter\.([^=\n]+)\.[^.=\n]+")
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # git's name for a folder without files
_DIFF_PATIENCE_S = 20.0
_MOST_DIFF = 1_000_000  # bytes that are stored
_MOST_READ = 16_000_000  # bytes that git may write, most of which is left out
# no program of the repository's settings, and one form whatever the user's settings are
_DIFF = (
    "diff --no-ext-diff --no-textconv --no-color --no-relative --ignore-submodules=dirty"
    " --src-prefix=a/ --dst-prefix=b/"
)


class SourceState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a git repository."""

    commit: str  # full name of the commit that is checked out; empty before the first
    branch: str = ""  # its branch; empty if none is checked out
    changed: int = 0  # number of tracked files that differ from the commit
    untracked: int = 0  # number of files and folders that git neither tracks nor ignores

    @property
    def clean(self) -> bool:
        """Whether all tracked files are as in the commit."""
        return self.changed == 0


def ask_git(folder: str, helpers: Helpers | None = None) -> SourceState | None:
    """Ask git for the state of the repository around a folder, 5 seconds at most.

    Changes within submodules do not count, as their own settings could name programs. Returns None without git, without
    a repository or an answer in time.
    """
    command = ("status", "--porcelain=v2", "--branch", "--ignore-submodules=dirty", "-z")
    try:
        ended = _run_git(folder, command, limit_s=_PATIENCE_S, most_out=_MOST_STATUS, helpers=helpers)
    except OSError:
        return None
    # if the parent reaps all of its children, a failure has status 0 and no lines
    is_state = ended.status == 0 and ended.out.startswith(b"# branch.oid ")
    return parse_status(ended.out.decode(errors="replace")) if is_state else None


def _run_git(
    folder: str, command: Sequence[str], *, limit_s: float, most_out: int, helpers: Helpers | None = None
) -> HelperEnd:
    """Run git in a folder, without any program that its settings name, and without a change of the index."""
    git = ("env", *_GIT_ENVIRON, "git", "-C", folder or ".")
    ask = (*git, "config", "-z", "--name-only", "--get-regexp", r"^filter\.")
    listed = run_helper(ask, limit_s=limit_s, most_out=_MOST_NAMES, helpers=helpers)
    names = listed.out.decode(errors="surrogateescape").split("\0")[:-1]
    found = [_FILTER.fullmatch(name) for name in names if name.count(".") > 1]
    if listed.status is None or listed.is_cut or None in found:
        raise OSError("git's filters cannot be turned off")
    filters = sorted({each[1] for each in found if each})
    # An empty command is none, and a filter that is not required passes content on.
    off = ("clean=", "smudge=", "process=", "required=false")
    settings = [*_GIT_SETTINGS, *(f"filter.{name}.{each}" for name in filters for each in off)]
    flags = [word for setting in settings for word in ("-c", setting)]
    return run_helper((*git, *flags, *command), limit_s=limit_s, most_out=most_out, helpers=helpers)


def read_diff(folder: str, source: SourceState) -> str:
    """Return how tracked files differ from the commit, as `git diff` prints it, with stars in place of credentials.

    Files beyond 1 MB in all are left out; the last line has their number. Raises `OSError` where git gives no answer.
    """
    command = [*_DIFF.split(), source.commit or _EMPTY_TREE, "--"]
    ended = _run_git(folder, command, limit_s=_DIFF_PATIENCE_S, most_out=_MOST_READ)
    if ended.status is None:
        raise OSError(f"git diff has not ended after {show_limit(_DIFF_PATIENCE_S)}")
    if ended.status != 0 and not ended.is_cut:
        raise OSError(f"git diff ended with status {ended.status}")
    files = re.split(r"(?m)^(?=diff --git )", ended.out.decode(errors="replace"))
    # A file with its first line alone has another time, and the same content: the index is not refreshed.
    return _bounded_diff([each for each in files if "\n" in each.rstrip("\n")], is_cut=ended.is_cut)


def _bounded_diff(files: Sequence[str], *, is_cut: bool) -> str:
    kept: list[str] = []
    size = 0
    for each in files[:-1] if is_cut else files:
        if size + len(each.encode()) > _MOST_DIFF:
            continue
        shown = hide_in_diff(each)
        kept.append(shown)
        size += len(shown.encode())
    left_out = len(files) - len(kept)
    if left_out:
        more = " or more" if is_cut else ""
        kept.append(f"# left out: {left_out}{more} changed files, beyond {show_size(_MOST_DIFF)}\n")
    return "".join(kept)


def parse_status(text: str) -> SourceState:
    """Return the state that `git status --porcelain=v2 --branch -z` prints; see git-status(1)."""
    commit = branch = ""
    changed = untracked = 0
    entries = iter(text.split("\0"))
    for entry in entries:
        if entry.startswith("# branch.oid "):
            commit = entry.split(" ", 2)[2]
        elif entry.startswith("# branch.head "):
            branch = entry.split(" ", 2)[2]
        elif entry[:2] in ("1 ", "2 ", "u "):
            changed += 1
            if entry.startswith("2 "):
                _ = next(entries, "")  # the old name of a renamed file
        elif entry.startswith("? "):
            untracked += 1
    return SourceState(
        commit="" if commit == "(initial)" else commit,
        branch="" if branch == "(detached)" else branch,
        changed=changed,
        untracked=untracked,
    )


def installed_versions() -> dict[str, str]:
    """Return versions of Python and of the packages that decide what a run computes, without importing them."""
    from importlib.metadata import PackageNotFoundError, version  # 15 ms, which a launch spends in a thread

    found = {"python": platform.python_version(), _DISTRIBUTION: accel.__version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def conflicting_package(folder: Path | None = None) -> str | None:
    """Return a warning if the distribution `accel` is installed in the same folder: both write `accel/` there."""
    folder = folder or Path(accel.__path__[0]).parent
    # Names of files, as importlib.metadata takes 15 ms, and would find a stranger in folders where it harms nobody.
    found = [path.name for path in folder.iterdir() if _CONFLICTING.match(path.name)]
    if not found:
        return None
    return (
        f"{folder} has {found[0]}, of another distribution: `accel` and `{_DISTRIBUTION}` share the folder accel/. "
        f"Run `pip uninstall accel`, then `pip install --force-reinstall --no-deps {_DISTRIBUTION}`"
    )


EventKind = Literal["start", "restart", "hosts", "stop", "notice", "hang", "end"]


class Setting(msgspec.Struct, frozen=True):
    """A setting."""

    value: str  # its value, as its flag takes it
    source: str  # the flag, variable, file or default that set it


class LaunchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a launch."""

    time_s: float  # its time, in seconds since the epoch
    # Start or restart of all ranks; hosts that came or went; a request to stop, or another signal; a report of
    # silent ranks; the end.
    kind: EventKind
    text: str = ""  # its report


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of an attempt."""

    rank: int  # its rank
    status: int | None = None  # exit status, or minus the number of the signal that killed it; None while it runs
    ended_s: float | None = None  # time at which its end was noticed, in seconds since the epoch; None while it runs
    text: str = ""  # its error in one line; empty for none


class RankError(msgspec.Struct, frozen=True, kw_only=True):
    """The error of the rank that failed first."""

    rank: int  # its rank
    status: int  # exit status, or minus the number of the signal that killed it
    exception: str = ""  # the exception's class; empty if the process left no record
    message: str = ""  # the exception's text
    location: str = ""  # `file:line` of the innermost frame of the user's code
    traceback: str = ""  # its traceback, or the dump of a crash
    text: str = ""  # its end in one line; empty in records of older versions


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of all ranks of a host."""

    started_s: float  # time of the start, in seconds since the epoch
    ranks: tuple[RankState, ...]  # ranks of this host
    hosts: tuple[str, ...] = ()  # hosts of the launch, in order of their ranks; empty if there is one
    ended_s: float | None = None  # time of the end; None while it runs
    error: RankError | None = None  # the error that ended it; None without one


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A launch on one host."""

    format: int = 1  # version of this record
    host: str  # name of the host
    pid: int  # process of the launcher
    command: tuple[str, ...]  # the script and its arguments, without credentials
    folder: str  # working directory
    started_s: float  # time of the start, in seconds since the epoch
    settings: dict[str, Setting] = {}  # each setting with its source
    versions: dict[str, str] = {}  # versions of Python and packages
    source: SourceState | None = None  # state of the script's git repository; None if there is none
    attempts: tuple[Attempt, ...] = ()  # starts of all ranks, the current one last; of many, the newest 100
    events: tuple[LaunchEvent, ...] = ()  # events in order of time; of many, the first 250 and the newest 250
    log_dir: str = ""  # folder of the ranks' output; empty for none
    restarts: int = 0  # number of times that all ranks have started again after a failure
    checkpoint: str = ""  # newest checkpoint that a rank wrote or resumed from; empty for none
    ended_s: float | None = None  # time of the end; None while it runs, or if the launcher was killed
    status: int | None = None  # exit status of the launch; None while it runs
    stopped: str = ""  # name of the signal that stopped it; empty for none
    damaged: int = 0  # number of lines of its log that could not be read; a last line may be torn


class LaunchLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="launch"):
    """A line of a launch's log: its settings, code and end, as far as they are known; a later one replaces it."""

    launch: LaunchRecord


class AttemptLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="attempt"):
    """A line of a launch's log: an attempt so far; a later one with the same start replaces it."""

    attempt: Attempt


class EventLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="event"):
    """A line of a launch's log: one event more."""

    event: LaunchEvent


LogLine = LaunchLine | AttemptLine | EventLine

_MOST_ATTEMPTS = 100
_MOST_EVENTS = 250  # of the first, and of the newest


def fold_log(log: Iterable[bytes]) -> LaunchRecord | None:
    """Return the record that a launch's log adds up to; None for other content.

    Args:
        log: its lines with their newlines. A line that cannot be read is skipped and counted, as is a torn last one.
    """
    decoder = msgspec.json.Decoder(LogLine)
    damaged = 0
    restarts = 0
    launch = None
    attempts: deque[Attempt] = deque(maxlen=_MOST_ATTEMPTS)
    first: list[LaunchEvent] = []
    newest: deque[LaunchEvent] = deque(maxlen=_MOST_EVENTS)
    for text in log:
        try:
            line: LogLine | None = decoder.decode(text) if text.endswith(b"\n") else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            line = None
        match line:
            case None:
                damaged += 1
            case LaunchLine():
                launch = line.launch
            case AttemptLine():
                if attempts and attempts[-1].started_s == line.attempt.started_s:
                    _ = attempts.pop()
                attempts.append(line.attempt)
            case EventLine():
                restarts += line.event.kind == "restart"
                if len(newest) == _MOST_EVENTS and len(first) < _MOST_EVENTS:
                    first.append(newest[0])
                newest.append(line.event)
    if launch is None:
        return None
    return replace(launch, attempts=tuple(attempts), events=(*first, *newest), restarts=restarts, damaged=damaged)


def launch_file(host: str, pid: int, started_s: float) -> str:
    """Return the name of a launch's log inside a run's folder; no two launches share one."""
    began = datetime.fromtimestamp(started_s, UTC).strftime("%Y%m%dT%H%M%S.%f")  # containers may share host and pid
    return f"{LAUNCHES}/{began}-{re.sub(r'[^0-9A-Za-z.-]', '_', host)}-{pid}.jsonl"


def read_launches(folder: Path) -> list[LaunchRecord]:
    """Return the records of the launches of a run in order of their start; files of other kinds are left out."""
    return _read_launches(folder, [])


def _read_launches(folder: Path, problems: list[str]) -> list[LaunchRecord]:
    found: list[LaunchRecord] = []
    for path, lines in read_files(folder, LAUNCHES, problems):
        before = len(problems)
        if path.suffix == ".json":  # before logs had lines, a file was one record
            launch = read_json(path, LaunchRecord, within=folder)
            is_whole = bool(problem_of_json(path, LaunchRecord, within=folder))
        else:
            start = next(lines, b"")
            launch = fold_log(chain([start] if start else [], lines))
            is_whole = start.endswith(b"\n")
        if launch is not None:
            found.append(launch)
        elif is_whole and len(problems) == before:  # a line that is still being written is no problem
            problems.append(f"{LAUNCHES}/{path.name} is no log of a launch")
    return sorted(found, key=lambda each: (each.started_s, each.host))


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    format: int = 1  # version of this record
    id: str  # identity of the run, the same after each resume
    project: str  # project of the run
    started_s: float  # time of the first start, in seconds since the epoch
    name: str = ""  # its name for people; empty for none
    resumed_s: tuple[float, ...] = ()  # times at which the run resumed
    world_size: int = 1  # number of ranks at the last start
    host: str = ""  # name of the host of rank 0 at the last start; empty in records of older versions
    pid: int = 0  # process of rank 0 there; 0 likewise
    config: dict[str, Any] = {}  # its configuration, without credentials
    hidden: tuple[str, ...] = ()  # dotted names of the configuration's values that were credentials
    settings: dict[str, Setting] = {}  # settings of the context with their sources
    versions: dict[str, str] = {}  # versions of Python and packages at the last start
    source: SourceState | None = None  # state of the script's git repository at the last start; None if there is none
    # `code.diff` if that file has the differences of tracked files from the commit, or the reason why there is
    # none; empty if it was not asked for.
    code: str = ""
    status: Literal["running", "finished", "failed"] = "running"  # state of the run as the training loop left it
    error: str = ""  # error of the loop; empty without one
    lost: str = ""  # records that files of the run lack, by tracker; empty for none
    ended_s: float | None = None  # time of the end; None while it runs, or if the process was killed


def read_run(folder: Path, launches: Sequence[LaunchRecord] | None = None) -> RunRecord | None:
    """Return the record of a run, with the error that ended it from the launch's log; None if the folder has none."""
    run = read_json(folder / RUN, RunRecord, within=folder)
    return run and _with_error(run, read_launches(folder) if launches is None else launches)


class FolderRecords(NamedTuple):
    """The records in a run's folder."""

    run: RunRecord | None  # its record, as `read_run` returns it
    launches: list[LaunchRecord]  # its launches, as `read_launches` returns them
    problems: list[str]  # records that cannot be read, with the reason, a line each


def read_records(folder: Path) -> FolderRecords:
    """Return the records in a run's folder, and which of them cannot be read."""
    problems: list[str] = []
    launches = _read_launches(folder, problems)
    run = read_run(folder, launches)
    if run is None and (problem := problem_of_json(folder / RUN, RunRecord, within=folder)):
        problems.insert(0, f"{RUN} cannot be read: {problem}")
    return FolderRecords(run, launches, problems)


def _with_error(run: RunRecord, launches: Sequence[LaunchRecord]) -> RunRecord:
    if run.status == "finished":
        return run
    # rank 0 wrote it: its own error may only report a lost peer, and a killed rank 0 writes none
    last_s = max((run.started_s, *run.resumed_s))
    for launch in launches:
        for attempt in launch.attempts:
            first, ended_s = attempt.error, attempt.ended_s
            if first is None or not first.text or ended_s is None or not attempt.started_s <= last_s <= ended_s:
                continue  # the run continued in another attempt
            has_own = run.status == "failed" and first.rank == 0
            if not has_own and any(each.rank == 0 for each in attempt.ranks):
                text = f"rank {first.rank} {first.text}"
                run = replace(run, status="failed", error=text, ended_s=run.ended_s or ended_s)
    return run
