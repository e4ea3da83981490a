# SPDX-License-Identifier: Apache-2.0
"""Folders of runs as their writers leave them, made by hand."""

from __future__ import annotations

import math
import random
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from accel.report import FollowedRun, RunData, StoredCheckpoint
from accel.run_folder import (
    Attempt,
    AttemptLine,
    EventLine,
    LaunchEvent,
    LaunchLine,
    LaunchRecord,
    MediaKind,
    MediaName,
    RankError,
    RankState,
    RunRecord,
    Setting,
    SourceState,
    encode_line,
    launch_file,
    write_json,
)

START_S = 1_795_000_000.0
TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 41, in train
    loss = step(batch)
{error}
"""


def look_at(name: str, folder: Path, checkpoints: Sequence[StoredCheckpoint] = (), profile: str = "") -> RunData:
    """The run in a folder, with these checkpoints and this profile."""
    return FollowedRun(name, folder, lambda _: checkpoints, lambda _: profile).look()


def write_metrics(folder: Path, steps: int, *, seed: int = 0, rate: float = 0.02, bad: int | None = None) -> None:
    """A file of metrics: loss, learning rate and gradient norm, with values at `bad` that are not finite."""
    noise = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("wb") as file:
        for step in range(0, steps, 10):
            loss = 0.4 + 2.2 * math.exp(-rate * step) + 0.08 * noise.random()
            values = {
                "loss": math.nan if bad is not None and step >= bad else loss,
                "lr": 3e-4 * math.cos(1.5 * step / steps),
                "grad_norm": math.inf if step == bad else 1 + noise.random(),
            }
            at = {"step_s": 0.05 + 0.002 * noise.random(), "tokens_per_s": 41e3 + 900 * noise.random()}
            file.write(encode_line(step, values, {**at, "at": START_S + 0.05 * step}))


def write_run(
    folder: Path,
    *,
    config: dict[str, object],
    status: str = "finished",
    error: str = "",
    settings: dict[str, Setting] | None = None,
) -> None:
    """The record of a run."""
    record = RunRecord(
        id="k3v9q1",
        project="digits",
        name=folder.name,
        started_s=START_S,
        world_size=2,
        config=config,
        settings=settings or {},
        versions={"python": "3.11.9", "torch": "2.13.0"},
        status=status,  # type: ignore[arg-type]
        error=error,
        ended_s=START_S + 3600,
    )
    write_json(folder / "run.json", record)


def write_launch(
    folder: Path,
    *,
    failed: str = "",
    pid: int = 7,
    offset_s: float = 0.0,
    stopped: str = "",
    settings: dict[str, Setting] | None = None,
) -> None:
    """The record of a launch of two ranks; `failed` is the text of the error that ended it."""
    start_s = START_S + offset_s
    kind, _, message = failed.partition(": ")
    error = failed and RankError(
        rank=1,
        status=1,
        exception=kind,
        message=message,
        location="/home/me/train.py:41",
        traceback=TRACEBACK.format(error=failed),
    )
    status = 1 if failed else 143 if stopped else 0
    ranks = tuple(
        RankState(
            rank=rank,
            status=status if failed and rank == 1 else -15 if failed or stopped else 0,
            ended_s=start_s + 1800,
            text=f"failed: {failed}" if failed and rank == 1 else "",
        )
        for rank in range(2)
    )
    record = LaunchRecord(
        host="node-a",
        pid=pid,
        command=("/home/me/train.py", "--lr", "3e-4", "--token=***"),
        folder="/home/me",
        started_s=start_s,
        settings=settings or {"precision": Setting("bf16", "flag --precision"), "mesh": Setting("", "default")},
        versions={"python": "3.11.9", "torch": "2.13.0"},
        source=SourceState(commit="0123456789abcdef0123456789abcdef01234567", branch="main", changed=2 * bool(failed)),
        attempts=(Attempt(started_s=start_s, ranks=ranks, ended_s=start_s + 1800, error=error or None),),
        events=(
            LaunchEvent(time_s=start_s, kind="start", text="ranks 0 to 1"),
            LaunchEvent(time_s=start_s + 900, kind="hang", text="no output for 600 s\nrank 1: at train.py:41 in step"),
            LaunchEvent(time_s=start_s + 1800, kind="stop" if stopped else "end", text=stopped or failed),
        ),
        log_dir="/home/me/logs",
        checkpoint="runs/demo/step-00000400",
        ended_s=start_s + 1800,
        status=status,
        stopped=stopped,
    )
    write_log(folder, record)


def write_log(folder: Path, record: LaunchRecord) -> Path:
    """Write the log that a launch of this record would leave; return its path."""
    lines = [
        LaunchLine(launch=msgspec.structs.replace(record, attempts=(), events=())),
        *(AttemptLine(attempt=each) for each in record.attempts),
        *(EventLine(event=each) for each in record.events),
    ]
    path = folder / launch_file(record.host, record.pid, record.started_s)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def write_everything(folder: Path) -> list[Path]:
    """Three runs of one project: one finished, one failed with values that are not finite, one stopped."""
    plain, wide, short = folder / "plain", folder / "wide", folder / "stopped early"
    write_metrics(plain, 4000)
    write_run(plain, config={"model": {"width": 128, "depth": 4}, "lr": 3e-4, "batch": 64})
    write_launch(plain)
    write_metrics(wide, 2600, seed=1, rate=0.01, bad=2400)
    error = "NonFiniteError: the gradient of head.weight is not finite at step 2400"
    write_run(wide, config={"model": {"width": 512, "depth": 4}, "lr": 1e-3, "batch": 64}, status="failed", error=error)
    write_launch(wide, failed=error)
    write_metrics(short, 1200, seed=2, rate=0.03)
    write_launch(short, stopped="SIGTERM", pid=8)
    return [plain, wide, short]


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_head(width: int, height: int, depth: int = 8, color: int = 2, interlaced: int = 0) -> bytes:
    """The first chunk of a PNG."""
    return png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced))


def make_png(*chunks: bytes) -> bytes:
    """A PNG of chunks, without its end."""
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + png_chunk(b"IEND", b"")


PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # by the type of color
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def png_rows(width: int, height: int, bits: int, interlaced: int = 0) -> bytes:
    """Rows of all passes, each behind its filter."""
    rows = b""
    for left, top, across, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        columns = len(range(left, width, across))
        rows += (b"\0" + b"\1" * ((columns * bits + 7) // 8)) * (len(range(top, height, down)) if columns else 0)
    return rows


def png_of_form(width: int, height: int, depth: int, color: int, interlaced: int, parts: int = 1) -> bytes:
    """A PNG of a type of color and a depth, with its pixels in several chunks."""
    packed = zlib.compress(png_rows(width, height, depth * _CHANNELS[color], interlaced))
    cuts = [packed[at * len(packed) // parts : (at + 1) * len(packed) // parts] for at in range(parts)]
    palette = [png_chunk(b"PLTE", b"\1\2\3" * 2), png_chunk(b"tRNS", b"\5")] if color == 3 else []
    head = png_head(width, height, depth, color, interlaced)
    return make_png(head, *palette, *(png_chunk(b"IDAT", each) for each in cuts))


def make_picture(width: int = 3, height: int = 2, value: int = 0) -> bytes:
    """A PNG of pixels of one color."""
    rows = (b"\0" + bytes([value % 256, value // 256 % 256, 7]) * width) * height
    return make_png(png_head(width, height), png_chunk(b"IDAT", zlib.compress(rows)))


def write_media(
    folder: Path, kind: MediaKind, name: str, step: int, content: bytes | str | dict[str, object], at: int = 0
) -> Path:
    """A file of media, which appears whole."""
    (folder / "media").mkdir(parents=True, exist_ok=True)
    path = folder / "media" / MediaName(name, kind, step, at).file
    partial = path.with_name("partial")
    data = msgspec.json.encode(content) if isinstance(content, dict) else content
    partial.write_bytes(data if isinstance(data, bytes) else data.encode())
    return partial.rename(path)
