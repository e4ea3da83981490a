# SPDX-License-Identifier: Apache-2.0
"""Alerts: rules against plain loops, repeats that only count, ways out that fail in one line, slips at the start."""

from __future__ import annotations

import datetime
import http.server
import importlib
import json
import logging
import math
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from catching import assert_raises, caught
from hypothesis import given, strategies as st
from processes import patience, wait_for
from tables import rows

import accel
from accel.alerts import AlertLog, RuleWatch, read_alerts
from accel.endpoints import post_json
from accel.errors import ConfigError
from accel.run_folder import read_run
from accel.testing import Simulator
from accel.trackers import AlertRule, Alerts, alert, jsonl

URL = "https://hooks.example/T0/secret-part"
WRONG = [
    "https://",
    "https:///secret-part",
    "https://:80/secret-part",
    "https://user:secret-part@hooks.example/",
    "https://hooks.example:port/secret-part",
    "https://hooks.example:99999/secret-part",
    "https://hooks.example/secret-part x",
    "https://hooks.example/secret-part\x7f",
    "https://hooks.example/secret-pärt",
    "//hooks.example/secret-part",
]
RIGHT = [
    "https://hooks.example",
    "https://hooks.example:8443/a?b=c@d",
    "https://[::1]:8443/",
    "https://hooks.example?a@b",
]
VALUES = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, math.nan, math.inf, -math.inf]), max_size=30)


@given(VALUES)
def test_limits_hold_for_each_value_and_what_is_not_finite_breaks_them(values: list[float]) -> None:
    watch = RuleWatch([AlertRule(metric="x", above=2.0), AlertRule(metric="x", below=1.0)])
    for step, value in enumerate(values):
        broken = {breach.rule.title for breach in watch.see({"x": value}, step)}
        bad = not math.isfinite(value)
        limits = {"x above 2": bad or value > 2, "x below 1": bad or value < 1}
        assert broken == {title for title, is_broken in limits.items() if is_broken}


@given(VALUES, st.integers(1, 5))
def test_a_metric_without_change_alerts_once_as_many_steps_are_over(values: list[float], most: int) -> None:
    watch = RuleWatch([AlertRule(metric="x", unchanged_steps=most)])
    for step, value in enumerate(values):
        alike = [repr(each) == repr(value) for each in values[max(0, step - most) : step + 1]]
        assert bool(watch.see({"x": value}, step)) == (len(alike) == most + 1 and all(alike))


def test_a_slow_rank_is_named_and_even_or_short_delays_are_not() -> None:
    watch = RuleWatch([AlertRule(slow_rank=1.5, level="error")])
    even = {"time/slowest_own_s": 0.010, "time/own_s": 0.009, "time/step_s": 0.02, "time/slowest_rank": 3}
    assert watch.see(even, 1) == watch.see({"loss": 1.0}, 2) == []
    assert watch.see(even | {"time/own_s": 0.001, "time/step_s": 1.0}, 3) == []  # 9 ms of a second
    [breach] = watch.see(even | {"time/slowest_own_s": 0.030}, 4)
    assert breach.text == "rank 3 takes 30 ms a step of its own, the median is 9 ms at step 4"


@rows(
    "section, fields",
    [
        ({"webhok": URL}, {"fix": "Did you mean `webhook`"}),
        ({"webhook": "http://hooks.example/T0/secret-part"}, {"expected": "https"}),
        ({"webhook": 3, "command": [URL]}, {"fix": "Expected `str`"}),
        *(({"webhook": url}, {"problem": "the URL for alerts is not valid"}) for url in WRONG),
        ({"rules": [{"metric": "loss", "abov": 1}]}, {"got": r"'rules\[0\].abov'", "fix": "Did you mean `above`"}),
        ({"rules": [{"metric": "loss", "above": 1, "level": "warn"}]}, {"fix": "Did you mean `warning`"}),
        ({"rules": [{"metric": "loss", "above": 1, "below": 0}]}, {"problem": "one condition"}),
        ({"rules": [{"metric": "loss"}]}, {"problem": "one condition"}),
        ({"rules": [{"above": 1}]}, {"problem": "does not fit the metric"}),
        ({"rules": [{"metric": "loss", "slow_rank": 2}]}, {"problem": "does not fit the metric"}),
        ({"rules": [{"slow_rank": 0.5}]}, {"problem": "the factor is not valid"}),
        ({"rules": [{"metric": "loss", "above": math.nan}]}, {"got": "'above': nan"}),
        ({"command": [""]}, {"problem": "the command is not valid"}),
        ({"every_s": 0}, {"got": "every_s"}),
    ],
)
def test_a_wrong_section_is_an_error_that_shows_no_url(section: dict[str, Any], fields: dict[str, str]) -> None:
    with assert_raises(ConfigError, **fields) as raised:
        _ = accel.config.resolve({}, {}, accel.config.ConfigFile(path="accel.toml", values={"alerts": section}))
    assert "secret-part" not in str(raised.value) or "command" in section  # a command's words are no credential


def test_urls_of_webhooks_are_taken_with_ports_and_queries() -> None:
    for url in RIGHT:
        assert Alerts(webhook=url).webhook == url
        assert url not in repr(Alerts(webhook=url))


def test_a_metric_that_the_first_log_lacks_is_an_error_on_every_rank(ranks: Simulator, tmp_path: Path) -> None:
    rules: dict[str, list[dict[str, Any]]] = {"rules": [{"metric": "train/los", "above": 3}]}

    def train(ctx: accel.DistContext) -> None:
        with accel.tracking(ctx, "p", to=[jsonl()], dir=tmp_path) as trackers:
            accel.log(ctx, trackers, {"train": {"loss": 1.0}}, step=1)

    def told(ctx: accel.DistContext) -> str:
        return str(caught(lambda: train(accel.replace(ctx, alerts=json.dumps(rules)))))

    for text in ranks.run(told, 2):
        assert "Did you mean `train/loss`?" in text
        assert "later = true" in text
    rules["rules"] = [{"slow_rank": 1.5}]
    assert "Log the values of `accel.metrics.step_statistics`" in ranks.run(told, 1)[0]


@pytest.mark.parametrize(
    ("metric", "near"),
    [
        ("loss", "`eval/loss` or `train/loss`"),
        ("train/los", "`train/loss`"),
        ("valid/loss", "`eval/loss` or `train/loss`"),
        ("step_s", "`time/step_s`"),
    ],
)
def test_a_rule_on_an_unknown_metric_is_told_the_nearest_of_many(tmp_path: Path, metric: str, near: str) -> None:
    ctx = accel.single(alerts=Alerts(rules=(AlertRule(metric=metric, above=3.0),)))
    values = {f"a/{at}": 1.0 for at in range(30)} | {"train": {"loss": 1.0}, "eval/loss": 1.0, "time": {"step_s": 0.1}}
    with accel.tracking(ctx, "p", to=[jsonl()], dir=tmp_path) as trackers, pytest.raises(ConfigError) as raised:
        accel.log(ctx, trackers, values, step=1)
    text = str(raised.value)
    assert f"Did you mean {near}?" in text
    assert f"expected one of {near.replace('`', '').replace(' or ', ', ')}, a/0, a/1, " in text
    assert "and 13 more" in text
    assert not (tmp_path / "metrics.jsonl").exists()  # told before anything is recorded


def test_rules_are_evaluated_by_rank_0_and_each_rank_may_alert(
    ranks: Simulator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = [{"metric": "loss", "above": 3, "level": "error"}, {"metric": "eval", "below": 1, "later": True}]
    section = json.dumps({"rules": rules})

    def train(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, alerts=section)
        with accel.tracking(ctx, "p", to=[jsonl()], dir=tmp_path) as trackers:
            for step in range(9):
                accel.log(ctx, trackers, {"loss": float(step)}, step=step)
                if ctx.rank == 1:
                    alert(ctx, trackers, "short of blocks", "token=hf_Abcdefgh1234", level="info")
        text = str(caught(lambda: alert(ctx, trackers, "late")))
        assert "have ended" in text

    caplog.set_level(logging.INFO, "accel.trackers")
    _ = ranks.run(train, 2)
    found = {each.title: each for each in read_alerts(tmp_path)}
    above, short = found["loss above 3"], found["short of blocks"]
    assert (above.source, above.level, above.count, above.text) == ("rank 0", "error", 5, "loss is 4 at step 4")
    assert (short.source, short.count, short.text) == ("rank 1", 9, "token=***")
    assert set(found) == {"loss above 3", "short of blocks"}
    assert [each.getMessage() for each in caplog.records if "alert: " in each.getMessage()].count(
        "alert: loss above 3: loss is 4 at step 4"
    ) == 1
    assert "the alert's rule 'eval below 1' was never evaluated" in caplog.text
    assert "hf_Abc" not in caplog.text


def test_an_alert_at_the_first_step_is_one_of_the_run_however_late_its_record_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = importlib.import_module("accel.trackers._tracked_run")._start

    def start_late(*args: Any, **options: Any) -> Any:
        wait_for(lambda: bool(read_alerts(tmp_path)))
        return start(*args, **options)

    monkeypatch.setattr("accel.trackers._tracked_run._start", start_late)
    ctx = accel.single(alerts=Alerts(rules=(AlertRule(metric="loss", above=3.0),)))
    with accel.tracking(ctx, "p", to=[jsonl()], dir=tmp_path) as trackers:
        accel.log(ctx, trackers, {"loss": 4.0}, step=1)
    run = read_run(tmp_path)
    assert run is not None
    assert [each.title for each in read_alerts(tmp_path) if each.time_s >= run.started_s] == ["loss above 3"]


def test_wrong_calls_of_the_verb_say_what_to_write(tmp_path: Path) -> None:
    ctx = accel.single()
    with accel.tracking(ctx, "p", to=[jsonl()], dir=tmp_path) as trackers:
        for text, call in (
            ("Did you mean `warning`", lambda: alert(ctx, trackers, "a", level="warn")),  # pyright: ignore
            ("the title is not valid", lambda: alert(ctx, trackers, "a\nb")),
            ("the time is not valid", lambda: alert(ctx, trackers, "a", every_s=-1)),
            ("the values are not trackers", lambda: alert(ctx, "a", "b")),  # pyright: ignore
        ):
            assert text in str(caught(call))
    assert read_alerts(tmp_path) == []


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 400)), max_size=40))
def test_equal_alerts_within_the_time_are_one_with_their_count(pairs: list[tuple[str, float]]) -> None:
    clock, lines = Clock(), list[str]()
    log = AlertLog(Alerts(), source="rank 0", report=lambda level, text: lines.append(text), clock=clock)
    expected: dict[str, list[list[float]]] = {"a": [], "b": []}
    for title, pause_s in pairs:
        clock.now_s += pause_s
        log.add(title, level="info", every_s=600.0)
        if expected[title] and clock.now_s < expected[title][-1][0] + 600:
            expected[title][-1].append(clock.now_s)
        else:
            expected[title].append([clock.now_s])
    log.end(10)
    latest: dict[tuple[str, float], int] = {}
    for line in bytes(log._content).splitlines():
        found = json.loads(line)
        latest[found["title"], found["time_s"]] = found["count"]
    assert latest == {(name, times[0]): len(times) for name, all_ in expected.items() for times in all_}
    assert len(lines) == len(latest)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Files of a certificate for the name localhost, signed by itself, and of its key."""
    x509 = pytest.importorskip("cryptography.x509", reason="cryptography, which makes the certificate, is missing")
    parts = ("asymmetric.ec", "hashes", "serialization")
    ec, hashes, to = (importlib.import_module(f"cryptography.hazmat.primitives.{part}") for part in parts)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now - day).not_valid_after(now + day)
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    folder = tmp_path_factory.mktemp("certificate")
    files = folder / "certificate.pem", folder / "key.pem"
    _ = files[0].write_bytes(made.sign(key, hashes.SHA256()).public_bytes(to.Encoding.PEM))
    plain = key.private_bytes(to.Encoding.PEM, to.PrivateFormat.PKCS8, to.NoEncryption())
    _ = files[1].write_bytes(plain)
    return files


class Service(http.server.ThreadingHTTPServer):
    """A webhook on loopback, with TLS.

    Attributes:
        url: its URL.
        answers: statuses that it answers with, the last for good; 0 is an answer of a byte now and then.
        place: where it redirects to.
        got: path and body of each request.
    """

    daemon_threads = True

    def __init__(self, certificate: tuple[Path, Path]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"https://localhost:{self.server_port}/T0/secret-part?key=secret-part"
        self.answers = [200]
        self.place = ""
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.ended = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that refuse the certificate are expected."""


class Answer(http.server.BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, body))
        answers = self.server.answers
        status = answers.pop(0) if len(answers) > 1 else answers[0]
        if not status:
            while not self.server.ended.wait(0.02):
                self.wfile.write(b"H")
            return
        self.send_response(status)
        if self.server.place:
            self.send_header("Location", self.server.place)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def service(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A webhook whose certificate is trusted, asked without a proxy and tried again at once."""
    monkeypatch.setattr("accel.alerts._PAUSE_S", 0.0)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Service(certificate) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.ended.set()
        found.shutdown()
        thread.join()


def told(url: str) -> list[str]:
    """Deliver an alert; return the lines of the log."""
    lines: list[str] = []
    log = AlertLog(Alerts(webhook=url), source="rank 0", report=lambda level, text: lines.append(text))
    log.add("loss above 3", "loss is 4", level="error", every_s=600)
    log.end(60)
    assert "secret-part" not in "".join(lines)
    return lines


ALERTED = "alert: loss above 3: loss is 4"
FAILED = "the webhook did not get the alert 'loss above 3': 3 tries, "


@pytest.mark.parametrize(("answers", "tries"), [([200], 1), ([204], 1), ([500, 200], 2), ([500], 3), ([404], 3)])
def test_a_webhook_is_tried_three_times_and_its_failure_is_one_line(
    answers: list[int], tries: int, service: Service
) -> None:
    service.answers = list(answers)
    lines = told(service.url)
    assert [path for path, _ in service.got] == ["/T0/secret-part?key=secret-part"] * tries
    body = service.got[0][1]
    assert body["line"] == "loss above 3: loss is 4"
    assert (body["level"], body["source"], body["count"]) == ("error", "rank 0", 1)
    failed = [] if answers[-1] < 300 else [f"{FAILED}HTTP status {answers[-1]}"]
    assert lines == [ALERTED, *failed]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_webhook_leads_nowhere_else(status: int, service: Service) -> None:
    for place in (f"https://localhost:{service.server_port}/else", "http://localhost:1/secret-part", "file:///etc/"):
        service.answers, service.place = [status], place
        service.got.clear()
        assert told(service.url) == [ALERTED, f"{FAILED}HTTP status {status}"]
        assert {path for path, _ in service.got} == {"/T0/secret-part?key=secret-part"}
        assert len(service.got) == 3


def test_a_webhook_of_no_known_certificate_or_of_another_name_gets_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another = service.url.replace("localhost", "127.0.0.1")
    [_, failed] = told(of_another)
    assert failed.startswith(FAILED)
    assert "certificate verify failed: IP address mismatch" in failed
    monkeypatch.delenv("SSL_CERT_FILE")
    [_, failed] = told(service.url)
    assert "certificate verify failed: self-signed certificate" in failed
    assert service.got == []
    [_, failed] = told("https://localhost:1/T0/secret-part")
    assert "Connection refused" in failed


def test_a_webhook_that_answers_a_byte_now_and_then_has_its_time_in_all(service: Service) -> None:
    service.answers = [0]
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer in 0\.5 s"):
        post_json(service.url, b"{}", 0.5)
    assert time.monotonic() - began < patience(10)
    wait_for(lambda: not any(each.name == "accel-request" for each in threading.enumerate()), patience(10))


def test_a_try_has_ten_seconds() -> None:
    given: list[tuple[str, float]] = []

    def post(url: str, body: bytes, patience_s: float) -> None:
        given.append((url, patience_s))

    log = AlertLog(Alerts(webhook=URL), source="", report=lambda level, text: None, post=post)
    log.add("a", level="info", every_s=600)
    log.end(30)
    assert given == [(URL, 10.0)]


def test_a_run_alerts_its_webhook_and_shows_the_url_nowhere(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service.answers = [500, 200]
    ctx = accel.single(alerts=Alerts(webhook=service.url, rules=(AlertRule(metric="loss", above=3.0),)))
    with accel.tracking(ctx, "p", to=[jsonl()], dir=tmp_path, run="first", config={"webhook": service.url}) as trackers:
        accel.log(ctx, trackers, {"loss": 4.0}, step=1)
    assert [(body["title"], body["run"]) for _, body in service.got] == [("loss above 3", "first")] * 2
    assert "secret-part" not in caplog.text + repr(ctx)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"secret-part" not in path.read_bytes(), path


def test_a_webhook_that_hangs_ends_no_run_and_plain_http_is_never_asked() -> None:
    lines: list[str] = []
    began = threading.Event()

    def hang(url: str, body: bytes, patience_s: float) -> None:
        began.set()
        threading.Event().wait()

    log = AlertLog(Alerts(webhook=URL), source="launch", report=lambda level, text: lines.append(text), post=hang)
    for number in range(3):
        log.add(f"alert {number}", level="info", every_s=600)
    assert began.wait(30)
    log.end(0.1)
    assert lines[-1] == "3 alerts were not delivered in time"
    with pytest.raises(ValueError, match="not https"):
        post_json("http://127.0.0.1:1/", b"{}", 1.0)


def test_a_command_gets_words_and_json_and_no_shell(tmp_path: Path) -> None:
    lines: list[str] = []
    script = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2] + '|' + sys.stdin.read())"
    words = (sys.executable, "-c", script, str(tmp_path / "got"), "{level}: {title} $(touch x)")
    log = AlertLog(Alerts(command=words), source="rank 0", report=lambda level, text: lines.append(text))
    log.add("a; touch {text}", "b", level="error", every_s=600)
    log.end(30)
    shown, _, body = (tmp_path / "got").read_text().partition("|")
    assert shown == "error: a; touch {text} $(touch x)"
    assert json.loads(body)["text"] == "b"
    log = AlertLog(Alerts(command=("no-such-program",)), source="", report=lambda level, text: lines.append(text))
    log.add("lost", level="error", every_s=600)
    log.end(30)
    assert "the command did not get the alert 'lost': " in lines[-1]
