# SPDX-License-Identifier: Apache-2.0
"""Files of a run's folder: lines of metrics that are read while they are written, records, git's state, credentials."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from profiles import share
from sample_runs import write_log

from accel.errors import ConfigError
from accel.run_folder import (
    Attempt,
    LaunchRecord,
    Position,
    RankState,
    RunRecord,
    Setting,
    ask_git,
    decode_line,
    encode_line,
    hide_in_config,
    hide_in_words,
    installed_versions,
    launch_file,
    read_diff,
    read_json,
    read_launches,
    read_new,
    read_run,
    write_json,
)

NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name not in ("step", "time"))
NUMBERS = st.dictionaries(NAMES, st.floats() | st.integers(-(2**53), 2**53), max_size=4)


def same(one: dict[str, float], other: dict[str, float]) -> bool:
    return one.keys() == other.keys() and all(
        value == other[name] or (math.isnan(value) and math.isnan(other[name])) for name, value in one.items()
    )


@settings(max_examples=share(0.8))
@given(step=st.integers(0, 2**53), values=NUMBERS, time=NUMBERS)
def test_a_line_keeps_all_numbers(step: int, values: dict[str, float], time: dict[str, float]) -> None:
    line = encode_line(step, values, time)
    assert line.count(b"\n") == 1
    assert line.endswith(b"}}\n")
    read = decode_line(line)
    assert read is not None
    assert read.step == step
    assert same(read.values, values)
    assert same(read.time, time)


def test_a_line_is_what_the_page_says() -> None:
    assert encode_line(3, {"loss": math.nan, "n": 4}, {"clock": 1.5}) == (
        b'{"step":3,"loss":"nan","n":4,"time":{"clock":1.5}}\n'
    )


NESTED = b'{"step":1,"a":' + b"[" * 5000 + b"]" * 5000 + b"}"


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b'{"loss":1}', b'{"step":true}', b'{"step":"1"}', b"\xff"],
    ids=lambda line: line[:9],
)
def test_a_damaged_line_is_none(line: bytes) -> None:
    assert decode_line(line) is None


def test_a_line_nested_too_deeply_is_none_or_without_its_value() -> None:
    """How deep Python decodes depends on its version."""
    read = decode_line(NESTED)
    assert read is None or (read.step, read.values) == (1, {})


def test_values_of_other_kinds_are_left_out() -> None:
    read = decode_line(b'{"step":1,"a":"text","b":null,"c":true,"d":2,"time":[]}')
    assert read is not None
    assert (read.values, read.time) == ({"d": 2}, {})


@pytest.mark.parametrize("values", [{"step": 1.0}, {"time": 1.0}, {"flag": True}, {"text": "1"}])
def test_a_metric_that_no_line_can_hold_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        _ = encode_line(0, values)


WRITES = st.one_of(
    st.tuples(st.just("append"), st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"\n", b"")), max_size=3)),
    st.tuples(st.just("torn"), st.binary(min_size=1, max_size=5).map(lambda b: b.replace(b"\n", b"x"))),
    st.tuples(st.just("cut"), st.integers(0, 30)),
)


@settings(max_examples=share(0.5))
@given(writes=st.lists(WRITES, max_size=8))
def test_a_reader_that_follows_has_what_a_reader_at_the_end_has(
    writes: list[tuple[str, object]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("follow") / "metrics.jsonl"
    content = b""
    seen: list[bytes] = []
    position = Position()
    for kind, what in writes:
        if kind == "append":
            content += b"".join(line + b"\n" for line in what)  # type: ignore[union-attr]
        elif kind == "torn":
            content += what  # type: ignore[operator]
        else:
            content = content[:what]  # type: ignore[index]
        path.write_bytes(content)
        lines, position, restarted = read_new(path, position)
        seen = lines if restarted else [*seen, *lines]
        assert seen == content.split(b"\n")[:-1]
        assert read_new(path, position) == ([], position, False)


def test_a_file_that_is_cut_back_and_grows_again_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_new(path) == ([], Position(), False)
    path.write_bytes(b"1\n2\n3\n")
    _, position, _ = read_new(path)
    path.write_bytes(b"1\n2\n4\n5\n")
    assert read_new(path, position)[::2] == ([b"1", b"2", b"4", b"5"], True)
    path.unlink()
    assert read_new(path, position) == ([], Position(), True)


def test_records_are_read_as_written_and_anything_else_is_none(tmp_path: Path) -> None:
    attempt = Attempt(started_s=1.0, ranks=(RankState(rank=0, status=-9, ended_s=2.0, text="killed"),))
    one = LaunchRecord(
        host="a/b c", pid=7, command=("x",), folder="/", started_s=0.5, settings={"a": Setting("1", "flag --a")}
    )
    two = LaunchRecord(host="h", pid=8, command=("x",), folder="/", started_s=0.25, attempts=(attempt,))
    path = write_log(tmp_path, one)
    assert path == tmp_path / launch_file("a/b c", 7, 0.5)
    write_json(path.with_name("19700101T000000-h-8.json"), two)  # as launches wrote it before they had a log
    (tmp_path / "launches" / "other.json").write_text("[1]")
    assert read_launches(tmp_path) == [two, one]
    assert read_run(tmp_path) is None
    run = RunRecord(id="r", project="p", started_s=1.0, config={"lr": 0.1})
    write_json(tmp_path / "run.json", run)
    assert read_run(tmp_path) == run
    assert read_json(tmp_path / "run.json", LaunchRecord) is None
    (tmp_path / "run.json").write_bytes(NESTED)
    assert read_json(tmp_path / "run.json", RunRecord) is None


def test_no_repository_is_no_commit_where_another_takes_the_status_of_children(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from accel.run_folder import ask_git\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as if all children were reaped elsewhere\n"
        f"sys.exit(ask_git({str(tmp_path)!r}) is not None)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_git_tells_commit_and_changes(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=trunk")
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert ask_git(str(tmp_path / "nowhere")) is None
    _ = git("init")
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1\n2\n3\n")
    _ = git("add", ".")
    _ = git("commit", "-m", "first")
    state = ask_git(str(tmp_path))
    assert state is not None
    assert (state.commit, state.branch, state.clean, state.untracked) == (git("rev-parse", "HEAD"), "trunk", True, 0)
    (tmp_path / "a").write_text("2")
    (tmp_path / "c d").write_text("new")
    _ = git("mv", "b", "e")
    state = ask_git(str(tmp_path))
    assert state is not None
    assert (state.clean, state.changed, state.untracked) == (False, 2, 1)


def make_repository(folder: Path, files: dict[str, str]) -> None:
    """A repository whose one commit has these files."""
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=trunk")
    for name, text in files.items():
        (folder / name).write_text(text)
    for words in (["init"], ["add", "."], ["commit", "-m", "first"]):
        _ = subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def test_differences_from_the_commit_are_those_of_tracked_files_without_credentials(tmp_path: Path) -> None:
    make_repository(tmp_path, {"a.py": "lr = 1\n", "huge.txt": "", "z.py": ""})
    state = ask_git(str(tmp_path))
    assert state is not None
    assert read_diff(str(tmp_path), state) == ""
    (tmp_path / "a.py").write_text('lr = 2\napi_key = "Zq7Vx9Lw3Kj"\n')
    (tmp_path / "untracked.py").write_text("lr = 3\n")
    (tmp_path / "huge.txt").write_text("x\n" * 600_000)
    (tmp_path / "z.py").write_text("last = 1\n")
    marker = tmp_path / "ran"
    config = ["git", "-C", str(tmp_path), "config", "diff.external", f"touch {marker};:"]
    _ = subprocess.run(config, check=True)
    diff = read_diff(str(tmp_path), state)
    assert '-lr = 1\n+lr = 2\n+api_key = "***"\n' in diff
    assert "+last = 1\n# left out: 1 changed files, beyond 1.0 MB\n" in diff
    assert "untracked" not in diff
    assert not marker.exists()
    with pytest.raises(OSError, match="git diff ended with status"):
        _ = read_diff(str(tmp_path / "nowhere"), state)


PLANTED = {
    "core.fsmonitor": "{}",
    "core.hooksPath": "hooks",
    "core.pager": "{}",
    "core.sshCommand": "{}",
    "diff.external": "{}",
    "diff.planted.command": "{}",
    "diff.planted.textconv": "{}",
    "filter.planted.clean": "{}",
    "filter.planted.smudge": "{}",
    "filter.planted.process": "{}",
    "filter.planted.required": "true",
    "filter.a.b c.clean": "{}",
    "filter.plain": "1",
    "protocol.ext.allow": "always",
    "remote.origin.url": "ext::{}",
    "remote.origin.promisor": "true",
    "extensions.partialClone": "origin",
    "pager.diff": "{}",
    "submodule.recurse": "true",
}


def test_git_runs_no_program_of_a_repositorys_settings_and_leaves_its_index(tmp_path: Path) -> None:
    inside, ran = tmp_path / "repository", tmp_path / "ran"
    inside.mkdir()
    make_repository(inside, {"a.py": "lr = 1\n", "b.dat": "1\n", "c.dat": "1\n"})
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    program.chmod(0o755)
    (inside / ".git/hooks/post-index-change").write_bytes(program.read_bytes())
    (inside / ".git/hooks/post-index-change").chmod(0o755)
    (inside / ".git/info/attributes").write_text('*.dat filter=planted diff=planted\n*.py filter="a.b c"\n')
    for key, text in PLANTED.items():
        _ = subprocess.run(["git", "-C", str(inside), "config", key, text.format(program)], check=True)
    (inside / "b.dat").write_text("2\n")
    (inside / "c.dat").touch()  # another time, the same content
    (inside / "a.py").write_text("lr = 2\n")
    index = (inside / ".git/index").read_bytes()
    state = ask_git(str(inside))
    assert state is not None
    assert state.changed == 2
    diff = read_diff(str(inside), state)
    assert "+lr = 2" in diff
    assert "+2" in diff
    assert "c.dat" not in diff
    assert (inside / ".git/index").read_bytes() == index
    for path in inside.joinpath(".git/objects").glob("??/*"):  # a blob is missing, as in a partial clone
        path.unlink()
    with pytest.raises(OSError, match="git diff"):
        _ = read_diff(str(inside), state)
    assert not ran.exists()


def test_differences_before_the_first_commit_are_all_tracked_files(tmp_path: Path) -> None:
    _ = subprocess.run(["git", "-C", str(tmp_path), "init"], check=True, capture_output=True)
    (tmp_path / "a.py").write_text("lr = 1\n")
    _ = subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    state = ask_git(str(tmp_path))
    assert state is not None
    assert "+lr = 1" in read_diff(str(tmp_path), state)


def test_versions_name_python_and_torch() -> None:
    assert {"python", "accel-torch", "torch"} <= installed_versions().keys()


def test_credentials_reach_no_record() -> None:
    words = ["train.py", "--api-key", "abc", "--lr", "0.1", "--token=xyz", "https://me:pw@host/x", "--max-tokens", "5"]
    assert hide_in_words(words) == (
        *("train.py", "--api-key", "***", "--lr", "0.1", "--token=***", "https://***@host/x", "--max-tokens", "5"),
    )
    config = {
        "max_tokens": 512,
        "tokenizer": "gpt2",
        "key_dim": "64",
        "wandb": {"apiKey": "abc", "urls": ["http://a:b@c"]},
        "hf_token": "",
    }
    shown, hidden = hide_in_config(config)
    assert hidden == ("wandb.apiKey", "wandb.urls[0]")
    assert shown == config | {"wandb": {"apiKey": "***", "urls": ["http://***@c"]}}
