# SPDX-License-Identifier: Apache-2.0
"""`tracking`: the trackers of a run, opened and finished on every rank, with its configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from accel.alerts import Alerts
from accel.comm import Call, agreed_values, call_site, exchange_values
from accel.context import DistContext, context_first
from accel.errors import CheckpointError, ConfigError, TrackerError
from accel.errors._checks import check_count, check_kind
from accel.run_folder import hide_in_config
from accel.trackers._system import System, check_system, system_tracker
from accel.trackers._tracked_run import SavedRun, TrackedRun, run_file
from accel.trackers._tracker import Ending, Ranks, Run, Tracker


def plain_config(config: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a configuration that may be stored, and the dotted names of the credentials in it, replaced by stars.

    Mappings, Structs, dataclasses and objects with attributes become values as JSON has them, other objects their text.
    """
    if config is None:
        return {}, ()
    fields: object
    is_dataclass = dataclasses.is_dataclass(config) and not isinstance(config, type)
    if isinstance(config, Mapping | msgspec.Struct) or is_dataclass:
        fields = cast(object, config)
    elif hasattr(config, "__dict__") and not isinstance(config, type) and not callable(config):
        fields = vars(config)
    else:
        raise ConfigError(
            "the value is not a configuration",
            expected="a mapping, a Struct, a dataclass or a Namespace",
            got=type(config).__name__,
            where="tracking, config=",
        )
    plain = cast("dict[str, Any]", msgspec.to_builtins(fields, str_keys=True, enc_hook=str))
    return hide_in_config(plain)


class Trackers:
    """The trackers of a run, from `tracking`. An item for `save_state` and `resume`, such as `"trackers": trackers`.

    A checkpoint holds the run's identity and its last logged step. It commits once local files hold all steps up to
    that. A run that loads it is the same run in trackers that can resume, and local files are cut back to that step.

    Args:
        tracked: the run and its writers.
        strict, debug: as for `tracking`.
    """

    def __init__(self, tracked: TrackedRun, *, strict: bool, debug: bool) -> None:
        self.tracked = tracked
        self.strict = strict
        self.debug = debug

    def __repr__(self) -> str:
        return f"Trackers({', '.join(tracker.name for tracker in self.tracked.all)}; run {self.run.name})"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the trackers for which this rank writes, as `get_tracker` takes them."""
        return self.tracked.names

    @property
    def run(self) -> Run:
        """The run."""
        return self.tracked.run

    def state_dict(self) -> dict[str, Any]:
        """Return the run's identity and last logged step, once local files hold all steps up to it.

        Raises:
            CheckpointError: a local file lacks some of them, or could not be written in time.
        """
        return msgspec.structs.asdict(self.tracked.save())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the run of a checkpoint after its last step. Trackers that have started are finished.

        Raises:
            CheckpointError: no saved run, or one of another project; or a local file is still being written.
        """
        try:
            saved = msgspec.convert(state_dict, SavedRun)
        except msgspec.ValidationError as error:
            raise CheckpointError(
                "the run of trackers is not valid", got=str(error), where="load_state_dict"
            ) from error
        self.tracked.load(saved)


_ROOM_BYTES = 64 * 2**20
_FINISH_S = 30.0
_FINISH_FAILED_S = 5.0
_LIVE_S = 60.0


class _Opening(msgspec.Struct, frozen=True):
    """Identity of a new run, and the lowest steps of earlier runs by tracker; rank 0's count. Process and host of each
    rank."""

    id: str
    name: str
    first_steps: dict[str, int]
    node: int
    pid: int


@context_first
@contextlib.contextmanager
def tracking(
    ctx: DistContext,
    project: str,
    *,
    to: Sequence[Tracker],
    config: object = None,
    dir: str | os.PathLike[str] | None = None,
    run: str | None = None,
    code: bool = False,
    system: bool | System | None = None,
    strict: bool = False,
    debug: bool = False,
    room_bytes: int = _ROOM_BYTES,
    finish_s: float = _FINISH_S,
) -> Generator[Trackers]:
    """Give the trackers of a run, and finish them at the end of the block. A collective at the start.

    If the block raises, trackers end with the status "failed" and the error. Nothing else is closed. Each tracker has a
    background thread on the ranks that write: one that fails or hangs delays no step. Lost records are counted, and
    reported when the block ends.

    Args:
        ctx: the context.
        project: name of the project.
        to: the trackers, such as `[accel.trackers.jsonl(), accel.trackers.wandb(mode="offline")]`.
        config: configuration to store: a mapping, Struct, dataclass or Namespace; rank 0's. Credentials become stars.
        dir: folder of the run's files, made if it is missing; best the one given to `save_state`.
        run: name of the run for people; a date and part of its identity by default.
        code: whether `code.diff` in the folder has how tracked files differ from the commit, 1 MB at most. Credentials
            become stars.
        system: whether the first rank of each host samples the machine into `system-NODE.jsonl` of the folder, each 5
            seconds or as `accel.trackers.System(every_s=)` has it; None for the setting `system` (`accel launch
            --system`). Extra: `system`.
        strict: whether lost records raise `TrackerError`, on every rank at the same `log`. Each `log` is then a
            collective of one small message.
        debug: whether each `log` compares the values of all ranks. A collective that waits for the device.
        room_bytes: bytes of records that may wait for each tracker; the oldest beyond it are dropped.
        finish_s: seconds to wait for all trackers at the end; at most 5 after an exception.

    Returns:
        A context manager that gives the `Trackers`.

    Raises:
        ConfigError: an argument out of range, or a folder that cannot be written; on every rank.
        MissingExtraError: the package of a tracker is missing; on every rank.
        TrackerError: records were lost and `strict` is set; on every rank.

    Examples:
        >>> with accel.tracking(ctx, "demo", to=[accel.trackers.jsonl()], dir="runs/demo") as trackers:
        ...     accel.log(ctx, trackers, {"loss": 0.5}, step=1)
        >>> Path("runs/demo/metrics.jsonl").read_text()[:22]
        '{"step":1,"loss":0.5,"'
    """
    trackers = init_trackers(
        ctx,
        project,
        to=to,
        config=config,
        dir=dir,
        run=run,
        code=code,
        system=system,
        strict=strict,
        debug=debug,
        room_bytes=room_bytes,
    )
    try:
        yield trackers
    except BaseException as error:
        end_trackers(ctx, trackers, error=error, finish_s=finish_s)
        raise
    end_trackers(ctx, trackers, finish_s=finish_s)


@context_first
def init_trackers(
    ctx: DistContext,
    project: str,
    *,
    to: Sequence[Tracker],
    config: object = None,
    dir: str | os.PathLike[str] | None = None,
    run: str | None = None,
    code: bool = False,
    system: bool | System | None = None,
    strict: bool = False,
    debug: bool = False,
    room_bytes: int = _ROOM_BYTES,
) -> Trackers:
    """Return the trackers of a run; pair it with `end_trackers`. A collective. Arguments and errors: see `tracking`.

    A tracker starts with its first record, so that a checkpoint loaded before decides which run is resumed.
    """
    if isinstance(to, str) or not isinstance(to, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        fix = f"Pass a list of trackers: {_line_of(to)}"
        raise ConfigError("the value is not a list of trackers", got=type(to).__name__, where="tracking, to=", fix=fix)
    names = [tracker.name for tracker in to if isinstance(tracker, Tracker)]  # pyright: ignore[reportUnnecessaryIsInstance]
    detail = f"project {project!r}, to {', '.join(names)}, strict {strict}, debug {debug}"
    folder = None if dir is None else Path(os.path.abspath(dir))  # trackers start later, maybe elsewhere
    new = _new_run(ctx, project, run, folder)
    samples = _samples(ctx, system)
    mine = list[Tracker]()
    stored: tuple[Mapping[str, Any], tuple[str, ...]] = ({}, ())

    def open_places() -> _Opening:
        nonlocal stored
        _check(project, to, run, room_bytes)
        if code and dir is None:
            fix = "Name the folder of the run: dir=."
            raise ConfigError("the changes of the code have no folder", where="tracking, code=", fix=fix)
        if dir is not None and ctx.is_main_process:
            _make_folder(os.fspath(dir))
        stored = plain_config(config)
        mine.extend(tracker for tracker in to if _writes(ctx, tracker.ranks))
        for tracker in mine:
            if tracker.check is not None:
                _ = tracker.check(new)
        steps = {each.name: step for each in mine if each.first_step and (step := each.first_step(new)) is not None}
        if samples is not None:
            check_system(new)
        return _Opening(new.id, new.name, steps, ctx.node_rank, os.getpid())

    call = Call("tracking", detail, call_site())
    openings = agreed_values(ctx.comm, call, open_places, _Opening)
    opening = openings[0]
    if folder is not None and ctx.is_main_process:
        mine.append(run_file(ctx, stored[1], code=code))
    if samples is not None and ctx.is_local_main_process:
        pids = [each.pid for each in openings if each.node == ctx.node_rank]
        mine.append(system_tracker(samples, node=ctx.node_rank, pids=pids))
    run_now = msgspec.structs.replace(new, id=opening.id, name=opening.name)
    alerts = Alerts() if ctx.settings.alerts == "none" else ctx.settings.alerts
    tracked = TrackedRun(run_now, stored[0], to, mine, opening.first_steps, alerts=alerts, room_bytes=room_bytes)
    return Trackers(tracked, strict=strict, debug=debug)


@context_first
def end_trackers(
    ctx: DistContext, trackers: Trackers, *, error: BaseException | None = None, finish_s: float = _FINISH_S
) -> None:
    """Finish the trackers, and report the records that they lost. Ending twice does nothing.

    A collective if the trackers are strict and there is no error; else no communication. The context stays open.

    Args:
        ctx: the context.
        trackers: from `init_trackers`.
        error: exception that ended the loop; trackers get the status "failed" and its text.
        finish_s: seconds to wait for all trackers; at most 5 with an error.

    Raises:
        TrackerError: records were lost and the trackers are strict; on every rank.
    """
    if error is not None:
        text = f"{type(error).__name__}: {error}"
        _ = trackers.tracked.end(Ending("failed", text), min(finish_s, _FINISH_FAILED_S))
        return
    lost = trackers.tracked.end(Ending(), finish_s)
    if trackers.strict:
        raise_lost(exchange_values(ctx.comm, Call("end_trackers"), lost, str), "end_trackers")


def get_tracker(trackers: Trackers, name: str, *, patience_s: float = _LIVE_S) -> Any:
    """Return a tracker's own run object, such as wandb's run. No communication.

    It belongs to the tracker's thread. Clients of wandb and MLflow take calls from several threads.

    Args:
        trackers: the trackers.
        name: name of the tracker.
        patience_s: seconds to wait for its start.

    Returns:
        The object; None on ranks that do not write to it.

    Raises:
        ConfigError: no such tracker, or it did not start in time.
    """
    return trackers.tracked.live(name, patience_s)


def raise_lost(lost: Sequence[str], where: str) -> None:
    """Raise `TrackerError` if any rank has lost records; an empty text is none."""
    for rank, text in enumerate(lost):
        if text:
            raise TrackerError(
                "a tracker lost records, and the trackers are strict",
                got=f"on rank {rank}: {text}",
                where=where,
                fix="Pass strict=False to train on without them.",
            )


def _samples(ctx: DistContext, system: object) -> System | None:
    given = ctx.settings.system if system is None else system
    if not isinstance(given, bool | System):
        expected = "True, False or accel.trackers.System(every_s=5.0)"
        raise ConfigError(
            "the samples of the machine are not valid", expected=expected, got=repr(given), where="tracking, system="
        )
    return (System() if given else None) if isinstance(given, bool) else given


def _new_run(ctx: DistContext, project: str, run: str | None, folder: Path | None) -> Run:
    ident = uuid.uuid4().hex
    return Run(
        project=project,
        id=ident,
        name=run or f"{time.strftime('%Y%m%d-%H%M%S')}-{ident[:6]}",
        folder=folder,
        rank=ctx.rank,
        world_size=ctx.world_size,
    )


def _writes(ctx: DistContext, ranks: Ranks) -> bool:
    return ranks == "every" or (ranks == "host" and ctx.is_local_main_process) or ctx.is_main_process


def _make_folder(folder: str) -> None:
    """Make the folder of a run's files; raise `ConfigError` if it cannot be written, or is not on this machine."""
    where = "tracking, dir="
    if "://" in folder:
        fix = "Name a local folder; trackers that store files elsewhere take artifacts."
        raise ConfigError("a run's files are local", got=folder, where=where, fix=fix)
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write {folder!r}")
    except OSError as error:
        fix = "Name a folder that can be written."
        raise ConfigError("the run's folder cannot be written", got=str(error), where=where, fix=fix) from error


def _line_of(given: object) -> str:
    """Return `to=` with the tracker that somebody has named, by a text or by its function; else with `jsonl`."""
    from accel.trackers._by_name import TRACKERS  # which imports this file

    name = given if isinstance(given, str) else getattr(given, "__name__", "")
    return f"to=[accel.trackers.{name if name in TRACKERS else 'jsonl'}()]"


def _check(project: str, to: Sequence[Tracker], run: str | None, room_bytes: int) -> None:
    for tracker in to:
        expected = "records such as accel.trackers.jsonl()"
        fix = f"Call the tracker's function: {_line_of(tracker)}"
        check_kind(tracker, Tracker, "the value is not a tracker", expected=expected, where="tracking, to=", fix=fix)
    names = [tracker.name for tracker in to]
    if len(set(names)) < len(names):
        fix = 'Give one another name: msgspec.structs.replace(tracker, name="second").'
        raise ConfigError("two trackers have one name", got=", ".join(names), where="tracking, to=", fix=fix)
    for text, where in ((project, "project"), (run, "run=")):
        if text is not None and (not isinstance(text, str) or not text or not text.isprintable()):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "the name is not valid", expected="printable text", got=repr(text), where=f"tracking, {where}"
            )
    check_count(room_bytes, "no room for records", where="room_bytes=")
