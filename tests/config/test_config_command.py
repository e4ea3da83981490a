# SPDX-License-Identifier: Apache-2.0
"""`accel config`: what it asks, at a terminal and without one, what it writes, and what it shows."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from launches import Gpu, Machine
from processes import patience

from accel.cli import main
from accel.cli._questions import describe_machine, interview, suggest
from accel.config import LaunchConfig, decode, read_config
from accel.topology import Plan

ARROW_DOWN, ARROW_UP, ENTER = b"\x1b[B", b"\x1b[A", b"\r"
TWO_GPUS = Machine(cores=8, gpus=(Gpu(name="H100", generation=9),) * 2)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "dumb")
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


class Terminal:
    """`accel config` behind a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self.fd, inner = pty.openpty()
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "accel.cli", "config", *words],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=os.environ | {"TERM": "xterm"},
        )
        os.close(inner)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Read until a text has come since the last time."""
        end = time.monotonic() + patience(10)
        fresh = ""
        while text not in fresh:
            assert select.select([self.fd], [], [], max(0, end - time.monotonic()))[0], f"{text!r} not in {fresh!r}"
            fresh += os.read(self.fd, 1 << 16).decode()
        self.shown += fresh

    def press(self, *keys: bytes) -> None:
        for key in keys:
            os.write(self.fd, key)

    def end(self) -> int:
        with contextlib.suppress(OSError):  # what a pseudo-terminal says at its end
            while chunk := os.read(self.fd, 1 << 16):
                self.shown += chunk.decode()
        os.close(self.fd)
        return self.popen.wait(timeout=patience(10))


def test_arrow_keys_choose_and_the_result_is_shown_before_it_is_written() -> None:
    terminal = Terminal()
    terminal.wait_for("other")
    terminal.press(ARROW_UP, ARROW_DOWN, ARROW_DOWN, ENTER)
    terminal.wait_for("[1]: ")
    terminal.press(b"many\r")
    terminal.wait_for("got 'many'")
    terminal.press(b"3\r")
    terminal.wait_for("fp8 ")
    terminal.press(ARROW_UP, b"k", b"\x1bOA", b"j", ENTER)
    terminal.wait_for("time-outs")
    terminal.press(ENTER)
    terminal.wait_for("to accel.toml")
    assert not Path("accel.toml").exists()
    assert 'precision = "pure-bf16"' in terminal.shown
    terminal.press(ENTER)
    assert terminal.end() == 0
    assert read_config("accel.toml").values == {"device": "cpu", "nproc_per_node": 3, "precision": "pure-bf16"}
    assert terminal.shown.count("\x1b[?25l") == terminal.shown.count("\x1b[?25h")  # the cursor is visible again


@pytest.mark.parametrize("status", [130, 2])
def test_leaving_early_writes_nothing(status: int) -> None:
    terminal = Terminal()
    terminal.wait_for("other")
    if status == 130:
        terminal.popen.send_signal(signal.SIGINT)
    else:
        terminal.press(b"\x04")
    assert terminal.end() == status
    assert "Nothing has been written." in terminal.shown
    assert "Traceback" not in terminal.shown
    assert terminal.shown.count("\x1b[?25l") == terminal.shown.count("\x1b[?25h")
    assert not Path("accel.toml").exists()


def test_without_a_terminal_numbers_and_names_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(
        monkeypatch,
        "gpu",
        "2",
        "2",
        "bf16",
        "yes",
        "4",
        "fsdp",
        "offload=true",
        "repeated",
        "dp=1,tp=2",
        "",
        "60",
        "",
        "",
        "",
        "",
        "",
        "",
        "",
        "",
        *("", "", ""),  # rdzv_last_call_s, rdzv_id, role
        "logs",
        "false",
        "",
        "",
        "",
        "",
        "",
        "1",
    )
    assert main(["config"]) == 0
    assert "'gpu' is not in the list." in capsys.readouterr().out
    said = LaunchConfig(device="cpu", nproc_per_node=2, precision="bf16", timeout_s=60, log_dir="logs", prefix=False)
    said = msgspec.structs.replace(said, accumulation=4, strategy="fsdp", mesh="dp=1,tp=2")
    said = msgspec.structs.replace(said, plan=Plan(offload=True), compile="repeated")
    text = Path("accel.toml").read_text()
    assert decode(text) == said
    assert "\n#gpu_ids" in text


def test_a_file_that_is_there_gives_the_defaults_and_keeps_what_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.json").write_text('{"device": "cuda:1", "nproc_per_node": 1, "log_dir": "logs"}')
    answer(monkeypatch, "", "", "tf32", "", "")
    assert main(["config", "--output", "a.json"]) == 0
    expected = {"device": "cuda:1", "nproc_per_node": 1, "precision": "tf32", "log_dir": "logs"}
    assert read_config("a.json").values == expected


def test_answers_that_contradict_each_other_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "auto", "0,0", "1", "2", "1", "", "no")
    answers = interview(TWO_GPUS, {}, arrows=False)
    assert answers == {"device": "auto", "gpu_ids": (1,), "nproc_per_node": 1, "precision": "bf16"}


def test_what_is_there_can_be_taken_or_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"device": "cuda", "gpu_ids": (0, 1), "nproc_per_node": 2, "precision": "fp16", "quiet": True}
    answer(monkeypatch, "", "", "", "", "")
    assert interview(TWO_GPUS, present, arrows=False) == present
    answer(monkeypatch, "", "1", "", "1", "", "")  # two processes have no place on one GPU
    assert interview(TWO_GPUS, present, arrows=False) == present | {"gpu_ids": (1,), "nproc_per_node": 1}
    answer(monkeypatch, "cpu", "", "", "")
    on_cpu = {name: value for name, value in present.items() if name != "gpu_ids"} | {"device": "cpu"}
    assert interview(TWO_GPUS, present, arrows=False) == on_cpu
    answer(monkeypatch, "", "", "", "")
    assert interview(Machine(cores=1), present, arrows=False) == present


def test_the_machine_decides_what_is_suggested() -> None:
    assert suggest(TWO_GPUS) == {"nproc_per_node": "auto", "precision": "bf16"}
    assert suggest(Machine(cores=2, gpus=(Gpu(name="V100", generation=7),)))["precision"] == "fp16"
    assert suggest(Machine(cores=2)) == {}
    assert describe_machine(TWO_GPUS) == "This machine: 8 CPU cores, 2 x H100."


def test_no_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "", "", "", "", "no")
    assert main(["config"]) == 1
    assert not Path("accel.toml").exists()


def test_default_writes_a_template_and_replaces_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "default"]) == 0
    assert all(name in Path("accel.toml").read_text() for name in LaunchConfig.__struct_fields__)
    Path("accel.toml").write_text("quiet = true")
    assert main(["config", "default"]) == 2
    assert "Pass --force to replace it." in capsys.readouterr().err
    assert Path("accel.toml").read_text() == "quiet = true"
    assert main(["config", "default", "--force"]) == 0
    assert read_config("accel.toml").values == suggest(Machine(cores=1))


def test_show_tells_every_field_its_value_and_its_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text("nproc_per_node = 2\nquiet = true\n")
    monkeypatch.setenv("ACCEL_CONFIG", "mine.toml")
    monkeypatch.setenv("ACCEL_PRECISION", "bf16")
    assert main(["config", "show", "--quiet=false", "--cpu"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == list(LaunchConfig.__struct_fields__)
    assert ["nproc_per_node", "2", "file", "mine.toml"] in lines
    assert ["precision", "bf16", "environment", "ACCEL_PRECISION"] in lines
    assert ["quiet", "false", "flag", "--quiet"] in lines
    assert ["device", "cpu", "flag", "--device"] in lines
    assert ["backend", "auto", "default"] in lines


def test_import_writes_what_it_took_and_lists_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    Path("old.yaml").write_text("num_processes: 2\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n")
    assert main(["config", "import", "old.yaml"]) == 0
    out = capsys.readouterr().out
    assert "precision = bf16\n" in out
    assert "  fsdp_config: {'fsdp_version': 2} - " in out
    assert read_config("accel.toml").values == {"nproc_per_node": 2, "precision": "bf16"}
    assert main(["config", "import", "old.yaml"]) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["shwo"], "Did you mean `show`?"),
        (["--ouput", "a.toml"], "Did you mean `--output`?"),
        (["default", "--output", "a.yaml"], "accel does not read or write this format"),
        (["default", "--output", "no/where.toml"], "the file cannot be written"),
        (["--output", "no/where.toml"], "the input ended"),
        (["import"], "the following arguments are required: FILE"),
        (["import", "nowhere.yaml"], "there is no such file"),
        (
            ["import", "bad.yaml"],
            "malformed YAML: got mapping values are not allowed here - at bad.yaml, line 1, column 5",
        ),
        (["show", "--config", "wrong.toml"], "got 0 - at wrong.toml, key nproc_per_node"),
        (["--output", "wrong.toml"], "got 0 - at wrong.toml, key nproc_per_node"),
        (["show", "extra"], "unknown"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong.toml").write_text("nproc_per_node = 0\n")
    Path("bad.yaml").write_text("a: b: c\n")
    answer(monkeypatch)
    assert main(["config", *words]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
