# SPDX-License-Identifier: Apache-2.0
"""The served page without a browser: what is refused, what stays cheap, what a reader sees when a run changes."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any, cast

import msgspec
import pytest
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from processes import patience
from profiles import share
from sample_runs import START_S, write_launch, write_metrics, write_run

import accel.report
from accel.cli import main
from accel.cli._runs import _token, run_report
from accel.errors import ConfigError
from accel.report import FollowedRun, FoundRuns, LiveReport, ReportServer, _followed, _media, _served
from accel.report._served import change_of
from accel.run_folder import encode_line

TOKEN = "a-token-of-24-characters"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def follow(folder: Path) -> FollowedRun:
    return FollowedRun(folder.name, folder, lambda _: [], lambda _: "")


def report_of(folder: Path, clock: Clock) -> LiveReport:
    def find() -> FoundRuns:
        inner = sorted(each for each in folder.glob("*") if each.is_dir())
        return FoundRuns(inner or [folder])

    return LiveReport(find, follow, every_s=2.0, now_s=clock)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(tmp_path: Path, clock: Clock) -> Iterator[ReportServer]:
    write_metrics(tmp_path / "runs" / "demo", 300)
    (tmp_path / "runs" / "demo" / "secret.txt").write_text("only here")
    opened = ReportServer(report_of(tmp_path / "runs", clock), TOKEN)
    thread = Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield opened
    opened.shutdown()
    thread.join()
    opened.server_close()


def exchange(server: ReportServer, request: bytes) -> bytes:
    """Send bytes; return the answer as it is."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20) as wire:
        wire.sendall(request)
        parts: list[bytes] = []
        while part := wire.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def ask(server: ReportServer, target: str, *headers: str, method: str = "GET", host: str = "") -> tuple[int, str, str]:
    """Return status, head and body of an answer."""
    host = host or f"127.0.0.1:{server.server_address[1]}"
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *headers, "", ""]
    head, _, body = exchange(server, "\r\n".join(lines).encode()).partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), body.decode()


PAGE, DATA = f"/?token={TOKEN}", f"/data?token={TOKEN}"


LONG = st.sampled_from(["", "a", "ab" * 30, "b" * 45, "\N{GRINNING FACE}" * 41])
JSON = st.recursive(
    st.none() | st.integers(0, 3) | st.sampled_from(["", "a"]) | st.builds("{}{}{}".format, LONG, LONG, LONG),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("kvxn"), inner, max_size=3),
)


def changed(old: Any, change: Any) -> Any:
    """What `changedBy` of the page's script does."""
    if not change:
        return old
    if "v" in change:
        return change["v"]
    if "t" in change:
        return old[: change["a"]] + change["t"] + old[len(old) - change["z"] :]
    if isinstance(old, list):
        made = {str(at): each for at, each in enumerate(cast("list[Any]", old)[: change["n"]])}
    else:
        made = dict(old)
    made |= {key: changed(made.get(key), each) for key, each in change["k"].items()}
    for key in change.get("x", ()):
        del made[key]
    return [made[str(at)] for at in range(len(made))] if isinstance(old, list) else made


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        inner = cast("dict[str, Any] | list[Any]", value)
        for each in inner.values() if isinstance(inner, dict) else inner:
            yield from texts_of(each)


@given(old=JSON, new=JSON)
def test_a_change_gives_the_new_value_and_is_none_for_an_equal_one(old: Any, new: Any) -> None:
    change = change_of(old, new)
    assert (change is None) == (old == new)
    assert changed(old, change) == new


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine")
@settings(max_examples=share(0.2), deadline=None)
@given(pairs=st.lists(st.tuples(JSON, JSON), min_size=20, max_size=20))
def test_the_script_of_the_page_applies_a_change(pairs: list[tuple[Any, Any]]) -> None:
    script = (Path(accel.report.__file__).parent / "assets" / "live.js").read_text()
    function = re.search(r"function changedBy\(.*?\n}\n", script, flags=re.DOTALL)
    assert function
    cases = msgspec.json.encode([[old, change_of(old, new)] for old, new in pairs]).decode()
    program = f"{function[0]}console.log(JSON.stringify({cases}.map(([old, change]) => changedBy(old, change))))"
    made = subprocess.run(["node", "-e", program], capture_output=True, check=True).stdout
    assert msgspec.json.decode(made) == [new for _, new in pairs]


def test_a_reader_gets_what_changed_and_all_of_it_compressed(
    server: ReportServer, tmp_path: Path, clock: Clock
) -> None:
    status, head, whole = ask(server, DATA)
    tag = re.search(r'ETag: "(\w+)"', head)
    assert tag
    write_metrics(tmp_path / "runs" / "demo", 600)
    clock.now_s += 10
    status, head, part = ask(server, f"{DATA}&base={tag[1]}", f'If-None-Match: "{tag[1]}"')
    assert status == 200
    found = msgspec.json.decode(part)
    assert found["base"] == tag[1]
    fresh = msgspec.json.decode(ask(server, f"{DATA}&base=unknown")[2])
    assert changed(msgspec.json.decode(whole), found["change"]) == fresh
    status, head, whole = ask(server, DATA)
    tag = re.search(r'ETag: "(\w+)"', head)
    assert tag
    with (tmp_path / "runs" / "demo" / "metrics.jsonl").open("ab") as file:
        at = {"step_s": 0.05, "tokens_per_s": 4e4, "at": START_S + 30}
        _ = file.write(encode_line(600, {"loss": 0.5, "lr": 1e-4, "grad_norm": 1.0}, at))
    clock.now_s += 10
    added = msgspec.json.decode(ask(server, f"{DATA}&base={tag[1]}", f'If-None-Match: "{tag[1]}"')[2])
    curves = [each for each in texts_of(added["change"]["k"]["data"]) if len(each) > 100]
    assert not curves  # a line more is a few characters more of its curve
    request = f"GET {PAGE} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: br, gzip\r\n\r\n".encode()
    head_bytes, _, body = exchange(server, request).partition(b"\r\n\r\n")
    assert b"Content-Encoding: gzip" in head_bytes
    plain = ask(server, PAGE, "Accept-Encoding: gzip;q=0")[2].encode()
    assert gzip.decompress(body) == plain
    assert len(body) < len(plain) / 2


def test_a_reader_with_the_token_gets_the_page_and_its_data(server: ReportServer, tmp_path: Path) -> None:
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}{PAGE}"
    status, head, page = ask(server, PAGE)
    assert status == 200
    assert "text/html" in head
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy[1].replace("&#x27;", "'").split(";")}
    assert rules.pop("connect-src") == ["'self'"]
    assert rules["default-src"] == ["'none'"]
    assert all(re.fullmatch(r"'sha256-.*'", source) for source in rules["script-src"])
    status, head, body = ask(server, DATA)
    found = msgspec.json.decode(body)
    assert status == 200
    assert [run["name"] for run in found["data"]["runs"]] == ["demo"]
    assert found["main"] in page
    tag = re.search(r'ETag: ("\w+")', head)
    assert tag
    assert ask(server, DATA, f"If-None-Match: {tag[1]}")[::2] == (304, "")
    assert ask(server, DATA, 'If-None-Match: "other"')[0] == 200
    assert ask(server, PAGE, method="HEAD")[::2] == (200, "")
    assert ask(server, PAGE, f"Origin: http://127.0.0.1:{server.server_address[1]}")[0] == 200
    assert ask(server, PAGE, host="localhost:1")[0] == 200  # another port: a tunnel
    assert TOKEN not in page


@pytest.mark.parametrize(
    ("target", "headers", "options", "expected"),
    [
        ("/", [], {}, 403),
        ("/data", [], {}, 403),
        (f"/?token={TOKEN[:-1]}", [], {}, 403),
        (f"/?token={TOKEN}x", [], {}, 403),
        ("/?token=%ff%00", [], {}, 403),
        (f"/?token={TOKEN}&token={TOKEN}", [], {}, 403),
        (f"/?token=x&token={TOKEN}", [], {}, 403),
        (PAGE, [], {"host": "evil.example"}, 403),
        (PAGE, [], {"host": "127.0.0.1.evil.example"}, 403),
        (PAGE, [], {"host": "evil.example@127.0.0.1"}, 403),
        (PAGE, ["Host: evil.example"], {}, 403),
        (PAGE, ["Origin: http://evil.example"], {}, 403),
        (PAGE, ["Origin: null"], {}, 403),
        (PAGE, ["Origin: http://localhost:3000"], {}, 403),
        (PAGE, [], {"method": "POST"}, 405),
        (PAGE, [], {"method": "PUT"}, 405),
        (PAGE, [], {"method": "DELETE"}, 405),
        (PAGE, [], {"method": "OPTIONS"}, 405),
        (PAGE, [], {"method": "get"}, 405),
        (f"/metrics.jsonl?token={TOKEN}", [], {}, 404),
        (f"/demo/secret.txt?token={TOKEN}", [], {}, 404),
        (f"/../demo/secret.txt?token={TOKEN}", [], {}, 404),
        (f"/data/../demo/secret.txt?token={TOKEN}", [], {}, 404),
        (f"/%2e%2e/demo/secret.txt?token={TOKEN}", [], {}, 404),
        (f"//demo/secret.txt?token={TOKEN}", [], {}, 404),
        (f"http://evil.example/?token={TOKEN}", [], {}, 404),
        (f"/etc/passwd?token={TOKEN}", [], {}, 404),
        (f"/?token={'x' * 70_000}", [], {}, 414),
        (PAGE, [f"X: {'x' * 70_000}"], {}, 431),
    ],
)
def test_all_else_is_refused_and_told_nothing(
    server: ReportServer, target: str, headers: list[str], options: dict[str, str], expected: int
) -> None:
    status, head, body = ask(server, target, *headers, **options)
    assert status == expected
    assert "text/plain" in head
    assert len(body) < 200
    for secret in (TOKEN, "only here", "Python", "demo"):
        assert secret not in head + body


@pytest.mark.parametrize(
    "request_", [b"GET /?token=" + TOKEN.encode() + b"\r\n\r\n", b"\r\n\r\n", b"\xff\xfe x y z\r\n\r\n"]
)
def test_a_request_without_a_host_or_without_a_form_is_refused(server: ReportServer, request_: bytes) -> None:
    answer = exchange(server, request_)
    assert b"<main" not in answer
    assert ask(server, PAGE)[0] == 200


def test_ten_readers_of_a_run_cost_one_look_and_an_unchanged_run_none(
    server: ReportServer, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read_new = _followed.read_new

    def counted(*args: Any, **options: Any) -> Any:
        new = read_new(*args, **options)
        reads.append(len(new.lines))
        return new

    monkeypatch.setattr(_followed, "read_new", counted)
    pages: list[object] = []
    page_of = _served.page_of
    monkeypatch.setattr(_served, "page_of", lambda *args: pages.append(args) or page_of(*args))

    def all_read() -> set[str]:
        with ThreadPoolExecutor(10) as pool:
            answers = list(pool.map(lambda _: ask(server, DATA), range(20)))
        assert {status for status, _, _ in answers} == {200}
        return {body for _, _, body in answers}

    assert len(all_read()) == 1
    assert reads == [30, 0]
    clock.now_s += 100
    assert len(all_read()) == 1
    assert reads == [30, 0]  # nothing changed: no file was read
    assert len(pages) == 1
    with (tmp_path / "runs" / "demo" / "metrics.jsonl").open("ab") as file:
        _ = file.write(encode_line(400, {"loss": 0.1}))
    assert len(all_read()) == 1
    assert reads == [30, 0]  # the last look was a moment ago
    clock.now_s += 100
    assert len(all_read()) <= 2  # readers beside the one that looks get the page before
    assert len(all_read()) == 1
    assert reads == [30, 0, 1, 0]  # the new line alone
    assert len(pages) == 2


def test_looks_take_a_tenth_of_the_time_however_long_they_are(tmp_path: Path, clock: Clock) -> None:
    looks: list[float] = []

    def find() -> FoundRuns:
        looks.append(clock.now_s)
        clock.now_s += 5
        return FoundRuns([tmp_path])

    report = LiveReport(find, follow, every_s=2.0, now_s=clock)
    for now_s in range(200):
        clock.now_s = max(clock.now_s, float(now_s))
        _ = report.snapshot()
    assert looks == [0, 50, 100, 150]


def test_a_folder_that_comes_later_its_metrics_and_more_runs_appear(tmp_path: Path, clock: Clock) -> None:
    report = report_of(tmp_path / "later", clock)

    def seen() -> dict[str, Any]:
        clock.now_s += 10
        snapshot = report.snapshot()
        assert snapshot.problem == ""
        return msgspec.json.decode(snapshot.data)

    assert seen()["kind"] == "empty"
    (tmp_path / "later" / "b").mkdir(parents=True)
    write_run(tmp_path / "later" / "b", config={"lr": 1}, status="running")
    assert seen()["kind"] == "empty"
    write_metrics(tmp_path / "later" / "b", 100)
    found = seen()
    assert found["kind"] == "one"
    first = [each["name"] for each in found["data"]["metrics"]]
    write_metrics(tmp_path / "later" / "a", 100)
    with (tmp_path / "later" / "b" / "metrics.jsonl").open("ab") as file:
        _ = file.write(encode_line(100, {"eval/accuracy": 0.5, "loss": 1.0}))
    found = seen()
    assert [each["name"] for each in found["data"]["runs"]] == ["b", "a"]  # numbers and colours stay
    names = [each["name"] for each in found["data"]["metrics"]]
    assert names == [*first, "eval/accuracy"]
    assert found["main"].count('class="card"') == len(names)


def test_a_followed_page_shows_what_the_written_one_shows(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "runs" / "demo"
    write_metrics(folder, 500, bad=400)
    write_run(folder, config={"lr": 1}, status="failed", error="ValueError: no")
    write_launch(folder, failed="ValueError: no")
    for host in ("a", "b"):
        lines = [encode_line(at, {"gpu0/use": at * 0.1, "gpu1/use": 0.5}, {"at": 1.795e9 + at}) for at in range(20)]
        (folder / f"system-{host}.jsonl").write_bytes(b"".join(lines))
    (folder / "media").mkdir()
    (folder / "media" / "said-00000010.txt").write_text("hello")
    report = report_of(tmp_path / "runs", clock)
    _ = report.snapshot()
    (folder / "media" / "said-00000020.txt").write_text("again")
    with (folder / "system-b.jsonl").open("ab") as file:
        _ = file.write(encode_line(20, {"gpu0/use": 9.0}, {"at": 1.795e9 + 20}))
    clock.now_s = 10
    found = msgspec.json.decode(report.snapshot().data)
    expected = _served.page_of([follow(folder).look()])
    assert found["main"] == str(expected.main)
    assert found["data"] == msgspec.json.decode(msgspec.json.encode(expected.data))
    (folder / "system-b.jsonl").write_bytes(b"")  # a resume cuts the samples back
    clock.now_s = 20
    found = msgspec.json.decode(report.snapshot().data)
    assert found["data"] == msgspec.json.decode(msgspec.json.encode(_served.page_of([follow(folder).look()]).data))


def test_media_are_read_once_and_given_to_readers_that_ask_for_their_keys(
    tmp_path: Path, clock: Clock, server: ReportServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    media = tmp_path / "runs" / "demo" / "media"
    reads: list[str] = []
    read = _media._bytes_of
    monkeypatch.setattr(_media, "_bytes_of", lambda file, *most: reads.append(file.name.file) or read(file, *most))

    def keys() -> list[str]:
        clock.now_s += 100
        found = msgspec.json.decode(ask(server, DATA)[2])["data"]["media"]
        return [key for each in found for _, named in each["runs"]["0"] for key in named]

    def log(step: int, text: str) -> None:
        media.mkdir(exist_ok=True)
        (media / "new").write_text(text)
        os.replace(media / "new", media / f"said-{step:08}.txt")

    assert keys() == []
    log(1, "<b>first")
    log(2, "now the other")
    first = keys()
    target = f"/media?token={TOKEN}&keys="
    status, head, body = ask(server, f"{target}{','.join(first)},other")
    assert (status, "application/json" in head) == (200, True)
    shown = [{"text": "<b>first", "more": ""}, {"text": "now the other", "more": ""}]
    assert msgspec.json.decode(body) == dict(zip(first, shown, strict=True))
    assert "<b>" not in body
    assert "now the other" not in ask(server, PAGE)[2]
    log(3, "third")
    assert keys()[:2] == first
    assert reads == ["said-00000002.txt", "said-00000001.txt", "said-00000003.txt"]
    log(2, "another")
    assert keys() != first
    assert ask(server, f"{target}{first[1]}")[2] == "{}"
    for refused in ("/media?keys=", f"/media?token=x&keys={first[0]}"):
        assert ask(server, f"{refused}{first[0]}")[0] == 403
    for empty in ("", "&keys=", "&keys=..%2F..%2Fsecret.txt", "&keys=demo/secret.txt"):
        assert ask(server, f"/media?token={TOKEN}{empty}")[::2] == (200, "{}")


def test_a_link_out_of_a_run_is_not_followed_and_a_name_that_is_no_text_is_shown(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "runs" / os.fsdecode(b"caf\xe9")
    write_metrics(folder, 100)
    (tmp_path / "private").write_text("only here")
    (folder / "code.diff").symlink_to(tmp_path / "private")
    found = report_of(tmp_path / "runs", clock).snapshot()
    assert "caf?" in found.page.decode()
    assert b"only here" not in found.page + found.data
    assert main(["report", str(folder)]) == 0
    assert "only here" not in (folder / "report.html").read_text()
    (folder / "code.diff").unlink()
    _ = (folder / "code.diff").write_text("only here")
    clock.now_s = 10
    assert b"only here" in report_of(tmp_path / "runs", clock).snapshot().data


def test_a_file_that_cannot_be_read_is_told_until_it_can_beside_the_other_runs(tmp_path: Path, clock: Clock) -> None:
    for name in ("demo", "other"):
        write_metrics(tmp_path / "runs" / name, 100)
    folder = tmp_path / "runs" / "demo"
    report = report_of(tmp_path / "runs", clock)
    assert b"cannot be read" not in report.snapshot().data
    metrics = (folder / "metrics.jsonl").rename(tmp_path / "kept")
    (folder / "metrics.jsonl").mkdir()
    clock.now_s = 10
    page = msgspec.json.decode(report.snapshot().data)
    assert "demo: metrics.jsonl cannot be read: Is a directory" in page["main"]
    assert [run["name"] for run in page["data"]["runs"]] == ["demo", "other"]
    assert all(metric["curves"].keys() == {"0", "1"} for metric in page["data"]["metrics"])  # as far as it was read
    (folder / "metrics.jsonl").rmdir()
    _ = metrics.rename(folder / "metrics.jsonl")
    clock.now_s = 20
    assert b"cannot be read" not in report.snapshot().data


def test_a_page_before_its_run_says_what_it_waits_for(tmp_path: Path, clock: Clock) -> None:
    report = LiveReport(lambda: FoundRuns([tmp_path / "later"]), follow, every_s=2.0, now_s=clock)
    page = msgspec.json.decode(report.snapshot().data)
    assert page["kind"] == "empty"
    assert f"Nothing of a run is in <code>{tmp_path / 'later'}</code> yet" in page["main"]
    assert "Overview" not in page["main"]
    write_metrics(tmp_path / "later", 20)
    clock.now_s = 10
    page = msgspec.json.decode(report.snapshot().data)
    assert page["kind"] == "one"
    assert "yet" not in page["main"]


def test_a_folder_that_cannot_be_searched_is_named_on_the_served_page(tmp_path: Path, clock: Clock) -> None:
    write_metrics(tmp_path / "demo", 100)
    unreadable = ["runs/secret cannot be read: Permission denied"]
    report = LiveReport(lambda: FoundRuns([tmp_path / "demo"], unreadable), follow, every_s=2.0, now_s=clock)
    assert unreadable[0].encode() in report.snapshot().data
    unreadable.clear()
    clock.now_s = 10
    assert b"Permission denied" not in report.snapshot().data


def test_the_command_prints_the_url_serves_a_folder_that_comes_later_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accel.cli", "report", "--serve", str(tmp_path / "later")]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None
    url, end, folder = (started.stdout.readline().strip() for _ in range(3))
    assert end == "Ctrl-C ends the server."
    assert folder == f"{tmp_path / 'later'} does not exist yet"
    found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{32})", url)
    assert found, url

    def page() -> str:
        with socket.create_connection(("127.0.0.1", int(found[1]))) as wire:
            wire.sendall(f"GET /?token={found[2]} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            return b"".join(iter(lambda: wire.recv(1 << 16), b"")).decode()

    assert "Nothing of a run is in" in page()
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=patience(60))
    assert (started.returncode, err) == (0, "")


def test_flags_that_do_not_go_together_or_with_this_machine_are_refused(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", 100)
    run = str(tmp_path / "run")
    token = tmp_path / "token"
    token.write_text("short")
    token.chmod(0o600)
    shared = tmp_path / "shared"
    shared.write_text(TOKEN)
    shared.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, fields in (
            ([run, "--port", "80"], {"problem": "--serve"}),
            ([run, "--host", "localhost"], {"problem": "--serve"}),
            ([run, "--serve", "--output", "x.html"], {"got": "--output"}),
            ([run, "--serve", "--host", "0.0.0.0"], {"fix": "reach"}),
            ([run, "--serve", "--port", port], {"fix": "another --host or --port"}),
            ([run, "--serve", "--host", "203.0.113.7"], {"fix": "another --host or --port"}),
            ([run, "--serve", "--token-file", str(token)], {"expected": "16 or more"}),
            ([run, "--serve", "--token-file", str(shared)], {"fix": "chmod 600"}),
            ([run, "--serve", "--token-file", str(tmp_path / "no" / "token")], {"problem": "cannot be read"}),
            ([str(token), "--serve"], {"problem": "the path is not a folder"}),
        ):
            with assert_raises(ConfigError, **fields):
                _ = run_report(words, {})
    assert not Path("x.html").exists()


def test_a_token_file_is_made_for_its_owner_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = _token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert _token(path) == token
    assert main(["report", str(tmp_path), "--port", "70000"]) == 2


def test_a_folder_that_becomes_a_link_is_not_followed(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    write_metrics(folder, 100)
    write_metrics(other, 500)
    followed = follow(folder)
    assert followed.look().curves.last_step == 90
    folder.rename(tmp_path / "away")
    folder.symlink_to(other)
    seen = followed.look()
    assert seen.curves.last_step == 90
    assert seen.problems == ["the folder was replaced by a link, which is not followed"]
    folder.unlink()
    (tmp_path / "away").rename(folder)
    assert not followed.look().problems
    chosen = tmp_path / "chosen"  # a link from the beginning is the reader's own
    chosen.symlink_to(other)
    assert follow(chosen).look().curves.last_step == 490
