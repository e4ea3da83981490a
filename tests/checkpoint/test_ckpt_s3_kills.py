# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed at any request of a save to an S3 server leave the former checkpoint or the new one."""

import contextlib
import itertools
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
import torch
from ckpt_helpers import CPU
from processes import job, patience
from torch import nn

import accel
from accel.storage import RemotePath, as_place

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the server's and the client's own, and of forks
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

DONE = 7
LARGE = (17 << 20) // 8  # elements; more than one part of an upload


class Killer:
    """A WSGI application that kills processes before or after a request of a number has been handled."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app, self.lock = app, threading.Lock()
        self.aim([], -1, after=False)

    def aim(self, pids: list[int], moment: int, *, after: bool) -> None:
        self.pids, self.moment, self.after, self.count = pids, moment, after, 0

    def __call__(self, environ: Any, start: Any) -> Any:
        with self.lock:
            chosen, self.count = self.count == self.moment, self.count + 1
        if chosen and not self.after:
            self.kill()
        answer = self.app(environ, start)
        if chosen and self.after:
            self.kill()
        return answer

    def kill(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def killer() -> Iterator[tuple[Killer, RemotePath]]:
    # here, so that the default run, which has no test of this file, imports none of them
    pytest.importorskip("s3fs", reason="needs accel-torch[s3]")
    server = pytest.importorskip("moto.server", reason="needs moto, an S3 server; it is in accel-torch[tests]")
    serving = pytest.importorskip("werkzeug.serving")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = Killer(server.DomainDispatcherApplication(server.create_backend_app))
    running = serving.make_server("127.0.0.1", 0, app, True, request_handler=server.MotoRequestHandler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{running.server_address[1]}"
    options = {"key": "key", "secret": "secret"}
    options |= {"client_kwargs": {"endpoint_url": url, "region_name": "us-east-1"}}
    fsspec.filesystem("s3", **options).call_s3("create_bucket", Bucket="kills")
    yield app, RemotePath("s3://kills", options)
    running.shutdown()
    thread.join()


def items(value: int, large: bool) -> dict[str, Any]:
    """A model of which each rank writes a share."""
    sizes = {"x": 50, "y": 70, "large": LARGE if large else 1}
    weights = {name: torch.full((size,), float(value), dtype=torch.float64) for name, size in sizes.items()}
    return {"value": value, "model": nn.ParameterDict(weights)}


def start_rank(environ: dict[str, str], gate: int, work: Callable[[accel.DistContext], object]) -> int:
    """Fork a process that joins its group, waits until the gate closes, and works; return its number."""
    if pid := os.fork():
        return pid
    try:
        with accel.session(environ) as ctx:
            os.read(gate, 1)
            work(ctx)
        os._exit(DONE)
    except BaseException as error:
        print(f"rank {environ['RANK']}: {error!r}", flush=True)
    finally:
        os._exit(1)


def wait_all(pids: list[int], seconds: float) -> list[int]:
    """Wait for processes, which end soon after one of them has been killed; return their exit codes."""
    codes, end = dict[int, int](), time.monotonic() + seconds
    while len(codes) < len(pids) and time.monotonic() < end:
        for pid in pids:
            if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(found[1])
        time.sleep(0.005)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert len(codes) == len(pids), "a rank was stuck after another had been killed"
    return [codes[pid] for pid in pids]


def save_and_kill(
    killer: Killer, out: RemotePath, world: int, moment: int, *, after: bool, victims: list[int], step: int, large: bool
) -> list[int]:
    """Save with that many processes, of which some are killed at a request; return the exit codes."""
    gate, opener = os.pipe()
    pids = list[int]()
    for environ in job(world, ACCEL_DEVICE="cpu"):
        work = lambda ctx: accel.save_state(ctx, out, items(2, large), step=step, keep=1)  # noqa: E731
        pids.append(start_rank(environ, gate, work))
    killer.aim([pids[rank] for rank in victims], moment, after=after)
    os.write(opener, b"." * world)
    try:
        return wait_all(pids, patience(60))
    finally:
        os.close(gate)
        os.close(opener)


def loaded_value(out: RemotePath, large: bool) -> int:
    """Load the newest checkpoint, which must be of one save in all its parts."""
    found = accel.load_state(CPU, out, items(0, large))
    assert all(weight.eq(found["value"]).all() for weight in found["model"].values())
    return int(found["value"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [1, 2])
def test_kills_at_requests_lose_nothing(world: int, killer: tuple[Killer, RemotePath]) -> None:
    torch.set_num_threads(1)
    app, bucket = killer
    rng, counts = random.Random(world), dict[bool, int]()
    for large in (False, True):
        out = bucket / f"count-{world}-{large}"
        accel.save_state(CPU, out, items(1, large), step=1)
        codes = save_and_kill(app, out, world, -1, after=False, victims=[], step=2, large=large)
        assert codes == [DONE] * world
        counts[large] = app.count
    who = [[0]] if world == 1 else [[0, 1], [0], [1]]
    moments = {
        large: list(itertools.product(range(count), (False, True), who, (1, 2))) for large, count in counts.items()
    }
    chosen = [(False, each) for each in rng.sample(moments[False], 6)]
    chosen += [(True, each) for each in rng.sample(moments[True], 1)]
    outcomes = list[int]()
    for number, (large, (moment, after, victims, step)) in enumerate(chosen):
        out = bucket / f"run-{world}-{number}"
        accel.save_state(CPU, out, items(1, large), step=1)
        codes = save_and_kill(app, out, world, moment, after=after, victims=victims, step=step, large=large)
        app.aim([], -1, after=False)
        value = loaded_value(out, large)
        assert value in (1, 2)
        assert value == 2 or DONE not in codes, f"a save that returned is lost: {codes}"
        outcomes.append(value)
        accel.save_state(CPU, out, items(3, large), step=3, keep=1)  # nothing holds up the next save
        assert loaded_value(out, large) == 3
        assert {name: len(found.names()) for name, found in as_place(out).inside().items()} == {"step-00000003": 2}
        fsspec.filesystem("s3", **bucket.options).rm(out.url, recursive=True)
    assert set(outcomes) == {1, 2}  # killed before the commit, and after it
    print(f"{world} ranks: {counts} requests, {len(outcomes)} kills, {outcomes.count(2)} committed, 0 lost")
