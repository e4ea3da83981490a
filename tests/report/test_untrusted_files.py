# SPDX-License-Identifier: Apache-2.0
"""Files of a run's folder that someone else may have written: no kind of file stops a reader or fills its memory."""

from __future__ import annotations

import gzip
import os
import signal
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from catching import assert_raises
from sample_runs import write_launch, write_metrics, write_run

from accel.cli import main
from accel.config import read_config
from accel.errors import ConfigError
from accel.opening import open_regular, read_named, read_regular
from accel.report import FollowedRun, FoundRuns, LiveReport, find_runs
from accel.report.traces import read_traces
from accel.run_folder import Position, read_launches, read_new, read_run

SECRET = "S3CRET-0F-AN0THER-F0LDER"
NAMES = (
    "metrics.jsonl",
    "run.json",
    "alerts/rank-0.jsonl",
    "launches/20261101T000000.000000-host-1.jsonl",
    "launches/old.json",
    "system-host.jsonl",
    "code.diff",
    "profile/rank-0.json",
    "profile/rank-0.json.gz",
    "media/shown-00000001-0.png",
    "media/said-00000001.txt",
    "media/rows-00000001.json",
    "step-00000001/manifest.json",
)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 40 * 2**30)


def sparse_behind_a_line(path: Path) -> None:
    path.write_bytes(b'{"step": 1}\n')
    os.truncate(path, 40 * 2**30)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(os.path.relpath(path))  # a socket's path has few characters


def linked_out(path: Path) -> None:
    secret = next(each for each in path.parents if each.name == "run").parent / "secret"
    secret.write_text(f'{{"step": 1, "{SECRET}": 2}}\n')
    path.symlink_to(secret)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": lambda path: os.mkfifo(path),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "sparse": sparse,
    "sparse behind a line": sparse_behind_a_line,
    "folder": lambda path: path.mkdir(),
    "socket": listening,
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "outside": linked_out,
}


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("a reader waits for a file")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def a_run(folder: Path) -> Path:
    write_metrics(folder, 100)
    write_run(folder, config={"lr": 1})
    return folder


def put(run: Path, name: str, kind: str) -> Path:
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [NAMES[:1], ("code.diff",), NAMES[1:]], ids=["metrics", "code", "all others"])
def test_no_kind_of_file_stops_a_command(
    names: Sequence[str],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    other = a_run(tmp_path / "other")
    run = a_run(tmp_path / "run")
    for name in names:
        put(run, name, kind)
    page = tmp_path / "page.html"
    tracemalloc.start()
    for words in (
        ["report", str(run), "--output", str(page)],
        ["watch", str(run), "--once"],
        ["compare", str(run), str(other)],
        ["profile", str(run)],
    ):
        assert main(words) in (0, 1, 2), words
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100e6
    assert SECRET not in "".join(capsys.readouterr()) + (page.read_text() if page.exists() else "")


def test_the_rest_of_a_run_is_shown_and_the_file_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for at, name in enumerate(NAMES[2:7]):
        run = a_run(tmp_path / str(at) / "run")
        put(run, name, "pipe")
        assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
        page = (tmp_path / "page.html").read_text()
        assert "grad_norm" in page
        assert name in page + capsys.readouterr().err


def test_a_packed_trace_is_unpacked_within_a_limit(tmp_path: Path) -> None:
    (tmp_path / "rank-0.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}' + bytes(2**24)))
    tracemalloc.start()
    with assert_raises(ConfigError, problem="too large"):
        read_traces(tmp_path, most=1_000_000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4e6


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json"])
def test_a_run_with_such_a_file_is_found_and_stops_no_other(name: str, tmp_path: Path) -> None:
    a_run(tmp_path / "good")
    bad = tmp_path / "bad" / "run"
    put(bad, name, "pipe")
    assert find_runs(tmp_path).folders == [bad, tmp_path / "good"]
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0


def test_links_within_a_run_and_to_a_run_are_followed(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    write_launch(run)
    (run / "kept").mkdir()
    for name in ("metrics.jsonl", "run.json", "launches"):
        (run / name).rename(run / "kept" / name)
        (run / name).symlink_to(Path("kept") / name)
    (tmp_path / "link").symlink_to(run)
    for folder in (run, tmp_path / "link", tmp_path / "link" / ".." / "run"):
        assert read_run(folder) is not None
        assert len(read_launches(folder)) == 1
        assert read_new(folder / "metrics.jsonl", within=folder).lines


def test_a_folder_that_is_a_link_to_another_place_is_not_followed(tmp_path: Path) -> None:
    write_launch(tmp_path / "elsewhere")
    run = a_run(tmp_path / "run")
    (run / "launches").symlink_to(tmp_path / "elsewhere" / "launches")
    assert len(read_launches(tmp_path / "elsewhere")) == 1
    assert read_launches(run) == []


def test_files_larger_than_a_block_are_read(tmp_path: Path) -> None:
    lines = [b'{"step": %d, "text": "%s"}' % (step, b"x" * 1000) for step in range(20_000)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    found: list[bytes] = []
    position = Position()
    while (new := read_new(tmp_path / "metrics.jsonl", position)).lines:
        position = new.position
        found += new.lines
    assert found == lines


@pytest.mark.parametrize("size", [2**20 - 1, 2**20, 2**20 + 1, 2**24, 2**24 + 1])
def test_a_line_that_does_not_end_is_an_error_and_lines_before_it_count(size: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"first\n" + b"x" * size)
    new = read_new(path)
    assert new.lines == [b"first"]
    if size <= 2**20:
        assert read_new(path, new.position).lines == []
    else:
        with pytest.raises(OSError, match="more than 1048576 bytes"):
            read_new(path, new.position)


def test_a_configuration_that_was_named_may_be_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "..data" / "accel.toml"
    written.parent.mkdir()
    written.write_text("seed = 3\n")
    link = tmp_path / "accel.toml"
    link.symlink_to(written)  # as a ConfigMap is mounted
    assert read_config(str(link)).values == read_config(str(link), found=True).values == {"seed": 3}
    assert read_config("/dev/null").values == {}
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("seed = 4\n",))
    writer.start()
    assert read_config(str(pipe)).values == {"seed": 4}
    writer.join()
    with assert_raises(ConfigError, got="not a regular file"):
        read_config(str(pipe), found=True)
    with assert_raises(ConfigError, got=r"larger than 16\.0 MB"):
        read_config("/dev/zero")
    monkeypatch.chdir(tmp_path)
    link.unlink()
    os.mkfifo(link)
    assert main(["launch", "--dry-run", "train.py"]) == 2


def test_the_opener_takes_regular_files_alone(tmp_path: Path) -> None:
    inside = tmp_path / "run" / "file"
    inside.parent.mkdir()
    inside.write_bytes(b"12345")
    assert read_regular(inside, 5) == read_named(inside, 5) == b"12345"
    with pytest.raises(OSError, match="larger"):
        read_regular(inside, 4)
    (tmp_path / "run" / "link").symlink_to("file")
    assert read_regular(tmp_path / "run" / "link", within=tmp_path / "run") == b"12345"
    with pytest.raises(OSError, match="symbolic link"):
        open_regular(tmp_path / "run" / "link", follow=False)
    (tmp_path / "run-other").write_bytes(b"")  # begins as the folder's name does
    (tmp_path / "run" / "near").symlink_to("../run-other")
    with pytest.raises(OSError, match="leads out"):
        open_regular(tmp_path / "run" / "near", within=tmp_path / "run")


def test_readers_of_a_page_do_not_wait_for_the_one_that_looks(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    now_s = [0.0]
    looks, goes_on = threading.Event(), threading.Event()
    goes_on.set()

    def find() -> FoundRuns:
        looks.set()
        assert goes_on.wait(20)
        return FoundRuns([run])

    report = LiveReport(find, lambda folder: FollowedRun(folder.name, folder, lambda _: []), now_s=lambda: now_s[0])
    first = report.snapshot()
    assert first.version
    write_metrics(run, 300)
    now_s[0] = 60.0
    goes_on.clear()
    looks.clear()
    slow = threading.Thread(target=report.snapshot)
    slow.start()
    assert looks.wait(20)
    assert [report.snapshot().version for _ in range(3)] == [first.version] * 3
    goes_on.set()
    slow.join()
    assert report.snapshot().version != first.version
