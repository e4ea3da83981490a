# SPDX-License-Identifier: Apache-2.0
"""Files of a run's folder: their names, JSON that a reader finds whole or not at all, and lines of metrics."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast
from urllib.parse import quote, unquote

import msgspec

from accel.errors import CheckpointError, ConfigError
from accel.opening import open_regular, read_regular

T = TypeVar("T")


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Write a value as JSON to a file that only this process writes, so that a reader finds all of it or nothing."""
    replace_file(path, msgspec.json.encode(value))


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file that only this process writes by one rename, so that a reader finds all of it or nothing."""
    partial = f"{os.fspath(path)}.partial"
    with open(partial, "wb") as file:
        _ = file.write(content)
    os.replace(partial, path)


def append_rest(path: str | os.PathLike[str], content: bytes | bytearray) -> None:
    """Append what a file lacks of its content so far, whole lines at once; one process alone writes it.

    After an error the next call continues where the file ends.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        # Only this process appends, so its size gives the rest, also after a full disk or a removal.
        written = os.fstat(file).st_size
        while written < len(content):
            written += os.write(file, content[written:])
    finally:
        os.close(file)


def read_json(path: str | os.PathLike[str], type_: type[T], *, within: Path | None = None) -> T | None:
    """Return the value of a file of `write_json`; None if there is nothing, or nothing of that type.

    With `within`, a link that leads out of that folder is not followed.
    """
    return _decoded(path, type_, within)[0]


def problem_of_json(path: str | os.PathLike[str], type_: type[Any], *, within: Path | None = None) -> str:
    """Return why a file has no value of that type; empty if it has one, or if there is no file."""
    return _decoded(path, type_, within)[1]


def _decoded(path: str | os.PathLike[str], type_: type[T], within: Path | None) -> tuple[T | None, str]:
    """The value of a file, and why it has none of that type."""
    try:
        return msgspec.json.decode(read_regular(path, within=within), type=type_), ""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        return None, error.strerror or str(error)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return None, f"{type(error).__name__}: {error}"


@contextmanager
def noted(problems: list[str], what: str) -> Generator[None]:
    """Go on behind the block where a file cannot be read, with a line more in `problems`."""
    try:
        yield
    except OSError as error:
        problems.append(f"{what} cannot be read: {error.strerror or error}")
    except CheckpointError as error:
        problems.append(f"{what} cannot be read: {error.problem}")


def read_files(folder: Path, name: str, problems: list[str]) -> Iterator[tuple[Path, Iterator[bytes]]]:
    """Yield the files of JSON in a folder of a run's folder, in order of name, and their lines with their newlines.

    Nothing is yielded without such a folder. What cannot be read is a line more in `problems`; the lines before count.
    """
    inside: list[str] = []
    with noted(problems, name), suppress(FileNotFoundError, NotADirectoryError):
        inside = sorted(os.listdir(folder / name))
    for each in inside:
        if each.endswith((".json", ".jsonl")):
            yield folder / name / each, _read_lines(folder, f"{name}/{each}", problems)


def _read_lines(folder: Path, name: str, problems: list[str]) -> Iterator[bytes]:
    with (
        noted(problems, name),
        suppress(FileNotFoundError),  # it may go since it was listed
        open(open_regular(folder / name, within=folder), "rb") as file,
    ):
        while line := file.readline(MOST_LINE + 1):
            if len(line) > MOST_LINE:
                raise OSError(errno.EFBIG, _TOO_LONG)
            yield line


METRICS = "metrics.jsonl"  # a line for each logged step
RUN = "run.json"  # the record of the run
LAUNCHES = "launches"  # a folder with a log for each launch and host
CODE = "code.diff"  # how tracked files differ from the commit
PROFILE = "profile"  # a folder with a trace for each rank
MEDIA = "media"  # a folder of images, tables, figures, texts and histograms
RUN_EVENT = "accel.run"  # audit event by which a rank announces the run's folder to its launcher


MOST_LINE = 2**20  # bytes of a line
_TOO_LONG = f"a line of more than {MOST_LINE} bytes"
_CHUNK = 2**24
_TAIL = 256  # bytes before the position that must still be the same


class Position(NamedTuple):
    """A position in a file behind the lines that have been read."""

    offset: int = 0  # bytes before it
    tail: bytes = b""  # the last of these bytes, by which another content of the same length is noticed


class NewLines(NamedTuple):
    """Lines behind a position."""

    lines: list[bytes]  # whole lines, without their newlines
    position: Position  # position behind them
    # Whether the file was cut back or replaced: lines of earlier reads no longer count, and these begin with the
    # file's first.
    restarted: bool


def read_new(
    path: str | os.PathLike[str],
    position: Position = Position(),  # noqa: B008 - a frozen value
    *,
    within: Path | None = None,
) -> NewLines:
    """Return whole lines behind a position, some 16 MiB at most; no lines once all have been read.

    A torn last line stays for the next read. A file that does not exist has no lines. With `within`, a link that leads
    out of that folder is not followed. Raises `OSError` where a line does not end within 1 MiB.
    """
    try:
        file = open(open_regular(path, within=within), "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return NewLines([], Position(), position.offset > 0)
    with file:
        _ = file.seek(max(0, position.offset - len(position.tail)))
        restarted = file.read(len(position.tail)) != position.tail
        if restarted:
            position = Position()
            _ = file.seek(0)
        data = file.read(_CHUNK)
    end = data.rfind(b"\n") + 1
    if not end and len(data) > MOST_LINE:
        raise OSError(errno.EFBIG, _TOO_LONG, os.fspath(path))
    data = data[:end]
    moved = Position(position.offset + len(data), (position.tail + data)[-_TAIL:])
    return NewLines(data.splitlines() if b"\r" not in data else data.split(b"\n")[:-1], moved, restarted)


_STEP, _TIME = "step", "time"
_TEXTS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one step."""

    step: int  # optimizer step
    values: dict[str, float]  # numbers by name
    time: dict[str, float] = {}  # readings of clocks by name, in seconds, or rates such as samples per second


def encode_line(step: int, values: Mapping[str, float], time: Mapping[str, float] | None = None) -> bytes:
    """Return a line with its newline; other values than numbers, or named "step" or "time", are a `ConfigError`."""
    for taken in values.keys() & {_STEP, _TIME}:
        raise ConfigError("a metric has a name that the line uses itself", got=repr(taken), fix="Rename the metric.")
    line = {
        _STEP: step,
        **{name: _encodable(name, value) for name, value in values.items()},
        _TIME: {name: _encodable(name, value) for name, value in (time or {}).items()},
    }
    return msgspec.json.encode(line) + b"\n"


def decode_line(line: bytes) -> MetricsLine | None:
    """Return the values of a line; None if it is damaged. Values of other kinds than numbers are left out."""
    if len(line) > MOST_LINE:
        return None
    try:
        found: Any = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    values = cast("dict[str, Any]", found)
    step = values.pop(_STEP, None)
    time = values.pop(_TIME, None)
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    return MetricsLine(step=step, values=_numbers(values), time=_numbers(time))


def _encodable(name: str, value: Any) -> float | str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            "the value is not a number",
            expected="an int or a float",
            got=type(value).__name__,
            where=f"the metric {name!r}",
        )
    if isinstance(value, int) or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _numbers(found: Any) -> dict[str, float]:
    values = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, str):
            value = _TEXTS.get(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = value
    return numbers


MediaKind = Literal["images", "figure", "table", "text", "histogram"]

_SUFFIXES: Mapping[MediaKind, str] = {
    "images": "png",
    "figure": "png",
    "table": "json",
    "text": "txt",
    "histogram": "histogram.json",
}
_MEDIA_NAME = re.compile(r"(.+)-(\d{8,15})(?:-(\d{1,9}))?\.(png|json|txt|histogram\.json)", re.ASCII | re.DOTALL)


class MediaName(NamedTuple):
    """The name of a file of media, `NAME-STEP.SUFFIX`, or `NAME-STEP-AT.png` for images."""

    name: str  # name in the call of `log_images` or its kin
    kind: MediaKind  # kind of media
    step: int  # step of the call
    at: int = 0  # number among the images of the call; 0 for other media

    @property
    def file(self) -> str:
        """The file's name; characters of `name` that folders or shells use are percent-encoded."""
        name = re.sub(r"[^\w.-]|^\.", _percent, self.name)
        number = f"-{self.at}" if self.kind == "images" else ""
        return f"{name}-{self.step:08}{number}.{_SUFFIXES[self.kind]}"


def _percent(found: re.Match[str]) -> str:
    return "%2E" if found[0] == "." else quote(found[0], safe="", errors="backslashreplace")


def parse_media(file: str) -> MediaName | None:
    """Return the parts of a file's name; None for another file."""
    found = _MEDIA_NAME.fullmatch(file)
    if found is None:
        return None
    name, step, at, suffix = found.groups()
    kinds: dict[str, MediaKind] = {"json": "table", "txt": "text", "histogram.json": "histogram"}
    kind = kinds.get(suffix, "figure" if at is None else "images")
    if at is not None and kind != "images":
        return None
    return MediaName(unquote(name), kind, int(step), int(at or 0))
