# SPDX-License-Identifier: Apache-2.0
"""Servers of other processes draw the trainer's samples; each way that they fail is one error on all ranks, in time."""

from __future__ import annotations

import inspect
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from catching import assert_raises
from processes import patience, same_path
from torch import Tensor, nn

import accel
from accel.errors import ConfigError, ServerError
from accel.post_training import (
    PendingSamples,
    SampleOptions,
    SampleRequest,
    Samples,
    Version,
    publish,
    sample,
    sample_later,
    servers,
)
from accel.seeding import Key
from accel.testing import simulate

TOKEN = "secret"
PROMPTS = {number: [number % 7, 1] for number in range(5)}
OPTIONS: dict[str, Any] = {"key": Key(3), "max_new_tokens": 5, "n": 2, "stop": 10}


class Digits(nn.Module):
    """Predicts the next token from the last one alone."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(11, 11, generator=generator, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(11, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids] + self.bias


@contextmanager
def served(model: nn.Module | None = None, **options: Any) -> Generator[str]:
    server = servers.local(model or Digits(9))
    with servers.serve(accel.single(), server, token=TOKEN, **options) as url:
        yield url


@contextmanager
def faulty(answer: Callable[[socket.socket], None]) -> Generator[str]:
    """Run a server that treats each connection in its own way."""
    listener = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = []

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            opened.append(connection)
            threading.Thread(target=guarded, args=(connection,), daemon=True).start()

    def guarded(connection: socket.socket) -> None:
        try:
            answer(connection)
        except OSError:
            return

    threading.Thread(target=run, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for each in opened:
            each.close()


def collected(ctx: accel.DistContext, later: PendingSamples) -> None:
    """Take samples, and make the next call, in which ranks get the failures of others."""
    later.result()
    accel.wait_for_everyone(ctx)


def expected(prompts: dict[int, list[int]]) -> Samples:
    return sample(accel.single(), servers.local(Digits()), prompts, **OPTIONS)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_servers_draw_what_the_trainer_would(count: int, ranks: int) -> None:
    with served() as first, served() as second:
        urls = [first, second][:count]

        def rank(ctx: accel.DistContext) -> bool:
            client = servers.http(urls, token=TOKEN, timeout_s=patience(30))
            sends = client if ctx.is_main_process else None
            version = publish(ctx, sends, Digits(), version=Version("a", 1), chunk_bytes=100).version
            mine = {number: ids for number, ids in PROMPTS.items() if number % ctx.world_size == ctx.rank}
            later = sample_later(ctx, client, mine, version=version, **OPTIONS)
            right = expected(mine)
            return all(
                torch.equal(found.ids, right.ids)
                and torch.equal(found.logprobs, right.logprobs)  # pyright: ignore[reportArgumentType]
                and (found.prompts, found.finish_reasons, found.version)
                == (right.prompts, right.finish_reasons, version)
                for found in (later.result(), sample(ctx, client, mine, **OPTIONS))
            )

        assert all(simulate(rank, ranks))
    none = servers.http(urls, token=TOKEN)
    assert sample(accel.single(), none, {}, **OPTIONS).prompts == ()  # a rank without prompts asks for nothing


def hang(connection: socket.socket) -> None:
    threading.Event().wait(60)


def drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.05)


def vanish(connection: socket.socket) -> None:
    connection.recv(10)
    connection.close()


def chatter(connection: socket.socket) -> None:
    connection.recv(100_000)
    connection.sendall(b"220 mail\r\n")
    end(connection)


def end(connection: socket.socket) -> None:
    """Close after the client. An unread request would reset the connection, and the client would lose the answer."""
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(100_000):
        pass
    connection.close()


def cut(connection: socket.socket) -> None:
    connection.recv(100_000)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nnull")
    end(connection)


def redirect(connection: socket.socket) -> None:
    connection.recv(100_000)
    connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")
    end(connection)


def other(connection: socket.socket) -> None:
    connection.recv(100_000)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
    end(connection)


FAULTS: dict[str, tuple[Any, str]] = {
    "hangs": (hang, "no answer in 0.3 s"),
    "a byte now and then": (drip, "no answer in 0.3 s"),
    "vanishes": (vanish, "Error"),
    "is none of HTTP": (chatter, "BadStatusLine"),
    "ends in the answer": (cut, "IncompleteRead"),
    "is elsewhere": (redirect, "HTTP status 302"),
    "answers something else": (other, "ValidationError"),
}


@pytest.mark.parametrize("fault", [*FAULTS, "gone", "stale", "half loaded", "of another dtype", "of another token"])
@pytest.mark.parametrize("verb", ["publish", "sample"])
def test_each_fault_is_one_error_on_every_rank_in_time(fault: str, verb: str) -> None:
    answer, got = FAULTS.get(fault, (None, ""))
    token, wanted = TOKEN, Version("a", 1)
    if fault == "answers something else" and verb == "publish":
        pytest.skip("an answer of status 200 to begin, load and commit has no content")
    with faulty(answer) if answer else served(Digits(9).float() if "dtype" in fault else None) as url:
        own = servers.http(url, token=TOKEN)
        if fault == "gone":
            with served() as ended:
                url = ended
            got = "refused"
        elif fault == "of another token":
            token = "other"
            got = ""
        elif fault == "stale":
            publish(accel.single(), own, Digits(4), version=Version("a", 1))
            wanted = Version("a", 1) if verb == "publish" else Version("a", 2)
            got = "version 1 of session 'a'"
        elif fault == "half loaded":
            own.begin(Version("a", 0))
            own.load({"table": Digits().table})
            got = "some of version 0" if verb == "sample" else ""
        elif fault == "of another dtype":
            got = "torch.float64" if verb == "publish" else ""

        def rank(ctx: accel.DistContext) -> tuple[str, str]:
            client = servers.http(url, token=token, timeout_s=0.3 if answer else patience(30))
            if verb == "publish":
                ctx = accel.replace(ctx, mesh="dp=2", strategy="fsdp")
                model = accel.prepare_model(ctx, Digits())
                with pytest.raises(ServerError) as caught:
                    publish(ctx, client if ctx.is_main_process else None, model, version=wanted)
            else:
                mine = PROMPTS if ctx.rank == 0 else {}
                later = sample_later(ctx, client, mine, version=wanted, **OPTIONS)
                with pytest.raises(ServerError) as caught:
                    collected(ctx, later)  # rank 1 has asked for nothing
            return caught.value.problem, caught.value.got

        began = time.monotonic()
        if fault == "half loaded" and verb == "publish":  # the next publish begins anew
            assert publish(accel.single(), own, Digits(), version=wanted).version == wanted
            return
        first, second = simulate(rank, 2, default_group=True)
        assert first == second
        assert got in first[1]
        assert time.monotonic() - began < patience(10)


def test_one_of_several_servers_that_fails_is_the_error() -> None:
    with served() as right, faulty(vanish) as wrong:
        client = servers.http([right, wrong], token=TOKEN, timeout_s=patience(5))
        calls: list[Any] = [
            lambda: sample(accel.single(), client, PROMPTS, **OPTIONS),
            lambda: publish(accel.single(), client, Digits(), version=Version("a", 1)),
        ]
        for call in calls:
            with pytest.raises(ServerError) as caught:
                call()
            assert caught.value.where.startswith(wrong)
    with served() as right, served() as newer:
        publish(accel.single(), servers.http(newer, token=TOKEN), Digits(), version=Version("a", 1))
        both = servers.http([right, newer], token=TOKEN)
        with assert_raises(ServerError, problem="servers have different weights"):
            sample(accel.single(), both, PROMPTS, **OPTIONS)
        publish(accel.single(), both, Digits(), version=Version("a", 2))  # the line of the fix
        assert torch.equal(sample(accel.single(), both, PROMPTS, **OPTIONS).ids, expected(PROMPTS).ids)


def test_a_server_with_logits_that_are_not_finite_is_an_error_by_that_name() -> None:
    broken = Digits()
    _ = broken.table.data.fill_(float("nan"))
    with served(broken) as url:
        client = servers.http(url, token=TOKEN, timeout_s=patience(30))
        with assert_raises(ServerError, problem="not finite") as caught:
            sample(accel.single(), client, PROMPTS, **OPTIONS)
        assert caught.value.where.startswith(url)
        publish(accel.single(), client, Digits(), version=Version("a", 1))  # the line of the fix
        assert torch.equal(sample(accel.single(), client, PROMPTS, **OPTIONS).ids, expected(PROMPTS).ids)


def test_a_chunk_that_comes_too_late_changes_nothing() -> None:
    model = Digits(9)
    with served(model) as url:
        client = servers.http(url, token=TOKEN)
        publish(accel.single(), client, Digits(), version=Version("a", 1))
        with assert_raises(ServerError, problem="nobody has begun"):
            client.load({"table": torch.zeros(11, 11, dtype=torch.float64)})
        with assert_raises(ServerError, problem="nobody has begun"):
            client.commit("", 0)
    assert torch.equal(model.table, Digits().table)


def test_a_server_refuses_requests_that_it_should_not_read() -> None:
    def status(url: str, *, body: bytes = b"{}", token: str = TOKEN) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    with served(most_bytes=100) as url:
        assert status(f"{url}/begin", token="") == 403
        assert status(f"{url}/begin", body=b" " * 101) == 413
        assert status(f"{url}/begin", body=b"[]") == 500
        assert status(f"{url}/load", body=b"no safetensors") == 500
        assert status(f"{url}/shell") == 400
        assert status(f"{url}/begin", body=b'{"number": 1}') == 200


def test_slips_are_refused() -> None:
    spread = servers.local(Digits())
    slips: list[Any] = [
        lambda: servers.http("host:80", token=TOKEN),
        lambda: servers.http([], token=TOKEN),
        lambda: servers.http("http://", token=TOKEN),
        lambda: servers.http("http://host:port", token=TOKEN),
        lambda: servers.http(["http://host:80", 5], token=TOKEN),  # type: ignore[list-item]
        lambda: servers.http("http://host:80", token=TOKEN, timeout_s=0),
        lambda: servers.vllm("host:80", "folder"),
        lambda: servers.http("http://host:80", token=" "),
        lambda: servers.http("http://host:80", token="a\nb"),
        lambda: servers.serve(accel.single(), spread, token="").__enter__(),
    ]
    for call in slips:
        with pytest.raises(ConfigError):
            call()
    for wrong, where in ((slips[0], "http(urls)"), (lambda: servers.vllm("host:80", "folder"), "vllm(url)")):
        with pytest.raises(ConfigError) as caught:
            wrong()
        assert caught.value.where == where


class Slow:
    """A server of one's own that draws when it is let, and fails if told so."""

    place: Any = "remote"

    def __init__(self, error: Exception | None = None) -> None:
        self.go = threading.Event()
        self.thread = ""
        self._error = error

    def sample(self, ctx: accel.DistContext, requests: Sequence[SampleRequest], options: SampleOptions) -> Samples:
        self.thread = threading.current_thread().name
        assert self.go.wait(60)
        if self._error is not None:
            raise self._error
        return servers.local(Digits()).sample(ctx, requests, options)


def test_a_result_is_waited_for_and_its_failure_is_every_rank_s() -> None:
    slow = Slow()
    later = sample_later(accel.single(), slow, PROMPTS, **OPTIONS)
    assert not later.is_done  # a step of training goes here
    with assert_raises(ServerError, problem="not come in time"):
        later.result(timeout_s=0.01)
    slow.go.set()
    assert torch.equal(later.result(timeout_s=patience(30)).ids, expected(PROMPTS).ids)
    assert slow.thread == "accel-samples"

    def rank(ctx: accel.DistContext) -> str:
        server = Slow(ConnectionResetError("gone") if ctx.rank == 1 else None)
        server.go.set()
        later = sample_later(ctx, server, PROMPTS, **OPTIONS)
        with pytest.raises(ServerError) as caught:
            collected(ctx, later)
        return caught.value.got

    assert simulate(rank, 2) == ["ConnectionResetError: gone"] * 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_server_of_this_process_draws_before_training_goes_on(strategy: Any) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        ctx = accel.replace(ctx, mesh="dp=2", strategy=strategy)
        model = accel.prepare_model(ctx, Digits())
        later = sample_later(ctx, servers.local(model), {ctx.rank: PROMPTS[ctx.rank]}, **OPTIONS)
        assert later.is_done
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()
        return torch.equal(later.result().ids, expected({ctx.rank: PROMPTS[ctx.rank]}).ids)

    assert all(simulate(rank, 2, default_group=True))


def test_limits_with_the_model_s_log_probabilities_warn_once() -> None:
    class Whole:
        place: Any = "rank"

        def sample(self, ctx: accel.DistContext, requests: Sequence[SampleRequest], options: SampleOptions) -> Samples:
            return expected(PROMPTS)  # log-probabilities of the model's whole distribution

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # Python's own: once for a line
        for _ in range(3):
            sample(accel.single(), Whole(), PROMPTS, top_p=0.5, **OPTIONS)
    assert ["are biased" in str(each.message) for each in caught] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sample(accel.single(), Whole(), PROMPTS, **OPTIONS)
        sample(accel.single(), servers.local(Digits()), PROMPTS, top_p=0.5, **OPTIONS)


SERVER = """
import signal
import sys

import torch
from torch import Tensor, nn

import accel
from accel.post_training import servers

{model}

with servers.serve(accel.single(), servers.local(Digits(9)), token=sys.argv[1]) as url:
    print(url, flush=True)
    signal.pause()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_each_fault_of_a_second_process_is_one_error_on_all_ranks_in_time() -> None:
    code = SERVER.format(model=inspect.getsource(Digits))
    process = subprocess.Popen([sys.executable, "-c", code, TOKEN], stdout=subprocess.PIPE, text=True, env=same_path())
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        own = servers.http(url, token=TOKEN, timeout_s=patience(30))

        def failed(
            verb: str, number: int, timeout_s: float, wanted: str, meanwhile: Callable[[], object] = int
        ) -> None:
            def rank(ctx: accel.DistContext) -> str:
                client = servers.http(url, token=TOKEN, timeout_s=timeout_s)
                version = Version("a", number)
                if verb == "publish":
                    ctx = accel.replace(ctx, mesh="dp=3", strategy="fsdp")
                    model = accel.prepare_model(ctx, Digits())
                    sends = client if ctx.is_main_process else None
                    with pytest.raises(ServerError) as caught:
                        publish(ctx, sends, model, version=version)
                else:
                    later = sample_later(ctx, client, PROMPTS if ctx.rank == 1 else {}, version=version, **OPTIONS)
                    if ctx.rank == 1:
                        meanwhile()
                    with pytest.raises(ServerError) as caught:
                        collected(ctx, later)
                return f"{caught.value.problem} {caught.value.got}"

            began = time.monotonic()
            first, *others = simulate(rank, 3, default_group=True)
            assert others == [first] * 2
            assert wanted in first
            assert time.monotonic() - began < patience(10) + timeout_s

        publish(accel.single(), own, Digits(), version=Version("a", 1))
        right = sample(accel.single(), own, PROMPTS, version=Version("a", 1), **OPTIONS)
        assert torch.equal(right.ids, expected(PROMPTS).ids)
        failed("publish", 1, patience(30), "not newer")
        failed("sample", 2, patience(30), "version 1 of session 'a'")  # stale

        own.begin(Version("a", 2))  # by a trainer that dies before the commit
        own.load({"table": Digits(4).table})
        failed("sample", 1, patience(30), "weights of two versions")
        publish(accel.single(), own, Digits(), version=Version("b", 0))  # the next start of it

        process.send_signal(signal.SIGSTOP)
        failed("publish", 1, 1.0, "no answer in 1 s")
        failed("sample", 1, 1.0, "no answer in 1 s")
        failed("sample", 1, patience(30), "Error", process.kill)  # while it draws
        process.wait()
        failed("publish", 1, patience(30), "refused")
        failed("sample", 1, patience(30), "refused")
    finally:
        process.kill()
        process.communicate()
