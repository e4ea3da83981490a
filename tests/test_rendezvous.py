# SPDX-License-Identifier: Apache-2.0
"""How real ranks come together: one group after another, and what they say when somebody does not come."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from catching import assert_raises
from processes import free_port, patience, script_ranks

import accel

pytestmark = pytest.mark.multiprocess

_KEEPER = "rank 0 has left or hangs: it keeps the list of who came"

SESSIONS = """
import accel, torch
for turn in range(3):
    with accel.session(device="cpu") as ctx:
        assert accel.gather(ctx, torch.tensor([ctx.rank + turn])).tolist() == [turn, turn + 1]
"""
ABSENT = """
import os, sys, time, accel
if os.environ["RANK"] == "1":
    time.sleep(600)
timeout_s = float(sys.argv[1])
try:
    with accel.session(device="cpu", timeout_s=timeout_s):
        pass
except accel.errors.PeerError as error:
    assert f"did not reach the collective within {timeout_s:g} s" in str(error), error
    assert "2 ranks at 127.0.0.1" in str(error), error
    sys.exit(7)
"""


MISSING = """
import os, signal, sys, time, torch, accel
how, who, most_gathered, timeout_s, most_s = sys.argv[1:]
with accel.session(device="cpu", timeout_s=float(timeout_s)) as ctx:
    ctx.comm.most_gathered = int(most_gathered)  # in a large group, messages go between pairs
    accel.gather(ctx, torch.ones(1))
    if ctx.rank == int(who):
        if how == "exits":
            sys.exit(0)
        if how == "hangs":
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGSTOP if how == "stops" else signal.SIGKILL)
    began = time.monotonic()
    try:
        accel.gather(ctx, torch.ones(1))
    except accel.errors.PeerError as error:
        assert f"rank {ctx.rank}, gather at missing.py:15 in <module>" in str(error), error
        assert time.monotonic() - began < float(most_s), error
        print("SAID", error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [["accel.cli", "launch"], ["torch.distributed.run"]], ids=["accel", "torchrun"])
def test_one_session_after_another(tmp_path: Path, launcher: list[str]) -> None:
    script = tmp_path / "sessions.py"
    script.write_text(SESSIONS)
    command = [sys.executable, "-m", *launcher, "--nproc-per-node", "2", str(script)]
    subprocess.run(command, check=True, timeout=patience(120))


def test_a_rank_that_does_not_come_is_told_of(tmp_path: Path) -> None:
    script = tmp_path / "absent.py"
    script.write_text(ABSENT)
    command = [sys.executable, "-m", "accel.cli", "launch", "--nproc-per-node", "2", str(script), str(patience(2))]
    assert subprocess.run(command, capture_output=True, timeout=patience(120), check=False).returncode == 7


@pytest.mark.parametrize(
    ("how", "who", "said"),
    [
        ("exits", 1, "rank 1 left: the context there is closed"),
        # what rank 0 noted may be gone with it, as it keeps the notes
        pytest.param("exits", 0, "rank 0 ", marks=pytest.mark.slow),
        pytest.param("is killed", 1, "rank 1 left: the connection is gone", marks=pytest.mark.slow),
        pytest.param("is killed", 0, _KEEPER, marks=pytest.mark.slow),
        (
            "hangs",
            1,
            r"rank 1 did not reach the collective within \S+ s: expected all 3 ranks in .* \d, got ranks 0, 2 only",
        ),
        pytest.param("stops", 0, _KEEPER, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("most_gathered", [pytest.param(2, marks=pytest.mark.slow), 64], ids=["large", "small"])
def test_a_missing_rank_is_named_by_all_others(
    tmp_path: Path, how: str, who: int, said: str, most_gathered: int
) -> None:
    script = tmp_path / "missing.py"
    script.write_text(MISSING)
    port = free_port()
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environs = [common | {"RANK": str(rank)} for rank in range(3)]
    with script_ranks(script, environs, how, who, most_gathered, patience(2), patience(12), folder=tmp_path) as ranks:
        for rank, process in enumerate(ranks):
            if rank != who:
                assert process.wait(60) == 0, process.said()
                assert re.search(f"SAID {said}", process.said()), process.said()


DISAGREEING = """
import sys, time, accel
from accel import session
began = time.monotonic()
try:
    with session(device="cpu", timeout_s=2 * float(sys.argv[1])):
        pass
except accel.errors.EnvError as error:
    print(error)
    sys.exit(7 if time.monotonic() - began < float(sys.argv[1]) else 8)
"""


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"RANK": "1"}, {"RANK": "1"}, ("two processes are rank 1: got rank 1 on ", " and rank 1 on ")),
        pytest.param(
            {"RANK": "1"},
            {"RANK": "2", "WORLD_SIZE": "4"},
            ("ranks do not agree on world_size: got ", " at rank "),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"RANK": "1", "ACCEL_PRECISION": "bf16"},
            {"RANK": "2"},
            ("ranks do not agree on precision: got ",),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_that_cannot_belong_together_say_so_on_every_rank(
    tmp_path: Path, one: dict[str, str], other: dict[str, str], said: tuple[str, ...]
) -> None:
    script = tmp_path / "disagreeing.py"
    script.write_text(DISAGREEING)
    port = free_port()
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environs = [common | own for own in ({"RANK": "0"}, one, other)]
    with script_ranks(script, environs, patience(30), folder=tmp_path) as ranks:
        assert [rank.wait(120) for rank in ranks] == [7, 7, 7], [rank.said() for rank in ranks]
        (told,) = {rank.said() for rank in ranks}
    assert all(words in told for words in said), told


INIT_METHOD = """
import sys, accel, torch
for turn in range(2):
    with accel.session(device="cpu", init_method=sys.argv[1]) as ctx:
        assert accel.gather(ctx, torch.tensor([ctx.rank + turn])).tolist() == [turn, turn + 1]
        try:
            accel.from_env(device="cpu", init_method=sys.argv[1])
        except accel.errors.ConfigError as error:
            assert "open already" in str(error), error
"""


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_meet_where_the_script_says(tmp_path: Path, kind: str) -> None:
    """Without an address in the variables, and not at the one that is there."""
    script = tmp_path / "met.py"
    script.write_text(INIT_METHOD)
    place = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else (tmp_path / "store").as_uri()
    elsewhere = {"MASTER_ADDR": "node..0", "MASTER_PORT": "1"} if kind == "file" else {}
    environs = [{"RANK": str(rank), "WORLD_SIZE": "2", **elsewhere} for rank in range(2)]
    with script_ranks(script, environs, place, folder=tmp_path) as ranks:
        assert [rank.wait(patience(60)) for rank in ranks] == [0, 0], [rank.said() for rank in ranks]


def test_a_file_to_meet_in_is_of_a_folder_that_is_there() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2"}
    with assert_raises(
        accel.errors.PeerError,
        problem="rank 1 cannot open the address",
        expected="/missing/store",
        got="no folder /missing",
    ):
        accel.from_env(environ, init_method="file:///missing/store", device="cpu")


def test_an_address_that_is_taken_or_empty_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with assert_raises(
            accel.errors.PeerError, problem="cannot serve the address", expected=rf"127\.0\.0\.1:{port}"
        ):
            accel.from_env(environ, device="cpu", timeout_s=1)
    with assert_raises(accel.errors.PeerError, problem="cannot reach the address", expected=rf"127\.0\.0\.1:{port}"):
        accel.from_env({**environ, "RANK": "1"}, device="cpu", timeout_s=1)
    assert "MASTER_PORT" not in os.environ


def test_what_can_be_no_name_is_refused_at_once() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node..0", "MASTER_PORT": "29500"}
    with assert_raises(accel.errors.PeerError, problem="rank 1 cannot reach ", expected=r"node\.\.0:29500"):
        accel.from_env(environ, device="cpu")


def test_a_name_that_is_not_known_yet_is_waited_for_aloud(capfd: pytest.CaptureFixture[str]) -> None:
    environ = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid"}
    with assert_raises(accel.errors.PeerError, problem="rank 1 cannot reach", expected=r"no-such-host\.invalid:29500"):
        accel.from_env({**environ, "MASTER_PORT": "29500"}, device="cpu", timeout_s=2.5)
    said = capfd.readouterr().err
    assert said.startswith("accel: rank 1 waits for rank 0 at no-such-host.invalid:29500, up to 2.5 s: ")
    assert said.count("\n") == 1


def test_a_socket_that_reached_itself_is_not_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give a caller the very port that it calls, and TCP connects the two."""
    opened = list[socket.socket]()

    def connect(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        calling = socket.socket()
        calling.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        calling.bind(address)
        calling.connect(address)
        opened.append(calling)
        return calling

    port = free_port()
    monkeypatch.setattr(socket, "create_connection", connect)
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    fields = {"problem": "cannot reach the address", "expected": rf"127\.0\.0\.1:{port}", "got": "refused"}
    with assert_raises(accel.errors.PeerError, **fields):
        accel.from_env(environ, device="cpu", timeout_s=1)
    assert opened
